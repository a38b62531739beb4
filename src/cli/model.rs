//! Common parts of subcommands that use models: resolving a path or hub id, opening devices by name, loading with a progress bar.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, Result};
use NVFP4::engine::{LoadedAdapter, Served};
use NVFP4::format::nvfp4::{QuantizeOptions, Recipe};
use NVFP4::model::placement::{self, Placement, Requirements};
use NVFP4::model::{Activations, Device, KvType, LoadOptions, PackedUse, Tuning, open};
use clap::ValueEnum;

use super::recipe::RecipeName;
use super::{hub, output};

/// The path of `model`: an existing path, or a model of the hub, fetched if it is not in the cache.
pub(super) fn resolve(model: &OsStr) -> Result<PathBuf> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(path.to_owned());
    }
    let Some(model) = model.to_str() else {
        bail!(
            NotFound,
            "there is no file or directory '{}'",
            path.display()
        );
    };
    let Some(name) = hub::Name::parse(model, &hub::endpoint()?).filter(|_| !is_path(model)) else {
        bail!(
            NotFound,
            "there is no file or directory '{model}', and it is no model of the hub, which would be ORG/NAME"
        );
    };
    if let Some(path) = hub::cached(&name)? {
        return Ok(path);
    }
    match hub::pull(&name, hub::TIMEOUT) {
        Ok(pulled) => Ok(pulled.path),
        // A mistyped path may look like a model's name.
        Err(e) if !model.contains([':', '@']) => Err(Error::new(
            e.kind(),
            format_args!("{e} (nor is there a file or directory '{model}')"),
        )),
        Err(e) => Err(e),
    }
}

/// Whether `model` can only be a path.
fn is_path(model: &str) -> bool {
    ["/", "./", "../", "~"]
        .iter()
        .any(|start| model.starts_with(start))
        || !model.contains(':')
            && ["safetensors", "gguf", "dat", "json"]
                .iter()
                .any(|extension| {
                    Path::new(model)
                        .extension()
                        .is_some_and(|e| e == *extension)
                })
}

#[derive(Clone, Copy, ValueEnum)]
enum ActivationsName {
    /// Not quantized
    Exact,
    /// Rounded to 8 bits
    Int8,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum KvName {
    F16,
    F32,
    /// e4m3 with a scale for each token and head
    F8,
}

impl From<KvName> for KvType {
    fn from(name: KvName) -> Self {
        match name {
            KvName::F16 => KvType::F16,
            KvName::F32 => KvType::F32,
            KvName::F8 => KvType::F8,
        }
    }
}

#[derive(clap::Args)]
pub(super) struct ModelArgs {
    /// The model: a file, a directory, or a model of the hub: ORG/NAME[@REVISION][:PART], where PART is a file, a folder or a
    /// quantization as in Q4_K_M
    #[arg(long)]
    pub(super) model: OsString,
    /// The device: cpu, cuda:N, or auto for the GPU with room for the model, else the CPU
    #[arg(long, default_value = "auto")]
    device: String,
    /// CPU threads; default: one for each core
    #[arg(long)]
    threads: Option<usize>,
    /// The type of activations in products with NVFP4 weights
    #[arg(long, value_enum, default_value_t = ActivationsName::Exact)]
    activations: ActivationsName,
    /// Quantize dense linear weights to NVFP4 while loading
    #[arg(long, value_enum)]
    quantize: Option<RecipeName>,
    /// The type of the KV cache
    #[arg(long, value_enum, default_value_t = KvName::F16)]
    pub(super) kv: KvName,
    /// Memory for keys and values, in GB, reserved when the model is loaded; without it memory is allocated as the context grows
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    kv_memory: Option<usize>,
    /// Give each conversation the same bits whatever runs beside it, also on a GPU, at the cost of speed
    #[arg(long)]
    deterministic: bool,
    /// Lock the weights in memory, so that the system never pages them out; `ulimit -l` must allow for them. Without effect on a GPU
    #[arg(long)]
    mlock: bool,
    /// Use of the file of packed weights that `quantize --packed` writes, which processes on the CPU share
    #[arg(long, value_enum, default_value_t = PackedName::Auto)]
    packed: PackedName,
    /// Goal of passes with prompts while other conversations generate
    #[arg(long, value_enum, default_value_t = TuningName::Throughput)]
    tuning: TuningName,
}

#[derive(Clone, Copy, ValueEnum)]
enum TuningName {
    /// Prompts end soon
    Throughput,
    /// Prompts hold up the others as little as possible
    Latency,
}

/// Use of packed weights.
#[derive(Clone, Copy, ValueEnum)]
enum PackedName {
    /// If the file is there
    Auto,
    /// Not at all: weights are packed into memory
    Off,
    /// Or fail
    Required,
}

/// Bytes of a number of gigabytes.
pub(super) fn gigabytes(text: &str) -> std::result::Result<usize, String> {
    match text.parse::<f64>() {
        Ok(gb) if gb > 0.0 && gb < 1e6 => Ok((gb * 1e9) as usize),
        _ => Err("it takes a positive number of gigabytes, such as 1.5".to_owned()),
    }
}

impl ModelArgs {
    /// Loads on the requested device; `auto` chooses one with room for the models at `paths`.
    fn load_on<T>(
        &self,
        paths: &[&Path],
        load: impl Fn(&Device, Option<&Placement>) -> Result<T>,
    ) -> Result<T> {
        if self.device != "auto" {
            return load(&self.named(&self.device)?, None);
        }
        let requirements = Requirements {
            quantize: self.quantize.is_some(),
            sampling_only: false,
            activations: self.activations(),
            kv: self.kv.into(),
            kv_bytes: self.kv_memory,
        };
        // Printed at a terminal, and whenever there was a GPU to choose.
        let told = |placement: &Placement| {
            if std::io::stderr().is_terminal() || placement.had_gpus() {
                eprintln!("nvfp4: {placement}");
            }
        };
        placement::load(
            || paths.iter().map(|path| open(path)).collect(),
            &requirements,
            || self.named("cpu"),
            told,
            |device, placement| load(device, Some(placement)),
        )
    }

