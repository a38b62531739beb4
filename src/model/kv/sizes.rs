//! The sizes of a model's blocks, known before it is loaded.

use std::fmt;

use serde::Serialize;

use super::arena::block_bytes;
use super::group::KvGroup;
use super::state::{state_bytes, state_layers};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{self, Arenas};
use crate::model::spec::Spec;
use crate::ops::DeviceKind;
use crate::ops::attention::{KvType, PAGE as HOST_PAGE};

/// Sizes of the blocks of one group of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GroupBlocks {
    /// Layers of the group.
    pub layers: usize,
    /// Positions that a token sees, its own included; all if `None`.
    pub window: Option<usize>,
    /// Positions of a block.
    pub positions: usize,
    /// Bytes of a block.
    pub bytes: u64,
}

/// Sizes of the blocks of a model's sequences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockSizes {
    /// Keys and values, by groups of layers that are alike.
    pub groups: Vec<GroupBlocks>,
    /// Bytes of a recurrent state; 0 in models without recurrent layers.
    pub state_bytes: u64,
    /// Bytes of the blocks that padding rows of a step write to; 0 on the CPU.
    pub null_bytes: u64,
    /// Arenas of the memory of a GPU.
    #[serde(skip)]
    arenas: Option<usize>,
}

impl BlockSizes {
    /// The sizes of a model on a device, with keys and values of this type. Fails for a type that the device does not keep. `without_f8` says
    /// why a GPU cannot keep the model's keys and values in 8 bits, if so.
    pub(in crate::model) fn of(
        spec: &Spec,
        device: DeviceKind,
        kind: KvType,
        without_f8: Option<&str>,
    ) -> Result<BlockSizes> {
        check_kind(device, kind, &format_args!("a GPU"), without_f8)?;
        let positions = match device {
            DeviceKind::Cpu => HOST_PAGE,
            DeviceKind::Cuda => cuda::PAGE,
        };
        let groups = KvGroup::of(spec).into_iter().map(|group| {
            Ok(GroupBlocks {
                layers: group.layers.len(),
                window: group.window,
                positions,
                bytes: block_bytes(&group, kind, positions)? as u64,
            })
        });
        let groups = groups.collect::<Result<Vec<_>>>()?;
        let state_bytes = state_bytes(&state_layers(spec))? as u64;
        let is_cuda = device == DeviceKind::Cuda;
        let mut sizes = BlockSizes {
            state_bytes,
            null_bytes: 0,
            arenas: is_cuda.then(|| {
                let of_type = groups.len() + usize::from(state_bytes > 0);
                of_type * types_on_gpu(without_f8)
            }),
            groups,
        };
        if is_cuda {
            sizes.null_bytes = sizes.block_bytes() + state_bytes;
        }
        Ok(sizes)
    }

    /// Bytes of a block of keys and values in every group.
    pub fn block_bytes(&self) -> u64 {
        self.groups.iter().map(|group| group.bytes).sum()
    }

    /// Positions of a block of keys and values; 0 in models without attention.
    pub fn block_positions(&self) -> usize {
        self.groups.first().map_or(0, |group| group.positions)
    }

    /// Bytes of keys and values of a position.
    pub fn position_bytes(&self) -> u64 {
        let groups = self.groups.iter();
        groups.map(|g| g.bytes / g.positions as u64).sum()
    }

    /// Bytes that blocks of `bytes` bytes take of the device: a GPU maps memory in chunks.
    pub fn physical_bytes(&self, bytes: u64) -> u64 {
        match self.arenas {
            None => bytes,
            Some(count) => Arenas::physical_bytes(bytes, count),
        }
    }
}

/// Types of keys and values that a GPU keeps.
pub(super) fn types_on_gpu(without_f8: Option<&str>) -> usize {
    if without_f8.is_some() { 1 } else { 2 }
}

/// Fails for a type of keys and values that a device does not keep.
pub(super) fn check_kind(
    device: DeviceKind,
    kind: KvType,
    name: &dyn fmt::Display,
    without_f8: Option<&str>,
) -> Result<()> {
    let refused = match kind {
        KvType::F32 => Some("a GPU keeps them as f16 or f8"),
        KvType::F8 => without_f8,
        KvType::F16 => None,
    };
    match refused.filter(|_| device == DeviceKind::Cuda) {
        None => Ok(()),
        Some(reason) => bail!(
            Unsupported,
            "keys and values as {} on {name}; {reason}",
            kind.name()
        ),
    }
}
