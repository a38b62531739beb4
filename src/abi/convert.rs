//! Converting models: from disk to NVFP4 on disk, by their weights alone or calibrated by text

use std::ffi::c_char;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use super::arguments::{self, Growing, choice, fill, flag, options, reserved};
use super::call::{NVFP4_CallOptions, watched};
use super::guard::enter;
use super::quantize::NVFP4_QuantizeOptions;
use super::shared;
use super::status::NVFP4_Status;
use super::tensor::{NVFP4_DEVICE_CPU, device_of};
use crate::base::call::{self, Progress};
use crate::base::error::{Result, bail};
use crate::checkpoint::Checkpoint;
use crate::format::nvfp4::Recipe;
use crate::model::convert::{self, Container, ConvertOptions, ConvertProgress, Tables};
use crate::model::{self, Device};
use crate::train::calibration::{self, Stage, TextOptions};

/// A directory with safetensors in ModelOpt's layout, config and tokenizer.
pub const NVFP4_CONTAINER_MODELOPT: i32 = 0;
/// A `.dat` file of TorchSharp with single-level scales, and config and tokenizer beside it.
pub const NVFP4_CONTAINER_DAT: i32 = 1;

/// Embedding and head in int8 if the source has them in at most 8 bits or is calibrated, and the container supports int8; otherwise in 16
/// bits: float16 stays, anything else becomes bfloat16. NVFP4 stays NVFP4. Only for conversions.
pub const NVFP4_TABLES_AUTO: i32 = -1;
/// Embedding and head in bfloat16, which every reader of such directories supports.
pub const NVFP4_TABLES_BFLOAT16: i32 = 0;
/// Embedding and head in NVFP4, a little more than a quarter of the bytes.
pub const NVFP4_TABLES_NVFP4: i32 = 1;
/// Embedding and head in int8 with one float32 scale per row, half of the bytes; not for `.dat`. Only for conversions.
pub const NVFP4_TABLES_INT8: i32 = 2;

/// How to calibrate a model. Fill with NVFP4_calibrate_options_init(), then change what is to differ. Paths are read during the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_CalibrateOptions {
    /// sizeof(NVFP4_CalibrateOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_DEVICE_*: the device on which the model reads the text. The search for codes runs on the CPU. Default:
    /// #NVFP4_DEVICE_CPU.
    pub device_type: i32,
    /// The number of the device of that type; 0 (or -1) for #NVFP4_DEVICE_AUTO. Default: 0.
    pub device_index: i32,
    /// Upper limit of text windows; 0 for 32 on a CPU and 128 on a GPU. Default: 0.
    pub windows: i32,
    /// Tokens per window; 0 for 1024 on a CPU and 2048 on a GPU, or the model's context if that is less. Default: 0.
    pub window: usize,
    /// Paths of files with text of the kinds that the model is used for, with rows as NVFP4_data_read() reads them. The library's own text
    /// of prose, 38 languages, code and conversations fills the remaining windows. Default: NULL, for that text alone.
    pub files: *const *const c_char,
    /// Bytes of each path.
    pub file_lengths: *const usize,
    /// Number of files.
    pub file_count: usize,
    /// Average bits per weight of the model's blocks, scales included: from 4.5, all NVFP4, to 8. The blocks that NVFP4 harms most get int8
    /// rows. 0 for all NVFP4. Default: 0.
    pub budget: f64,
    /// Steps of distillation after the calibration, in which the whole model, still in NVFP4, learns the predictions of the original. For
    /// GPUs: a step takes minutes on a CPU. Default: 0.
    pub distill_steps: u64,
}

// SAFETY: integers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_CalibrateOptions {
    const NAME: &'static str = "NVFP4_CalibrateOptions";
    fn defaults() -> Self {
        NVFP4_CalibrateOptions {
            struct_size: size_of::<Self>() as u32,
            device_type: NVFP4_DEVICE_CPU,
            device_index: 0,
            windows: 0,
            window: 0,
            files: std::ptr::null(),
            file_lengths: std::ptr::null(),
            file_count: 0,
            budget: 0.0,
            distill_steps: 0,
        }
    }
}

impl NVFP4_CalibrateOptions {
    /// # Safety
    /// The paths must be readable.
    unsafe fn read(&self) -> Result<(Device, calibration::Options)> {
        let Ok(windows) = usize::try_from(self.windows) else {
            bail!(
                InvalidArgument,
                "windows is {}; it must not be negative",
                self.windows
            );
        };
        // SAFETY: promised by the caller.
        let files =
            unsafe { arguments::paths("files", self.files, self.file_lengths, self.file_count) }?;
        let options = calibration::Options {
            text: TextOptions {
                files,
                windows: (windows > 0).then_some(windows),
                window: (self.window > 0).then_some(self.window),
            },
            budget: (self.budget != 0.0).then_some(self.budget),
            distill: (self.distill_steps > 0).then_some(self.distill_steps),
        };
        Ok((
            device_of(self.device_type, self.device_index, shared::device)?,
            options,
        ))
    }
}

