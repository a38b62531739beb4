//! Perplexity of a text, and divergence from a reference.

use std::ffi::OsStr;
use std::fmt;
use std::sync::{Arc, OnceLock};

use NVFP4::base::Result;
use NVFP4::base::threads::Pool;
use NVFP4::engine::Served;
use NVFP4::model::KvType;
use serde::Serialize;

use super::reader::Reader;
use super::sums::{Predicted, Sums};
use crate::cli::{model, output};

#[derive(Serialize)]
pub(super) struct Report {
    tokens: usize,
    windows: usize,
    /// Tokens predicted: all but the first of each window.
    predicted: usize,
    perplexity: f64,
    /// Mean negative log-likelihood per token, in nats.
    loss: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<Reference>,
}

#[derive(Serialize)]
struct Reference {
    model: String,
    perplexity: f64,
    /// Mean divergence from the reference, in nats.
    kl_divergence: f64,
    /// Largest divergence at a token.
    kl_max: f64,
    /// Fraction of tokens on which both models have the same argmax.
    same_top: f64,
}

/// Windows of a text.
pub(super) struct Windows<'a> {
    /// Tokens of the text.
    pub(super) tokens: usize,
    /// Length of the longest window in tokens.
    pub(super) longest: usize,
    pub(super) all: Vec<&'a [u32]>,
}

/// Measures a model, and a named reference if given, on windows of a text.
pub(super) fn measure(
    windows: &Windows<'_>,
    kv: KvType,
    model: &Arc<Served>,
    reference: Option<(&Arc<Served>, &OsStr)>,
) -> Result<Report> {
    let vocabulary = model.spec().vocab_size;
    let Windows {
        tokens,
        longest,
        all: windows,
    } = windows;
    for window in windows {
        model.check_ids(window)?;
    }
    let mut reader = Reader::new(model, *longest, kv)?;
    let mut other = reference
        .map(|(reference, _)| Reader::new(reference, *longest, kv))
        .transpose()?;
    let bar = output::count_bar("reading", windows.iter().map(|w| w.len() as u64).sum());
    let pool = Pool::new(Pool::default_threads()?)?;
    let run = match other {
        Some(_) => reader.run(),
        None => reader.scored_run(),
    };
    let mut sums = Sums::default();
    for window in windows {
        reader.truncate(0)?;
        if let Some(other) = &mut other {
            other.truncate(0)?;
        }
        // The last token has no successor to predict.
        let inputs = &window[..window.len() - 1];
        for (inputs, targets) in inputs.chunks(run).zip(window[1..].chunks(run)) {
            let Some(other) = &mut other else {
                let found = reader.score(inputs, targets)?;
                found.into_iter().for_each(|found| sums.add(&found.into()));
                bar.inc(inputs.len() as u64);
                continue;
            };
            let (logits, expected) = (reader.read(inputs)?, other.read(inputs)?);
            let tokens: Vec<OnceLock<Result<Predicted>>> =
                targets.iter().map(|_| OnceLock::new()).collect();
            pool.run(targets.len(), |i| {
                let row = i * vocabulary..(i + 1) * vocabulary;
                let (logits, expected) = (&logits[row.clone()], &expected[row]);
                tokens[i].get_or_init(|| Predicted::new(logits, expected, targets[i]));
            });
            for token in tokens.into_iter().filter_map(OnceLock::into_inner) {
                sums.add(&token?);
            }
            bar.inc(inputs.len() as u64);
        }
    }
    bar.finish_and_clear();
    let n = sums.predicted as f64;
    Ok(Report {
        tokens: *tokens,
        windows: windows.len(),
        predicted: sums.predicted,
        perplexity: (sums.loss / n).exp(),
        loss: sums.loss / n,
        reference: reference.map(|(_, name)| Reference {
            model: model::shown(name),
            perplexity: (sums.reference_loss / n).exp(),
            kl_divergence: sums.divergence / n,
            kl_max: sums.largest,
            same_top: sums.same as f64 / n,
        }),
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "perplexity {:.4} over {} tokens in {} windows",
            self.perplexity, self.predicted, self.windows
        )?;
        match &self.reference {
            None => Ok(()),
            Some(r) => write!(
                f,
                "\nreference {:.4}; divergence {:.6} nats on average, {:.4} at most; same argmax {:.2} %",
                r.perplexity,
                r.kl_divergence,
                r.kl_max,
                r.same_top * 100.0
            ),
        }
    }
}
