//! The choice of tokens on the device: the largest logit, and draws that are those of the processor.

use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::memory::Tag;
use NVFP4::cuda::{
    self, DeviceBuffer, DrawRule, DrawScratch, Drawn, FoundLikelihood, Gpu, MaskRows, Pinned,
};
use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::format::random;
use NVFP4::model::{Device, KvType, Output, Scratch, TokenMask, Wanted};
use NVFP4::ops::sample::{self, Choice};
use NVFP4::session::{Sampler, SamplingOptions};

use crate::common::{golden, some_tokens};
use crate::support::{
    generated, gpu, load_on, normal, poisoned, prompted, read_f32, upload, with_context,
};

#[test]
fn the_argmax_is_the_first_of_equals() {
    let Some(gpu) = gpu() else { return };
    let (rows, vocabulary) = (3, 5000);
    let mut logits = normal(3, rows * vocabulary);
    for (row, at) in [(0, 4999), (1, 0), (2, 77)] {
        logits[row * vocabulary + at] = 100.0;
    }
    logits[2 * vocabulary + 4000] = 100.0;
    let logits = upload(&gpu, &logits);
    let best = cuda::Best::new(&gpu, rows).unwrap();
    let tokens = poisoned(&gpu, rows * 4);
    for _ in 0..2 {
        cuda::argmax(&gpu, &logits, rows, vocabulary, &best, &tokens, None).unwrap();
        let mut got = [0u32; 3];
        tokens.read(0, &mut got).unwrap();
        assert_eq!(got, [4999, 0, 77]);
    }
}

/// The kinds of logits that draws are made from.
const KINDS: u64 = 7;
/// The kind of logits with a NaN in each row.
const UNUSABLE: u64 = 6;

fn choice<'a>(options: &'a SamplingOptions, draw: u64, history: &'a [u32]) -> Choice<'a> {
    Choice {
        options,
        draw,
        history,
        allowed: None,
    }
}

/// A batch of rows of logits of one kind.
struct Batch {
    gpu: Arc<Gpu>,
    rows: usize,
    vocabulary: usize,
    case: u64,
    kind: u64,
    logits: Vec<f32>,
    device: DeviceBuffer,
}

impl Batch {
    fn new(gpu: &Arc<Gpu>, rows: usize, vocabulary: usize, case: u64, kind: u64) -> Batch {
        let mut logits = normal(40 + case, rows * vocabulary);
        for (i, x) in logits.iter_mut().enumerate() {
            match kind {
                // Many equal ones, zeros of both signs among them.
                1 => *x = (*x * 4.0).round() * 0.5,
                // All the largest in one place; most ruled out; all equal; all in one bucket.
                2 => *x += (10 - (i % vocabulary / 512).min(10)) as f32,
                3 if !(i % vocabulary).is_multiple_of(37) => *x = f32::NEG_INFINITY,
                4 => *x = -1.25,
                5 => *x *= 1e-5,
                UNUSABLE if i % vocabulary == vocabulary / 3 => *x = f32::NAN,
                _ => *x *= 3.0,
            }
        }
        Batch {
            gpu: gpu.clone(),
            rows,
            vocabulary,
            case,
            kind,
            device: upload(gpu, &logits),
            logits,
        }
    }

    /// The options of each row, which differ.
    fn options(&self, penalties: bool) -> Vec<SamplingOptions> {
        let of_row = |row: u64| {
            let number = 64 * self.kind + row + self.case;
            let pick = |salt: u64, of: u64| (random::bits(salt, number) % of) as usize;
            SamplingOptions {
                temperature: [0.7, 1.0, 0.0, 3.0][pick(0, 4)],
                top_k: [0, 40, 5000, 2][pick(1, 4)],
                top_p: [1.0, 0.95, 0.5][pick(2, 3)],
                min_p: [0.0, 0.02][pick(3, 2)],
                repetition_penalty: match penalties {
                    true => [1.2, 0.8, 1.0][pick(4, 3)],
                    false => 1.0,
                },
                seed: Some(row),
            }
        };
        (0..self.rows as u64).map(of_row).collect()
    }

