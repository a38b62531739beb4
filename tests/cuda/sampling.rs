//! The choice of tokens on the device: the largest logit, and draws that are those of the processor.

use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::memory::Tag;
use NVFP4::cuda::{self, DeviceBuffer, DrawRule, DrawScratch, Drawn, Gpu, Pinned};
use NVFP4::format::random;
use NVFP4::model::Device;
use NVFP4::ops::sample::{self, Choice};
use NVFP4::session::{Sampler, SamplingOptions};

use crate::common::{golden, some_tokens};
use crate::support::{generated, gpu, load_on, normal, poisoned, prompted, upload, with_context};

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
