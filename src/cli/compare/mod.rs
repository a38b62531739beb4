//! `nvfp4 compare`: how a model differs from a reference of the same shape on a text, by position, by block and at its worst tokens.

mod picture;
mod report;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use NVFP4::base::error::bail;
use NVFP4::base::{Error, Result};
use NVFP4::model::compare::{Measures, check_alike, compare};
use NVFP4::model::training::Source;
use NVFP4::text::Tokenizer;

use self::report::Report;
use super::{model, output, windows};

/// Default tokens per window; less if a model's context is shorter.
const WINDOW: usize = 512;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The model to examine, usually the quantized one: a file, a directory, or ORG/NAME on the hub
    model: OsString,
    /// The reference, of the same shape and vocabulary
    reference: OsString,
    /// The text to predict, in UTF-8; - is standard input
    #[arg(long)]
    text: PathBuf,
    /// Tokens in a window; default: 512, or the models' context
    #[arg(long)]
    window: Option<usize>,
    /// The most windows to read
    #[arg(long)]
    windows: Option<usize>,
    /// Tokens to list, those with the largest divergence
    #[arg(long, default_value_t = 10)]
    worst: usize,
    /// Leave out the divergence with one block exchanged, which takes half as many forward passes as the models have blocks
    #[arg(long)]
    skip_blocks: bool,
    /// Where to draw divergence by position and by block, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The device: cpu, which computes in float32, cuda:N, where activations are bfloat16, or auto for the first GPU if there is one and else
    /// the CPU
    #[arg(long, default_value = "cpu")]
    device: String,
    /// CPU threads; default: one for each core
    #[arg(long)]
    threads: Option<usize>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    windows::check(args.window, args.windows)?;
    let text = model::read_text(&args.text)?;
    let examined = Arc::new(Source::open(&model::resolve(&args.model)?)?);
    let reference = Arc::new(Source::open(&model::resolve(&args.reference)?)?);
    check_alike(&examined, &reference)?;
    let window = window(args, &examined, &reference)?;
    let (tokens, tokenizer) = encoded(&text, &examined, &reference)?;
    let chosen = windows::of(&args.text, &tokens, window, args.windows)?;
    let device = model::device(&args.device, args.threads)?;
    let measures = Measures {
        tokens: true,
        streams: true,
        blocks: !args.skip_blocks,
    };
    let bar = output::count_bar("comparing", 0);
    let found = compare(
        &device,
        &examined,
        &reference,
        &chosen,
        measures,
        &mut |p| {
            bar.set_length(p.total);
            bar.set_position(p.done);
        },
    );
    bar.finish_and_clear();
    let names = [&args.model, &args.reference].map(|name| model::shown(name));
    let text = (&chosen[..], tokens.len());
    let report = Report::new(names, text, &found?, &tokenizer, args.worst)?;
    match args.json {
        true => output::json(&report)?,
        false => output::print(&report)?,
    }
    let Some(path) = &args.svg else {
        return Ok(());
    };
    std::fs::write(path, picture::picture(&report))
        .map_err(|e| Error::io(format_args!("writing {}", path.display()), e))
}

/// The number of tokens in a window.
fn window(args: &Args, examined: &Source, reference: &Source) -> Result<usize> {
    let positions = [examined, reference].map(|source| source.spec().max_positions);
    let context = positions[0].min(positions[1]);
    match args.window {
        None => Ok(WINDOW.min(context)),
        Some(window) if window <= context => Ok(window),
        Some(window) => bail!(
            InvalidArgument,
            "--window {window} is beyond the models' context; they were made for {} and {} positions",
            positions[0],
            positions[1]
        ),
    }
}

/// Tokenizes a text with the examined model's tokenizer, or else the reference's. Fails if a token of the text has different meanings in
/// the two vocabularies.
fn encoded(
    text: &str,
    examined: &Source,
    reference: &Source,
) -> Result<(Vec<u32>, Arc<Tokenizer>)> {
    let (own, other) = match (examined.text(), reference.text()) {
        (Ok(own), Ok(other)) => (own.tokenizer, Some(other.tokenizer)),
        (Ok(text), Err(_)) | (Err(_), Ok(text)) => (text.tokenizer, None),
        (Err(e), Err(_)) => return Err(e),
    };
    let tokens = own.encode(text, false)?;
    let Some(other) = other else {
        return Ok((tokens, own));
    };
    let (of_own, of_other) = (
        |token: u32| own.text_of(token).unwrap_or_default(),
        |token: u32| other.text_of(token).unwrap_or_default(),
    );
    if let Some(&token) = tokens.iter().find(|&&t| of_own(t) != of_other(t)) {
        bail!(
            InvalidArgument,
            "the models have different vocabularies: token {token} is {:?} and {:?}; only models of the same shape and vocabulary can be \
             compared",
            of_own(token),
            of_other(token)
        );
    }
    Ok((tokens, own))
}