    /// The tokens before the draws, for each row.
    fn histories(&self) -> Vec<Vec<u32>> {
        let token = |row: u64, i: u64| (random::bits(row, i) % self.vocabulary as u64) as u32;
        (0..self.rows as u64)
            .map(|row| (0..1 + row * 13).map(|i| token(row, i)).collect())
            .collect()
    }

    /// Draws three tokens for each row on the device, and demands that the processor draws the same. A token that the device has chosen
    /// counts as having occurred.
    fn check(&self, draws: &mut DrawScratch, scratch: &mut sample::SampleScratch, penalties: bool) {
        let &Batch {
            ref gpu,
            rows,
            vocabulary,
            kind,
            ..
        } = self;
        let options = self.options(penalties);
        let mut histories = self.histories();
        let rules: Vec<DrawRule> = options.iter().map(|o| choice(o, 5, &[]).rule()).collect();
        let all: Vec<&[u32]> = histories.iter().map(|h| &h[..]).collect();
        draws.set(gpu, &rules, &all).unwrap();
        let last: Vec<i32> = all.iter().map(|h| h[h.len() - 1].cast_signed()).collect();
        let tokens = upload(gpu, &last);
        let positions = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows * 4).unwrap();
        let drawn = Pinned::new(gpu, Tag::Scratch, 8 * rows * 4).unwrap();
        for draw in 5..8u64 {
            let logits = &self.device;
            cuda::draw(
                gpu, logits, rows, vocabulary, penalties, draws, &tokens, &positions, &drawn,
            )
            .unwrap();
            gpu.synchronize().unwrap();
            for (row, logits) in self.logits.chunks_exact(vocabulary).enumerate() {
                let choice = choice(&options[row], draw, &histories[row]);
                let want = sample::sample(logits, &choice, scratch);
                let got = drawn.read_i32((draw as usize - 4) * rows + row).unwrap();
                let what = format!(
                    "kind {kind}, row {row} of {rows}, {vocabulary} tokens, draw {draw}: {:?}",
                    options[row]
                );
                histories[row].push(self.agreed(Drawn::read(got), want, &what));
            }
        }
    }

    /// The token that both drew, or the one whose logit neither can use.
    fn agreed(&self, got: Drawn, want: Result<u32>, what: &str) -> u32 {
        match (got, want) {
            (Drawn::Token(got), Ok(want)) => {
                assert_eq!(got, want, "{what}");
                got
            }
            (Drawn::Unusable(at), Err(_)) => {
                let unusable = (UNUSABLE, self.vocabulary / 3);
                assert_eq!((self.kind, at as usize), unusable, "{what}");
                at
            }
            (got, want) => panic!("{what}: {got:?}, not {want:?}"),
        }
    }
}

/// Tokens drawn by the kernels are those that the CPU draws from the same logits, in batches of different rules.
#[test]
fn tokens_drawn_on_the_device_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let mut scratch = sample::SampleScratch::default();
    for (case, (rows, vocabulary)) in [
        (1, 151_936),
        (5, 49_152),
        (64, 32_768),
        (3, 1000),
        (2, 100),
        (2, 1),
        (1, 300_001),
    ]
    .into_iter()
    .enumerate()
    {
        let mut draws = DrawScratch::new(&gpu, rows, vocabulary).unwrap();
        for kind in 0..KINDS {
            let batch = Batch::new(&gpu, rows, vocabulary, case as u64, kind);
            for penalties in [false, true] {
                batch.check(&mut draws, &mut scratch, penalties);
            }
        }
    }
}

