//! Drafters that are made by hand, whose guesses are known, and the sessions and generations by which tests compare drafts.

use std::fs;
use std::sync::Arc;

use NVFP4::engine::Served;
use NVFP4::session::{GenerateOptions, SamplingOptions, Session, SessionOptions};
use safetensors::SafeTensors;

use super::{Copy, change_tensor};

/// The guesses of a drafter that is made by hand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Guess {
    /// As stored, with random weights.
    Random,
    /// The tokens that the model chooses.
    Right,
    /// The tokens that the model chooses, some of them wrong by an error.
    Near,
    /// The least probable token.
    Wrong,
}

/// A copy of a case with such a drafter. But for random ones, the next token depends on the last token alone: mixers and MLPs add nothing.
pub(crate) fn made(case: &str, guess: Guess) -> Copy {
    let dir = Copy::of(case, "drafter");
    if guess == Guess::Random {
        return dir;
    }
    let bytes = fs::read(dir.0.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let hidden = file.tensor("model.norm.weight").unwrap().shape()[0];
    let last_norm = file.tensor("model.norm.weight").unwrap().data().to_vec();
    let (last_norm, _) = last_norm.as_chunks::<4>();
    let ends = ["o_proj.weight", "out_proj.weight", "down_proj.weight"];
    for name in file.names() {
        let is_of_drafter = name.starts_with("mtp.");
        let is_near = guess == Guess::Near && name.contains("self_attn");
        if ends.iter().any(|end| name.ends_with(end)) && !(is_of_drafter && is_near) {
            change_tensor(&dir, name, |_, _, bytes| bytes.fill(0));
        }
    }
    // The embedding passes through.
    change_tensor(&dir, "mtp.fc.weight", |_, _, bytes| {
        bytes.fill(0);
        let one = half::bf16::ONE.to_le_bytes();
        for row in 0..hidden {
            let at = 2 * (row * 2 * hidden + row);
            bytes[at..at + 2].copy_from_slice(&one);
        }
    });
    change_tensor(&dir, "mtp.pre_fc_norm_embedding.weight", |_, _, bytes| {
        bytes.fill(0)
    });
    change_tensor(&dir, "mtp.norm.weight", |_, _, bytes| {
        for (to, from) in bytes.chunks_exact_mut(4).zip(last_norm) {
            // Norms are offsets from one.
            let factor = 1.0 + f32::from_le_bytes(*from);
            let factor = if guess == Guess::Wrong {
                -factor
            } else {
                factor
            };
            to.copy_from_slice(&(factor - 1.0).to_le_bytes());
        }
    });
    dir
}

/// A greedy generation of so many tokens.
pub(crate) fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        sampling: SamplingOptions {
            seed: Some(1),
            ..SamplingOptions::default()
        },
        ignore_model_stops: true,
        ..GenerateOptions::default()
    }
}

/// A generation of so many tokens, drawn with a penalty.
pub(crate) fn drawn(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        sampling: SamplingOptions {
            temperature: 1.2,
            top_k: 40,
            repetition_penalty: 1.1,
            seed: Some(5),
            ..SamplingOptions::default()
        },
        ..greedy(max_tokens)
    }
}

/// An empty session that shares no prefix with another.
pub(crate) fn session(model: &Arc<Served>, context: usize) -> Session {
    let options = SessionOptions {
        context,
        private: true,
        ..SessionOptions::default()
    };
    Session::new(model.clone(), &options).unwrap()
}

/// The logits of its next token, bit by bit.
pub(crate) fn logits(session: &mut Session) -> Vec<u32> {
    let logits = session.logits().unwrap();
    logits.iter().map(|x| x.to_bits()).collect()
}
