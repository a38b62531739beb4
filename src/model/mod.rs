//! Floor 5: decoder models. Config, weights (immutable, shared), the forward pass, and the memory of the KV cache. Architectures are
//! data. Knows nothing of conversations.

mod adapter;
mod batch;
mod block;
pub mod calibrate;
pub mod compare;
pub mod convert;
mod drafter;
mod embedding;
pub mod families;
pub mod footprint;
mod fused;
pub(crate) mod generation;
mod keys;
pub mod kv;
mod load;
mod mapped;
mod options;
mod order;
mod pack;
pub mod placement;
mod rope;
mod run;
mod run_on_gpu;
pub mod spec;
mod stored_rows;
pub mod support;
pub mod tensors;
pub(crate) mod text;
mod trained;
pub mod training;
pub mod weights;

use std::any::Any;
use std::collections::{BTreeMap, HashSet};
use std::hash::Hasher;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use serde::Serialize;
use twox_hash::XxHash3_64;

use crate::base::error::{bail, err};
use crate::base::turns::Turns;
use crate::base::{Result, call, threads};
use crate::checkpoint::Checkpoint;

use crate::ops::Array;
use adapter::ModelKey;
use fused::HostTables;
use kv::KvMemory;

pub use crate::ops::Device;
pub use crate::ops::attention::KvType;
pub use crate::ops::linear::Activations;
pub use crate::ops::sample::{Choice, SamplingOptions, TokenMask};
pub use adapter::Adapter;
pub use batch::{Batch, HiddenBefore, Output, Segment, Verification, Wanted};
pub use drafter::{DrafterRows, Drafting};
pub use embedding::{EmbeddingSettings, Pooling};
pub use families::{open, open_bytes, open_given};
pub use mapped::verify_packed;
pub use options::{LONG_PROMPT, LoadOptions, PackedUse, Tuning};
pub(crate) use pack::pack_new;
pub use pack::{PackReport, is_same_directory, pack};
pub use rope::{LongRope, RopeSet};
pub use run::Scratch;
pub use spec::Spec;
pub use trained::Trained;
pub use weights::Weights;

use spec::{AttentionSpec, BlockSpec, DrafterSpec, MlpSpec};

/// Poll interval while a model waits for kernels to compile.
const WAIT: Duration = Duration::from_millis(2);

/// The logits that a forward pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the tokens only enter the cache.
    None,
    /// Logits of the last token.
    Last,
    /// Logits of every token.
    All,
}

/// Total of the weight matrices held in one format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FormatUse {
    /// Number of matrices.
    pub tensors: usize,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes in memory.
    pub bytes: u64,
}

/// Properties of a loaded model, for reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelInfo {
    /// `llama`, `qwen2`, ...
    pub architecture: &'static str,
    /// Layout of the file that it was loaded from.
    pub file_format: &'static str,
    /// The device that it runs on.
    pub device: String,
    /// The reason for the device: `running on cuda:0: ...`. `None` if the caller named the device.
    pub device_choice: Option<String>,
    /// Number of parameters; a tied head counts once.
    pub parameters: u64,
    /// Bytes of weights in memory.
    pub weight_bytes: u64,
    /// Part of `weight_bytes` that is mapped from a file of packed weights, which processes share.
    pub mapped_bytes: u64,
    /// Matrices by the format in which they are held.
    pub formats: BTreeMap<&'static str, FormatUse>,
    /// Precision of activations in products with NVFP4 weights: `exact` or `int8`.
    pub activations: &'static str,
    /// Decoder blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP, or of one expert. This and the next four fields describe the first block.
    pub intermediate_size: usize,
    /// Number of experts of a mixture; 0 for a dense MLP.
    pub experts: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Maximum number of positions of the model.
    pub max_positions: usize,
    /// Whether embedding and head share one table in the file.
    pub tied: bool,
    /// Whether embedding rows are read from the file on each lookup instead of being held in memory.
    pub embedding_in_file: bool,
    /// Whether the layers were skipped.
    pub sampling_only: bool,
    /// Bytes of one cached position in f16. See [`Spec::kv_bytes_per_token`] for other types.
    pub kv_bytes_per_token: u64,
}

