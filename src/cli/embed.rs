//! `nvfp4 embed`: embeddings of texts as JSON lines, or the cosines between them.

use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use NVFP4::base::Result;
use NVFP4::base::call::{Progress, Watch};
use NVFP4::base::error::bail;
use NVFP4::base::memory;
use NVFP4::model::Pooling;
use NVFP4::session::{EmbedOptions, EmbedPrompt, Embedding};
use clap::ValueEnum;
use serde::Serialize;

use super::{model, output};

/// Most texts with a table of cosines, whose numbers are their product.
const MOST_COMPARED: usize = 64;
/// Characters of a text that are shown.
const SHOWN: usize = 60;

#[derive(Clone, Copy, ValueEnum)]
enum PoolingName {
    /// The last token
    Last,
    /// The mean of all tokens
    Mean,
    /// The first token
    Cls,
    /// Every token
    None,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    Yes,
    No,
}

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: model::ModelArgs,
    /// The texts
    #[arg(required_unless_present = "texts")]
    text: Vec<OsString>,
    /// A file with a text in each line; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    texts: Option<PathBuf>,
    /// The rows of a text that make its embedding; default: those that the model asks for
    #[arg(long, value_enum)]
    pooling: Option<PoolingName>,
    /// Whether embeddings are divided by their length; default: what the model says
    #[arg(long, value_enum)]
    normalize: Option<Switch>,
    /// Keep the first elements of an embedding
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    dimensions: usize,
    /// A text that goes before each text
    #[arg(long)]
    prompt: Option<String>,
    /// The name of one of the model's prompts, such as query
    #[arg(long, conflicts_with = "prompt", value_name = "NAME")]
    prompt_name: Option<String>,
    /// Cut texts that are longer than the model takes
    #[arg(long)]
    truncate: bool,
    /// Print JSON lines of texts and embeddings, rather than cosines
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    index: usize,
    text: &'a str,
    tokens: usize,
    /// The embedding, or the rows of all tokens.
    #[serde(flatten)]
    numbers: Numbers<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Numbers<'a> {
    Embedding(&'a [f32]),
    Rows(Vec<&'a [f32]>),
}

pub(super) fn run(args: &Args) -> Result<()> {
    let file = args.texts.as_deref().map(model::read_text).transpose()?;
    let texts: Vec<&str> = match &file {
        Some(file) => file.lines().collect(),
        None => {
            let each = args.text.iter().enumerate();
            let each =
                each.map(|(i, text)| NVFP4::text::utf8(&format!("the text {i}"), text.as_bytes()));
            each.collect::<Result<_>>()?
        }
    };
    let options = args.options();
    if !args.json {
        check_compared(texts.len(), options.pooling)?;
    }
    let model = args.model.load()?;
    let embedding = Embedding::of_texts(&model, &texts, &options)?;
    let mut values = memory::zeros(embedding.rows() * embedding.dimensions())?;
    let bar = output::count_bar("tokens", 0);
    let show = |at: Progress| {
        bar.set_length(at.total);
        bar.set_position(at.done);
        std::ops::ControlFlow::Continue(())
    };
    let watch = Watch {
        progress: Some(&show),
        ..Watch::default()
    };
    watch.during(|| embedding.run(&mut values))?;
    bar.finish_and_clear();
    let mut rows = values.chunks_exact(embedding.dimensions());
    if args.json {
        for (index, text) in texts.iter().enumerate() {
            let own: Vec<&[f32]> = rows.by_ref().take(embedding.rows_of(index)).collect();
            output::json(&Line {
                index,
                text,
                tokens: embedding.tokens(index).len(),
                numbers: match (options.pooling, &own[..]) {
                    (Some(Pooling::None), _) => Numbers::Rows(own),
                    (_, [row]) => Numbers::Embedding(row),
                    (_, several) => bail!(Internal, "{} rows of one text", several.len()),
                },
            })?;
        }
        return Ok(());
    }
    output::print(table(&texts, &embedding, &rows.collect::<Vec<_>>()))
}

impl Args {
    fn options(&self) -> EmbedOptions<'_> {
        EmbedOptions {
            pooling: self.pooling.map(|pooling| match pooling {
                PoolingName::Last => Pooling::Last,
                PoolingName::Mean => Pooling::Mean,
                PoolingName::Cls => Pooling::Cls,
                PoolingName::None => Pooling::None,
            }),
            normalize: self.normalize.map(|switch| switch == Switch::Yes),
            dimensions: self.dimensions,
            prompt: match (&self.prompt, &self.prompt_name) {
                (Some(text), _) => EmbedPrompt::Text(text),
                (None, Some(name)) => EmbedPrompt::Named(name),
                (None, None) => EmbedPrompt::AsModel,
            },
            truncate: self.truncate,
            kv: self.model.kv.into(),
            private: false,
        }
    }
}

/// Fails for what no table shows.
fn check_compared(texts: usize, pooling: Option<Pooling>) -> Result<()> {
    if texts > MOST_COMPARED {
        bail!(
            InvalidArgument,
            "{texts} texts, and a table of cosines has up to {MOST_COMPARED}; print embeddings with --json"
        );
    }
    if pooling == Some(Pooling::None) {
        bail!(
            InvalidArgument,
            "a table of cosines shows one embedding for each text; print the rows of tokens with --json"
        );
    }
    Ok(())
}

/// The texts, and the cosine of each with each.
fn table(texts: &[&str], embedding: &Embedding<'_>, rows: &[&[f32]]) -> String {
    let mut out = String::new();
    for (i, text) in texts.iter().enumerate() {
        let mut shown: String = text.chars().take(SHOWN).collect();
        if shown.len() < text.len() {
            shown.push_str("...");
        }
        let tokens = embedding.tokens(i).len();
        let _ = writeln!(out, "{i:>3}  {tokens:>5} tokens  {shown}");
    }
    let _ = writeln!(out, "cosines of {} dimensions", embedding.dimensions());
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    let lengths: Vec<f64> = rows.iter().map(|row| dot(row, row).sqrt()).collect();
    for (i, row) in rows.iter().enumerate() {
        let _ = write!(out, "{i:>3}");
        for (other, length) in rows.iter().zip(&lengths) {
            let _ = write!(out, " {:>7.4}", dot(row, other) / (lengths[i] * length));
        }
        out.push('\n');
    }
    out
}
