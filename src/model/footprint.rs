//! The memory of a model, known from the headers of its files. Each number comes from the function by which the memory is allocated
//! later, so the accounts of [`memory`](crate::base::memory) say the same once the model is loaded and has run.

use std::collections::HashSet;

use super::block::RowWidths;
use super::kv::BlockSizes;
use super::load::{self, COMPARED_ROWS, HeldForm, HeldTensor, HeldTensors};
use super::mapped::MappedWeights;
use super::options::LONG_PROMPT;
use super::run::{ROWS, pass_rows};
use super::spec::{BlockSpec, Spec};
use super::tensors::{HEAD, TensorRole};
use super::{Activations, Device, KvType, LoadOptions, fused, spec_of};
use crate::base::error::bail;
use crate::base::memory::Bytes;
use crate::base::{Result, host_memory};
use crate::checkpoint::Checkpoint;
use crate::cuda::{self, ExpertTable, ScratchDevice};
use crate::ops::linear::Linear;
use crate::ops::{DeviceKind, WorkspaceSizes};
use crate::tensor::WeightType;

/// Passes that working memory has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passes {
    /// Sequences that take a step together, at least one.
    pub sequences: usize,
    /// Rows of the longest pass.
    pub rows: usize,
    /// Parts of a pass after which a recurrent state is kept.
    pub states: usize,
    /// Positions of the longest sequence.
    pub context: usize,
}

/// A weight that rows are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Factor {
    kind: WeightType,
    cols: usize,
    is_head: bool,
}

/// The memory of a model on a device.
#[derive(Debug)]
pub struct Footprint {
    spec: Spec,
    device: Device,
    activations: Activations,
    weights: Bytes,
    mapped_bytes: u64,
    load_peak: Bytes,
    factors: HashSet<Factor>,
    /// Sizes of fused passes on a GPU.
    sizes: Option<fused::Sizes>,
    /// The share of a GPU on which prompts run beside steps, in working memory of their own.
    beside: Option<fused::LaneShare>,
}

impl Footprint {
    /// The footprint of the model in an opened checkpoint. Fails, with the error of loading, for a model that the device cannot run. Reads
    /// no tensors.
    pub fn of(checkpoint: &dyn Checkpoint, options: &LoadOptions) -> Result<Footprint> {
        if let Some(quantize) = &options.quantize {
            quantize.check()?;
        }
        options.activations.check(&options.device)?;
        let mut spec = spec_of(checkpoint)?;
        let (quantize, sampling_only) = (options.quantize.is_some(), options.sampling_only);
        let kind = options.device.kind();
        if kind == DeviceKind::Cuda {
            fused::check_supported(&spec)?;
            spec = spec.without_growth();
        }
        let packed = MappedWeights::of(checkpoint, options)?.is_some();
        let held = load::held_tensors(checkpoint, &spec, quantize, sampling_only, packed)?;
        if kind == DeviceKind::Cuda {
            check_experts(&held)?;
        }
        let weights = bytes_of(&held, &spec, kind, sampling_only)?;
        let threads = options.device.threads();
        let checking = Bytes::of_host(held.checked_bytes as u64);
        let working = held.tensors.iter().map(|tensor| working(tensor, kind));
        let working = working
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .fold(checking, Bytes::max);
        let factors = held.tensors.iter().filter_map(factor);
        let is_dense = |tensor: &HeldTensor| {
            let of_rows = tensor.role != TensorRole::Router;
            of_rows && factor(tensor).is_some_and(|f| f.kind != WeightType::Nvfp4)
        };
        let sizes = match kind {
            DeviceKind::Cpu => None,
            DeviceKind::Cuda => {
                let dense = held.tensors.iter().any(is_dense);
                Some(fused::Sizes::of(&spec, dense, options.deterministic)?)
            }
        };
        let beside = match &options.device {
            Device::Cuda(gpu) => fused::LaneShare::of(gpu, options.tuning),
            Device::Cpu(_) => None,
        };
        Ok(Footprint {
            device: options.device.clone(),
            beside,
            activations: options.activations,
            weights,
            mapped_bytes: mapped_bytes(&held)?,
            load_peak: weights + working.times(threads as u64),
            factors: factors.collect(),
            sizes,
            spec,
        })
    }

