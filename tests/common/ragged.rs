//! Batches of single tokens and of chunks of prompts, on either device: each slot has what its segment gives alone, or its own fault.

use NVFP4::engine::{NewTokens, Sequence, Served};
use NVFP4::model::{Choice, KvType, Logits, Output, Scratch, Wanted};
use NVFP4::ops::sample::SamplingOptions;

/// Output that a segment asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ask {
    Nothing,
    Last,
    All,
    Greedy,
    Drawn,
}

/// Demands that logits are the expected ones; the text says whose they are.
pub(crate) type Same<'a> = dyn Fn(&[f32], &[f32], &str) + 'a;

/// Tokens in the cache before, tokens of the segment, and what it asks for: 8 decode steps, and chunks at the beginning and within a text.
const SEGMENTS: [(usize, usize, Ask); 12] = [
    (3, 1, Ask::Last),
    (10, 37, Ask::All),
    (17, 1, Ask::Greedy),
    (1, 1, Ask::Drawn),
    (30, 1, Ask::Last),
    (0, 512, Ask::Last),
    (5, 1, Ask::Greedy),
    (64, 1, Ask::Drawn),
    (65, 1, Ask::Nothing),
    (0, 9, Ask::Nothing),
    (63, 1, Ask::All),
    (2, 6, Ask::Greedy),
];

const DRAWN: SamplingOptions = SamplingOptions {
    temperature: 0.8,
    top_p: 0.9,
    seed: Some(11),
    ..SamplingOptions::GREEDY
};

/// A sequence of the batch.
struct Member {
    /// The tokens of the segment.
    tokens: Vec<u32>,
    cache: Sequence,
    ask: Ask,
}

/// The type of keys and values with the least rounding on the model's device.
pub(crate) fn finest_kv(model: &Served) -> KvType {
    match model.device().is_cuda() {
        true => KvType::F16,
        false => KvType::F32,
    }
}

/// The sequences of the batch, with these types of keys and values in turn.
fn sequences(model: &Served, kv: &[KvType]) -> Vec<Member> {
    let (vocabulary, room) = (model.spec().vocab_size, model.spec().max_positions.min(640));
    let each = SEGMENTS
        .iter()
        .enumerate()
        .map(|(i, &(before, count, ask))| {
            let count = count.min(room - 8);
            let token = |n: usize| ((n * 37 + i * 11 + n / 7) % vocabulary) as u32;
            let all: Vec<u32> = (0..before + count).map(token).collect();
            let mut cache = model.sequence(room, kv[i % kv.len()]).unwrap();
            let (mut scratch, mut logits) = (Scratch::new(), Vec::new());
            model
                .forward(
                    &all[..before],
                    &mut cache,
                    &mut scratch,
                    Logits::None,
                    &mut logits,
                )
                .unwrap();
            Member {
                tokens: all[before..].to_vec(),
                cache,
                ask,
            }
        });
    each.collect()
}

fn segment(sequence: &mut Member) -> NewTokens<'_> {
    let choice = |options| Choice {
        options,
        draw: 3,
        history: &[],
        allowed: None,
    };
    NewTokens {
        tokens: &sequence.tokens,
        sequence: &mut sequence.cache,
        wanted: match sequence.ask {
            Ask::Nothing => Wanted::Nothing,
            Ask::Last => Wanted::Last,
            Ask::All => Wanted::All,
            Ask::Greedy => Wanted::Token(choice(&SamplingOptions::GREEDY)),
            Ask::Drawn => Wanted::Token(choice(&DRAWN)),
        },
    }
}

/// The output of a slot, with its rows of logits.
type Found = (Output, Vec<f32>);

fn found(model: &Served, output: Output, logits: &[f32]) -> Found {
    let rows = match &output {
        Output::Logits(rows) => {
            let vocabulary = model.spec().vocab_size;
            logits[rows.start * vocabulary..rows.end * vocabulary].to_vec()
        }
        Output::Cached
        | Output::Hidden(_)
        | Output::Likelihoods(_)
        | Output::Token(_)
        | Output::Verified(_) => Vec::new(),
    };
    (output, rows)
}

/// Runs each sequence alone.
fn apart(model: &Served, sequences: &mut [Member]) -> Vec<Found> {
    let each = sequences.iter_mut().map(|sequence| {
        let mut logits = Vec::new();
        let work = vec![segment(sequence)];
        let output = model
            .run(work, false, &mut Scratch::new(), &mut logits)
            .unwrap();
        let output = output.into_iter().next().unwrap().unwrap();
        found(model, output, &logits)
    });
    each.collect()
}

/// Runs all sequences in one batch, after rows of logits that were there before.
fn together(model: &Served, sequences: &mut [Member]) -> Vec<Found> {
    let mut logits = vec![7.0; 2 * model.spec().vocab_size];
    let work = sequences.iter_mut().map(segment).collect();
    let outputs = model
        .run(work, true, &mut Scratch::new(), &mut logits)
        .unwrap();
    let each = outputs.into_iter().map(Result::unwrap);
    each.map(|output| found(model, output, &logits)).collect()
}