/// Draws on the device are those of a host that reads all logits of the same device.
#[test]
fn sampling_on_the_device_draws_the_same_tokens() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let prompt = some_tokens(&model, 40);
    for (seed, (temperature, top_k, top_p, min_p, repetition_penalty)) in [
        (0.8, 40, 0.95, 0.0, 1.0),
        (1.0, 1, 1.0, 0.0, 1.0),
        (0.05, 0, 0.9, 0.0, 1.0),
        (5.0, 0, 0.999, 0.0, 1.0),
        (1.0, 0, 1.0, 0.02, 1.0),
        (0.7, 20, 1.0, 0.0, 1.2),
        (0.0, 0, 1.0, 0.0, 1.3),
        (1.0, 0, 1.0, 0.0, 1.0),
        (0.9, 10, 1.0, 0.0, 0.9),
    ]
    .into_iter()
    .enumerate()
    {
        let sampling = SamplingOptions {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            seed: Some(seed as u64),
        };
        let mut by_host = prompted(&model, &with_context(160), &prompt);
        let mut sampler = Sampler::new(&sampling).unwrap().after(prompt.len());
        let want: Vec<u32> = (0..100)
            .map(|_| {
                let token = by_host.sample(&mut sampler).unwrap();
                by_host.decode(token).unwrap();
                token
            })
            .collect();
        let mut s = prompted(&model, &with_context(160), &prompt);
        assert_eq!(generated(&mut s, 100, &sampling), want, "{sampling:?}");
        // The session goes on where the device kept the logits.
        assert_eq!(s.logits().unwrap(), by_host.logits().unwrap());
    }
}

/// A mask of a random share of the tokens, a few at least.
fn random_mask(vocabulary: usize, number: u64) -> Vec<u32> {
    let share = [1, 8, 31, 32][(random::bits(3, number) % 4) as usize];
    let bit = |token: u64| random::bits(90 + number, token) % 32 < share || token % 97 == 5;
    let word = |word: u64| (0..32).fold(0, |bits, i| bits | u32::from(bit(32 * word + i)) << i);
    (0..vocabulary.div_ceil(32) as u64).map(word).collect()
}

/// Masked logits have the bits that the host's mask leaves, and rows without a mask stay.
#[test]
fn masked_logits_are_those_of_the_host() {
    let Some(gpu) = gpu() else { return };
    for (case, (rows, vocabulary)) in [(1, 151_936), (5, 1000), (64, 32_001), (3, 31), (2, 8193)]
        .into_iter()
        .enumerate()
    {
        let mut on_device = MaskRows::new(&gpu, rows, vocabulary).unwrap();
        for kind in [0, 3, UNUSABLE] {
            let batch = Batch::new(&gpu, rows, vocabulary, case as u64, kind);
            let mut want = batch.logits.clone();
            let mut masks: Vec<(usize, Vec<u32>)> = Vec::new();
            for row in (0..rows).filter(|row| row % 3 != 1) {
                let mut mask = random_mask(vocabulary, (7 * row + case) as u64);
                // Words that a mask lacks allow nothing, and bits past the vocabulary mean nothing.
                match row % 9 {
                    3 => mask.truncate(mask.len() / 2),
                    6 => mask.push(u32::MAX),
                    _ => {}
                }
                TokenMask(&mask).apply(&mut want[row * vocabulary..][..vocabulary]);
                masks.push((row, mask));
            }
            let views: Vec<_> = masks.iter().map(|(row, mask)| (*row, &mask[..])).collect();
            on_device.set(&views).unwrap();
            cuda::mask_logits(&gpu, &batch.device, &on_device).unwrap();
            let got = read_f32(&batch.device, rows * vocabulary);
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
            assert!(got.iter().zip(&want).all(same), "{rows} of {vocabulary}");
        }
    }
}