/// How to convert a model. Fill with NVFP4_convert_options_init(), then change what is to differ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NVFP4_ConvertOptions {
    /// sizeof(NVFP4_ConvertOptions) as the caller knows it.
    pub struct_size: u32,
    /// One of NVFP4_CONTAINER_*: the output format. Default: ModelOpt.
    pub container: i32,
    /// 1 to replace a directory that holds a model and no subdirectories, with everything in it; 0 to refuse a directory
    /// that is not empty. Default: 0.
    pub replace: i32,
    /// 1 to keep the output head, or the table that it shares with the embedding, in its precision, whatever `tables` says. Default: 0.
    pub keep_head: i32,
    /// Cancels the call, and reports progress in bytes of the source and of what is packed, or in shares of the work of a calibration; NULL
    /// for neither. Default: NULL.
    pub call: *const NVFP4_CallOptions,
    /// One of NVFP4_TABLES_*: format of the embedding and the output head. A tied head stays tied: the table is written once.
    /// Default: #NVFP4_TABLES_AUTO.
    pub tables: i32,
    /// Must be 0.
    pub reserved: i32,
    /// How to calibrate. Codes and scales of linear weights are then chosen so that their products with the inputs that occur in text
    /// change least; a recipe is used only for weights that are not calibrated. NULL to quantize all weights by a recipe. Default: NULL.
    pub calibrate: *const NVFP4_CalibrateOptions,
    /// 1 to also write `packed.nvfp4` into the directory `destination`: the weights as the CPU's kernels read them, which processes that load
    /// the model on the CPU share. The directory appears with it or not at all. If `destination` is `source` itself, nothing is quantized
    /// and that file alone is written; only `call` may then differ from its default. Not for `.dat`. Default: 0.
    pub packed: i32,
    /// Must be 0.
    pub reserved2: i32,
}

// SAFETY: integers and pointers without padding, the first a u32 size.
unsafe impl Growing for NVFP4_ConvertOptions {
    const NAME: &'static str = "NVFP4_ConvertOptions";
    const EARLIER: &'static [usize] = &[24, 32, 40];
    fn defaults() -> Self {
        NVFP4_ConvertOptions {
            struct_size: size_of::<Self>() as u32,
            container: NVFP4_CONTAINER_MODELOPT,
            replace: 0,
            keep_head: 0,
            call: std::ptr::null(),
            tables: NVFP4_TABLES_AUTO,
            reserved: 0,
            calibrate: std::ptr::null(),
            packed: 0,
            reserved2: 0,
        }
    }
}

impl NVFP4_ConvertOptions {
    /// Fails if an option of quantization is given although nothing is quantized.
    fn check_only_packs(&self, quantize: bool) -> Result<()> {
        let given = [
            ("replace", self.replace != 0),
            ("keep_head", self.keep_head != 0),
            ("tables", self.tables != NVFP4_TABLES_AUTO),
            ("calibrate", !self.calibrate.is_null()),
            ("quantize", quantize),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => bail!(
                InvalidArgument,
                "source and destination are the same directory, so that packed alone packs it as it is, and {name} has no effect; leave {name} at its default, or name another destination"
            ),
            None => Ok(()),
        }
    }
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_ConvertOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_convert_options_init(
    options: *mut NVFP4_ConvertOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_convert_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_ConvertOptions::defaults()) }
    })
}

/// The form of tables for one of NVFP4_TABLES_*.
pub(super) fn tables_of(value: i32) -> Result<Tables> {
    choice(
        "tables",
        value,
        &[
            (NVFP4_TABLES_AUTO, "auto", Tables::Auto),
            (NVFP4_TABLES_BFLOAT16, "bfloat16", Tables::Bf16),
            (NVFP4_TABLES_NVFP4, "nvfp4", Tables::Nvfp4),
            (NVFP4_TABLES_INT8, "int8", Tables::Int8),
        ],
    )
}

/// Fills `options` with the defaults. `struct_size` is sizeof(NVFP4_CalibrateOptions).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_calibrate_options_init(
    options: *mut NVFP4_CalibrateOptions,
    struct_size: u32,
) -> NVFP4_Status {
    enter("NVFP4_calibrate_options_init", || {
        // SAFETY: the pointer is as the header asks.
        unsafe { fill(options, struct_size, NVFP4_CalibrateOptions::defaults()) }
    })
}