/// The logits after one more token of each sequence, which show what is in the caches.
fn after(model: &Served, sequences: &mut [Member]) -> Vec<Vec<f32>> {
    let each = sequences.iter_mut().map(|sequence| {
        let mut logits = Vec::new();
        let (cache, mut scratch) = (&mut sequence.cache, Scratch::new());
        model
            .forward(&[9], cache, &mut scratch, Logits::Last, &mut logits)
            .unwrap();
        logits
    });
    each.collect()
}

/// Compares a batch, whose sequences have these types of keys and values in turn, with its segments alone: logits by `same`, which is told
/// the slot, and tokens by their logits where `near` allows a difference.
pub(crate) fn check(model: &Served, kv: &[KvType], near: Option<f32>, same: &Same<'_>) {
    let (mut alone, mut all) = (sequences(model, kv), sequences(model, kv));
    let expected = apart(model, &mut alone);
    let got = together(model, &mut all);
    for (slot, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let (_, count, ask) = SEGMENTS[slot];
        let what = format!("slot {slot}: {count} tokens, {ask:?}");
        assert_eq!(got.1.len(), expected.1.len(), "{what}");
        same(&got.1, &expected.1, &what);
        match (ask, near) {
            (Ask::Greedy | Ask::Drawn, None) => assert_eq!(got.0, expected.0, "{what}"),
            (Ask::Greedy | Ask::Drawn, Some(_)) => {
                assert!(matches!(got.0, Output::Token(_)), "{what}: {got:?}");
            }
            (Ask::Nothing, _) => assert_eq!(got.0, Output::Cached, "{what}"),
            (Ask::Last | Ask::All, _) => {}
        }
        assert_eq!(all[slot].cache.len(), alone[slot].cache.len(), "{what}");
    }
    let pairs = after(model, &mut all)
        .into_iter()
        .zip(after(model, &mut alone));
    for (slot, (got, expected)) in pairs.enumerate() {
        same(&got, &expected, &format!("slot {slot}, a token later"));
    }
}

/// A batch of a model of [`spoil`], whose slot 1 runs a token with an embedding that is not finite: it alone has a fault with these words, and its sequence
/// goes on with another token.
pub(crate) fn check_faults(model: &Served, words: &str, same: &Same<'_>) {
    for others in [[1, 1], [1, 20]] {
        let kv = [finest_kv(model)];
        let mut good = sequences(model, &kv);
        good.truncate(3);
        for (sequence, count) in good.iter_mut().zip([others[0], 1, others[1]]) {
            sequence.tokens = (0..count).map(|n| 20 + n as u32).collect();
            sequence.ask = Ask::Last;
        }
        let mut bad = sequences(model, &kv);
        bad.truncate(3);
        for (sequence, good) in bad.iter_mut().zip(&good) {
            sequence.tokens.clone_from(&good.tokens);
            sequence.ask = Ask::Greedy;
        }
        bad[0].ask = Ask::Last;
        bad[2].ask = Ask::Last;
        bad[1].tokens = vec![ODD];
        let before = bad[1].cache.len();

        let mut logits = Vec::new();
        let work = bad.iter_mut().map(segment).collect();
        let outputs = model
            .run(work, false, &mut Scratch::new(), &mut logits)
            .unwrap();
        let fault = outputs[1].as_ref().unwrap_err().to_string();
        assert!(fault.contains(words), "{fault}");
        assert_eq!(bad[1].cache.len(), before);
        let expected = apart(model, &mut good);
        for slot in [0, 2] {
            let output = outputs[slot].as_ref().unwrap().clone();
            let got = found(model, output, &logits);
            same(
                &got.1,
                &expected[slot].1,
                &format!("slot {slot} beside a fault"),
            );
            assert_eq!(bad[slot].cache.len(), good[slot].cache.len());
        }
        let pairs = after(model, &mut bad)
            .into_iter()
            .zip(after(model, &mut good));
        // The sequence of the fault is a token behind.
        for (slot, (got, expected)) in pairs.enumerate().filter(|(slot, _)| *slot != 1) {
            same(&got, &expected, &format!("slot {slot} after a fault"));
        }
    }
}

/// The token of [`check_faults`] whose embedding is not finite.
pub(crate) const ODD: u32 = 7;

/// A copy of a golden Gemma in which the embedding of `token` leaves the range of f32 once it is scaled.
pub(crate) fn spoil(token: u32) -> super::Copy {
    let dir = super::Copy::of("gemma3_wide", "odd");
    super::change_tensor(&dir, "model.embed_tokens.weight", |dtype, shape, bytes| {
        assert_eq!(dtype, safetensors::Dtype::BF16);
        let large = half::bf16::from_f32(7.5e37).to_le_bytes();
        bytes[token as usize * shape[1] * 2..][..2].copy_from_slice(&large);
    });
    dir
}
