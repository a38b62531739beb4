//! `nvfp4 quantize`: a model on disk to NVFP4 on disk.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;

use NVFP4::base::Result;
use NVFP4::base::threads::Pool;
use NVFP4::model::convert::{Container, ConvertOptions, Tables, convert};
use NVFP4::model::open;
use clap::ValueEnum;

use super::recipe::{RecipeName, TableForm};
use super::{model, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The model to read: a file with its config.json beside it, a directory, or ORG/NAME on the hub. A model that run would
    /// refuse is refused
    input: OsString,
    /// Where to write: a directory for safetensors, new or empty, or a file for dat
    output: PathBuf,
    /// How block scales are chosen: sweep has the smallest error. A model of Qwen3-0.6B's shape in bf16, 1.2 GB, took 10 s
    /// by sweep, 8 s by four-over-six and 4 s by amax on 2 shared Xeon cores, 2026-11-23
    #[arg(long, value_enum, default_value_t = RecipeName::Sweep)]
    recipe: RecipeName,
    /// The format to write; default: dat if OUTPUT ends in .dat, else safetensors
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Format of the embedding and the output head. A tied head stays tied: the table is written once.
    /// Default: int8 with a scale a row where INPUT has the table in at most 8 bits and OUTPUT is a directory, else bf16
    /// (f16 stays f16); NVFP4 stays NVFP4. nvfp4 makes the smallest and fastest model and harms answers most
    #[arg(long, value_enum)]
    tables: Option<TableForm>,
    /// Leave the output head, or the table that it shares with the embedding, in the precision that it has, whatever --tables
    /// says: what a file holds in blocks of at most 8 bits becomes bf16
    #[arg(long)]
    keep_head: bool,
    /// Replace the model in the directory OUTPUT, with everything in it, once the new one is complete; without it a
    /// directory that is not empty is refused. A file is always replaced
    #[arg(long)]
    force: bool,
    /// CPU threads; default: one for each core
    #[arg(long)]
    threads: Option<usize>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Dat,
    Safetensors,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let container = match args.format {
        Some(Format::Dat) => Container::Dat,
        Some(Format::Safetensors) => Container::ModelOpt,
        None if args.output.extension().is_some_and(|e| e == "dat") => Container::Dat,
        None => Container::ModelOpt,
    };
    let source = open(&model::resolve(&args.input)?)?;
    let pool = Pool::new(match args.threads {
        Some(threads) => threads,
        None => Pool::default_threads()?,
    })?;
    let options = ConvertOptions {
        tables: args.tables.map(Tables::from).unwrap_or_default(),
        keep_head: args.keep_head,
        replace: args.force,
        ..ConvertOptions::new(container, args.recipe.into())
    };
    let bar = output::byte_bar("quantizing", 0);
    let report = convert(&*source, &args.output, &options, &pool, &mut |p| {
        bar.set_length(p.total);
        bar.set_position(p.done);
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    let report = report?;
    if args.json {
        return output::json(&report);
    }
    output::line(format_args!(
        "{}: {} of {} tensors quantized, {} already NVFP4; embedding {}, head {}; {} -> {}, relative error {:.4}",
        args.output.display(),
        report.quantized,
        report.tensors,
        report.kept_nvfp4,
        named(report.embedding),
        named(report.head),
        output::size(report.bytes_in),
        output::size(report.bytes_out),
        report.relative_error
    ))
}

/// The encoding of a table; a model of another kind may have none.
fn named(encoding: &str) -> &str {
    match encoding {
        "" => "none",
        encoding => encoding,
    }
}
