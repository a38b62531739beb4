//! `nvfp4 perplexity`: how well a model predicts a text, in windows that do not overlap, its mean Kullback-Leibler divergence from a
//! reference model, and how many multiple-choice questions both answer correctly.

mod reader;
mod scoring;
mod sums;
mod tasks;
mod text;

use std::ffi::OsString;
use std::path::PathBuf;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use serde::Serialize;

use self::tasks::{Results, Set};
use super::{model, output, windows};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    /// The text to predict, in UTF-8; - is standard input
    #[arg(long, required_unless_present = "tasks")]
    text: Option<PathBuf>,
    /// Sets of multiple-choice questions, JSON Lines of {"question": "..", "choices": ["..", ".."], "answer": 0}: the answer is
    /// the number of a choice, a letter from A on, or the text of a choice
    #[arg(long, num_args = 1.., value_name = "FILE")]
    tasks: Vec<PathBuf>,
    /// A model whose predictions are the reference; same vocabulary, if there is a text
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

#[derive(Serialize)]
struct Report {
    model: String,
    #[serde(flatten)]
    text: Option<text::Report>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tasks: Vec<Results>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    windows::check(Some(args.window), args.windows)?;
    let text = args.text.as_deref();
    let text = text
        .map(|path| Ok((path, model::read_text(path)?)))
        .transpose()?;
    let sets = args.tasks.iter().map(|path| Set::read(path));
    let sets = sets.collect::<Result<Vec<_>>>()?;
    let (model, reference) = match &args.reference {
        Some(name) => {
            let (model, reference) = args.model.load_both(name)?;
            (model, Some(reference))
        }
        None => (args.model.load()?, None),
    };
    model::warn_of_template(&model);
    let kv = args.model.kv.into();
    let vocabulary = model.spec().vocab_size;
    if let (Some(reference), Some(_)) = (&reference, &text)
        && reference.spec().vocab_size != vocabulary
    {
        bail!(
            InvalidArgument,
            "the model has {vocabulary} tokens and the reference {}; their predictions cannot be compared",
            reference.spec().vocab_size
        );
    }
    let text = text.map(|(path, text)| {
        let tokens = model.tokenizer()?.encode(&text, false)?;
        let windows = text::Windows {
            tokens: tokens.len(),
            longest: args.window,
            all: windows::of(path, &tokens, args.window, args.windows)?,
        };
        let reference = reference.as_ref().zip(args.reference.as_deref());
        text::measure(&windows, kv, &model, reference)
    });
    let text = text.transpose()?;
    let tasks = sets
        .iter()
        .map(|set| tasks::measure(set, &model, reference.as_ref(), kv));
    let report = Report {
        model: model::shown(&args.model.model),
        text,
        tasks: tasks.collect::<Result<_>>()?,
    };
    if args.json {
        return output::json(&report);
    }
    if let Some(text) = &report.text {
        output::line(text)?;
    }
    report.tasks.iter().try_for_each(output::line)
}