    /// Its architecture.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The device that it is for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Weights as they are held, with tables in page-locked host memory and with the constants of kernels.
    pub fn weights(&self) -> Bytes {
        self.weights
    }

    /// Weights beside these that are mapped from a file, in memory that processes share.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Weights and working memory while they are loaded, at most, without what is mapped.
    pub fn load_peak(&self) -> Bytes {
        self.load_peak
    }

    /// Most rows that go through the weights together.
    pub fn pass_rows(&self) -> usize {
        pass_rows(self.sizes.is_some())
    }

    /// Working memory of passes, at most: on a GPU of the model, and on the CPU of each caller that runs them. Drafts and verifications of
    /// several tokens of a sequence may take more.
    pub fn workspace(&self, passes: &Passes) -> Result<Bytes> {
        match &self.sizes {
            None => self.workspace_on_cpu(passes),
            Some(sizes) => self.workspace_on_gpu(sizes, passes),
        }
    }

    fn workspace_on_gpu(&self, sizes: &fused::Sizes, passes: &Passes) -> Result<Bytes> {
        let Device::Cuda(gpu) = &self.device else {
            bail!(Internal, "fused passes of a model that is not on a GPU");
        };
        let steps = fused::bucket(passes.sequences.min(fused::BATCH));
        let room = fused::Room {
            rows: passes.rows.min(fused::ROWS).max(steps),
            head_rows: steps,
            batch: steps.max(passes.states),
            pages: passes.context.div_ceil(cuda::PAGE),
        };
        let device = ScratchDevice::of(gpu);
        let own = fused::working_bytes(sizes, device, room)?;
        let joins =
            passes.sequences > 1 && passes.rows > LONG_PROMPT && passes.context > LONG_PROMPT;
        let Some(share) = self.beside.filter(|share| share.is_prepared || joins) else {
            return Ok(own);
        };
        let rows = match share.is_prepared {
            true => self.spec.max_positions,
            false => passes.rows,
        };
        let beside = fused::Room {
            rows: rows.min(share.rows),
            head_rows: 1,
            batch: fused::states_of_part(sizes),
            ..room
        };
        Ok(own + fused::working_bytes(sizes, device, beside)?)
    }

    fn workspace_on_cpu(&self, passes: &Passes) -> Result<Bytes> {
        let cpu = self.device.host()?;
        let steps = passes.sequences.min(ROWS);
        let rows = passes.rows.min(ROWS).max(steps);
        let int8 = self.activations == Activations::Int8;
        let of_factor = |factor: &Factor| {
            let rows = if factor.is_head { steps } else { rows };
            cpu.linear_sizes(rows, factor.cols, factor.kind, int8)
        };
        let attends = self.spec.all_blocks().any(|b| b.attention().is_some());
        let attention = attends.then(|| cpu.attention_sizes(passes.context));
        let parts = self.factors.iter().map(of_factor).chain(attention);
        let workspace = parts.fold(WorkspaceSizes::default(), WorkspaceSizes::max);
        let rows = RowWidths::of(&self.spec).bytes(rows)?;
        Ok(Bytes::of_host((rows + workspace.bytes()) as u64))
    }

    /// Most bytes of recorded passes, in the memory of the driver on the device and on the host together; 0 on the CPU.
    pub fn graph_bytes_bound(&self) -> u64 {
        self.sizes.as_ref().map_or(0, |_| fused::GRAPH_BYTES as u64)
    }

    /// Sizes of the blocks of sequences with keys and values of this type.
    pub fn blocks(&self, kind: KvType) -> Result<BlockSizes> {
        let without_f8 = fused::unsupported_f8(&self.spec);
        BlockSizes::of(&self.spec, self.device.kind(), kind, without_f8.as_deref())
    }

    /// Bytes that the device has free: of host memory for the CPU. `None` if the system does not say.
    pub fn free_bytes(&self) -> Result<Option<u64>> {
        match &self.device {
            Device::Cpu(_) => Ok(host_memory::read().map(|memory| memory.available)),
            Device::Cuda(gpu) => Ok(Some(gpu.memory()?.0 as u64)),
        }
    }
}

