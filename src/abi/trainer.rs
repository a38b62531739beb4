//! Training: steps on a model's weights, which are stored in 4 bits with their optimizer's moments.
//!
//! A trainer holds the parameters of a dense model and steps them by AdamW, as its options say; the host brings the batches. Only one call
//! at a time may use it: another one meanwhile, even from a callback, fails with #NVFP4_BUSY. NVFP4_trainer_info() can be called at any
//! time. A call that fails leaves the trainer unchanged, unless its description says otherwise. The same batches, options and seed give the
//! same bits on the same device with the same number of threads.

use std::ffi::c_char;
use std::sync::Arc;

use serde_json::{Value, json};

use super::arguments::{
    self, Element, Growing, Out, choice, copy_text, count, elements, fill, flag, options, reserved,
    results, slice, text,
};
use super::call::{NVFP4_CallOptions, watched};
use super::convert::{NVFP4_TABLES_AUTO, tables_of};
use super::guard::{enter, enter_to_free};
use super::handle::{self, Exclusive, Object, Snapshots};
use super::library::thread_count;
use super::model::{NVFP4_Model, tokens_in};
use super::quantize::{NVFP4_RECIPE_SWEEP, recipe_of};
use super::shared;
use super::status::NVFP4_Status;
use super::tensor::{NVFP4_DEVICE_CPU, device_of};
use crate::base::call;
use crate::base::error::{Result, bail, err};
use crate::format::adamw::{FirstForm, SecondForm, WeightForm};
use crate::format::residual::Bits;
use crate::model::training::Source;
use crate::ops::Device;
use crate::train::{
    Clip, Config, Decay, Distillation, MicroBatch, Outcome, Recipe, Schedule, Step,
    TeacherPlacement, Trainer,
};

/// A trainer. See the training chapter.
pub struct NVFP4_Trainer {
    _private: [u8; 0],
}

struct Training {
    state: Exclusive<State>,
}

struct State {
    trainer: Trainer,
    source: Source,
    /// The data saved with the checkpoint that it was resumed from.
    data: Value,
}

impl State {
    fn info(&self) -> Result<String> {
        let (trainer, parameters) = (&self.trainer, self.trainer.parameters());
        let config = serde_json::to_value(trainer.config())
            .map_err(|e| err!(Internal, "the trainer's settings: {e}"))?;
        Ok(json!({
            "architecture": trainer.spec().family,
            "device": trainer.device().name(),
            "steps": trainer.steps(),
            "skipped": trainer.skipped(),
            "trains_delivered": trainer.trains_delivered(),
            "parameters": parameters.layout().parameters(),
            "trained_weights": parameters.trained(),
            "bytes": parameters.bytes(),
            "vocab_size": trainer.spec().vocab_size,
            "config": config,
        })
        .to_string())
    }
}

impl Snapshots for State {
    type Snapshot = (Result<String>, Value);
    fn snapshot(&self) -> Self::Snapshot {
        (self.info(), self.data.clone())
    }
    fn begin_use(&mut self) {}
}

impl Object for Training {
    type Handle = NVFP4_Trainer;
    const NAME: &'static str = "NVFP4_Trainer";
}

/// The rate stays constant after the warm-up.
pub const NVFP4_SCHEDULE_CONSTANT: i32 = 0;
/// The rate falls along half a cosine.
pub const NVFP4_SCHEDULE_COSINE: i32 = 1;
/// The rate falls linearly.
pub const NVFP4_SCHEDULE_LINEAR: i32 = 2;
/// The rate stays constant, and falls linearly over the last `decay_share` of the steps.
pub const NVFP4_SCHEDULE_STABLE: i32 = 3;

/// Gradients are not clipped.
pub const NVFP4_CLIP_NEVER: i32 = 0;
/// All gradients together are clipped to the norm `clip_norm`. Not with `release`.
pub const NVFP4_CLIP_GLOBAL: i32 = 1;
/// All gradients are multiplied by the factor that would have clipped those of the previous step to `clip_norm`. Only with `release`.
pub const NVFP4_CLIP_PREVIOUS: i32 = 2;
/// The gradients of each matrix are clipped to the norm `clip_norm`. Only with `release`.
pub const NVFP4_CLIP_TENSOR: i32 = 3;

/// An NVFP4 code and a residual of 4 bits, rounded stochastically: 8.5 bits per weight, of which 4.5 are delivered.
pub const NVFP4_WEIGHT_FORM_RESIDUAL4: i32 = 0;
/// An NVFP4 code and a residual of 8 bits, rounded stochastically.
pub const NVFP4_WEIGHT_FORM_RESIDUAL8: i32 = 1;
/// Two E2M1 codes; the second holds the remainder of the first.
pub const NVFP4_WEIGHT_FORM_TWO_TERM: i32 = 2;
/// One NVFP4 code, rounded stochastically: 4.5 bits per weight.
pub const NVFP4_WEIGHT_FORM_ONE_TERM: i32 = 3;
/// bfloat16, rounded stochastically.
pub const NVFP4_WEIGHT_FORM_BFLOAT16: i32 = 4;
/// float32.
pub const NVFP4_WEIGHT_FORM_FLOAT32: i32 = 5;

/// First moments as integers of 4 bits with dither, and block scales.
pub const NVFP4_FIRST_MOMENT_INT4: i32 = 0;
/// First moments in NVFP4, rounded stochastically.
pub const NVFP4_FIRST_MOMENT_NVFP4: i32 = 1;
/// First moments as integers of 8 bits, rounded stochastically.
pub const NVFP4_FIRST_MOMENT_INT8: i32 = 2;
/// First moments in float32.
pub const NVFP4_FIRST_MOMENT_FLOAT32: i32 = 3;

