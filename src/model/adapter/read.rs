//! Reads adapters in peft's format: `adapter_config.json` and `adapter_model.safetensors`. Finds the place of every factor in the model
//! and checks its shape before reading any.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hasher;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::config::AdapterConfig;
use super::factors::Factors;
use super::loaded::{Adapter, ModelKey};
use super::places::{OnGpu, Places};
use crate::base::error::{bail, err};
use crate::base::memory::{Buffer, Tag};
use crate::base::{Error, Result, call, file};
use crate::checkpoint::{self, Checkpoint, Encoding, Entry};
use crate::cuda::Unit;
use crate::model::load::is_of_shared_keys;
use crate::model::spec::Spec;
use crate::model::tensors::{self, DRAFTER, StoredRows, TensorRole, TensorSpec};
use crate::model::weights::Weights;
use crate::ops::Device;
use crate::ops::linear::Linear;
use crate::tensor::DType;

const CONFIG: &str = "adapter_config.json";
const FACTORS: &str = "adapter_model.safetensors";
/// Prefix that peft gives the names of a base model's modules.
const BASE: &str = "base_model.model.";
const FACTOR_A: &str = ".lora_A.weight";
const FACTOR_B: &str = ".lora_B.weight";
/// Products have inputs in multiples of this.
const RANK_MULTIPLE: usize = 16;
/// Names that tell what else an adapter may hold.
const OTHERS: [(&str, &str); 4] = [
    ("lora_embedding_", "adapters of embeddings"),
    ("lora_magnitude_vector", "DoRA"),
    ("modules_to_save", "whole modules"),
    ("lm_head", "adapters of the output layer"),
];

/// The two factors of a module, and where they go.
struct Module<'a> {
    /// Its name in the text model.
    name: String,
    a: &'a Entry,
    b: &'a Entry,
    rank: usize,
    scale: f32,
    parts: Vec<Part>,
}

/// A projection of the model that is some rows of a module.
struct Part {
    projection: String,
    rows: StoredRows,
}

/// Reads the adapter in the directory `path` for the model on this device with this spec, weights and key.
pub(in crate::model) fn read(
    device: &Device,
    (spec, weights): (&Spec, &Weights),
    model: &Arc<ModelKey>,
    path: &Path,
) -> Result<Adapter> {
    let place = path.join(CONFIG);
    let text = file::read(&place)
        .map_err(|e| Error::io(format_args!("reading {}", place.display()), e))?;
    let config =
        serde_json::from_slice(&text).map_err(|e| err!(CorruptFile, "{}: {e}", place.display()))?;
    let config = AdapterConfig::read(&config).map_err(|e| e.within(place.display()))?;
    let place = path.join(FACTORS);
    let checkpoint = checkpoint::open(&place, &[])?;
    let within = |e: Error| e.within(place.display());
    let modules = modules(&*checkpoint, spec, &config).map_err(within)?;
    let places = match device {
        Device::Cpu(_) => None,
        Device::Cuda(gpu) => Some((gpu, Places::of(weights))),
    };
    if let Some((gpu, places)) = &places {
        check_places(places, &modules).map_err(within)?;
        gpu.prepare(&[Unit::Adapter], &|| false)?;
    }
    let name = path.canonicalize().ok();
    let name = name.as_deref().unwrap_or(path).file_name();
    let mut adapter = Adapter {
        name: name.map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        model: model.clone(),
        identity: NonZeroU64::MAX,
        rank: modules.iter().map(|m| m.rank).max().unwrap_or(0),
        bytes: 0,
        factors: HashMap::new(),
        on_gpu: None,
    };
    let mut sum = XxHash3_64::new();
    for module in modules {
        call::check()?;
        load(&*checkpoint, device, &module, &mut adapter, &mut sum).map_err(within)?;
    }
    adapter.identity = NonZeroU64::new(sum.finish()).unwrap_or(NonZeroU64::MAX);
    if let Some((gpu, places)) = &places {
        let on_gpu = OnGpu::new(gpu, places, &adapter.factors)?;
        adapter.bytes += on_gpu.bytes();
        adapter.on_gpu = Some(on_gpu);
    }
    Ok(adapter)
}