/// Bytes of the weights of the model in an opened checkpoint on a kind of device, and of those that are mapped beside them; `quantize` says
/// whether dense weights are quantized while they are loaded. Fails, with the error of loading, for a checkpoint that cannot be run. Reads no
/// tensors.
pub fn weight_bytes(
    checkpoint: &dyn Checkpoint,
    device: DeviceKind,
    quantize: bool,
) -> Result<(Bytes, u64)> {
    let spec = spec_of(checkpoint)?;
    let packed = match device {
        DeviceKind::Cpu => MappedWeights::beside(checkpoint, false)?.is_some(),
        DeviceKind::Cuda => false,
    };
    let held = load::held_tensors(checkpoint, &spec, quantize, false, packed)?;
    Ok((bytes_of(&held, &spec, device, false)?, mapped_bytes(&held)?))
}

fn bytes_of(
    held: &HeldTensors<'_>,
    spec: &Spec,
    device: DeviceKind,
    sampling_only: bool,
) -> Result<Bytes> {
    let vectors = |floats: usize| {
        let bytes = (floats * size_of::<f32>()) as u64;
        match device {
            DeviceKind::Cpu => Bytes::of_host(bytes),
            DeviceKind::Cuda => Bytes::of_device(bytes),
        }
    };
    let own = held.tensors.iter().filter(|tensor| !tensor.is_mapped);
    let tensors = own.map(|tensor| match tensor.form {
        HeldForm::Matrix { kind, rows, cols } => Linear::bytes_of(device, rows, cols, kind),
        HeldForm::Vector { len } => Ok(vectors(len)),
    });
    let tensors = tensors.sum::<Result<Bytes>>()?;
    let blocks = spec.all_blocks().filter(|_| !sampling_only);
    let attentions = blocks.filter_map(BlockSpec::attention);
    let ones = attentions.map(load::value_norm).sum();
    let beside = match device {
        DeviceKind::Cpu => Bytes::default(),
        DeviceKind::Cuda => {
            let tables = held.tables.iter().map(|entry| fused::table_bytes(entry));
            Bytes {
                host: tables.sum::<Result<usize>>()? as u64,
                device: fused::Lowered::device_bytes_of(spec, sampling_only) as u64,
            }
        }
    };
    Ok(tensors + vectors(ones) + beside)
}

/// Bytes of tensors that are mapped from a file.
fn mapped_bytes(held: &HeldTensors<'_>) -> Result<u64> {
    let each = held.tensors.iter().map(|tensor| match tensor.form {
        HeldForm::Matrix { kind, rows, cols } if tensor.is_mapped => {
            Ok(Linear::bytes_of(DeviceKind::Cpu, rows, cols, kind)?.host)
        }
        _ => Ok(0),
    });
    each.sum()
}

/// Working memory of loading a tensor.
fn working(tensor: &HeldTensor, device: DeviceKind) -> Result<Bytes> {
    let converted = Bytes::of_host(tensor.converted_bytes as u64);
    match tensor.form {
        HeldForm::Matrix { kind, rows, cols } => {
            // A mapped weight is compared with some rows at a time that are packed again.
            let compared = match tensor.is_mapped {
                true => Linear::bytes_of(device, rows.min(COMPARED_ROWS), cols, kind)?,
                false => Bytes::default(),
            };
            Ok(converted + compared + Linear::preparing_bytes_of(device, rows, cols, kind))
        }
        HeldForm::Vector { .. } => Ok(converted),
    }
}

fn factor(tensor: &HeldTensor) -> Option<Factor> {
    match tensor.form {
        HeldForm::Matrix { kind, cols, .. } => Some(Factor {
            kind,
            cols,
            is_head: tensor.name == HEAD,
        }),
        HeldForm::Vector { .. } => None,
    }
}

/// Refuses experts in types that no kernel of a GPU multiplies, as loading does.
fn check_experts(held: &HeldTensors<'_>) -> Result<()> {
    held.tensors.iter().try_for_each(|tensor| {
        let of_expert = tensor.name.split_once(".experts.").map(|(_, name)| name);
        let Some((number, projection)) = of_expert.and_then(|name| name.split_once('.')) else {
            return Ok(());
        };
        match (factor(tensor), number.parse()) {
            (Some(factor), Ok(number)) => {
                let what = projection.split('_').next().unwrap_or(projection);
                ExpertTable::check_storage(number, what, factor.kind)
            }
            _ => Ok(()),
        }
    })
}
