//! `nvfp4 quantize`: a model on disk to NVFP4 on disk.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::base::threads::Pool;
use NVFP4::checkpoint::Checkpoint;
use NVFP4::format::nvfp4;
use NVFP4::model::Device;
use NVFP4::model::calibrate::CalibratedMatrix;
use NVFP4::model::convert::{Container, ConvertOptions, ConvertReport, Tables, convert};
use NVFP4::model::open;
use NVFP4::train::calibration::{Calibration, Distilled, TextOptions};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde::Serialize;

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
    #[arg(long, value_enum, default_value = "sweep")]
    recipe: Recipe,
    /// Texts for the recipe calibrated, of the kinds that the model is used for: files as `nvfp4 train` reads them. Where they are
    /// short, and by default, a text of prose, 38 languages, code and conversations that the command brings
    #[arg(long, num_args = 1.., value_name = "FILE")]
    calibration: Vec<PathBuf>,
    /// Windows that calibrated takes of the texts, at most; default: 32 on a CPU, 128 on a GPU
    #[arg(long, value_name = "COUNT")]
    calibration_windows: Option<usize>,
    /// Tokens in such a window; default: 1024 on a CPU and 2048 on a GPU, or the model's context
    #[arg(long, value_name = "TOKENS")]
    calibration_window: Option<usize>,
    /// Where the model reads the texts of the recipe calibrated: cpu or cuda:N; default: cpu
    #[arg(long)]
    device: Option<String>,
    /// Steps of distillation after the recipe calibrated: the whole model, still in NVFP4, learns what INPUT predicts, from all of the
    /// texts. For a GPU: a step of 8192 tokens takes a CPU minutes
    #[arg(long, value_name = "STEPS")]
    distill: Option<u64>,
    /// The format to write; default: dat if OUTPUT ends in .dat, else safetensors
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Format of the embedding and the output head. A tied head stays tied: the table is written once.
    /// Default: int8 with a scale a row where INPUT has the table in at most 8 bits, or the recipe is calibrated, and OUTPUT is a
    /// directory; else bf16 (f16 stays f16); NVFP4 stays NVFP4. nvfp4 makes the smallest and fastest model and harms answers most
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
    /// Print the result as JSON, with the recipe calibrated also what became of each matrix
    #[arg(long)]
    json: bool,
}

/// How weights are quantized.
#[derive(Clone, Copy)]
enum Recipe {
    /// By weights alone.
    Plain(RecipeName),
    Calibrated,
}