/// Square roots of second moments as integers of 4 bits, rounded stochastically, and block scales.
pub const NVFP4_SECOND_MOMENT_UINT4: i32 = 0;
/// Square roots of second moments in NVFP4, rounded stochastically.
pub const NVFP4_SECOND_MOMENT_NVFP4: i32 = 1;
/// Square roots of second moments as integers of 8 bits, rounded stochastically.
pub const NVFP4_SECOND_MOMENT_INT8: i32 = 2;
/// Second moments in float32.
pub const NVFP4_SECOND_MOMENT_FLOAT32: i32 = 3;

/// The teacher's weights are on the device if both models fit in its memory with micro-batches of 4096 tokens, otherwise as
/// #NVFP4_TEACHER_STREAMED.
pub const NVFP4_TEACHER_AUTO: i32 = 0;
/// The teacher's weights are on the device.
pub const NVFP4_TEACHER_RESIDENT: i32 = 1;
/// The teacher's weights are read from its files in each pass, one matrix after another. The results have the same bits.
pub const NVFP4_TEACHER_STREAMED: i32 = 2;

/// Tokens per micro-batch that #NVFP4_TEACHER_AUTO assumes.
const AUTO_TOKENS: usize = 4096;

/// How to train. Fill with NVFP4_trainer_options_init(), then change what is to differ. The text is read during the call
/// only.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NVFP4_TrainerOptions {
    /// sizeof(NVFP4_TrainerOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_DEVICE_*. #NVFP4_DEVICE_AUTO is the first GPU, or else the CPU. Default: CPU.
    pub device_type: i32,
    /// The number of the device of that type; 0 (or -1) for #NVFP4_DEVICE_AUTO. Default: 0.
    pub device_index: i32,
    /// CPU threads of this trainer, or 0 for those of NVFP4_set_threads(). Ignored on a GPU. Default: 0.
    pub threads: i32,
    /// One of NVFP4_SCHEDULE_*: the rate after the warm-up. Default: cosine.
    pub schedule: i32,
    /// One of NVFP4_CLIP_*. Default: global.
    pub clip: i32,
    /// One of NVFP4_WEIGHT_FORM_*: the stored form of matrices between steps. Default: a residual of 4 bits.
    pub weights: i32,
    /// One of NVFP4_FIRST_MOMENT_*. Default: 4 bits.
    pub first_moments: i32,
    /// One of NVFP4_SECOND_MOMENT_*. Default: 4 bits.
    pub second_moments: i32,
    /// 1 to apply each gradient as soon as it is complete and keep none: gradients take no memory, and a step has one micro-batch. 0 to sum
    /// gradients in float32. Default: 0.
    pub release: i32,
    /// 1 to recompute activations in the backward pass instead of keeping them. Default: 1.
    pub recompute: i32,
    /// Trains only this many last blocks, with the final norm and an untied head; -1 trains everything. Default: -1.
    pub last_blocks: i32,
    /// Total number of steps, which the schedule spans. Default: 1000.
    pub steps: u64,
    /// Steps of linear warm-up at the beginning. Default: 0.
    pub warmup: u64,
    /// Seed of the random bits of rounding. Default: 0.
    pub seed: u64,
    /// The highest learning rate. Default: 0.001.
    pub rate: f64,
    /// The final rate, as a share of the highest. Default: 0.1.
    pub floor: f64,
    /// The share of the steps, at the end, in which #NVFP4_SCHEDULE_STABLE falls. Default: 0.2.
    pub decay_share: f64,
    /// Decoupled weight decay of matrices: each step multiplies them by 1 - rate x decay. Norms and biases have none. Default:
    /// 0.1.
    pub weight_decay: f64,
    /// Decay rate of first moments. Default: 0.9.
    pub beta1: f64,
    /// Decay rate of second moments. Default: 0.95.
    pub beta2: f64,
    /// Added to the square root of second moments. Default: 1e-8.
    pub eps: f64,
    /// The bound of `clip`. Default: 1.
    pub clip_norm: f64,
    /// The share of the steps, at the end, in which passes use the NVFP4 codes alone, that is, the delivered weights. -1 for 0.3, or 0.15
    /// for a model with random weights. Default: -1.
    pub delivered_share: f64,
    /// All settings as a JSON object, in the form of `config` in NVFP4_trainer_info(): missing keys have their defaults, and unknown ones
    /// are errors. With it, leave every field above except those of the device at its default. Default: NULL.
    pub config: *const c_char,
    /// Bytes of `config`.
    pub config_length: usize,
    /// One of NVFP4_TABLES_*: the delivered form of the embedding and the output head. For bfloat16 and int8 they are stored in bfloat16;
    /// for NVFP4 they are stored as `weights` says. #NVFP4_TABLES_AUTO takes the model's own form: NVFP4 if it has that, int8 if it holds
    /// them in at most 8 bits, else bfloat16. Default: auto.
    pub tables: i32,
    /// One of NVFP4_RECIPE_*: the rule for block scales when linear weights are quantized, at the beginning if the model does not hold them
    /// in NVFP4, and when adapters are merged. Default: sweep.
    pub weight_scales: i32,
    /// Path of a teacher: the trainer learns the predictions of this model, which must have the same vocabulary. The loss is (1 -
    /// label_share) x teacher_temperature^2 x KL(teacher || model) + label_share x cross-entropy, at each label that counts. Set
    /// `delivered_share` to 1 to bring an NVFP4 model closer to the one that it was quantized from. May be combined with `config`, as may
    /// `teacher_memory`. Default: NULL, none.
    pub teacher: *const c_char,
    /// Bytes of `teacher`.
    pub teacher_length: usize,
    /// Divides the logits of both models. Default: 1.
    pub teacher_temperature: f64,
    /// The share of the labels' cross-entropy in the loss with a teacher, below 1. Default: 0.
    pub label_share: f64,
    /// One of NVFP4_TEACHER_*: the place of the teacher's weights. Default: auto.
    pub teacher_memory: i32,
    /// Must be 0.
    pub reserved: i32,
}

