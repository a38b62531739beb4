//! `nvfp4 quantize`: converts a model on disk to NVFP4.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::base::threads::Pool;
use NVFP4::checkpoint::{Checkpoint, PACKED_FILE};
use NVFP4::format::nvfp4;
use NVFP4::model::convert::{Container, ConvertOptions, Tables, convert};
use NVFP4::model::{Device, PackReport, is_same_directory, open, pack};
use NVFP4::train::calibration::{self, Quantized, Stage, TextOptions};
use clap::ValueEnum;
use clap::builder::PossibleValue;

use super::recipe::{RecipeName, TableForm};
use super::{model, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The model to read: a file with its config.json beside it, a directory, or ORG/NAME on the hub. A model that run would
    /// refuse is refused
    input: OsString,
    /// Where to write: a directory for safetensors, new or empty, or a file for dat
    output: PathBuf,
    /// How codes and block scales are chosen; default: calibrated where --device or another option of it is given, else sweep, which has
    /// the smallest error of those that run no model. A model of Qwen3-0.6B's shape in bf16, 1.2 GB, took 10 s
    /// by sweep, 8 s by four-over-six and 4 s by amax on 2 shared Xeon cores, 2026-11-23; one of Qwen3-4B's shape 100 s by calibrated on an H100,
    /// 2026-11-27
    #[arg(long, value_enum)]
    recipe: Option<Recipe>,
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
    /// The device for the recipe calibrated: cpu, cuda:N, or auto for the first GPU if there is one and else the CPU; default: cpu
    #[arg(long)]
    device: Option<String>,
    /// Bits that a weight of the blocks may have on average with the recipe calibrated, scales included, such as 4.75: blocks that
    /// lose most in NVFP4, which has 4.5, get 8
    #[arg(long, value_name = "BITS")]
    budget: Option<f64>,
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
    /// Also write packed.nvfp4 into the directory OUTPUT: the weights as the CPU's kernels read them. Processes that load the model on the CPU
    /// then share their memory, and need not pack them. If OUTPUT is INPUT itself, nothing is quantized, and that file alone is written
    #[arg(long)]
    packed: bool,
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

/// Quantization recipe.
#[derive(Clone, Copy)]
enum Recipe {
    /// By the weights alone.
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
    let recipe = args.recipe()?;
    let is_calibrated = matches!(recipe, Recipe::Calibrated);
    if args.packed && matches!(container, Container::Dat) {
        bail!(
            InvalidArgument,
            "--packed is for a directory of safetensors, and {} is to be dat; name a directory, or leave it out",
            args.output.display()
        );
    }
    let input = model::resolve(&args.input)?;
    if args.packed && is_same_directory(&input, &args.output) {
        args.check_only_packs()?;
        let device = Device::cpu(args.threads)?;
        let packed = output::with_byte_bar("packing", || pack(&input, &device))?;
        if args.json {
            return output::json(&packed);
        }
        return show_packed(&packed);
    }
    let source: Arc<dyn Checkpoint> = Arc::from(open(&input)?);
    let pool = Pool::new(match args.threads {
        Some(threads) => threads,
        None => Pool::default_threads()?,
    })?;
    let options = ConvertOptions {
        packed: match args.packed {
            true => Some(Device::cpu(args.threads)?),
            false => None,
        },
        tables: args.tables.map(Tables::from).unwrap_or_default(),
        narrow_tables: is_calibrated,
        keep_head: args.keep_head,
        replace: args.force,
        ..ConvertOptions::new(
            container,
            match recipe {
                Recipe::Plain(name) => name.into(),
                // For weights that are not calibrated.
                Recipe::Calibrated => nvfp4::Recipe::Sweep,
            },
        )
    };
    let found = match recipe {
        Recipe::Calibrated => calibrated(args, source, &options, &pool)?,
        Recipe::Plain(_) => {
            let bar = output::byte_bar("quantizing", 0);
            let report = convert(&*source, &args.output, &options, &pool, &mut |p| {
                bar.set_length(p.total);
                bar.set_position(p.done);
                if p.tensor == PACKED_FILE {
                    bar.set_message("packing");
                }
                ControlFlow::Continue(())
            });
            bar.finish_and_clear();
            Quantized {
                report: report?,
                calibrated: Vec::new(),
                wide_blocks: Vec::new(),
                distilled: None,
            }
        }
    };
    if args.json {
        return output::json(&found);
    }
    show(args, &found)?;
    found.report.packed.iter().try_for_each(show_packed)
}

fn show_packed(packed: &PackReport) -> Result<()> {
    output::line(format_args!(
        "{}: {} matrices packed for the CPU, {}",
        packed.file.display(),
        packed.matrices,
        output::size(packed.bytes)
    ))
}

fn show(args: &Args, found: &Quantized) -> Result<()> {
    if !found.wide_blocks.is_empty() {
        output::line(format_args!("blocks in int8: {:?}", found.wide_blocks))?;
    }
    if let Some(distilled) = found.distilled {
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
    let report = &found.report;
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
        error_of(found)
    ))
}