    fn named(&self, name: &str) -> Result<Device> {
        device(name, self.threads)
    }

    pub(super) fn activations(&self) -> Activations {
        match self.activations {
            ActivationsName::Exact => Activations::Exact,
            ActivationsName::Int8 => Activations::Int8,
        }
    }

    pub(super) fn load(&self) -> Result<Arc<Served>> {
        let path = resolve(&self.model)?;
        self.load_on(&[&path], |device, placement| {
            self.load_from(&path, device, placement)
        })
    }

    /// Loads it, and another model on the same device if one is named.
    pub(super) fn load_beside(
        &self,
        other: Option<&OsStr>,
    ) -> Result<(Arc<Served>, Option<Arc<Served>>)> {
        match other {
            None => Ok((self.load()?, None)),
            Some(other) => {
                let (model, other) = self.load_both(other)?;
                Ok((model, Some(other)))
            }
        }
    }

    /// Loads a second model on the same device.
    pub(super) fn load_both(&self, other: &OsStr) -> Result<(Arc<Served>, Arc<Served>)> {
        let (path, other) = (resolve(&self.model)?, resolve(other)?);
        self.load_on(&[&path, &other], |device, placement| {
            Ok((
                self.load_from(&path, device, placement)?,
                self.load_from(&other, device, placement)?,
            ))
        })
    }

    fn load_from(
        &self,
        path: &Path,
        device: &Device,
        placement: Option<&Placement>,
    ) -> Result<Arc<Served>> {
        let options = LoadOptions {
            device: device.clone(),
            device_choice: placement.map(Placement::to_string),
            quantize: self.quantize.map(|recipe| QuantizeOptions {
                recipe: Recipe::from(recipe),
                ..QuantizeOptions::default()
            }),
            activations: self.activations(),
            kv_bytes: self.kv_memory,
            prefix_cache: true,
            prefix_bytes: 0,
            deterministic: self.deterministic,
            sampling_only: false,
            mlock: self.mlock,
            packed: match self.packed {
                PackedName::Auto => PackedUse::Auto,
                PackedName::Off => PackedUse::Off,
                PackedName::Required => PackedUse::Required,
            },
            tuning: match self.tuning {
                TuningName::Throughput => Tuning::Throughput,
                TuningName::Latency => Tuning::Latency,
            },
            prompt_tokens: None,
        };
        let model = output::with_byte_bar("loading", || Served::load(path, &options))?;
        // A GPU does not have all types for all models: another device may be chosen now.
        model.sequence(1, self.kv.into())?;
        Ok(model)
    }
}

/// The adapter that sessions of a model run with.
#[derive(clap::Args)]
pub(super) struct AdapterArgs {
    /// A LoRA adapter of the model, which `nvfp4 train --adapter` or peft wrote
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
}

impl AdapterArgs {
    pub(super) fn load(&self, model: &Served) -> Result<Option<Arc<LoadedAdapter>>> {
        let path = self.adapter.as_ref();
        path.map(|path| model.load_adapter(path)).transpose()
    }
}

/// Warns on standard error of an unusable chat template, in commands that may not need it.
pub(super) fn warn_of_template(model: &Served) {
    if let Some(fault) = model.chat_template().fault() {
        eprintln!("nvfp4: {fault}; conversations that need that template will be refused");
    }
}

/// Opens a device: `cpu` with the given number of threads, `cuda:N`, or `auto`, which is the first GPU or else the CPU.
pub(super) fn device(name: &str, threads: Option<usize>) -> Result<Device> {
    if name == "cpu" {
        Device::cpu(threads)
    } else if name == "auto" {
        Device::cuda(0).or_else(|_| Device::cpu(threads))
    } else if let Some(ordinal) = cuda_ordinal(name) {
        Device::cuda(ordinal).map_err(|e| e.within(format_args!("device '{name}'")))
    } else {
        bail!(
            InvalidArgument,
            "device '{name}' is not known; use auto, cpu, cuda or cuda:N"
        )
    }
}

/// The N of `cuda:N`; 0 for `cuda`.
fn cuda_ordinal(device: &str) -> Option<usize> {
    match device.strip_prefix("cuda")? {
        "" => Some(0),
        rest => rest.strip_prefix(':')?.parse().ok(),
    }
}

/// Human-readable form of a path or model name: bytes that are not UTF-8 become U+FFFD.
pub(super) fn shown(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

/// The text of a file, which must be UTF-8; `-` is standard input.
pub(super) fn read_text(path: &Path) -> Result<String> {
    let bytes = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut bytes)
            .map_err(|e| err!(Io, "reading standard input: {e}"))?;
        bytes
    } else {
        std::fs::read(path)
            .map_err(|e| NVFP4::base::Error::io(format_args!("reading {}", path.display()), e))?
    };
    Ok(NVFP4::text::utf8(&path.display().to_string(), &bytes)?.to_owned())
}