// SAFETY: numbers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_TrainerOptions {
    const NAME: &'static str = "NVFP4_TrainerOptions";
    fn defaults() -> Self {
        let Config {
            optimizer,
            schedule,
            recipe,
            steps,
            ..
        } = Config::default();
        NVFP4_TrainerOptions {
            struct_size: size_of::<Self>() as u32,
            device_type: NVFP4_DEVICE_CPU,
            device_index: 0,
            threads: 0,
            schedule: NVFP4_SCHEDULE_COSINE,
            clip: NVFP4_CLIP_GLOBAL,
            weights: NVFP4_WEIGHT_FORM_RESIDUAL4,
            first_moments: NVFP4_FIRST_MOMENT_INT4,
            second_moments: NVFP4_SECOND_MOMENT_UINT4,
            release: 0,
            recompute: 1,
            last_blocks: -1,
            steps,
            warmup: schedule.warmup,
            seed: recipe.seed,
            rate: optimizer.rate,
            floor: schedule.floor,
            decay_share: 0.2,
            weight_decay: optimizer.decay,
            beta1: optimizer.beta1,
            beta2: optimizer.beta2,
            eps: optimizer.eps,
            clip_norm: recipe.clip.bound().unwrap_or(1.0),
            delivered_share: -1.0,
            config: std::ptr::null(),
            config_length: 0,
            tables: NVFP4_TABLES_AUTO,
            weight_scales: NVFP4_RECIPE_SWEEP,
            teacher: std::ptr::null(),
            teacher_length: 0,
            teacher_temperature: 1.0,
            label_share: 0.0,
            teacher_memory: NVFP4_TEACHER_AUTO,
            reserved: 0,
        }
    }
}

/// The stored form for one of NVFP4_WEIGHT_FORM_*.
pub(super) fn weight_form(name: &str, value: i32) -> Result<WeightForm> {
    choice(
        name,
        value,
        &[
            (
                NVFP4_WEIGHT_FORM_RESIDUAL4,
                "residual of 4 bits",
                WeightForm::Residual(Bits::Four),
            ),
            (
                NVFP4_WEIGHT_FORM_RESIDUAL8,
                "residual of 8 bits",
                WeightForm::Residual(Bits::Eight),
            ),
            (NVFP4_WEIGHT_FORM_TWO_TERM, "two codes", WeightForm::TwoTerm),
            (NVFP4_WEIGHT_FORM_ONE_TERM, "one code", WeightForm::OneTerm),
            (NVFP4_WEIGHT_FORM_BFLOAT16, "bfloat16", WeightForm::Bf16),
            (NVFP4_WEIGHT_FORM_FLOAT32, "float32", WeightForm::F32),
        ],
    )
}

/// The stored form for one of NVFP4_FIRST_MOMENT_*.
pub(super) fn first_form(value: i32) -> Result<FirstForm> {
    choice(
        "first_moments",
        value,
        &[
            (NVFP4_FIRST_MOMENT_INT4, "int4", FirstForm::Int4),
            (NVFP4_FIRST_MOMENT_NVFP4, "nvfp4", FirstForm::Nvfp4),
            (NVFP4_FIRST_MOMENT_INT8, "int8", FirstForm::Int8),
            (NVFP4_FIRST_MOMENT_FLOAT32, "float32", FirstForm::F32),
        ],
    )
}

/// The stored form for one of NVFP4_SECOND_MOMENT_*.
pub(super) fn second_form(value: i32) -> Result<SecondForm> {
    choice(
        "second_moments",
        value,
        &[
            (NVFP4_SECOND_MOMENT_UINT4, "uint4", SecondForm::Uint4),
            (NVFP4_SECOND_MOMENT_NVFP4, "nvfp4", SecondForm::Nvfp4),
            (NVFP4_SECOND_MOMENT_INT8, "int8", SecondForm::Int8),
            (NVFP4_SECOND_MOMENT_FLOAT32, "float32", SecondForm::F32),
        ],
    )
}

impl NVFP4_TrainerOptions {
    fn device(&self) -> Result<Device> {
        let threads = thread_count(self.threads)?;
        device_of(self.device_type, self.device_index, || shared::cpu(threads))
    }