/// Describes the error of the quantization.
fn error_of(found: &Quantized) -> String {
    if found.calibrated.is_empty() {
        return format!("relative error {:.4}", found.report.relative_error);
    }
    let [error, of_sweep] = found.mean_errors();
    format!("relative error of products {error:.4} (by sweep {of_sweep:.4})")
}

impl Args {
    /// Fails if an option of quantization is given although nothing is quantized.
    fn check_only_packs(&self) -> Result<()> {
        let options = [
            ("--recipe", self.recipe.is_some()),
            ("--tables", self.tables.is_some()),
            ("--keep-head", self.keep_head),
            ("--force", self.force),
        ];
        let mut options = options.into_iter().chain(self.options_of_calibration());
        match options.find(|(_, is_given)| *is_given) {
            Some((name, _)) => bail!(
                InvalidArgument,
                "{} is both INPUT and OUTPUT, so that --packed alone packs it as it is, and {name} has no effect; leave it out, or name another OUTPUT",
                self.output.display()
            ),
            None => Ok(()),
        }
    }

    /// The options that only the calibrated recipe takes, and whether each is given.
    fn options_of_calibration(&self) -> [(&'static str, bool); 6] {
        [
            ("--calibration", !self.calibration.is_empty()),
            ("--calibration-windows", self.calibration_windows.is_some()),
            ("--calibration-window", self.calibration_window.is_some()),
            ("--device", self.device.is_some()),
            ("--budget", self.budget.is_some()),
            ("--distill", self.distill.is_some()),
        ]
    }

    /// The requested recipe; an option of the calibrated recipe implies it. Fails if such an option is combined with another recipe.
    fn recipe(&self) -> Result<Recipe> {
        let options = self.options_of_calibration();
        let given = options.iter().find(|(_, is_given)| *is_given);
        match (self.recipe, given) {
            (Some(Recipe::Plain(_)), Some((name, _))) => bail!(
                InvalidArgument,
                "{name} is for --recipe calibrated; the other recipes run no model"
            ),
            (Some(recipe), _) => Ok(recipe),
            (None, Some(_)) => Ok(Recipe::Calibrated),
            (None, None) => Ok(Recipe::Plain(RecipeName::Sweep)),
        }
    }
}

/// Calibrates, with a bar for each stage.
fn calibrated(
    args: &Args,
    checkpoint: Arc<dyn Checkpoint>,
    conversion: &ConvertOptions,
    pool: &Pool,
) -> Result<Quantized> {
    let device = model::device(args.device.as_deref().unwrap_or("cpu"), args.threads)?;
    let options = calibration::Options {
        text: TextOptions {
            files: args.calibration.clone(),
            windows: args.calibration_windows,
            window: args.calibration_window,
        },
        budget: args.budget,
        distill: args.distill,
    };
    let bar = output::share_bar("calibrating");
    let mut is_told = false;
    let found = calibration::quantize(
        checkpoint,
        &args.output,
        conversion,
        (&device, pool),
        &options,
        &mut |stage| {
            let (label, done, total) = match stage {
                Stage::Calibrate(p) => {
                    if p.resumed > 0 && !is_told {
                        bar.suspend(|| {
                            eprintln!(
                                "{} of {} blocks are there from a calibration that was interrupted",
                                p.resumed, p.blocks
                            );
                        });
                        is_told = true;
                    }
                    let block = (p.block + 1).min(p.blocks);
                    let label = format!("calibrating block {block}/{}", p.blocks);
                    (label, p.done, p.total)
                }
                Stage::Measure(done, total) => ("measuring blocks".to_owned(), done, total),
                Stage::Write(done, total) => ("writing".to_owned(), done, total),
                Stage::Distill(done, total) => {
                    (format!("distilling, step {done}/{total}"), done, total)
                }
            };
            if done < bar.position() {
                bar.reset();
            }
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(label);
        },
    );
    bar.finish_and_clear();
    found
}

/// The encoding of a table; `none` if the model has no such table.
fn named(encoding: &str) -> &str {
    match encoding {
        "" => "none",
        encoding => encoding,
    }
}