/// Fails for a checkpoint that loading would refuse before it reads values: checks the config, the tensors and the tokenizer files. Returns
/// the names of the entries that the model is loaded from.
fn check_loadable(checkpoint: &dyn Checkpoint) -> Result<HashSet<String>> {
    let spec = spec_with_frequencies(checkpoint)?;
    let used = load::entries_used(checkpoint, &spec)?;
    let source = &checkpoint.metadata().tokenizer;
    generation::read(&spec, source, &text::read(source)?)?;
    Ok(used)
}

fn spec_of(checkpoint: &dyn Checkpoint) -> Result<Spec> {
    match &checkpoint.metadata().config {
        Some(config) => {
            let mut spec = families::read(config)?;
            // A head stored beside the embedding is used, whatever the flags say.
            let embedding = tensors::EMBEDDINGS.iter().find_map(|n| checkpoint.find(n));
            spec.tied &= embedding.is_none() || checkpoint.find(tensors::HEAD).is_none();
            let mut names = checkpoint.entries().iter().map(|entry| &entry.name);
            // Many files leave the drafter out that their config names.
            match names.any(|name| name.starts_with(tensors::DRAFTER)) {
                true => spec.drafter.iter().try_for_each(DrafterSpec::check)?,
                false => spec.drafter = None,
            }
            Ok(spec)
        }
        None => bail!(
            NotFound,
            "there is no config.json beside the weights to say what the model is"
        ),
    }
}

/// Like [`spec_of`], and applies the frequency factors that GGUF files store as a tensor.
fn spec_with_frequencies(checkpoint: &dyn Checkpoint) -> Result<Spec> {
    let mut spec = spec_of(checkpoint)?;
    if let Some(factors) = checkpoint.find("rope_freqs.weight") {
        for set in &mut spec.ropes {
            let expected = set.table.frequencies.len();
            if factors.shape != [expected] {
                bail!(
                    CorruptFile,
                    "rope_freqs.weight has shape {:?}, expected [{expected}]",
                    factors.shape
                );
            }
            let mut values = vec![0.0; expected];
            checkpoint.rows_f32(factors, 0..1, &mut values)?;
            set.divide(&values)?;
        }
    }
    Ok(spec)
}

/// The parts of a model.
struct Made {
    spec: Spec,
    weights: Weights,
    /// The tables of a model on a GPU that are in host memory.
    tables: HostTables,
    fingerprint: u64,
}

/// The weights as passes read them. A trainer that has changed them replaces this as a whole: see [`Model::renew`].
struct Live {
    weights: Arc<Weights>,
    /// Runs the model on a GPU by fused kernels; `None` on other devices.
    executor: Option<Arc<fused::Executor>>,
    /// Runs prompts beside the passes of `executor`: see [`Model::run_beside`].
    beside: Option<Arc<fused::BesideSteps>>,
    fingerprint: u64,
}

/// Spec, weights and device of a loaded model, or of one that is being trained. Shared by everything that runs it, and immutable but for
/// the weights of one that is being trained.
pub struct Model {
    spec: Spec,
    live: RwLock<Live>,
    device: Device,
    kv: KvMemory,
    activations: Activations,
    info: ModelInfo,
    /// Tells its adapters from those of other models.
    key: Arc<ModelKey>,
    /// Serializes passes over the weights.
    turns: Turns,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Model({}, {} layers, {} bytes of weights)",
            self.info.architecture, self.info.layers, self.info.weight_bytes
        )
    }
}