    /// The teacher, and the place of its weights.
    ///
    /// # Safety
    /// The text must be readable.
    unsafe fn teacher(&self) -> Result<Option<(Arc<Source>, TeacherPlacement)>> {
        reserved(self, self.reserved)?;
        let placement = choice(
            "teacher_memory",
            self.teacher_memory,
            &[
                (NVFP4_TEACHER_AUTO, "auto", TeacherPlacement::Auto),
                (
                    NVFP4_TEACHER_RESIDENT,
                    "resident",
                    TeacherPlacement::Resident,
                ),
                (
                    NVFP4_TEACHER_STREAMED,
                    "streamed",
                    TeacherPlacement::Streamed,
                ),
            ],
        )?;
        if self.teacher.is_null() {
            return Ok(None);
        }
        // SAFETY: promised by the caller.
        let path = unsafe { arguments::path("teacher", self.teacher, self.teacher_length) }?;
        let source = Source::open(path).map_err(|e| e.within("the teacher"))?;
        Ok(Some((Arc::new(source), placement)))
    }

    /// Whether only the device and the teacher with its place are set.
    fn names_only_a_device(&self) -> bool {
        let plain = NVFP4_TrainerOptions {
            device_type: self.device_type,
            device_index: self.device_index,
            threads: self.threads,
            teacher: self.teacher,
            teacher_length: self.teacher_length,
            teacher_memory: self.teacher_memory,
            ..Self::defaults()
        };
        NVFP4_TrainerOptions {
            struct_size: plain.struct_size,
            config: plain.config,
            config_length: 0,
            ..*self
        } == plain
    }

    /// # Safety
    /// The text must be readable.
    unsafe fn read(&self) -> Result<Config> {
        // SAFETY: promised by the caller.
        let json = unsafe { text("config", self.config, self.config_length) }?;
        if !self.config.is_null() {
            if !self.names_only_a_device() {
                bail!(
                    InvalidArgument,
                    "config says all settings, and another field differs from its default; set either"
                );
            }
            let mut config: Config =
                serde_json::from_str(json).map_err(|e| err!(InvalidArgument, "config: {e}"))?;
            if !self.teacher.is_null() {
                config.distillation.get_or_insert_default();
            } else if config.distillation.is_some() {
                bail!(
                    InvalidArgument,
                    "config has a distillation, and no teacher is given; set teacher, or leave distillation out"
                );
            }
            return Ok(config);
        }
        let decay = choice(
            "schedule",
            self.schedule,
            &[
                (NVFP4_SCHEDULE_CONSTANT, "constant", Decay::Constant),
                (NVFP4_SCHEDULE_COSINE, "cosine", Decay::Cosine),
                (NVFP4_SCHEDULE_LINEAR, "linear", Decay::Linear),
                (
                    NVFP4_SCHEDULE_STABLE,
                    "stable",
                    Decay::Stable(self.decay_share),
                ),
            ],
        )?;
        let clip = choice(
            "clip",
            self.clip,
            &[
                (NVFP4_CLIP_NEVER, "never", Clip::Never),
                (NVFP4_CLIP_GLOBAL, "global", Clip::Global(self.clip_norm)),
                (
                    NVFP4_CLIP_PREVIOUS,
                    "previous",
                    Clip::Previous(self.clip_norm),
                ),
                (NVFP4_CLIP_TENSOR, "tensor", Clip::PerTensor(self.clip_norm)),
            ],
        )?;
        let mut config = Config {
            recipe: Recipe {
                weights: weight_form("weights", self.weights)?,
                tables: tables_of(self.tables)?,
                weight_scales: recipe_of("weight_scales", self.weight_scales)?,
                first_moments: first_form(self.first_moments)?,
                second_moments: second_form(self.second_moments)?,
                delivered_share: match self.delivered_share {
                    -1.0 => None,
                    share => Some(share),
                },
                last_blocks: match self.last_blocks {
                    -1 => None,
                    blocks => Some(count("last_blocks", blocks.into())?),
                },
                clip,
                release: flag("release", self.release)?,
                seed: self.seed,
                ..Recipe::default()
            },
            schedule: Schedule {
                warmup: self.warmup,
                decay,
                floor: self.floor,
            },
            steps: self.steps,
            recompute: flag("recompute", self.recompute)?.into(),
            ..Config::default()
        };
        let settings = Distillation {
            teacher: None,
            temperature: self.teacher_temperature,
            label_share: self.label_share,
        };
        if !self.teacher.is_null() {
            config.distillation = Some(settings);
        } else if settings != Distillation::default() {
            bail!(
                InvalidArgument,
                "teacher_temperature is {} and label_share {}, and no teacher is given; set teacher, or leave them as they are",
                self.teacher_temperature,
                self.label_share
            );
        }
        config.optimizer.rate = self.rate;
        config.optimizer.beta1 = self.beta1;
        config.optimizer.beta2 = self.beta2;
        config.optimizer.eps = self.eps;
        config.optimizer.decay = self.weight_decay;
        Ok(config)
    }
}

/// A micro-batch: documents in a row that go through the model together; no token attends to another document. Later versions may add
/// fields at the end: functions that take an array of these also take the size of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_MicroBatch {
    /// The tokens of all documents, as 32-bit integers of either sign.
    pub tokens: *const i32,
    /// For each token, the one that should follow; -100 or any negative number for none.
    pub labels: *const i32,
    /// Elements of `tokens` and of `labels`.
    pub token_count: usize,
    /// Number of tokens of each document; their sum is `token_count`. NULL with 0 documents: all tokens are one document.
    pub document_lengths: *const usize,
    /// Elements of `document_lengths`.
    pub document_count: usize,
    /// Weight of each label in the loss, finite and not negative. The loss is divided by the sum of the weights of the labels that count; a
    /// label of weight 0 does not count. NULL: 1 for all.
    pub weights: *const f32,
}