impl ValueEnum for Recipe {
    fn value_variants<'a>() -> &'a [Self] {
        &[
            Recipe::Plain(RecipeName::Amax),
            Recipe::Plain(RecipeName::FourOverSix),
            Recipe::Plain(RecipeName::Sweep),
            Recipe::Calibrated,
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Recipe::Plain(name) => name.to_possible_value(),
            Recipe::Calibrated => Some(PossibleValue::new("calibrated").help(
                "Codes and scales for which products differ least, by what the model makes of text (--calibration)",
            )),
        }
    }
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
    let is_calibrated = matches!(args.recipe, Recipe::Calibrated);
    if !is_calibrated {
        refuse_calibration(args)?;
    }
    if args.distill.is_some() {
        check_distillation(args, container)?;
    }
    let source: Arc<dyn Checkpoint> = Arc::from(open(&model::resolve(&args.input)?)?);
    let pool = Pool::new(match args.threads {
        Some(threads) => threads,
        None => Pool::default_threads()?,
    })?;
    let options = ConvertOptions {
        tables: args.tables.map(Tables::from).unwrap_or_default(),
        narrow_tables: is_calibrated,
        keep_head: args.keep_head,
        replace: args.force,
        ..ConvertOptions::new(
            container,
            match args.recipe {
                Recipe::Plain(name) => name.into(),
                // For what is not calibrated.
                Recipe::Calibrated => nvfp4::Recipe::Sweep,
            },
        )
    };
    let calibration = match args.recipe {
        Recipe::Calibrated => Some(calibrate(args, source.clone(), &options)?),
        Recipe::Plain(_) => None,
    };
    let from = calibration
        .as_ref()
        .map_or(&*source, |(c, _)| &*c.checkpoint);
    let bar = output::byte_bar("quantizing", 0);
    let report = convert(from, &args.output, &options, &pool, &mut |p| {
        bar.set_length(p.total);
        bar.set_position(p.done);
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    let mut report = report?;
    let (mut calibrated, mut distilled) = (Vec::new(), None);
    if let Some((calibration, device)) = calibration {
        if let Some(steps) = args.distill {
            distilled = Some(distill(args, &calibration, &report, &device, steps)?);
        }
        calibration.written();
        calibration.count_in(&mut report);
        calibrated = calibration.matrices;
    }
    if args.json {
        return output::json(&Quantized {
            report,
            calibrated,
            distilled,
        });
    }
    if let Some(distilled) = distilled {
        output::line(format_args!(
            "{} steps of distillation: a divergence of {:.4} where it was {:.4} before{}",
            distilled.steps,
            distilled.divergence,
            distilled.divergence_before,
            match distilled.divergence < distilled.divergence_before {
                true => "",
                false => ", so that the calibrated model stays",
            }
        ))?;
    }
    output::line(format_args!(
        "{}: {} of {} tensors quantized, {} already NVFP4; embedding {}, head {}; {} -> {}, {}",
        args.output.display(),
        report.quantized,
        report.tensors,
        report.kept_nvfp4,
        named(report.embedding),
        named(report.head),
        output::size(report.bytes_in),
        output::size(report.bytes_out),
        error_of(&report, &calibrated)
    ))
}

/// What the quantization lost, in words.
fn error_of(report: &ConvertReport, calibrated: &[CalibratedMatrix]) -> String {
    if calibrated.is_empty() {
        return format!("relative error {:.4}", report.relative_error);
    }
    let mean = |of: fn(&CalibratedMatrix) -> f64| {
        calibrated.iter().map(of).sum::<f64>() / calibrated.len() as f64
    };
    format!(
        "relative error of products {:.4} (by sweep {:.4})",
        mean(|m| m.error),
        mean(|m| m.error_of_sweep)
    )
}

/// Refuses to distill what could not be written.
fn check_distillation(args: &Args, container: Container) -> Result<()> {
    if args.distill == Some(0) {
        bail!(InvalidArgument, "--distill 0 learns nothing; leave it out");
    }
    if container == Container::Dat {
        bail!(
            InvalidArgument,
            "--distill writes directories; name one, and quantize it to .dat afterwards"
        );
    }
    if args.keep_head {
        bail!(
            InvalidArgument,
            "--keep-head leaves the head as it is, and --distill trains it; give one of them, or --tables bf16"
        );
    }
    Ok(())
}

/// Refuses options of the recipe calibrated beside another one.
fn refuse_calibration(args: &Args) -> Result<()> {
    let given = [
        ("--calibration", !args.calibration.is_empty()),
        ("--calibration-windows", args.calibration_windows.is_some()),
        ("--calibration-window", args.calibration_window.is_some()),
        ("--device", args.device.is_some()),
        ("--distill", args.distill.is_some()),
    ];
    if let Some((name, _)) = given.iter().find(|(_, is_given)| *is_given) {
        bail!(
            InvalidArgument,
            "{name} is for --recipe calibrated; the other recipes run no model"
        );
    }
    Ok(())
}

/// The command's result as JSON.
#[derive(Serialize)]
struct Quantized {
    #[serde(flatten)]
    report: ConvertReport,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    calibrated: Vec<CalibratedMatrix>,
    #[serde(skip_serializing_if = "Option::is_none")]
    distilled: Option<Distilled>,
}

/// The model with its linear weights calibrated.
fn calibrate(
    args: &Args,
    checkpoint: Arc<dyn Checkpoint>,
    options: &ConvertOptions,
) -> Result<(Calibration, Device)> {
    let device = model::device(args.device.as_deref().unwrap_or("cpu"), args.threads)?;
    let text = text_options(args);
    let bar = output::share_bar("calibrating");
    let mut is_told = false;
    let found = Calibration::new(
        checkpoint,
        &args.output,
        options,
        &device,
        &text,
        &mut |p| {
            if p.resumed > 0 && !is_told {
                bar.suspend(|| {
                    eprintln!(
                        "{} of {} blocks are there from a calibration that was interrupted",
                        p.resumed, p.blocks
                    );
                });
                is_told = true;
            }
            bar.set_length(p.total);
            bar.set_position(p.done);
            let block = (p.block + 1).min(p.blocks);
            bar.set_message(format!("calibrating block {block}/{}", p.blocks));
        },
    );
    bar.finish_and_clear();
    Ok((found?, device))
}

/// The text that the options name.
fn text_options(args: &Args) -> TextOptions {
    TextOptions {
        files: args.calibration.clone(),
        windows: args.calibration_windows,
        window: args.calibration_window,
    }
}

/// Distills what has been written.
fn distill(
    args: &Args,
    calibration: &Calibration,
    report: &ConvertReport,
    device: &Device,
    steps: u64,
) -> Result<Distilled> {
    let bar = output::count_bar("distilling", steps);
    let found = calibration.distill(
        &args.output,
        report,
        device,
        &text_options(args),
        steps,
        &mut |step| bar.set_position(step),
    );
    bar.finish_and_clear();
    found.map_err(|e| {
        e.within(format_args!(
            "distilling (the calibrated model is in {})",
            args.output.display()
        ))
    })
}

/// The encoding of a table; a model of another kind may have none.
fn named(encoding: &str) -> &str {
    match encoding {
        "" => "none",
        encoding => encoding,
    }
}