/// Likelihoods against f64, and rows without a token.
#[test]
fn likelihoods_on_the_device_are_those_of_the_exact_softmax() {
    let Some(gpu) = gpu() else { return };
    for (case, (rows, vocabulary)) in [(1, 151_936), (64, 32_001), (5, 1000), (3, 31), (2, 1)]
        .into_iter()
        .enumerate()
    {
        for kind in 0..KINDS {
            let batch = Batch::new(&gpu, rows, vocabulary, case as u64, kind);
            let first_of = |row: usize| {
                let logits = &batch.logits[row * vocabulary..][..vocabulary];
                (0..vocabulary).fold(0, |b, i| if logits[i] > logits[b] { i } else { b })
            };
            let of_row = |row: usize| match row % 3 {
                0 => first_of(row) as i32,
                _ => (random::bits(8, row as u64) % vocabulary as u64) as i32,
            };
            let tokens: Vec<i32> = (0..rows).map(of_row).collect();
            let found = poisoned(&gpu, rows * size_of::<FoundLikelihood>());
            let given = upload(&gpu, &tokens);
            let (given, to) = ((&given).into(), (&found).into());
            cuda::likelihoods(&batch.device, rows, vocabulary, given, to).unwrap();
            let mut got = vec![FoundLikelihood::default(); rows];
            found.read(0, &mut got).unwrap();
            for (row, found) in got.iter().enumerate() {
                let logits = &batch.logits[row * vocabulary..][..vocabulary];
                let what = format!("kind {kind}, row {row} of {rows}, {vocabulary} tokens");
                let argmax = match Drawn::read(found.argmax) {
                    Drawn::Token(token) => token as usize,
                    Drawn::Unusable(at) => {
                        assert!(logits[at as usize].is_nan(), "{what}");
                        continue;
                    }
                    Drawn::AllRuledOut => panic!("{what}"),
                };
                assert_ne!(kind, UNUSABLE, "{what}");
                assert_eq!(argmax, first_of(row), "{what}");
                let largest = f64::from(logits[argmax]);
                let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
                let want = f64::from(logits[tokens[row] as usize]) - largest - sum.ln();
                let error = (f64::from(found.log_probability) - want).abs();
                let is_near = error <= 1e-6 + want.abs() * 6e-8;
                assert!(is_near || want == f64::NEG_INFINITY, "{what}: {error}");
            }
        }
    }
}

/// Sequences that run together.
struct Stepped {
    sequences: Vec<Sequence>,
    scratch: Scratch,
}

impl Stepped {
    /// Sequences with the same prompt.
    fn new(model: &Served, count: usize, prompt: &[u32]) -> Stepped {
        let each = (0..count).map(|_| model.sequence(256, KvType::F16).unwrap());
        let mut stepped = Stepped {
            sequences: each.collect(),
            scratch: Scratch::new(),
        };
        let texts = vec![prompt; count];
        stepped.run(
            model,
            &texts,
            &vec![Wanted::Nothing; count],
            &mut Vec::new(),
        );
        stepped
    }