// SAFETY: pointers and sizes without padding.
unsafe impl Element for NVFP4_MicroBatch {
    const NAME: &'static str = "NVFP4_MicroBatch";
    const EARLIER: &'static [usize] = &[40];
    fn defaults() -> Self {
        NVFP4_MicroBatch {
            tokens: std::ptr::null(),
            labels: std::ptr::null(),
            token_count: 0,
            document_lengths: std::ptr::null(),
            document_count: 0,
            weights: std::ptr::null(),
        }
    }
}

/// A micro-batch from C, checked.
struct Documents<'a> {
    tokens: Vec<u32>,
    labels: &'a [i32],
    lengths: Vec<usize>,
    weights: Option<&'a [f32]>,
}

/// # Safety
/// As the header says of the pointers.
unsafe fn batches_in<'a>(
    batches: *const NVFP4_MicroBatch,
    count: usize,
    size: usize,
) -> Result<Vec<Documents<'a>>> {
    // SAFETY: promised by the caller.
    let batches = unsafe { elements("batches", batches, count, size) }?;
    if batches.is_empty() {
        bail!(InvalidArgument, "there are no batches; pass at least one");
    }
    let read = |batch: &NVFP4_MicroBatch| {
        // SAFETY: as above.
        let (tokens, labels, weights, lengths) = unsafe {
            (
                slice("tokens", batch.tokens, batch.token_count)?,
                slice("labels", batch.labels, batch.token_count)?,
                match batch.weights.is_null() {
                    true => None,
                    false => Some(slice("weights", batch.weights, batch.token_count)?),
                },
                slice(
                    "document_lengths",
                    batch.document_lengths,
                    batch.document_count,
                )?,
            )
        };
        if let Some(i) = lengths.iter().position(|&n| n == 0) {
            bail!(InvalidArgument, "document {i} has no tokens; leave it out");
        }
        Ok(Documents {
            tokens: tokens_in(tokens)?,
            labels,
            lengths: match lengths.is_empty() {
                true => vec![tokens.len()],
                false => lengths.to_vec(),
            },
            weights,
        })
    };
    let each = batches.iter().enumerate();
    each.map(|(i, batch)| read(batch).map_err(|e| e.within(format_args!("batches[{i}]"))))
        .collect()
}

fn micro_batches<'a>(documents: &'a [Documents<'a>]) -> Vec<MicroBatch<'a>> {
    let each = documents.iter();
    each.map(|d| MicroBatch {
        tokens: &d.tokens,
        documents: &d.lengths,
        labels: d.labels,
        weights: d.weights,
    })
    .collect()
}

/// Parameters were updated.
pub const NVFP4_STEP_UPDATED: i32 = 0;
/// The loss or a gradient was not finite, and no parameter was changed.
pub const NVFP4_STEP_SKIPPED: i32 = 1;

/// The result of a step. Set `struct_size` before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_StepReport {
    /// sizeof(NVFP4_StepReport) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_STEP_*.
    pub outcome: i32,
    /// The number of the step, from 1.
    pub step: u64,
    /// Labels that counted.
    pub targets: u64,
    /// Mean cross-entropy of the labels that counted, in nats, before the step.
    pub loss: f64,
    /// The learning rate.
    pub rate: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// Share of the trained weights of matrices whose stored code changed.
    pub changed: f64,
    /// Share of these weights whose delivered NVFP4 code changed.
    pub changed_delivered: f64,
}

// SAFETY: numbers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_StepReport {
    const NAME: &'static str = "NVFP4_StepReport";
    fn defaults() -> Self {
        NVFP4_StepReport {
            struct_size: size_of::<Self>() as u32,
            outcome: NVFP4_STEP_UPDATED,
            step: 0,
            targets: 0,
            loss: 0.0,
            rate: 0.0,
            gradient_norm: 0.0,
            changed: 0.0,
            changed_delivered: 0.0,
        }
    }
}

impl NVFP4_StepReport {
    fn of(step: &Step) -> Self {
        NVFP4_StepReport {
            outcome: match step.outcome {
                Outcome::Updated => NVFP4_STEP_UPDATED,
                Outcome::Skipped => NVFP4_STEP_SKIPPED,
            },
            step: step.number,
            targets: step.targets as u64,
            loss: step.loss,
            rate: step.rate,
            gradient_norm: step.gradient_norm,
            changed: step.changed,
            changed_delivered: step.changed_delivered,
            ..Self::defaults()
        }
    }
}

/// Sets a trainer's teacher. A trainer that has learned from one requires the same one again.
fn teach(
    trainer: &mut Trainer,
    source: &Source,
    teacher: Option<(Arc<Source>, TeacherPlacement)>,
) -> Result<()> {
    match teacher {
        Some((teacher, placement)) => trainer.set_teacher(source, teacher, placement, AUTO_TOKENS),
        None if trainer.config().distillation.is_some() => bail!(
            InvalidArgument,
            "the checkpoint is of a model that learns from a teacher, and none is given; set teacher"
        ),
        None => Ok(()),
    }
}

fn insert(trainer: Trainer, source: Source, data: Value) -> *mut NVFP4_Trainer {
    handle::insert(Arc::new(Training {
        state: Exclusive::new(State {
            trainer,
            source,
            data,
        }),
    }))
}