/// Fails for factors that no pass on a GPU applies.
fn check_places(places: &Places, modules: &[Module<'_>]) -> Result<()> {
    let parts = modules
        .iter()
        .flat_map(|m| m.parts.iter().map(move |p| (m, p)));
    let mut unplaced = parts.filter(|(_, part)| !places.contains(&part.projection));
    match unplaced.next() {
        None => Ok(()),
        Some((module, part)) => bail!(
            Unsupported,
            "{BASE}{}: a GPU adapts mixers, and MLPs that all rows use, but not {}; load the model on the CPU, or merge the adapter into it",
            module.name,
            part.projection
        ),
    }
}

/// The modules of an adapter, by name. Fails unless every tensor has a place in the model.
fn modules<'a>(
    checkpoint: &'a dyn Checkpoint,
    spec: &Spec,
    config: &AdapterConfig<'_>,
) -> Result<Vec<Module<'a>>> {
    if let Some(unreadable) = checkpoint.unreadable().first() {
        bail!(Unsupported, "{unreadable}");
    }
    let mut factors: BTreeMap<String, [Option<&Entry>; 2]> = BTreeMap::new();
    for entry in checkpoint.entries() {
        let module = |factor| entry.name.strip_prefix(BASE)?.strip_suffix(factor);
        let (module, which) = match (module(FACTOR_A), module(FACTOR_B)) {
            (Some(module), _) => (module, 0),
            (None, Some(module)) => (module, 1),
            (None, None) => return Err(no_factor(&entry.name)),
        };
        if module.contains("lm_head") {
            return Err(no_factor(&entry.name));
        }
        let dense = [DType::F32, DType::F16, DType::BF16].map(Encoding::Dense);
        if !dense.contains(&entry.encoding) {
            bail!(
                Unsupported,
                "{} is stored as {}; factors are float32, float16 or bfloat16",
                entry.name,
                entry.encoding
            );
        }
        let module = checkpoint::logical(module);
        factors.entry(module).or_default()[which] = Some(entry);
    }
    if factors.is_empty() {
        bail!(CorruptFile, "it has no factors; expected lora_A and lora_B");
    }
    let all = tensors::all(spec);
    // The keys and values of other blocks stand in for what these projections would give, as in transformers.
    let is_used = |name: &str| !is_of_shared_keys(spec, &format!("{name}.weight"));
    let used = factors.into_iter().filter(|(name, _)| is_used(name));
    let modules = used.map(|(name, pair)| {
        let [Some(a), Some(b)] = pair else {
            let (there, other) = match pair[0] {
                Some(_) => (FACTOR_A, FACTOR_B),
                None => (FACTOR_B, FACTOR_A),
            };
            bail!(
                CorruptFile,
                "{BASE}{name}{there} is there without {BASE}{name}{other}"
            );
        };
        module(&all, spec, config, name, (a, b))
    });
    modules.collect()
}

/// The error for a tensor that is no factor of a linear map.
fn no_factor(name: &str) -> Error {
    let other = OTHERS.iter().find(|(part, _)| name.contains(part));
    match other {
        Some((_, what)) => err!(
            Unsupported,
            "{name}: {what} are not read, only factors beside the linear maps of blocks; merge the adapter with peft"
        ),
        None => err!(
            Unsupported,
            "{name} is no factor of an adapter; expected {BASE}MODULE{FACTOR_A} and {BASE}MODULE{FACTOR_B}"
        ),
    }
}

