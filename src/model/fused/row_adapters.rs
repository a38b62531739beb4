//! The rows of fused passes by adapter, and the working memory that passes with adapters take.

use std::sync::Arc;

use super::sizes::Sizes;
use crate::base::Result;
use crate::base::memory::Tag;
use crate::cuda::{self, AdapterDivision, AdapterScratch, AdapterTiles, DeviceBuffer, Gpu};
use crate::model::adapter::{Adapter, Adapts};

/// The properties of a pass with adapters that its launches depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AdaptedPass {
    pub(super) adapts: Adapts,
    /// Tiles of rows that are launched.
    pub(super) tiles: usize,
    /// The largest rank, rounded up so that a recording serves others.
    pub(super) rank: usize,
}

impl AdaptedPass {
    pub(super) fn division(self) -> AdapterDivision {
        AdapterDivision {
            tiles: self.tiles,
            rank: self.rank,
        }
    }
}

/// The rows of a pass by adapter.
pub(super) struct RowAdapters {
    pub(super) pass: AdaptedPass,
    /// The table of each row's adapter, or 0.
    pub(super) tables: Vec<u64>,
    tiles: AdapterTiles,
}

impl RowAdapters {
    /// The adapters of rows, and of padding up to `rows`; `None` if no row has one.
    pub(super) fn of<'a>(
        each: impl Iterator<Item = Option<&'a Adapter>>,
        rows: usize,
    ) -> Result<Option<RowAdapters>> {
        let (mut adapts, mut rank) = (Adapts::NOTHING, 0);
        let mut tables = Vec::with_capacity(rows);
        for adapter in each {
            let Some(adapter) = adapter else {
                tables.push(0);
                continue;
            };
            let on_gpu = adapter.on_gpu()?;
            adapts = adapts.or(on_gpu.adapts());
            rank = rank.max(on_gpu.rank());
            tables.push(on_gpu.address());
        }
        if rank == 0 {
            return Ok(None);
        }
        tables.resize(rows, 0);
        let tiles = AdapterTiles::of(&tables);
        Ok(Some(RowAdapters {
            pass: AdaptedPass {
                adapts,
                tiles: tiles.count().next_power_of_two().min(rows),
                rank: rank.next_power_of_two(),
            },
            tables,
            tiles,
        }))
    }
}

/// Working memory of passes with adapters. The first of them allocates it.
pub(super) struct AdapterMemory {
    pub(super) scratch: AdapterScratch,
    /// f32 `[rows, 2 intermediate]`: gate and up where a pass without adapters has them in registers.
    pub(super) gate_up: DeviceBuffer,
}

impl AdapterMemory {
    /// Bytes of gate and up in f32 that a pass takes.
    fn wide_bytes(sizes: &Sizes, adapters: &RowAdapters) -> usize {
        let rows = adapters.tables.len();
        let has_wide =
            adapters.pass.adapts.mlp_inputs && (sizes.deterministic || rows <= cuda::TILED);
        if has_wide { wide(sizes, rows) } else { 0 }
    }

    /// Memory for a pass, and for others of up to `rows` rows.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        adapters: &RowAdapters,
        rows: usize,
    ) -> Result<AdapterMemory> {
        let own = adapters.tables.len();
        let most = rows.max(own);
        let wide_rows = match sizes.deterministic {
            true => own,
            false => cuda::TILED.min(most),
        };
        let bytes = Self::wide_bytes(sizes, adapters).max(wide(sizes, wide_rows));
        let width = sizes.inner().max(sizes.hidden);
        Ok(AdapterMemory {
            scratch: AdapterScratch::new(gpu, most, width, adapters.pass.rank)?,
            gate_up: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?,
        })
    }

    /// Whether it has room for a pass.
    pub(super) fn holds(&self, sizes: &Sizes, adapters: &RowAdapters) -> bool {
        self.scratch
            .holds(adapters.tables.len(), adapters.pass.rank)
            && self.gate_up.bytes() >= Self::wide_bytes(sizes, adapters)
    }

    /// Enqueues a write of the rows of a pass by adapter.
    pub(super) fn write(&mut self, adapters: &RowAdapters) -> Result<()> {
        self.scratch.write(&adapters.tiles, adapters.pass.tiles)
    }
}

/// Bytes of gate and up in f32.
fn wide(sizes: &Sizes, rows: usize) -> usize {
    rows * 2 * sizes.intermediate * size_of::<f32>()
}
