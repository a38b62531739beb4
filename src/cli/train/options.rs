//! The options of `nvfp4 train`, and the trainer settings derived from them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, Result};
use NVFP4::format::nvfp4;
use NVFP4::format::residual::Bits;
use NVFP4::model::convert::Tables;
use NVFP4::ops::Device;
use NVFP4::ops::training::optimizer::{Hyperparameters, WeightForm};
use NVFP4::train::data::{self, EmptyThink, Format, Long};
use NVFP4::train::{Clip, Config, Decay, Lora, Offload, ProductForm, Recipe, Recompute};
use clap::ValueEnum;
use serde_json::Value;

use super::super::recipe::{RecipeName, TableForm};
use super::teacher::TeacherArgs;

/// Default share of steps over which the rate rises.
const WARMUP: f64 = 0.03;
/// The share of steps over which the rate falls under `wsd`.
const LAST: f64 = 0.2;
/// Default learning rates: for a model's own parameters, for adapters, and with a teacher.
const RATE: f64 = 2e-5;
const ADAPTER_RATE: f64 = 2e-4;
const TEACHER_RATE: f64 = 1e-5;
/// Default ratio of alpha to the rank.
const ALPHA: f64 = 2.0;

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    /// The model to begin with: a file, a directory, or ORG/NAME on the hub
    #[arg(long, required_unless_present = "init", conflicts_with = "init")]
    pub(super) model: Option<OsString>,
    /// Begin with random weights instead: a directory with config.json and tokenizer.json; weights in it are not read
    #[arg(long, value_name = "DIR")]
    pub(super) init: Option<PathBuf>,
    /// Files to learn: .tsv (a line prompt<TAB>answer, # comments), .jsonl and .json (objects with messages, conversations, prompt and
    /// completion, instruction and output, question and answer, or text), .csv (the same as columns) and .txt; also with .gz or .zst
    #[arg(long, required_unless_present = "teacher_writes", num_args = 1.., value_name = "FILE")]
    pub(super) data: Vec<PathBuf>,
    /// Files to evaluate with, of the same formats: together one set, or as NAME=FILE the set NAME, of which there may be several; losses
    /// are told and drawn for each
    #[arg(long, num_args = 1.., value_name = "[NAME=]FILE")]
    pub(super) eval: Vec<OsString>,
    /// Sets a share of the data's rows aside to evaluate with, as in 0.02
    #[arg(long, value_name = "SHARE", conflicts_with = "eval")]
    pub(super) eval_share: Option<f64>,
    /// The directory of the run: checkpoints, loss.csv, loss.svg, memory.json, and the trained model in model/, or adapters in adapter/
    #[arg(
        long,
        value_name = "DIR",
        required = false,
        required_unless_present = "show_mask",
        default_value_if("show_mask", clap::builder::ArgPredicate::IsPresent, ".")
    )]
    pub(super) out: PathBuf,
    /// Go on with the run in OUT where its last checkpoint is, to the same bits as if it had never stopped: with the options that
    /// it began with. Steps, rate, schedule and the like may be others, which is said
    #[arg(long)]
    pub(super) resume: bool,
    /// Go on from this checkpoint: a step, or a checkpoint's directory. Checkpoints of later steps and what was delivered move to
    /// OUT/aside-N
    #[arg(long, value_name = "STEP")]
    pub(super) resume_from: Option<OsString>,

    /// Steps of the optimizer
    #[arg(long, conflicts_with = "epochs", help_heading = "Training")]
    steps: Option<u64>,
    /// How often to see all data; default: 1
    #[arg(long, help_heading = "Training")]
    epochs: Option<f64>,
    /// The highest learning rate; default: 2e-5, which is for fine-tuning, 2e-4 for adapters, and 1e-5 with a teacher
    #[arg(long, help_heading = "Training")]
    rate: Option<f64>,
    /// Steps over which the rate rises; default: 3 % of all
    #[arg(long, value_name = "STEPS", help_heading = "Training")]
    warmup: Option<u64>,
    /// How the rate falls after that, to a tenth: not, along a cosine, in a line, or in a line over the last fifth (wsd); default: cosine
    #[arg(long, value_enum, help_heading = "Training")]
    schedule: Option<ScheduleName>,
    /// The decoupled weight decay; default: 0.01
    #[arg(long, help_heading = "Training")]
    weight_decay: Option<f64>,
    /// The decay of the first moment; default: 0.9
    #[arg(long, help_heading = "Training")]
    beta1: Option<f64>,
    /// The decay of the second moment; default: 0.95
    #[arg(long, help_heading = "Training")]
    beta2: Option<f64>,
    /// The bound of the gradients' norm, 0 for none; default: 1
    #[arg(long, help_heading = "Training")]
    clip: Option<f64>,
    /// Windows that go through the model together
    #[arg(
        long,
        default_value_t = 1,
        value_name = "WINDOWS",
        help_heading = "Training"
    )]
    pub(super) batch: usize,
    /// Such batches in a step, whose gradients are added
    #[arg(
        long,
        default_value_t = 1,
        value_name = "BATCHES",
        help_heading = "Training"
    )]
    pub(super) accumulate: usize,
    /// Train only the last N blocks, the last norm and an untied head, or only the last N blocks' adapters
    #[arg(long, value_name = "N", help_heading = "Training")]
    last_blocks: Option<usize>,
    /// Chooses the order of data, what is set aside, the random bits of rounding and random weights
    #[arg(long, default_value_t = 0, help_heading = "Training")]
    pub(super) seed: u64,
    /// Settings in JSON, by the names in a checkpoint's trainer.json under config; options that are given come first, and what neither says
    /// has the defaults. Some settings have no option: groups of parameters with a rate or a decay of their own, and in the recipe
    /// high_blocks and how block scales are chosen
    #[arg(long, value_name = "FILE", help_heading = "Training")]
    config: Option<PathBuf>,

    /// Train low-rank adapters (LoRA) of this rank beside the model, which is held in NVFP4 and stays as it is
    #[arg(long, value_name = "RANK", help_heading = "Adapters")]
    adapter: Option<usize>,
    /// Factor of the adapters' results, times the rank; default: twice the rank
    #[arg(
        long,
        value_name = "ALPHA",
        requires = "adapter",
        help_heading = "Adapters"
    )]
    adapter_alpha: Option<f64>,
    /// The projections that have an adapter, by parts of their names with commas between them, as in q_proj,v_proj; default: all
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        requires = "adapter",
        help_heading = "Adapters"
    )]
    adapter_targets: Option<Vec<String>>,
    /// Write the model with the adapters in it too, quantized again, to OUT/model or where --export says; also of a run that has
    /// ended, with --resume
    #[arg(long, help_heading = "Adapters")]
    pub(super) merge: bool,

    #[command(flatten)]
    pub(super) teacher: TeacherArgs,

    /// Tokens of a window; default: 2048, or the model's context if that is less
    #[arg(long, value_name = "TOKENS", help_heading = "Data")]
    window: Option<usize>,
    /// Format of all files; default: by their names
    #[arg(long, value_enum, help_heading = "Data")]
    data_format: Option<FormatName>,
    /// Separator of the documents of a text, with \n and \t for line breaks and tabs; line breaks match CRLF too
    #[arg(long, value_name = "TEXT", help_heading = "Data")]
    separator: Option<String>,
    /// Learn prompts too, and not only answers
    #[arg(long, help_heading = "Data")]
    train_on_all: bool,
    /// Treatment of the empty reasoning that templates such as Qwen3's write before an answer without reasoning
    #[arg(long, value_enum, default_value_t = EmptyThinkName::Learn, help_heading = "Data")]
    empty_think: EmptyThinkName,
    /// Treatment of rows longer than a window; texts are cut into several
    #[arg(long, value_enum, default_value_t = LongName::Refuse, help_heading = "Data")]
    long: LongName,
    /// Leave out rows that cannot be used, and say how many, rather than refuse them all
    #[arg(long, help_heading = "Data")]
    skip_bad_rows: bool,
    /// One row in a window, rather than as many as fit
    #[arg(long, help_heading = "Data")]
    no_packing: bool,
    /// Print the first N rows as they would be trained, with what is learned of them, and end; nothing is written
    #[arg(long, value_name = "N", conflicts_with_all = ["resume", "merge", "teacher_writes"], help_heading = "Data")]
    pub(super) show_mask: Option<usize>,

    /// How weights of blocks and their moments are stored: nvfp4 (2.19 bytes a parameter), nvfp4-int8 (2.69, with a residual of 8 bits),
    /// float32 (12), or a file with a recipe in JSON; default: nvfp4
    #[arg(long, value_name = "RECIPE", help_heading = "Precision")]
    recipe: Option<String>,
    /// Form of the embedding and the output head in the trained model: bf16 and int8 are trained in bf16, nvfp4 as --recipe says. Default:
    /// that of the model, or what `nvfp4 quantize` would make of it: int8 where it has the table in at most 8 bits, else bf16
    #[arg(long, value_enum, help_heading = "Precision")]
    tables: Option<TableForm>,
    /// How block scales of weights are chosen that the model does not hold in NVFP4, as training begins and where adapters are merged: as
    /// --recipe of `nvfp4 quantize`; default: sweep
    #[arg(long, value_enum, value_name = "RECIPE", help_heading = "Precision")]
    weight_scales: Option<RecipeName>,
    /// Matrices to keep in float32 with their moments, and their products in bf16, by parts of their names with commas between them; with
    /// adapters, to keep as the model has them rather than in NVFP4
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        help_heading = "Precision"
    )]
    keep_high: Option<Vec<String>>,
    /// Precision of the rows in the products of blocks: nvfp4 rounds them as a tensor core for NVFP4 takes them; default: bf16
    #[arg(long, value_enum, value_name = "FORM", help_heading = "Precision")]
    activations: Option<FormName>,
    /// Precision of the gradients in the products of blocks: nvfp4 rounds them stochastically; default: bf16
    #[arg(long, value_enum, value_name = "FORM", help_heading = "Precision")]
    gradients: Option<FormName>,

    /// Use each gradient as soon as it is whole and keep none, clipping by the norm of the step before; default on a GPU without
    /// --accumulate
    #[arg(long, conflicts_with = "keep_gradients", help_heading = "Memory")]
    release_gradients: bool,
    /// Keep all gradients until the step's end, in float32
    #[arg(long, help_heading = "Memory")]
    keep_gradients: bool,
    /// Parts of a block that the backward pass recomputes instead of keeping: block (all, the default), none (faster, for more memory), or
    /// some of norms,qkv,heads,attention,output,gate_up,down
    #[arg(long, value_name = "PARTS", help_heading = "Memory")]
    recompute: Option<Recompute>,
    /// Keep activations for the backward pass rather than compute them again: --recompute none
    #[arg(long, conflicts_with = "recompute", help_heading = "Memory")]
    no_recompute: bool,
    /// Data of a GPU to keep in the host's memory: moments, activations (the inputs of blocks), both with a comma between them, or none
    #[arg(long, value_name = "WHAT", help_heading = "Memory")]
    offload: Option<Offload>,
    /// The device: cpu, cuda:N, or auto for the first GPU if any, else the CPU
    #[arg(long, default_value = "auto", help_heading = "Memory")]
    pub(super) device: String,
    /// CPU threads; default: one for each core
    #[arg(long, help_heading = "Memory")]
    pub(super) threads: Option<usize>,
    /// The most memory to use, in GB: more is an error that says what would fit
    #[arg(long, value_name = "GB", help_heading = "Memory")]
    pub(super) memory_budget: Option<f64>,

    /// Steps between checkpoints; 0 for one at the end alone
    #[arg(
        long,
        default_value_t = 200,
        value_name = "STEPS",
        help_heading = "Reports"
    )]
    pub(super) save_every: u64,
    /// Checkpoints to keep
    #[arg(long, default_value_t = 2, value_name = "N", help_heading = "Reports")]
    pub(super) keep: usize,
    /// Steps between evaluations and samples, which also come before the first step and after the last; 0 for those two alone
    #[arg(
        long,
        default_value_t = 100,
        value_name = "STEPS",
        help_heading = "Reports"
    )]
    pub(super) eval_every: u64,
    /// A prompt to answer at each evaluation, by the likeliest tokens; may be given several times
    #[arg(long, value_name = "PROMPT", help_heading = "Reports")]
    pub(super) sample: Vec<String>,
    /// Keep the checkpoint with the lowest evaluation loss as delivered, and deliver that one; by the first set, or the set NAME. With
    /// --teacher, the loss against the teacher
    #[arg(
        long,
        value_name = "NAME",
        num_args = 0..=1,
        default_missing_value = "",
        help_heading = "Reports"
    )]
    pub(super) best: Option<String>,
    /// End after N evaluations in a row that were not the best
    #[arg(long, value_name = "N", help_heading = "Reports")]
    pub(super) early_stop: Option<u64>,
    /// Write TensorBoard's event files too, to OUT/tensorboard
    #[arg(long, help_heading = "Reports")]
    pub(super) tensorboard: bool,
    /// Deliver what there is even if training has diverged
    #[arg(long, help_heading = "Reports")]
    pub(super) export_diverged: bool,
    /// Where the trained model goes: a directory, or a .dat file like the one that training begins with; default: OUT/model. Adapters go to
    /// OUT/adapter, and the model with them in it is asked for by --merge
    #[arg(long, value_name = "PATH", help_heading = "Reports")]
    pub(super) export: Option<PathBuf>,
    /// Print each event as a line of JSON
    #[arg(long, help_heading = "Reports")]
    pub(super) json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum ScheduleName {
    Constant,
    Cosine,
    Linear,
    Wsd,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormName {
    Bf16,
    Nvfp4,
}

impl From<FormName> for ProductForm {
    fn from(name: FormName) -> ProductForm {
        match name {
            FormName::Bf16 => ProductForm::Bf16,
            FormName::Nvfp4 => ProductForm::Nvfp4,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum FormatName {
    Tsv,
    Csv,
    Jsonl,
    Json,
    Text,
}

#[derive(Clone, Copy, ValueEnum)]
enum EmptyThinkName {
    /// It is learned with the answer
    Learn,
    /// It is context, as in the prompt of a model that is told not to reason
    Given,
    /// It is left out
    None,
}

#[derive(Clone, Copy, ValueEnum)]
enum LongName {
    /// An error that names them
    Refuse,
    /// Their ends are cut off
    Truncate,
    /// They are left out
    Drop,
}

/// Settings before the amount of data is known.
pub(super) struct Settings {
    pub(super) config: Config,
    /// The content of the `--config` file.
    file: Value,
}

impl Settings {
    /// Whether the file has a setting; options' defaults apply only to missing ones.
    fn says(&self, pointer: &str) -> bool {
        self.file.pointer(pointer).is_some()
    }
}

impl Args {
    /// Refuses values that are invalid for any run.
    pub(super) fn check(&self) -> Result<()> {
        for (name, value) in [
            ("--batch", self.batch),
            ("--accumulate", self.accumulate),
            ("--keep", self.keep),
        ] {
            if value == 0 {
                bail!(InvalidArgument, "{name} must be at least 1");
            }
        }
        if self.release_gradients && self.accumulate > 1 {
            bail!(
                InvalidArgument,
                "--release-gradients keeps none to add to, and --accumulate {} asks for sums; give one of them",
                self.accumulate
            );
        }
        for (name, value) in [
            ("--window", self.window),
            ("--threads", self.threads),
            ("--adapter", self.adapter),
            ("--last-blocks", self.last_blocks),
            ("--early-stop", self.early_stop.map(|n| n as usize)),
        ] {
            if value == Some(0) {
                bail!(InvalidArgument, "{name} must be at least 1");
            }
        }
        let below = |most: f64| move |x: f64| (0.0..most).contains(&x);
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let share = |x: f64| x > 0.0 && x < 1.0;
        type Range<'a> = (&'a dyn Fn(f64) -> bool, &'a str);
        let rate: Range<'_> = (&not_negative, "finite and at least 0");
        let some: Range<'_> = (&positive, "finite and positive");
        let beta: Range<'_> = (&below(1.0), "at least 0 and less than 1");
        let share: Range<'_> = (&share, "more than 0 and less than 1");
        for (name, value, (holds, right)) in [
            ("--rate", self.rate, rate),
            ("--weight-decay", self.weight_decay, rate),
            ("--clip", self.clip, rate),
            ("--beta1", self.beta1, beta),
            ("--beta2", self.beta2, beta),
            ("--epochs", self.epochs, some),
            ("--adapter-alpha", self.adapter_alpha, some),
            ("--memory-budget", self.memory_budget, some),
            ("--eval-share", self.eval_share, share),
        ] {
            if let Some(value) = value.filter(|&value| !holds(value)) {
                bail!(InvalidArgument, "{name} is {value}; it must be {right}");
            }
        }
        if (self.best.is_some() || self.early_stop.is_some())
            && self.eval.is_empty()
            && self.eval_share.is_none()
        {
            bail!(
                InvalidArgument,
                "{} needs evaluations; give --eval or --eval-share",
                if self.best.is_some() {
                    "--best"
                } else {
                    "--early-stop"
                }
            );
        }
        Ok(())
    }

    /// Tokens of a window for a model with `positions` positions.
    pub(super) fn window(&self, positions: usize) -> Result<usize> {
        data::window(self.window, positions)
    }

    /// Options for reading data in windows of `window` tokens.
    pub(super) fn data_options(&self, window: usize) -> data::Options {
        data::Options {
            window,
            format: self.data_format.map(|format| match format {
                FormatName::Tsv => Format::Tsv,
                FormatName::Csv => Format::Csv,
                FormatName::Jsonl => Format::Jsonl,
                FormatName::Json => Format::Json,
                FormatName::Text => Format::Text,
            }),
            separator: self.separator.as_deref().map(unescaped),
            learn_all: self.train_on_all,
            empty_think: match self.empty_think {
                EmptyThinkName::Learn => EmptyThink::Learn,
                EmptyThinkName::Given => EmptyThink::Given,
                EmptyThinkName::None => EmptyThink::None,
            },
            long: match self.long {
                LongName::Refuse => Long::Refuse,
                LongName::Truncate => Long::Truncate,
                LongName::Drop => Long::Drop,
            },
            skip_bad_rows: self.skip_bad_rows,
            packed: !self.no_packing,
            seed: self.seed,
        }
    }

    /// The trained parameters and their precision: `--config` or the defaults, overridden by the options.
    pub(super) fn settings(&self) -> Result<Settings> {
        let mut settings = Settings {
            config: fine_tuning(),
            file: Value::Null,
        };
        if let Some(file) = &self.config {
            let value: Value = read(file)?;
            let config: Config = serde_json::from_value(value.clone())
                .map_err(|e| err!(InvalidArgument, "{}: {e}", file.display()))?;
            let defaults = std::mem::replace(&mut settings.config, config).optimizer;
            settings.file = value;
            if !settings.says("/optimizer/rate") {
                settings.config.optimizer.rate = defaults.rate;
            }
            if !settings.says("/optimizer/decay") {
                settings.config.optimizer.decay = defaults.decay;
            }
        }
        let says_rate = settings.says("/optimizer/rate");
        let says_delivered = settings.says("/recipe/delivered_share");
        let config = &mut settings.config;
        if let Some(name) = &self.recipe {
            config.recipe = self.named_recipe(name)?;
        }
        let recipe = &mut config.recipe;
        if let Some(rank) = self.adapter {
            let earlier = recipe.lora.take();
            let alpha = earlier.as_ref().map(|lora| lora.alpha);
            let targets = earlier.map_or(Lora::default().targets, |lora| lora.targets);
            recipe.lora = Some(Lora {
                rank,
                alpha: self.adapter_alpha.or(alpha).unwrap_or(ALPHA * rank as f64),
                targets: self.adapter_targets.clone().unwrap_or(targets),
            });
        }
        if let Some(names) = &self.keep_high {
            recipe.keep_high.clone_from(names);
        }
        recipe.tables = self.tables.map_or(recipe.tables, Tables::from);
        recipe.weight_scales = self
            .weight_scales
            .map_or(recipe.weight_scales, nvfp4::Recipe::from);
        recipe.last_blocks = self.last_blocks.or(recipe.last_blocks);
        for (own, given) in [
            (&mut recipe.activations, self.activations),
            (&mut recipe.gradients, self.gradients),
        ] {
            *own = given.map_or(*own, ProductForm::from);
        }
        if self.teacher.teacher.is_some() && !says_delivered && !self.recipe_says_delivered()? {
            recipe.delivered_share = Some(1.0);
        }
        if self.teacher.teacher.is_none() && config.distillation.is_some() {
            bail!(
                InvalidArgument,
                "the settings in --config have a distillation; name the teacher by --teacher"
            );
        }
        if !says_rate && recipe.lora.is_some() {
            config.optimizer.rate = ADAPTER_RATE;
        } else if !says_rate && self.teacher.teacher.is_some() {
            config.optimizer.rate = TEACHER_RATE;
        }
        match &config.recipe.lora {
            Some(_) => self.check_adapters()?,
            None if self.merge => bail!(
                InvalidArgument,
                "--merge writes a model with its adapters in it, and no adapters are trained; give --adapter too, or leave --merge out"
            ),
            None => {}
        }
        Ok(settings)
    }

    /// Refuses options that have no effect with adapters.
    fn check_adapters(&self) -> Result<()> {
        if self.init.is_some() {
            bail!(
                InvalidArgument,
                "--init begins with random weights, and adapters leave them as they are; name a model that has learned by --model, or train \
                 without --adapter"
            );
        }
        if let (Some(place), false) = (&self.export, self.merge) {
            bail!(
                InvalidArgument,
                "--export {} says where a model goes, and --adapter trains none of its own; give --merge for the model with the adapters in it",
                place.display()
            );
        }
        Ok(())
    }

    /// The recipe with this name, or in this file.
    fn named_recipe(&self, name: &str) -> Result<Recipe> {
        let recipe = match name {
            "nvfp4" => Recipe::default(),
            "nvfp4-int8" => Recipe {
                weights: WeightForm::Residual(Bits::Eight),
                ..Recipe::default()
            },
            "float32" => Recipe::float32(),
            file if Path::new(file).exists() => return read(Path::new(file)),
            other => bail!(
                NotFound,
                "--recipe '{other}' is neither nvfp4, nvfp4-int8 or float32 nor a file"
            ),
        };
        match self.adapter {
            Some(rank) => bail!(
                InvalidArgument,
                "--recipe {name} says how a model's own weights are stored while they are trained, and --adapter {rank} trains none of them; give \
                 one of the two"
            ),
            None => Ok(recipe),
        }
    }

    /// Whether a recipe file sets when passes multiply with the delivered weights.
    fn recipe_says_delivered(&self) -> Result<bool> {
        match self.recipe.as_deref().map(Path::new) {
            Some(file) if file.exists() => {
                Ok(read::<Value>(file)?.get("delivered_share").is_some())
            }
            _ => Ok(false),
        }
    }

    /// The trainer's settings for data of `windows` windows.
    pub(super) fn config(
        &self,
        settings: &Settings,
        device: &Device,
        windows: usize,
    ) -> Result<Config> {
        let mut config = settings.config.clone();
        let each = (self.batch * self.accumulate) as f64;
        let epochs = |epochs: f64| (epochs * windows as f64 / each).ceil() as u64;
        config.steps = match (self.steps, self.epochs) {
            (Some(steps), _) => steps,
            (None, Some(number)) => epochs(number),
            (None, None) if settings.says("/steps") => config.steps,
            (None, None) => epochs(1.0),
        };
        config.recipe.seed = self.seed;
        let release = match device {
            _ if self.keep_gradients => false,
            _ if self.release_gradients => true,
            Device::Cuda(_) if !settings.says("/recipe/release") => self.accumulate == 1,
            _ => config.recipe.release,
        };
        config.recipe.release = release;
        let bound = self
            .clip
            .or(config.recipe.clip.bound())
            .filter(|&c| c != 0.0);
        config.recipe.clip = match (config.recipe.clip, bound, release) {
            (_, None, _) => Clip::Never,
            (Clip::PerTensor(_), Some(most), true) => Clip::PerTensor(most),
            (_, Some(most), true) => Clip::Previous(most),
            (_, Some(most), false) => Clip::Global(most),
        };
        let optimizer = &mut config.optimizer;
        for (own, given) in [
            (&mut optimizer.rate, self.rate),
            (&mut optimizer.beta1, self.beta1),
            (&mut optimizer.beta2, self.beta2),
            (&mut optimizer.decay, self.weight_decay),
        ] {
            *own = given.unwrap_or(*own);
        }
        match self.warmup {
            Some(steps) if steps > config.steps => bail!(
                InvalidArgument,
                "--warmup {steps} is longer than the {} steps of the run, which would never come to its rate",
                config.steps
            ),
            Some(steps) => config.schedule.warmup = steps,
            None if !settings.says("/schedule/warmup") => {
                config.schedule.warmup = (config.steps as f64 * WARMUP).round() as u64;
            }
            None => {}
        }
        if let Some(schedule) = self.schedule {
            config.schedule.decay = match schedule {
                ScheduleName::Constant => Decay::Constant,
                ScheduleName::Cosine => Decay::Cosine,
                ScheduleName::Linear => Decay::Linear,
                ScheduleName::Wsd => Decay::Stable(LAST),
            };
        }
        match (self.recompute, self.no_recompute) {
            (Some(recompute), _) => config.recompute = recompute,
            (None, true) => config.recompute = Recompute::None,
            (None, false) => {}
        }
        if let Some(offload) = self.offload {
            config.offload = offload;
        }
        config.check()?;
        Ok(config)
    }
}

/// Settings for a pretrained model.
fn fine_tuning() -> Config {
    Config {
        optimizer: Hyperparameters {
            rate: RATE,
            decay: 0.01,
            ..Hyperparameters::default()
        },
        ..Config::default()
    }
}

/// Reads a JSON file.
fn read<T: serde::de::DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read(file)
        .map_err(|e| Error::io(format_args!("reading {}", file.display()), e))?;
    serde_json::from_slice(&text).map_err(|e| err!(InvalidArgument, "{}: {e}", file.display()))
}

/// A text from the command line with `\n` and `\t` as a line break and a tab.
fn unescaped(text: &str) -> String {
    text.replace("\\n", "\n").replace("\\t", "\t")
}
