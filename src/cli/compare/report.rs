//! The result of a comparison, as text and as JSON.

use std::fmt;

use NVFP4::base::Result;
use NVFP4::model::compare::{
    Comparison, LIKELY, PositionRange, Summary, TokenComparison, by_position, worst,
};
use NVFP4::text::Tokenizer;
use serde::Serialize;

/// Tokens of context shown before a worst token.
const BEFORE: usize = 16;

#[derive(Serialize)]
pub(super) struct Report {
    model: String,
    reference: String,
    tokens: usize,
    windows: usize,
    /// Tokens predicted: all but the first of each window.
    predicted: usize,
    #[serde(flatten)]
    summary: Summary,
    pub(super) positions: Vec<PositionRange>,
    pub(super) blocks: Vec<Block>,
    /// KL with the examined model's embedding and head and the reference's blocks.
    #[serde(
        rename = "tables_kl_divergence",
        skip_serializing_if = "Option::is_none"
    )]
    tables: Option<f64>,
    worst: Vec<Worst>,
}

/// A block's contribution to the difference.
#[derive(Serialize)]
pub(super) struct Block {
    block: usize,
    pub(super) stream_error: f64,
    pub(super) block_error: f64,
    /// KL with only this block exchanged.
    #[serde(rename = "kl_divergence", skip_serializing_if = "Option::is_none")]
    pub(super) divergence: Option<f64>,
}

/// A token with its text.
#[derive(Serialize)]
struct Named {
    id: u32,
    text: String,
}

/// A likely token by a model.
#[derive(Serialize)]
struct Likely {
    #[serde(flatten)]
    token: Named,
    probability: f32,
}

/// A token on whose probability the models differ strongly.
#[derive(Serialize)]
struct Worst {
    window: usize,
    position: usize,
    /// Text before the token, as far as it is in the window.
    before: String,
    token: Named,
    kl_divergence: f64,
    /// Probability of the token by the model and by the reference.
    probability: [f64; 2],
    model: Vec<Likely>,
    reference: Vec<Likely>,
}

impl Worst {
    fn new(token: &TokenComparison, window: &[u32], tokenizer: &Tokenizer) -> Result<Worst> {
        let named = |id: u32| Named {
            id,
            text: tokenizer.text_of(id).unwrap_or_default(),
        };
        let likely = |tokens: [(u32, f32); LIKELY]| {
            let likely = tokens.map(|(id, probability)| Likely {
                token: named(id),
                probability,
            });
            likely.into_iter().collect()
        };
        let read = &window[..=token.position];
        let before = &read[read.len().saturating_sub(BEFORE)..];
        Ok(Worst {
            window: token.window,
            position: token.position,
            before: tokenizer.decode(before, false)?,
            token: named(token.token),
            kl_divergence: token.divergence,
            probability: token.losses.map(|loss| (-loss).exp()),
            model: likely(token.likely[0]),
            reference: likely(token.likely[1]),
        })
    }
}

impl Report {
    /// Creates a report on models of these names and windows of a text of `tokens` tokens, with the `most` worst tokens.
    pub(super) fn new(
        [model, reference]: [String; 2],
        (windows, tokens): (&[&[u32]], usize),
        found: &Comparison,
        tokenizer: &Tokenizer,
        most: usize,
    ) -> Result<Report> {
        let errors = found.stream_errors.iter().zip(&found.block_errors);
        let blocks = errors.enumerate().map(|(block, (stream, own))| Block {
            block,
            stream_error: *stream,
            block_error: *own,
            divergence: found.block_divergences.get(block).copied(),
        });
        let worst = worst(&found.tokens, most);
        let worst = worst
            .iter()
            .map(|token| Worst::new(token, windows[token.window], tokenizer));
        Ok(Report {
            model,
            reference,
            tokens,
            windows: windows.len(),
            predicted: found.tokens.len(),
            summary: Summary::new(&found.tokens),
            positions: by_position(&found.tokens),
            blocks: blocks.collect(),
            tables: found.tables_divergence,
            worst: worst.collect::<Result<_>>()?,
        })
    }
}

impl Report {
    /// Writes a table with a line for each block, and one for embedding and head.
    fn write_blocks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exchanged = |divergence: Option<f64>| match divergence {
            Some(divergence) => format!("  {divergence:>20.6}"),
            None => String::new(),
        };
        let heading = match self.tables {
            Some(_) => "  KL with it exchanged",
            None => "",
        };
        writeln!(f, "\n{:>11}  stream error  block error{heading}", "block")?;
        for block in &self.blocks {
            writeln!(
                f,
                "{:>11}  {:>12.6}  {:>11.6}{}",
                block.block,
                block.stream_error,
                block.block_error,
                exchanged(block.divergence)
            )?;
        }
        match self.tables {
            Some(_) => writeln!(f, "{:>11}  {:25}{}", "tables", "", exchanged(self.tables)),
            None => Ok(()),
        }
    }
}

/// Formats tables for a terminal. Token texts are quoted and escaped.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.summary;
        writeln!(
            f,
            "divergence from the reference {:.6} nats a token on average over {} tokens in {} windows",
            s.mean, self.predicted, self.windows
        )?;
        writeln!(
            f,
            "median {:.6}, 99th percentile {:.4}, largest {:.4}; same argmax {:.2} %; perplexity {:.4}, of the reference {:.4}",
            s.median,
            s.p99,
            s.max,
            s.same_top * 100.0,
            s.perplexity,
            s.reference_perplexity
        )?;
        writeln!(f, "\n{:>11}  {:>8}  {:>10}", "positions", "tokens", "KL")?;
        for range in &self.positions {
            let positions = format!("{}-{}", range.first, range.last);
            writeln!(
                f,
                "{positions:>11}  {:>8}  {:>10.6}",
                range.tokens, range.divergence
            )?;
        }
        self.write_blocks(f)?;
        if !self.worst.is_empty() {
            writeln!(f, "\nworst tokens")?;
        }
        self.worst.iter().try_for_each(|worst| worst.fmt(f))
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "KL {:.4}, window {}, position {}: {:?} [{:?}]",
            self.kl_divergence, self.window, self.position, self.before, self.token.text
        )?;
        let sides = [("model", &self.model), ("reference", &self.reference)];
        for ((name, likely), own) in sides.into_iter().zip(self.probability) {
            write!(f, "{name:>11}:")?;
            for likely in likely {
                let percent = 100.0 * likely.probability;
                write!(f, " {:?} {percent:.2} %,", likely.token.text)?;
            }
            writeln!(f, " the token itself {:.2} %", 100.0 * own)?;
        }
        Ok(())
    }
}