/// Runs `body`, which may take long, with exclusive use of a trainer, and with the cancellation and progress of `call`.
///
/// # Safety
/// As for [`watched`].
unsafe fn with_long<T>(
    trainer: *const NVFP4_Trainer,
    call: *const NVFP4_CallOptions,
    body: impl FnOnce(&mut State) -> Result<T>,
) -> Result<T> {
    let object = handle::get::<Training>("trainer", trainer)?;
    let mut state = object.state.take_long("trainer")?;
    // SAFETY: promised by the caller.
    unsafe { watched(call, || body(&mut state)) }
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_TrainerOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_options_init(
    options: *mut NVFP4_TrainerOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_trainer_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_TrainerOptions::defaults()) }
    })
}

/// Creates a trainer of a dense model: a directory, or a `.safetensors`, `.dat` or `.gguf` file. Its weights are read and rounded to the
/// stored forms of the options. The file stays open.
///
/// - `path`, `path_length`: UTF-8.
/// - `options`: NULL for the defaults.
/// - `call`: cancels the call before it reads weights; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_create(
    path: *const c_char,
    path_length: usize,
    options: *const NVFP4_TrainerOptions,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Trainer,
) -> NVFP4_Status {
    enter("NVFP4_trainer_create", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path, options) = unsafe {
            (
                Out::new("out", out)?,
                arguments::path("path", path, path_length)?,
                self::options(options)?,
            )
        };
        // SAFETY: as above.
        let config = unsafe { options.read() }?;
        config.check()?;
        let device = options.device()?;
        let create = || {
            let source = Source::open(path)?;
            // SAFETY: as above.
            let teacher = unsafe { options.teacher() }?;
            call::check()?;
            let mut trainer =
                Trainer::new(&device, &source, &config).map_err(|e| e.within(path.display()))?;
            teach(&mut trainer, &source, teacher)?;
            Ok((trainer, source))
        };
        // SAFETY: as above.
        let (trainer, source) = unsafe { watched(call, create) }?;
        out.set(insert(trainer, source, Value::Null));
        Ok(())
    })
}

/// Creates a trainer from a checkpoint, with its settings. Further steps have the same bits as training without a stop. A checkpoint of
/// another model is #NVFP4_INVALID_ARGUMENT, with the names that differ.
///
/// - `path`, `path_length`: the model that training began with, as for NVFP4_trainer_create().
/// - `directory`, `directory_length`: a directory of NVFP4_trainer_save(), whose last checkpoint is taken, or one of its checkpoints.
/// - `options`: the device and threads, and the teacher that training began with, if any; NULL for the CPU. Leave everything else at its
///   default.
/// - `call`: cancels the call before it reads the checkpoint; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_resume(
    path: *const c_char,
    path_length: usize,
    directory: *const c_char,
    directory_length: usize,
    options: *const NVFP4_TrainerOptions,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Trainer,
) -> NVFP4_Status {
    enter("NVFP4_trainer_resume", || {
        // SAFETY: the pointers are as the header asks.
        let (out, path, directory, options) = unsafe {
            (
                Out::new("out", out)?,
                arguments::path("path", path, path_length)?,
                arguments::path("directory", directory, directory_length)?,
                self::options(options)?,
            )
        };
        if !options.names_only_a_device() || !options.config.is_null() {
            bail!(
                InvalidArgument,
                "the settings of a trainer that is resumed are those of its checkpoint; leave all options but the device as they are"
            );
        }
        let device = options.device()?;
        let resume = || {
            let source = Source::open(path)?;
            // SAFETY: as above.
            let teacher = unsafe { options.teacher() }?;
            call::check()?;
            let (mut trainer, data) = Trainer::resume(&device, &source, directory)?;
            teach(&mut trainer, &source, teacher)?;
            Ok((trainer, source, data))
        };
        // SAFETY: as above.
        let (trainer, source, data) = unsafe { watched(call, resume) }?;
        out.set(insert(trainer, source, data));
        Ok(())
    })
}

/// Adds a reference to a trainer.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_retain(trainer: *mut NVFP4_Trainer) -> NVFP4_Status {
    enter("NVFP4_trainer_retain", || {
        handle::retain::<Training>("trainer", trainer)
    })
}

/// Gives up a reference to a trainer. After the last one the handle is stale; models obtained from it keep the weights.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_release(trainer: *mut NVFP4_Trainer) -> NVFP4_Status {
    enter_to_free("NVFP4_trainer_release", || {
        handle::release::<Training>("trainer", trainer)
    })
}

/// Takes a step by the gradients of all micro-batches together, in which each label counts by its weight. Labels that are all negative,
/// tokens or labels outside the vocabulary, documents longer than the model's context, and lengths that do not sum to the number of tokens
/// are errors, found before anything is changed.
///
/// If a loss or gradient is not finite, no parameter changes, and the step is reported as #NVFP4_STEP_SKIPPED; too many skipped steps in a
/// row are an error. With `release`, a gradient that is not finite after others were applied is #NVFP4_INTERNAL, and the message of any
/// other error after that point says so too: resume from the last checkpoint.
///
/// While a pass of NVFP4_trainer_model() runs, it waits for that; on a thread within such a pass it is #NVFP4_BUSY.
///
/// - `batches`, `batch_count`, `batch_size`: micro-batches, each of `batch_size` bytes, which is sizeof(NVFP4_MicroBatch).
/// - `call`: reports the tokens done. Cancels the step while it waits, between micro-batches, and between blocks of their forward passes, with
///   everything unchanged. With `release` it is cancelled only before the backward pass. May be NULL.
/// - `report`: the result of the step; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_step(
    trainer: *mut NVFP4_Trainer,
    batches: *const NVFP4_MicroBatch,
    batch_count: usize,
    batch_size: usize,
    call: *const NVFP4_CallOptions,
    report: *mut NVFP4_StepReport,
) -> NVFP4_Status {
    enter("NVFP4_trainer_step", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let report = results(report)?;
            let documents = batches_in(batches, batch_count, batch_size)?;
            let batches = micro_batches(&documents);
            let step = with_long(trainer, call, |state| state.trainer.step(&batches))?;
            if let Some(report) = report {
                report(NVFP4_StepReport::of(&step));
            }
        }
        Ok(())
    })
}