    /// Runs tokens of each, with look-ahead, and returns the outputs.
    fn run(
        &mut self,
        model: &Served,
        tokens: &[&[u32]],
        wanted: &[Wanted<'_>],
        logits: &mut Vec<f32>,
    ) -> Vec<Result<Output>> {
        let each = self.sequences.iter_mut().zip(tokens).zip(wanted);
        let work = each.map(|((sequence, tokens), wanted)| NewTokens {
            tokens,
            sequence,
            wanted: *wanted,
        });
        let scratch = &mut self.scratch;
        model.run(work.collect(), true, scratch, logits).unwrap()
    }
}

/// Rows of a step with masks, and how many steps there are.
const ROWS: usize = 7;
const STEPS: usize = 61;

/// The masks of a step's rows: some steps in a row have none, and at the last step one leaves no token.
fn masks_of(step: usize, vocabulary: usize) -> Vec<Option<Vec<u32>>> {
    let has_mask = |row: usize| step % 20 < 15 && !(row + step / 4).is_multiple_of(3);
    let mask_of = |row: usize| match has_mask(row) {
        true if leaves_none(step, row) => Some(vec![0; vocabulary.div_ceil(32)]),
        true => Some(random_mask(vocabulary, (step * ROWS + row) as u64)),
        false => None,
    };
    (0..ROWS).map(mask_of).collect()
}

fn leaves_none(step: usize, row: usize) -> bool {
    (step, row) == (STEPS - 1, 2)
}

/// The token that both the device and the host choose; 0 where neither has one to choose.
fn chosen_by_both(
    (step, row): (usize, usize),
    got: &Result<Output>,
    want: Result<u32>,
    what: &str,
) -> u32 {
    match (got, want) {
        (Ok(got), Ok(want)) => {
            assert_eq!(*got, Output::Token(want), "{what}");
            want
        }
        (Err(got), Err(want)) => {
            assert!(leaves_none(step, row), "{what}: {got}");
            assert_eq!(got.message(), want.message());
            assert!(got.message().contains("none of the 0 tokens"), "{got}");
            0
        }
        (got, want) => panic!("{what}: {got:?}, not {want:?}"),
    }
}

/// Steps that run ahead, of rows with and without masks that change from step to step, choose what the host chooses from the logits of the
/// same steps; a mask without a token is the fault of its row alone.
#[test]
fn steps_choose_by_masks_as_the_host_does() {
    let Some(gpu) = gpu() else { return };
    let model = load_on(Device::Cuda(gpu), &golden("qwen3_tied"));
    let vocabulary = model.spec().vocab_size;
    let prompt = some_tokens(&model, 30);
    for is_drawn in [false, true] {
        let options_of = |row: usize| SamplingOptions {
            temperature: [0.0, 0.9, 1.3][if is_drawn { row % 3 } else { 0 }],
            top_p: [1.0, 0.9][row % 2],
            repetition_penalty: if is_drawn && row == 4 { 1.3 } else { 1.0 },
            seed: Some(row as u64),
            ..SamplingOptions::default()
        };
        let options: Vec<SamplingOptions> = (0..ROWS).map(options_of).collect();
        let mut on_device = Stepped::new(&model, ROWS, &prompt);
        let mut on_host = Stepped::new(&model, ROWS, &prompt);
        let mut texts: Vec<Vec<u32>> = (0..ROWS as u32)
            .map(|row| [&prompt[..], &[row + 3]].concat())
            .collect();
        let mut scratch = sample::SampleScratch::default();
        let mut masked = 0;
        for step in 0..STEPS {
            let masks = masks_of(step, vocabulary);
            let choice_of = |row: usize| Choice {
                allowed: masks[row].as_deref().map(TokenMask),
                ..choice(&options[row], step as u64, &texts[row])
            };
            let choices: Vec<Choice<'_>> = (0..ROWS).map(choice_of).collect();
            let last: Vec<&[u32]> = texts.iter().map(|text| &text[text.len() - 1..]).collect();
            let wanted: Vec<Wanted<'_>> = choices.iter().map(|c| Wanted::Token(*c)).collect();
            let outputs = on_device.run(&model, &last, &wanted, &mut Vec::new());
            let mut logits = Vec::new();
            on_host.run(&model, &last, &[Wanted::Last; ROWS], &mut logits);
            let rows = logits.chunks_exact(vocabulary).zip(&choices);
            let chosen = rows
                .zip(&outputs)
                .enumerate()
                .map(|(row, ((own, by), got))| {
                    let what = format!("drawn: {is_drawn}, row {row}, step {step}");
                    let want = sample::sample(own, by, &mut scratch);
                    chosen_by_both((step, row), got, want, &what)
                });
            let chosen: Vec<u32> = chosen.collect();
            masked += masks.iter().flatten().count();
            let each = texts.iter_mut().zip(chosen);
            each.for_each(|(text, token)| text.push(token));
        }
        assert!(masked > 150, "{masked} masks");
    }
}