/// The place of a module's factors in the model.
fn module<'a>(
    all: &[TensorSpec],
    spec: &Spec,
    config: &AdapterConfig<'_>,
    name: String,
    (a, b): (&'a Entry, &'a Entry),
) -> Result<Module<'a>> {
    let weight = format!("{name}.weight");
    let mut shape: Option<&[usize]> = None;
    let mut parts = Vec::new();
    let mut role = None;
    for tensor in all.iter().filter(|t| !t.name.starts_with(DRAFTER)) {
        let (stored, rows) = match tensor.within.iter().find(|within| within.name == weight) {
            Some(within) => (&within.shape, within.rows.clone()),
            None if tensor.alone && tensor.name == weight => {
                (&tensor.shape, (0..tensor.shape[0]).into())
            }
            None => continue,
        };
        (shape, role) = (Some(stored.as_slice()), Some(tensor.role));
        parts.push(Part {
            projection: tensor.name.trim_end_matches(".weight").to_owned(),
            rows,
        });
    }
    let is_adapted = |role| {
        matches!(
            role,
            TensorRole::Linear | TensorRole::Recurrent | TensorRole::PerLayer
        )
    };
    let (outputs, inputs) = match (shape, role) {
        (Some(&[outputs, inputs]), Some(role)) if is_adapted(role) => (outputs, inputs),
        (Some(shape), Some(role)) => bail!(
            Unsupported,
            "{BASE}{name}: the base's {weight} {shape:?} is {}; factors beside the linear maps of blocks are read",
            match role {
                TensorRole::Router => "a router",
                TensorRole::Table => "a table of embeddings",
                TensorRole::Vector => "no linear map",
                _ => "a stack of experts",
            }
        ),
        _ => bail!(
            InvalidArgument,
            "{BASE}{name} stands beside {weight}, which a {} model of {} blocks does not have; the adapter is for another base",
            spec.family,
            spec.blocks.len()
        ),
    };
    let (rank, scale) = config.of_module(&name)?;
    for (entry, expected) in [(a, [rank, inputs]), (b, [outputs, rank])] {
        if entry.shape != expected {
            bail!(
                InvalidArgument,
                "{} has shape {:?}; a rank of {rank} beside the base's {weight} [{outputs}, {inputs}] takes {expected:?}",
                entry.name,
                entry.shape
            );
        }
    }
    Ok(Module {
        name,
        a,
        b,
        rank,
        scale,
        parts,
    })
}

/// Loads a module's factors, and adds their values to the adapter's checksum.
fn load(
    checkpoint: &dyn Checkpoint,
    device: &Device,
    module: &Module<'_>,
    adapter: &mut Adapter,
    sum: &mut XxHash3_64,
) -> Result<()> {
    let padded = module.rank.next_multiple_of(RANK_MULTIPLE);
    let inputs = module.a.cols();
    sum.write(module.name.as_bytes());
    sum.write(&module.scale.to_bits().to_le_bytes());
    let mut values = |entry: &Entry| -> Result<Buffer<f32>> {
        let (rows, cols) = (entry.rows(), entry.cols());
        let mut values = Buffer::zeroed(Tag::Scratch, rows * cols)?;
        checkpoint.rows_f32(entry, 0..rows, &mut values)?;
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            bail!(
                CorruptFile,
                "{}: element [{}, {}] is {}; factors must be finite",
                entry.name,
                i / cols,
                i % cols,
                values[i]
            );
        }
        let bits = values.iter().map(|v| v.to_bits());
        bits.for_each(|bits| sum.write(&bits.to_le_bytes()));
        Ok(values)
    };
    let (a, b) = (values(module.a)?, values(module.b)?);
    let held = |entry: &Entry| match entry.encoding {
        Encoding::Dense(dtype) => dtype,
        _ => DType::F32,
    };
    let read_a = &mut |rows: Range<usize>, out: &mut [f32]| {
        out.fill(0.0);
        let rows = rows.start * inputs..(rows.end * inputs).min(a.len());
        if let Some(values) = a.get(rows) {
            out[..values.len()].copy_from_slice(values);
        }
        Ok(())
    };
    let a = Arc::new(Linear::dense(
        device,
        padded,
        inputs,
        held(module.a),
        read_a,
    )?);
    adapter.bytes += a.bytes();
    for part in &module.parts {
        let read_b = &mut |rows: Range<usize>, out: &mut [f32]| {
            out.fill(0.0);
            let stored = part.rows.parts(rows).flat_map(|(_, stored)| stored);
            for (out, row) in out.chunks_exact_mut(padded).zip(stored) {
                let values = &b[row * module.rank..][..module.rank];
                out[..module.rank].copy_from_slice(values);
            }
            Ok(())
        };
        let outputs = part.rows.count();
        let b = Linear::dense(device, outputs, padded, held(module.b), read_b)?;
        adapter.bytes += b.bytes();
        let factors = Factors {
            a: a.clone(),
            b,
            scale: module.scale,
        };
        let there = adapter.factors.insert(part.projection.clone(), factors);
        if there.is_some() {
            bail!(
                Unsupported,
                "{} has an adapter of its own and one of a matrix that it is a part of",
                part.projection
            );
        }
    }
    Ok(())
}
