//! The recurrent state of a model: what its gated delta nets or its Mamba-2 layers hold of the tokens before. A block has the state of all of them after one
//! position, f32, layer by layer. Unlike keys and values it has one size however long the sequence is, and cannot be cut: whoever wants
//! to come back to a position keeps its block.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::blocks::{BlockArena, Reserve};
use super::{NULL_BLOCK, StateBlocks};
use crate::base::error::bail;
use crate::base::size::product;
use crate::base::{Result, memory};
use crate::cuda::{Arenas, DeviceSlice, RecurrentStates};
use crate::model::spec::Spec;
use crate::tensor::RecurrentShape;

/// The part of a block that is one layer's, in numbers.
#[derive(Clone, Debug)]
pub(super) struct StateLayer {
    shape: RecurrentShape,
    first: usize,
}

/// The recurrent layers of a model, by layer; empty if it has none.
pub(super) fn state_layers(spec: &Spec) -> Vec<Option<StateLayer>> {
    let mut first = 0;
    let layers = spec.all_blocks().map(|block| {
        let shape = block.recurrent()?;
        let layer = StateLayer { shape, first };
        first += shape.state_floats();
        Some(layer)
    });
    let layers: Vec<_> = layers.collect();
    match first {
        0 => Vec::new(),
        _ => layers,
    }
}

/// Bytes of a block of these layers' state; 0 without any.
pub(super) fn state_bytes(layers: &[Option<StateLayer>]) -> Result<usize> {
    let last = layers.iter().flatten().last();
    let floats = last.map_or(0, |last| last.first + last.shape.state_floats());
    product("a recurrent state", &[floats, size_of::<f32>()])
}

/// A part of one layer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum StatePart {
    /// The matrices, `[value_heads, key_dim, value_dim]`, or `[heads, state_size, head_dim]` of Mamba-2.
    Matrices,
    /// The inputs of the convolution at the last positions, `[taps - 1, channels]`.
    History,
}

/// Blocks of recurrent state. All functions may be called from any thread; whoever reads or writes a block owns it.
pub struct StateArena {
    blocks: BlockArena,
    layers: Vec<Option<StateLayer>>,
}

impl StateArena {
    /// The arena of a model, if it has recurrent layers.
    pub(super) fn new(
        layers: &[Option<StateLayer>],
        arenas: Option<&Arc<Arenas>>,
        reserve: &Arc<Reserve>,
    ) -> Result<Option<StateArena>> {
        let bytes = state_bytes(layers)?;
        let blocks = match arenas {
            _ if bytes == 0 => return Ok(None),
            None => BlockArena::in_host_memory(bytes, reserve),
            Some(arenas) => BlockArena::in_device_memory(bytes, arenas, reserve)?,
        };
        Ok(Some(StateArena {
            blocks,
            layers: layers.to_vec(),
        }))
    }

    /// Takes the locks of its blocks until the result is dropped.
    pub(super) fn locked(&'static self) -> Box<dyn Any> {
        self.blocks.locked()
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.blocks.block_bytes()
    }

    /// Memory for a block that has none.
    pub fn take(&self, block: u32) -> Result<()> {
        self.blocks.take(block)
    }

    /// Frees the memory of a block.
    pub fn free(&self, block: u32) {
        self.blocks.free(block);
    }

    /// Calls `each` with the bytes of a block.
    pub fn read(&self, block: u32, each: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
        if self.blocks.gpu().is_none() {
            // SAFETY: a user of the block calls, as for `KvTables`. Blocks that several use are not written.
            return each(unsafe { self.blocks.read(block, 0..self.block_bytes()) }?);
        }
        let mut bytes = memory::zeros(self.block_bytes())?;
        self.on_device(block)?.read(0, &mut bytes)?;
        each(&bytes)
    }

    /// Fills a block with the bytes that `next` gives. If that fails, some of them may be there.
    pub fn write(&self, block: u32, next: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        if self.blocks.gpu().is_none() {
            // SAFETY: the only user of the block calls, as for `KvTables`.
            return next(unsafe { self.blocks.write(block, 0..self.block_bytes()) }?);
        }
        let mut bytes = memory::zeros(self.block_bytes())?;
        next(&mut bytes)?;
        self.on_device(block)?.write(0, &bytes)
    }

    fn on_device(&self, block: u32) -> Result<DeviceSlice<'_>> {
        self.blocks.on_gpu(block, 0..self.block_bytes())
    }

    /// A layer's states on a GPU as kernels take them.
    pub(in crate::model) fn on_gpu(&self, layer: usize) -> Result<RecurrentStates> {
        Ok(RecurrentStates {
            arena: self.blocks.address()?,
            block_bytes: self.block_bytes(),
            offset: self.range(layer, StatePart::Matrices)?.start,
        })
    }

    /// Calls `work` with a part of a layer's state in the block to be written, which has what the other block holds.
    pub(in crate::model) fn update(
        &self,
        layer: usize,
        part: StatePart,
        blocks: StateBlocks,
        work: impl FnOnce(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let range = self.range(layer, part)?;
        let StateBlocks { read, write } = blocks;
        // SAFETY: the only user of the block calls, as for `KvTables`.
        let bytes = unsafe { self.blocks.write(write, range.clone()) }?;
        match read {
            NULL_BLOCK => bytes.fill(0),
            _ if read == write => {}
            // SAFETY: the sequence uses this block too, and it is another one. Blocks that several use are not written.
            _ => bytes.copy_from_slice(unsafe { self.blocks.read(read, range) }?),
        }
        work(floats(bytes)?)
    }

    /// The bytes of a part of a layer's state within a block.
    fn range(&self, layer: usize, part: StatePart) -> Result<Range<usize>> {
        let Some(Some(StateLayer { shape, first })) = self.layers.get(layer) else {
            bail!(Internal, "layer {layer} has no recurrent state");
        };
        let split = first + shape.matrix_floats();
        let floats = match part {
            StatePart::Matrices => *first..split,
            StatePart::History => split..first + shape.state_floats(),
        };
        Ok(floats.start * size_of::<f32>()..floats.end * size_of::<f32>())
    }
}

/// Bytes as the numbers that they hold.
fn floats(bytes: &mut [u8]) -> Result<&mut [f32]> {
    // SAFETY: all bits are numbers.
    match unsafe { bytes.align_to_mut::<f32>() } {
        ([], floats, []) => Ok(floats),
        _ => bail!(
            Internal,
            "a recurrent state that is not aligned to four bytes"
        ),
    }
}

impl std::fmt::Debug for StateArena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layers = self.layers.iter().flatten().count();
        write!(
            f,
            "StateArena({layers} layers, {} bytes)",
            self.block_bytes()
        )
    }
}