impl Model {
    /// Loads the model at `path`: a directory, or a `.safetensors`, `.dat` or `.gguf` file. Reports the bytes read to the thread's
    /// [`call`], and is cancelled with it.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Arc<Model>> {
        let checkpoint = Arc::from(open(path)?);
        Self::from_checkpoint(checkpoint, options).map_err(|e| e.within(path.display()))
    }

    /// Loads the model in an opened checkpoint.
    pub fn from_checkpoint(
        checkpoint: Arc<dyn Checkpoint>,
        options: &LoadOptions,
    ) -> Result<Arc<Model>> {
        Self::from_checkpoint_beside(checkpoint, options, &|| {})
    }

    /// As [`Model::from_checkpoint`]. Of the threads that read weights, as many as the device has, one calls `first` before it begins.
    pub(crate) fn from_checkpoint_beside(
        checkpoint: Arc<dyn Checkpoint>,
        options: &LoadOptions,
        first: &(dyn Fn() + Sync),
    ) -> Result<Arc<Model>> {
        if let Some(quantize) = &options.quantize {
            quantize.check()?;
        }
        options.activations.check(&options.device)?;
        let mut spec = spec_with_frequencies(&*checkpoint)?;
        let device = &options.device;
        let load = || {
            load::load(
                checkpoint.clone(),
                &spec,
                options,
                first,
                |embedding, per_layer| match device {
                    Device::Cuda(gpu) => fused::tables(gpu, embedding, per_layer),
                    _ => Ok(HostTables::default()),
                },
            )
        };
        let (weights, sum, tables) = match device {
            // Compiling kernels takes as long as reading weights, and uses other cores of the machine.
            Device::Cuda(gpu) => {
                fused::check_supported(&spec)?;
                let (given_up, done) = (AtomicBool::new(false), AtomicBool::new(false));
                let prepared = Mutex::new(Ok(()));
                let units = fused::units(&spec, options.deterministic);
                let prepare = || {
                    let result = gpu.prepare(&units, &|| given_up.load(Ordering::Relaxed));
                    *prepared.lock().unwrap_or_else(PoisonError::into_inner) = result;
                    done.store(true, Ordering::Release);
                };
                let loaded = threads::scope(|scope| {
                    scope
                        .start("nvfp4-kernels", prepare)
                        .map_err(|e| err!(OutOfMemory, "starting a thread for kernels: {e}"))?;
                    let mut loaded = load();
                    while loaded.is_ok() && !done.load(Ordering::Acquire) {
                        std::thread::sleep(WAIT);
                        if let Err(e) = call::check() {
                            loaded = Err(e);
                        }
                    }
                    given_up.store(loaded.is_err(), Ordering::Relaxed);
                    loaded
                });
                let prepared = prepared.into_inner();
                let loaded = loaded?;
                prepared.unwrap_or_else(PoisonError::into_inner)?;
                loaded
            }
            _ => load()?,
        };
        let mut fingerprint = XxHash3_64::new();
        // A drafter and layers that are not read bear on no result.
        let hashed = Spec {
            drafter: None,
            unread_layers: 0,
            ..spec.clone()
        };
        fingerprint.write(format!("{hashed:?}").as_bytes());
        fingerprint.write(&sum.to_le_bytes());
        if device.is_cuda() {
            let all = spec.max_positions;
            spec = spec.without_growth();
            if spec.max_positions < all {
                tracing::warn!(
                    "queries of this {} model grow with their position from position {} on, for which there is no kernel on a GPU: contexts end there",
                    spec.family,
                    spec.max_positions
                );
            }
        }
        let made = Made {
            spec,
            weights,
            tables,
            fingerprint: fingerprint.finish(),
        };
        Self::of(made, checkpoint.format(), options)
    }

    fn of(made: Made, format: &'static str, options: &LoadOptions) -> Result<Arc<Model>> {
        let Made {
            spec,
            weights,
            tables,
            fingerprint,
        } = made;
        let without_f8 = fused::unsupported_f8(&spec);
        let kv = KvMemory::new(&options.device, &spec, options.kv_bytes, without_f8)?;
        let (executor, beside, table_bytes) = match &options.device {
            Device::Cuda(gpu) => {
                let source = fused::Source {
                    spec: &spec,
                    weights: &weights,
                    kv: kv.cache(KvType::F16)?,
                };
                let executor = fused::Executor::new(gpu, source, tables, options.deterministic)?;
                let bytes = executor.bytes();
                let share = fused::LaneShare::of(gpu, options.tuning);
                let beside = share.map(|share| fused::BesideSteps::new(gpu, share));
                let beside = beside.transpose()?.flatten();
                (Some(Arc::new(executor)), beside.map(Arc::new), bytes)
            }
            Device::Cpu(_) => (None, None, 0),
        };
        let mut info = describe(&spec, &weights, options);
        info.file_format = format;
        info.weight_bytes += table_bytes as u64;
        Ok(Arc::new(Model {
            spec,
            live: RwLock::new(Live {
                weights: Arc::new(weights),
                executor,
                beside,
                fingerprint,
            }),
            device: options.device.clone(),
            kv,
            activations: options.activations,
            info,
            key: Arc::default(),
            turns: Turns::new(),
        }))
    }

    /// Its architecture.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    fn live(&self) -> RwLockReadGuard<'_, Live> {
        self.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its weights.
    pub fn weights(&self) -> Arc<Weights> {
        self.live().weights.clone()
    }

    /// Runs it on a GPU by fused kernels; `None` on other devices.
    fn executor(&self) -> Option<Arc<fused::Executor>> {
        self.live().executor.clone()
    }

    /// Runs prompts beside other passes; `None` where nothing does.
    fn beside(&self) -> Option<Arc<fused::BesideSteps>> {
        self.live().beside.clone()
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Takes the lock on the queue of passes, and those of its sequences' memory, until the result is dropped: see
    /// [`fork::Held`](crate::base::fork::Held).
    pub fn locked(&'static self) -> Vec<Box<dyn Any>> {
        let mut held = self.kv.locked();
        held.push(self.turns.locked());
        held
    }

    /// The memory of its sequences' keys and values.
    pub fn kv(&self) -> &KvMemory {
        &self.kv
    }

    /// Precision of activations in products with NVFP4 weights.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// The description of the loaded model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// A number that identifies this model as loaded, computed from its config and the stored bits of every weight except the drafter's.
    /// Independent of device and file format, but not of quantization. A model shared by a trainer has a fingerprint of its own, and another
    /// one after each step that changes weights: what was computed under one of them is of no use under another.
    pub fn fingerprint(&self) -> u64 {
        self.live().fingerprint
    }

    /// Loads an adapter from a directory in peft's format. Everything is checked against the model before memory is taken for factors. On a
    /// GPU, routed experts and per-layer inputs take none.
    pub fn load_adapter(&self, path: &Path) -> Result<Adapter> {
        if self.info.sampling_only {
            bail!(
                Unsupported,
                "{}: the model was loaded for sampling only, without the layers that an adapter stands beside; load it whole",
                path.display()
            );
        }
        let weights = self.weights();
        adapter::read(&self.device, (&self.spec, &weights), &self.key, path)
    }

    /// Fails unless an adapter was loaded for this model.
    pub fn check_adapter(&self, adapter: &Adapter) -> Result<()> {
        match adapter.is_of(&self.key) {
            true => Ok(()),
            false => bail!(
                InvalidArgument,
                "adapter '{}' was loaded for another model; load it for this one",
                adapter.name()
            ),
        }
    }
}

