//! `nvfp4 train --show-mask`: prints rows as they would be trained, with their learned parts marked.

use std::io::IsTerminal;

use NVFP4::base::Result;
use NVFP4::base::env;
use NVFP4::base::error::bail;
use NVFP4::train::data::{Data, Mask};
use serde_json::json;

use super::Args;
use crate::cli::output;

/// Prints the first `rows` rows of the data. Writes no file.
pub(super) fn show(args: &Args, rows: usize) -> Result<()> {
    if rows == 0 {
        bail!(
            InvalidArgument,
            "--show-mask 0; it takes a number of rows, at least 1"
        );
    }
    let source = args.source()?;
    let text = source.text()?;
    let window = args.window(source.spec().max_positions)?;
    let data = args.read(&args.data, &source, &text, &args.data_options(window))?;
    let colored = std::io::stdout().is_terminal() && !env::no_color();
    for index in 0..rows.min(data.documents().len()) {
        let mask = data.mask(index, &text.tokenizer)?;
        match args.json {
            true => output::json(&mask)?,
            false => output::print(shown(&mask, index, colored))?,
        }
    }
    summary(args, &data)
}

/// Formats a row for a person. Text is quoted with escapes, special tokens are not; a line that begins with `+` is learned, followed by its
/// weight unless that is 1.
fn shown(mask: &Mask, index: usize, colored: bool) -> String {
    let (learned, weight) = mask.targets();
    let mut out = format!(
        "row {}, {} line {}: {} tokens, {learned} learned{}\n",
        index + 1,
        mask.file,
        mask.line,
        mask.tokens.len(),
        match weight == learned as f64 {
            true => String::new(),
            false => format!(" with a weight of {}", rounded(weight)),
        }
    );
    for span in mask.spans() {
        let sign = match span.weight {
            0.0 => " ".to_owned(),
            1.0 => "+".to_owned(),
            weight => format!("+{weight}"),
        };
        let parts = span.parts.iter().map(|(text, special)| match special {
            true => text.clone(),
            false => format!("{text:?}"),
        });
        let said = parts.collect::<String>();
        out += &match colored && span.weight > 0.0 {
            // Reverse video works on every terminal.
            true => format!("{sign} \x1b[7m{said}\x1b[27m\n"),
            false => format!("{sign} {said}\n"),
        };
    }
    out
}

/// Rounds a sum of binary fractions for display.
fn rounded(weight: f64) -> f64 {
    (weight * 1e4).round() / 1e4
}

/// Prints the sums over all of the data.
fn summary(args: &Args, data: &Data) -> Result<()> {
    let documents = data.documents();
    let tokens: usize = documents.iter().map(|d| d.tokens.len()).sum();
    let learned: usize = documents.iter().map(|d| d.targets()).sum();
    let weights = documents
        .iter()
        .flat_map(|d| (1..d.tokens.len()).map(|i| f64::from(d.weight(i))));
    let weight: f64 = weights.sum();
    let count = documents.len();
    match args.json {
        true => output::json(&json!({
            "documents": count, "tokens": tokens, "learned": learned, "weight": weight, "report": data.report(),
        })),
        false => output::line(format_args!(
            "{count} rows: {tokens} tokens, {learned} learned, with a weight of {} in all",
            rounded(weight)
        )),
    }
}
