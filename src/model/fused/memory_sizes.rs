//! The sizes of the working memory of fused passes: those by which it is allocated, and its bytes before a model is loaded.

use super::drafter_scratch::DrafterScratch;
use super::per_layer_scratch::PerLayerScratch;
use super::recurrent_scratch::RecurrentScratch;
use super::sizes::Sizes;
use crate::base::Result;
use crate::base::memory::Bytes;
use crate::cuda::{
    self, Best, DrawScratch, ExpertScratch, Layout, LinearScratch, MaskRows, NormScratch,
    ScratchDevice, SplitKvWorkspace,
};

/// Number of steps that the device may run ahead of the host.
const HISTORY: usize = 8;

/// The passes that working memory has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct Room {
    /// Rows in the blocks.
    pub(in crate::model) rows: usize,
    /// Rows of logits.
    pub(in crate::model) head_rows: usize,
    /// Sequences of a step.
    pub(in crate::model) batch: usize,
    /// Pages of each sequence.
    pub(in crate::model) pages: usize,
}

/// The pages of the block tables that a sequence of `pages` pages needs. Pages are added one at a time; the tables grow by powers of two.
pub(super) fn table_pages(pages: usize) -> usize {
    match pages {
        0 | 1 => 1,
        pages => pages.next_power_of_two().max(64),
    }
}

/// Bytes of the buffers of working memory.
pub(super) struct BufferBytes {
    pub(super) residual: usize,
    /// One of the two rows between halves of blocks.
    pub(super) between: usize,
    pub(super) input: usize,
    pub(super) projected: usize,
    pub(super) inner: usize,
    pub(super) logits: usize,
    pub(super) tokens: usize,
    pub(super) positions: usize,
    /// Block tables of one group.
    pub(super) table: usize,
    /// One list of faults.
    pub(super) notes: usize,
    /// 0 in models without gates of attention.
    pub(super) head_gate: usize,
    /// In page-locked memory.
    pub(super) history: usize,
    pub(super) linear: LinearRoom,
}

/// Arguments of [`LinearScratch::new`].
#[derive(Clone, Copy)]
pub(super) struct LinearRoom {
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) copy: usize,
}

impl BufferBytes {
    pub(super) fn of(sizes: &Sizes, room: Room) -> BufferBytes {
        let Room {
            rows,
            head_rows,
            batch,
            pages,
        } = room;
        let (hidden, q) = (sizes.hidden, sizes.mixed());
        let wide = sizes.intermediate.max(sizes.own_input());
        let all_inputs = sizes.per_layer.map_or(0, |per_layer| per_layer.all);
        // The widest weight except the head, which is computed in parts because logits of many rows are rarely requested.
        let inner = sizes.inner();
        let widest = sizes.mixer_inputs().max(inner).max(all_inputs) * hidden * 2;
        let k = inner.max(hidden);
        let converted = rows * k * 2;
        let widest = widest.max(if sizes.dense { converted } else { 0 });
        let activations = |k| Layout::FragmentMajor.elements(rows, k);
        let fused = if sizes.dense {
            cuda::SKINNY_ROWS
        } else {
            cuda::TILED
        };
        let large = rows.max(head_rows) > fused;
        BufferBytes {
            residual: rows * hidden * 4,
            between: hidden * 4,
            input: activations(hidden.max(q)) * 2,
            projected: rows * sizes.mixer_inputs().max(wide).max(hidden) * 4,
            inner: activations(inner) * 2,
            logits: head_rows * sizes.vocab * 4,
            tokens: rows.max(batch) * 4,
            positions: batch * 4,
            table: batch * pages * 4,
            notes: rows.max(batch).max(1) * 4,
            head_gate: rows * sizes.head_gate * 4,
            history: HISTORY * batch * 4,
            linear: LinearRoom {
                rows: rows.max(head_rows),
                k,
                copy: if large { widest } else { 0 },
            },
        }
    }
}

/// Bytes of working memory with room for these passes, for draws with repetition penalties and masks too.
pub(in crate::model) fn working_bytes(
    sizes: &Sizes,
    device: ScratchDevice,
    room: Room,
) -> Result<Bytes> {
    let Room {
        rows,
        batch,
        head_rows,
        ..
    } = room;
    let room = Room {
        pages: table_pages(room.pages),
        ..room
    };
    let buffers = BufferBytes::of(sizes, room);
    let LinearRoom {
        rows: linear_rows,
        k,
        copy,
    } = buffers.linear;
    let drafter = match sizes.drafts {
        true => DrafterScratch::bytes_of(sizes, rows, batch),
        false => Bytes::default(),
    };
    let experts = match &sizes.experts {
        Some(e) => ExpertScratch::bytes_of(e.routing, rows, e.intermediate, sizes.hidden)?,
        None => 0,
    };
    let per_layer = sizes.per_layer;
    let parts = [
        buffers.residual,
        2 * buffers.between,
        buffers.input,
        buffers.projected,
        buffers.inner,
        buffers.logits,
        buffers.tokens,
        buffers.positions,
        sizes.groups * buffers.table,
        3 * buffers.notes,
        buffers.head_gate,
        Best::bytes_of(head_rows.max(batch)),
        DrawScratch::bytes_of(batch, sizes.vocab),
        MaskRows::bytes_of(batch, sizes.vocab),
        sizes
            .recurrent
            .map_or(0, |sizes| RecurrentScratch::bytes_of(sizes, rows, batch)),
        experts,
        per_layer.map_or(0, |sizes| PerLayerScratch::bytes_of(sizes, rows)),
        SplitKvWorkspace::bytes_of(sizes.split_kv(), batch),
        NormScratch::bytes_of(sizes.hidden),
        LinearScratch::bytes_of(sizes.scratch_device(device), linear_rows, k, copy),
    ];
    let own = Bytes {
        host: buffers.history as u64,
        device: parts.iter().sum::<usize>() as u64,
    };
    Ok(own + drafter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    /// Working memory grows with each part of the room, and by the logits of each row of them at least.
    #[test]
    fn more_room_takes_more_memory() {
        let device = ScratchDevice {
            arch: (9, 0),
            multiprocessors: 132,
            cublas: true,
            deterministic: false,
        };
        let small = Room {
            rows: 16,
            head_rows: 4,
            batch: 4,
            pages: 1,
        };
        for model_type in ["qwen3", "qwen3_moe", "qwen3_5", "nemotron_h", "gemma4"] {
            let config = serde_json::json!({
                "model_type": model_type, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512
            });
            let spec = families::read(&config).unwrap();
            for dense in [false, true] {
                let sizes = Sizes::of(&spec, dense, false).unwrap();
                let bytes = |room: Room| working_bytes(&sizes, device, room).unwrap();
                let grown = |change: fn(&mut Room)| {
                    let mut room = small;
                    change(&mut room);
                    bytes(room).device - bytes(small).device
                };
                assert!(grown(|room| room.rows = 512) > 0, "{model_type}");
                assert!(grown(|room| room.batch = 64) > 0, "{model_type}");
                assert!(grown(|room| room.pages = 65) > 0, "{model_type}");
                let logits = 12 * spec.vocab_size as u64 * 4;
                let best = (Best::bytes_of(16) - Best::bytes_of(4)) as u64;
                assert_eq!(
                    grown(|room| room.head_rows = 16),
                    logits + best,
                    "{model_type}"
                );
            }
        }
    }

    #[test]
    fn tables_grow_by_powers_of_two() {
        assert_eq!(
            [0, 1, 2, 64, 65, 200].map(table_pages),
            [1, 1, 64, 64, 128, 256]
        );
    }
}