/// Converts a model on disk to NVFP4 on disk, one tensor at a time: linear weights are quantized, the rest is kept. The destination is
/// replaced as a whole once the new model is complete; a call that fails leaves it unchanged, and leaves no other files behind. A model
/// that NVFP4_model_load() would refuse is refused with the same message, before anything is written if no weights have to be read to find
/// out.
///
/// A calibration keeps its finished blocks in a folder beside the destination, with `.calibration` after its name, until the model is
/// written. If the call was cancelled or interrupted, a repeated call continues after them.
///
/// - `source`: a model, as for NVFP4_model_load().
/// - `destination`: a directory that does not exist or is empty, or one to replace; for `.dat` a file, which is replaced if
///   it exists.
/// - `options`: NULL for the defaults.
/// - `quantize`: NULL for the defaults: two-level scales for ModelOpt, single-level scales for `.dat`, and the recipe amax.
///   The recipe sweep has a smaller error and takes two to three times as long; it is the default with `calibrate`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn NVFP4_model_convert(
    source: *const c_char,
    source_length: usize,
    destination: *const c_char,
    destination_length: usize,
    options: *const NVFP4_ConvertOptions,
    quantize: *const NVFP4_QuantizeOptions,
) -> NVFP4_Status {
    enter("NVFP4_model_convert", || {
        // SAFETY: the pointers are as the header asks.
        let (source, destination, options) = unsafe {
            (
                arguments::path("source", source, source_length)?,
                arguments::path("destination", destination, destination_length)?,
                self::options(options)?,
            )
        };
        let container = choice(
            "container",
            options.container,
            &[
                (NVFP4_CONTAINER_MODELOPT, "modelopt", Container::ModelOpt),
                (NVFP4_CONTAINER_DAT, "dat", Container::Dat),
            ],
        )?;
        let packed = flag("packed", options.packed)?;
        if packed && container == Container::Dat {
            bail!(
                InvalidArgument,
                "packed is 1, and container is dat; packed weights are for a directory, NVFP4_CONTAINER_MODELOPT"
            );
        }
        let is_calibrated = !options.calibrate.is_null();
        let recipe = match is_calibrated {
            true => Recipe::Sweep,
            false => Recipe::default(),
        };
        let mut conversion = ConvertOptions::new(container, recipe);
        conversion.replace = flag("replace", options.replace)?;
        conversion.keep_head = flag("keep_head", options.keep_head)?;
        reserved(&options, options.reserved)?;
        reserved(&options, options.reserved2)?;
        conversion.tables = tables_of(options.tables)?;
        conversion.narrow_tables = is_calibrated;
        if !quantize.is_null() {
            // SAFETY: as above.
            conversion.quantize = unsafe { self::options(quantize) }?.read_for_model()?;
        }
        if packed && model::is_same_directory(source, destination) {
            options.check_only_packs(!quantize.is_null())?;
            // SAFETY: as above.
            return unsafe { watched(options.call, || pack(source)) };
        }
        if packed {
            conversion.packed = Some(shared::device()?);
        }
        let calibrate = match is_calibrated {
            // SAFETY: as above.
            true => Some(unsafe { self::options(options.calibrate)?.read() }?),
            false => None,
        };
        let checkpoint = model::open(source)?;
        let run = || {
            let written = match &calibrate {
                None => converted(&*checkpoint, destination, &conversion),
                Some((device, how)) => {
                    calibrated(checkpoint.into(), destination, &conversion, device, how)
                }
            };
            written.map_err(|e| e.within(source.display()))
        };
        // SAFETY: as above.
        unsafe { watched(options.call, run) }
    })
}

/// Calibrates for a conversion, and converts. Each stage counts as a share of the work.
fn calibrated(
    checkpoint: Arc<dyn Checkpoint>,
    destination: &Path,
    conversion: &ConvertOptions,
    device: &Device,
    options: &calibration::Options,
) -> Result<()> {
    let host = shared::device()?;
    let distilled = u64::from(options.distill.is_some());
    let mut told = |stage: Stage| {
        let (before, share, done, total) = match stage {
            Stage::Calibrate(p) => (0, 8, p.done, p.total),
            Stage::Measure(done, total) => (8, 1, done, total),
            Stage::Write(done, total) => (9, 1, done, total),
            Stage::Distill(done, total) => (10, 10, done, total),
        };
        call::tell(Progress {
            done: before * SHARE + share * SHARE * done / total.max(1),
            total: (10 + 10 * distilled) * SHARE,
        });
    };
    let work = (device, host.host()?.pool());
    calibration::quantize(
        checkpoint,
        destination,
        conversion,
        work,
        options,
        &mut told,
    )
    .map(|_| ())
}

/// Writes the packed weights of the model in a directory.
fn pack(directory: &Path) -> Result<()> {
    let packed = model::pack(directory, &shared::device()?);
    packed
        .map_err(|e| e.within(directory.display()))
        .map(|_| ())
}

/// Units of progress in a tenth of a calibration.
const SHARE: u64 = 1000;

fn converted(
    checkpoint: &dyn Checkpoint,
    destination: &Path,
    conversion: &ConvertOptions,
) -> Result<()> {
    let device = shared::device()?;
    let pool = device.host()?.pool();
    let mut told = |p: ConvertProgress<'_>| {
        call::tell(Progress {
            done: p.done,
            total: p.total,
        });
        match call::is_over() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    convert::convert(checkpoint, destination, conversion, pool, &mut told).map(|_| ())
}