/// Writes the mean cross-entropy of the labels that count, by their weights, in nats. Changes nothing.
///
/// - `batches`, `batch_count`, `batch_size`: as for NVFP4_trainer_step().
/// - `delivered`: 1 for the NVFP4 codes alone, as they are exported; 0 for the full stored precision.
/// - `call`: cancels the call between blocks; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_evaluate(
    trainer: *mut NVFP4_Trainer,
    batches: *const NVFP4_MicroBatch,
    batch_count: usize,
    batch_size: usize,
    delivered: i32,
    call: *const NVFP4_CallOptions,
    loss: *mut f64,
) -> NVFP4_Status {
    enter("NVFP4_trainer_evaluate", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let out = Out::new("loss", loss)?;
            let delivered = flag("delivered", delivered)?;
            let documents = batches_in(batches, batch_count, batch_size)?;
            let batches = micro_batches(&documents);
            out.set(with_long(trainer, call, |state| {
                state.trainer.evaluate(&batches, delivered)
            })?);
        }
        Ok(())
    })
}

/// Writes the mean cross-entropy of the labels that count, and the mean divergence from the predictions of the trainer's teacher
/// at them, KL(teacher || model) at temperature 1, both in nats. Changes nothing. #NVFP4_INVALID_ARGUMENT without a teacher.
///
/// - `batches`, `batch_count`, `batch_size`: as for NVFP4_trainer_step().
/// - `delivered`: 1 for the NVFP4 codes alone, as they are exported; 0 for the full stored precision.
/// - `call`: cancels the call between blocks; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_compare(
    trainer: *mut NVFP4_Trainer,
    batches: *const NVFP4_MicroBatch,
    batch_count: usize,
    batch_size: usize,
    delivered: i32,
    call: *const NVFP4_CallOptions,
    loss: *mut f64,
    divergence: *mut f64,
) -> NVFP4_Status {
    enter("NVFP4_trainer_compare", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let (loss, divergence) = (Out::new("loss", loss)?, Out::new("divergence", divergence)?);
            let delivered = flag("delivered", delivered)?;
            let documents = batches_in(batches, batch_count, batch_size)?;
            let batches = micro_batches(&documents);
            let found = with_long(trainer, call, |state| {
                state.trainer.compare(&batches, delivered)
            })?;
            loss.set(found.loss);
            divergence.set(found.divergence);
        }
        Ok(())
    })
}

/// Describes a trainer, as JSON: steps, skipped (steps that changed nothing), parameters, trained_weights (of matrices),
/// bytes (of parameters and moments), config (all settings), architecture, vocab_size, device, trains_delivered. During a
/// call it is the state from before the call. Later versions may add keys.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_info(
    trainer: *const NVFP4_Trainer,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_trainer_info", || {
        let object = handle::get::<Training>("trainer", trainer)?;
        let info = object
            .state
            .look("trainer", State::info, |(info, _)| info.clone())?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&info, buffer, capacity, length) }
    })
}

/// Writes a checkpoint with the complete state of training into a directory, under the number of the last step (`step-00000020`), and
/// removes all but the last `keep` checkpoints there. A failed write leaves nothing.
///
/// - `directory`, `directory_length`: UTF-8; created if it does not exist.
/// - `data`, `data_length`: JSON that NVFP4_trainer_data() returns when the trainer is resumed, such as the position in the data;
///   NULL for none.
/// - `keep`: at least 1.
/// - `call`: cancels the call at its start; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_save(
    trainer: *mut NVFP4_Trainer,
    directory: *const c_char,
    directory_length: usize,
    data: *const c_char,
    data_length: usize,
    keep: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_trainer_save", || {
        // SAFETY: the pointers are as the header asks.
        let (directory, data) = unsafe {
            (
                arguments::path("directory", directory, directory_length)?,
                text("data", data, data_length)?,
            )
        };
        if keep == 0 {
            bail!(InvalidArgument, "keep is 0; keep at least 1 checkpoint");
        }
        let data = match data {
            "" => Value::Null,
            json => serde_json::from_str(json)
                .map_err(|e| err!(InvalidArgument, "data is not JSON: {e}"))?,
        };
        let save = |state: &mut State| {
            state.trainer.save(directory, &data, keep)?;
            state.data = data;
            Ok(())
        };
        // SAFETY: as above.
        unsafe { with_long(trainer, call, save) }
    })
}

/// Copies the JSON that was last saved with NVFP4_trainer_save(), or with the checkpoint that the trainer was resumed from; `null` if there
/// is none. For the buffer see TEXT above.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_data(
    trainer: *const NVFP4_Trainer,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> NVFP4_Status {
    enter("NVFP4_trainer_data", || {
        let object = handle::get::<Training>("trainer", trainer)?;
        let data = object.state.look(
            "trainer",
            |state| Ok(state.data.to_string()),
            |(_, data)| Ok(data.to_string()),
        )?;
        // SAFETY: the pointers are as the header asks.
        unsafe { copy_text(&data, buffer, capacity, length) }
    })
}

