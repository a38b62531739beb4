//! `nvfp4 perplexity`: how well a model predicts a text, in windows that do not overlap; and the mean Kullback-Leibler
//! divergence from a reference model's predictions.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::model::{KvCache, KvType, Logits, Model, Scratch};
use serde::Serialize;

use super::{model, output, windows};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    /// The text to predict, in UTF-8; - is standard input
    #[arg(long)]
    text: PathBuf,
    /// A model whose predictions are the reference; same vocabulary
    #[arg(long)]
    reference: Option<OsString>,
    /// Tokens in a window
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// The most windows to read
    #[arg(long)]
    windows: Option<usize>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct Report {
    model: String,
    tokens: usize,
    windows: usize,
    /// Tokens predicted: all but the first of each window.
    predicted: usize,
    perplexity: f64,
    /// Mean negative log-likelihood of a token, in nats.
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
    /// The largest divergence at one token.
    kl_max: f64,
    /// The fraction of tokens for which both models have the same argmax.
    same_top: f64,
}

/// The number of tokens whose logits are held at a time.
const RUN: usize = 32;

struct Reader {
    model: Arc<Model>,
    cache: KvCache,
    scratch: Scratch,
    logits: Vec<f32>,
}

impl Reader {
    fn new(model: Arc<Model>, window: usize, kv: KvType) -> Result<Self> {
        Ok(Reader {
            cache: KvCache::new(model.device(), model.spec(), window, kv)?,
            scratch: Scratch::default(),
            logits: Vec::new(),
            model,
        })
    }

    /// The logits after each of `tokens`, which follow those of earlier calls.
    fn read(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        self.model.forward(
            tokens,
            &mut self.cache,
            &mut self.scratch,
            Logits::All,
            &mut self.logits,
        )?;
        Ok(&self.logits)
    }
}

/// Sums over predicted tokens.
#[derive(Default)]
struct Sums {
    loss: f64,
    reference_loss: f64,
    divergence: f64,
    largest: f64,
    same: usize,
    predicted: usize,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let text = model::read_text(&args.text)?;
    windows::check(Some(args.window), args.windows)?;
    let (model, reference) = match &args.reference {
        Some(name) => {
            let (model, reference) = args.model.load_both(name)?;
            (model, Some(reference))
        }
        None => (args.model.load()?, None),
    };
    model::warn_of_template(&model);
    let vocabulary = model.spec().vocab_size;
    if let Some(reference) = &reference
        && reference.spec().vocab_size != vocabulary
    {
        bail!(
            InvalidArgument,
            "the model has {vocabulary} tokens and the reference {}; their predictions cannot be compared",
            reference.spec().vocab_size
        );
    }
    let tokens = model.tokenizer()?.encode(&text, false)?;
    let windows = windows::of(&args.text, &tokens, args.window, args.windows)?;
    let kv = args.model.kv.into();
    for window in &windows {
        model.check_ids(window)?;
    }
    let mut reader = Reader::new(model, args.window, kv)?;
    let mut reference = reference
        .map(|r| Reader::new(r, args.window, kv))
        .transpose()?;
    let bar = output::count_bar("reading", windows.iter().map(|w| w.len() as u64).sum());
    let mut sums = Sums::default();
    for window in &windows {
        reader.cache.truncate(0)?;
        if let Some(reference) = &mut reference {
            reference.cache.truncate(0)?;
        }
        // The last token has nothing to predict.
        let inputs = &window[..window.len() - 1];
        for (r, run) in inputs.chunks(RUN).enumerate() {
            let targets = &window[r * RUN + 1..];
            let logits = reader.read(run)?;
            let expected = match &mut reference {
                Some(reference) => Some(reference.read(run)?),
                None => None,
            };
            for i in 0..run.len() {
                let row = i * vocabulary..(i + 1) * vocabulary;
                sums.add(
                    &logits[row.clone()],
                    expected.map(|e| &e[row.clone()]),
                    targets[i],
                )?;
            }
            bar.inc(run.len() as u64);
        }
    }
    bar.finish_and_clear();
    let n = sums.predicted as f64;
    let report = Report {
        model: model::shown(&args.model.model),
        tokens: tokens.len(),
        windows: windows.len(),
        predicted: sums.predicted,
        perplexity: (sums.loss / n).exp(),
        loss: sums.loss / n,
        reference: args.reference.as_ref().map(|reference| Reference {
            model: model::shown(reference),
            perplexity: (sums.reference_loss / n).exp(),
            kl_divergence: sums.divergence / n,
            kl_max: sums.largest,
            same_top: sums.same as f64 / n,
        }),
    };
    if args.json {
        return output::json(&report);
    }
    output::line(format_args!(
        "perplexity {:.4} over {} tokens in {} windows",
        report.perplexity, report.predicted, report.windows
    ))?;
    if let Some(r) = &report.reference {
        output::line(format_args!(
            "reference {:.4}; divergence {:.6} nats on average, {:.4} at most; same argmax {:.2} %",
            r.perplexity,
            r.kl_divergence,
            r.kl_max,
            r.same_top * 100.0
        ))?;
    }
    Ok(())
}

/// The logarithm of the sum of exponentials, and the index of the largest.
fn log_sum(logits: &[f32]) -> (f64, usize) {
    let mut top = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[top] {
            top = i;
        }
    }
    let largest = f64::from(logits[top]);
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - largest).exp()).sum();
    (largest + sum.ln(), top)
}

impl Sums {
    fn add(&mut self, logits: &[f32], reference: Option<&[f32]>, target: u32) -> Result<()> {
        let target = target as usize;
        if target >= logits.len() {
            bail!(
                InvalidArgument,
                "token {target} of the text is not among the model's {} tokens",
                logits.len()
            );
        }
        let (total, top) = log_sum(logits);
        self.loss += total - f64::from(logits[target]);
        self.predicted += 1;
        if let Some(reference) = reference {
            let (reference_total, reference_top) = log_sum(reference);
            self.reference_loss += reference_total - f64::from(reference[target]);
            let divergence: f64 = logits
                .iter()
                .zip(reference)
                .map(|(&l, &r)| {
                    let expected = f64::from(r) - reference_total;
                    expected.exp() * (expected - (f64::from(l) - total))
                })
                .sum();
            self.divergence += divergence;
            self.largest = self.largest.max(divergence);
            self.same += usize::from(top == reference_top);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_models_do_not_diverge_and_others_do() {
        let mut sums = Sums::default();
        let a = [0.0, 1.0f32.ln(), 3.0f32.ln()];
        sums.add(&a, Some(&a), 2).unwrap();
        assert!((sums.loss - (5.0f64 / 3.0).ln()).abs() < 1e-6);
        assert!(sums.divergence.abs() < 1e-12);
        assert_eq!(sums.same, 1);

        // p = (1/2, 1/2) against q = (1/4, 3/4).
        let mut sums = Sums::default();
        sums.add(&[0.0, 3.0f32.ln()], Some(&[1.0, 1.0]), 0).unwrap();
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((sums.divergence - expected).abs() < 1e-6);
        assert!((sums.loss - 4f64.ln()).abs() < 1e-6);
        assert!((sums.reference_loss - 2f64.ln()).abs() < 1e-6);
        assert_eq!((sums.same, sums.predicted), (0, 1));
        let e = sums.add(&a, None, 3).unwrap_err();
        assert_eq!(e.kind(), NVFP4::base::ErrorKind::InvalidArgument);
        assert!(e.message().contains("token 3"), "{e}");
    }
}