fn describe(spec: &Spec, weights: &Weights, options: &LoadOptions) -> ModelInfo {
    let mut formats: BTreeMap<&'static str, FormatUse> = BTreeMap::new();
    for linear in weights.linears() {
        let format = formats.entry(linear.kind().name()).or_default();
        format.tensors += 1;
        format.parameters += linear.rows() as u64 * linear.cols() as u64;
        format.bytes += linear.bytes() as u64;
    }
    let table = (spec.vocab_size * spec.hidden_size) as u64;
    let vectors: usize = weights.vectors().map(Array::len).sum();
    let matrices: u64 = formats.values().map(|f| f.parameters).sum();
    let own_table = if spec.tied { 0 } else { table };
    let per_layer = weights.per_layer.as_ref();
    let per_layer = per_layer.map_or(0, |all| all.table.entry.shape.iter().product::<usize>());
    let mlp = spec
        .blocks
        .iter()
        .map(|b| &b.mlp)
        .find(|mlp| **mlp != MlpSpec::None);
    let attended = spec.blocks.iter().find_map(BlockSpec::attention);
    let attention = |of: fn(&AttentionSpec) -> usize| attended.map_or(0, of);
    ModelInfo {
        architecture: spec.family,
        file_format: "",
        device: options.device.name(),
        device_choice: options.device_choice.clone(),
        parameters: matrices + own_table + (per_layer + vectors) as u64,
        weight_bytes: weights.bytes() as u64,
        mapped_bytes: weights.mapped_bytes() as u64,
        formats,
        activations: match options.activations {
            Activations::Exact => "exact",
            Activations::Int8 => "int8",
        },
        layers: spec.blocks.len(),
        hidden_size: spec.hidden_size,
        intermediate_size: mlp.map_or(0, MlpSpec::intermediate_size),
        experts: mlp.map_or(0, MlpSpec::experts),
        heads: attention(|a| a.heads),
        kv_heads: attention(|a| a.kv_heads),
        head_dim: attention(|a| a.head_dim),
        vocab_size: spec.vocab_size,
        max_positions: spec.max_positions,
        tied: spec.tied,
        embedding_in_file: matches!(weights.embedding, weights::Embedding::File(_))
            && matches!(options.device, Device::Cpu(_)),
        sampling_only: options.sampling_only,
        kv_bytes_per_token: spec.kv_bytes_per_token(KvType::F16),
    }
}