/// Writes the delivered model to a directory in ModelOpt's layout, with config and tokenizer of the model that training began with.
/// Unchanged tensors are written as in that model, or as NVFP4_model_convert() would write them: codes, scales and bytes. Matrices trained
/// in a form of NVFP4 keep the codes that they are trained in; others are written in bfloat16 or float32, as they are stored.
///
/// - `tables`: one of NVFP4_TABLES_*: the form of the embedding and the output head; #NVFP4_TABLES_AUTO for the one that they are trained
///   for.
/// - `replace`: 1 to replace a directory that holds a model; 0 to refuse a directory that is not empty.
/// - `call`: cancels the call at its start; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_export_directory(
    trainer: *mut NVFP4_Trainer,
    path: *const c_char,
    path_length: usize,
    tables: i32,
    replace: i32,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_trainer_export_directory", || {
        let tables = tables_of(tables)?;
        let replace = flag("replace", replace)?;
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let path = arguments::path("path", path, path_length)?;
            with_long(
                trainer,
                call,
                |State {
                     trainer, source, ..
                 }| { trainer.export_directory(source, path, tables, replace) },
            )
        }
    })
}

/// Writes the delivered model to a `.dat` file, every tensor in its type in the `.dat` file that training began with.
///
/// - `call`: cancels the call at its start; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_export_dat(
    trainer: *mut NVFP4_Trainer,
    path: *const c_char,
    path_length: usize,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_trainer_export_dat", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let path = arguments::path("path", path, path_length)?;
            with_long(
                trainer,
                call,
                |State {
                     trainer, source, ..
                 }| { trainer.export_dat(source, path) },
            )
        }
    })
}

/// Writes the adapters of a trainer with `recipe.lora` in its config to a directory in peft's format: `adapter_model.safetensors` in
/// float32 and `adapter_config.json`. NVFP4_trainer_export_directory() writes the model with the adapters merged.
///
/// - `base`, `base_length`: the name of the base model in `adapter_config.json`: a directory, or a name of the Hugging Face hub.
/// - `replace`: 1 to replace a directory that holds an adapter; 0 to refuse a directory that is not empty.
/// - `call`: cancels the call at its start; may be NULL.
///
/// #NVFP4_INVALID_ARGUMENT if all parameters are trained; #NVFP4_UNSUPPORTED if the checkpoint holds adapted matrices as parts of larger
/// ones, for which peft has no such adapter.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_export_adapter(
    trainer: *mut NVFP4_Trainer,
    path: *const c_char,
    path_length: usize,
    base: *const c_char,
    base_length: usize,
    replace: i32,
    call: *const NVFP4_CallOptions,
) -> NVFP4_Status {
    enter("NVFP4_trainer_export_adapter", || {
        let replace = flag("replace", replace)?;
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let path = arguments::path("path", path, path_length)?;
            let base = text("base", base, base_length)?;
            if base.is_empty() {
                bail!(
                    InvalidArgument,
                    "base is empty; name the model that the adapters belong to"
                );
            }
            with_long(
                trainer,
                call,
                |State {
                     trainer, source, ..
                 }| { trainer.export_adapter(source, path, base, replace) },
            )
        }
    })
}

/// Writes the model under training with its delivered weights, for sessions beside the steps. It runs on the trainer's memory: matrices are
/// not copied. On the CPU its products are slower than those of a loaded model, and have the same bits. As long as it lives, later calls write
/// the same model. It may outlive the trainer, and then keeps the last weights.
///
/// The model follows the steps, and so do its sessions, forks of them too: they keep their tokens and conversations, and run the tokens that
/// older weights have run again when they are next asked for what follows. The answer is that of a new session with the same tokens, on the CPU
/// to the last bit. No session begins with keys and values of older weights. A session file has the weights of its time: after a step that
/// changes weights it is refused. What older weights have computed is not saved: a session that is saved after such a step, before it has
/// run, has its tokens in the file.
///
/// Threads may run sessions while another one calls NVFP4_trainer_step(). The step waits for the pass that runs, passes wait for the step,
/// and who has waited longer goes first; a prompt of several passes runs anew after a step between them, and the next step waits for its end.
/// A generation goes on after a step: its tokens before it are of the weights before, those after it of the weights after. Cancellation and
/// deadlines end a call that waits. A token callback may call NVFP4_trainer_step(), because no pass runs meanwhile. A progress callback of a
/// call that runs the model may not, nor may a callback of the step run the model: these fail with #NVFP4_BUSY, because the thread would wait
/// for itself.
///
/// If the model cannot follow a step for lack of memory, the log says so, and calls that run it fail with #NVFP4_INVALID_ARGUMENT until this
/// function or another step has succeeded.
///
/// - `call`: cancels the call; may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_trainer_model(
    trainer: *mut NVFP4_Trainer,
    call: *const NVFP4_CallOptions,
    out: *mut *mut NVFP4_Model,
) -> NVFP4_Status {
    enter("NVFP4_trainer_model", || {
        // SAFETY: the pointers are as the header asks.
        unsafe {
            let out = Out::new("out", out)?;
            let model = with_long(trainer, call, |state| state.trainer.model(&state.source))?;
            out.set(handle::insert(model));
        }
        Ok(())
    })
}
