//! Shared by the tests of recurrent layers: segments, and the blocks of an arena.

use std::sync::Arc;

use NVFP4::cuda::{DeviceBuffer, Gpu, Layout, RecurrentOutput, RecurrentSegments, RecurrentStates};

use crate::support::{
    HALF, assert_close, normal, poisoned, read_f32, read_rows, same_bits, upload,
};

/// Bytes of a block around the layer.
pub(crate) const AROUND: usize = 64;

/// A segment: its rows, the block with its state, and the block for its new state.
pub(crate) type Segment = (usize, u32, u32);

/// Segments that start from zeros, from their own block and from another, with more rows than a ring holds; and some that continue the one
/// before them.
pub(crate) const RAGGED: [Segment; 11] = [
    (1, 1, 1),
    (2, 2, 3),
    (3, 0, 4),
    (70, 5, 5),
    (1, 2, 6),
    (3, 7, 8),
    (2, 7, 9),
    (1, 9, 10),
    (40, 10, 11),
    (5, 12, 12),
    (1, 12, 13),
];

/// Blocks of an arena, those of [`RAGGED`] among them.
pub(crate) const BLOCKS: usize = 15;

/// Whether segment `index` continues the one before it.
pub(crate) fn continues(segments: &[Segment], index: usize) -> bool {
    let (_, read, _) = segments[index];
    let before = index.checked_sub(1).map(|index| segments[index].2);
    read != 0 && before == Some(read)
}

/// Segments on the device.
pub(crate) struct DeviceSegments {
    pub(crate) rows: usize,
    count: usize,
    row_starts: DeviceBuffer,
    read: DeviceBuffer,
    write: DeviceBuffer,
}

impl DeviceSegments {
    pub(crate) fn new(gpu: &Arc<Gpu>, segments: &[Segment]) -> DeviceSegments {
        let mut starts = vec![0i32];
        starts.extend(segments.iter().scan(0, |end, &(rows, ..)| {
            *end += rows as i32;
            Some(*end)
        }));
        let read: Vec<u32> = segments.iter().map(|&(_, read, _)| read).collect();
        let write: Vec<u32> = segments.iter().map(|&(.., write)| write).collect();
        DeviceSegments {
            rows: starts[segments.len()] as usize,
            count: segments.len(),
            row_starts: upload(gpu, &starts),
            read: upload(gpu, &read),
            write: upload(gpu, &write),
        }
    }

    pub(crate) fn argument(&self) -> RecurrentSegments<'_> {
        RecurrentSegments {
            row_starts: (&self.row_starts).into(),
            read: (&self.read).into(),
            write: (&self.write).into(),
            count: self.count,
        }
    }
}

/// The blocks of an arena. Their memory begins as random numbers, and block 0 as NaN.
pub(crate) struct Blocks {
    floats: usize,
    count: usize,
    pub(crate) before: Vec<f32>,
    device: DeviceBuffer,
}

impl Blocks {
    /// Blocks with a layer's state of so many floats.
    pub(crate) fn new(gpu: &Arc<Gpu>, state_floats: usize, count: usize, seed: u64) -> Blocks {
        let floats = state_floats + 2 * AROUND / 4;
        let mut before = normal(seed, count * floats);
        before[..floats].fill(f32::NAN);
        let device = upload(gpu, &before);
        Blocks {
            floats,
            count,
            before,
            device,
        }
    }

    pub(crate) fn states(&self) -> RecurrentStates {
        RecurrentStates {
            arena: self.device.address(),
            block_bytes: self.floats * 4,
            offset: AROUND,
        }
    }

    /// The floats of a block's state among those of all blocks.
    pub(crate) fn state<'a>(&self, all: &'a [f32], block: u32) -> &'a [f32] {
        &all[block as usize * self.floats..][AROUND / 4..self.floats - AROUND / 4]
    }

    /// The state that a segment reads, before it ran.
    pub(crate) fn read_by(&self, (_, read, _): Segment) -> Vec<f32> {
        let state = self.state(&self.before, read);
        match read {
            0 => vec![0.0; state.len()],
            _ => state.to_vec(),
        }
    }

    pub(crate) fn read(&self) -> Vec<f32> {
        read_f32(&self.device, self.before.len())
    }

    /// Demands that blocks that no segment writes are as they were.
    pub(crate) fn assert_others_kept(&self, after: &[f32], segments: &[Segment], what: &str) {
        let is_written = |block: usize| segments.iter().any(|s| s.2 as usize == block);
        for block in (1..self.count).filter(|&block| !is_written(block)) {
            let floats = block * self.floats..(block + 1) * self.floats;
            let same = same_bits(&after[floats.clone()], &self.before[floats]);
            assert!(same, "{what}: block {block}");
        }
    }
}

/// The norm that ends a layer, with every output. `norm` writes an output to memory.
pub(crate) fn check_norm_outputs(
    gpu: &Arc<Gpu>,
    [rows, width]: [usize; 2],
    want: &[f64],
    what: &str,
    norm: impl Fn(RecurrentOutput, &DeviceBuffer),
) {
    let run = |output: RecurrentOutput, bytes: usize| {
        let out = poisoned(gpu, bytes);
        norm(output, &out);
        out
    };
    let got = read_f32(&run(RecurrentOutput::F32, rows * width * 4), rows * width);
    assert_close(&got, want, 1e-6, &format!("{what}: the norm"));
    for layout in [Layout::RowMajor, Layout::FragmentMajor] {
        let out = run(
            RecurrentOutput::F16(layout),
            layout.elements(rows, width) * 2,
        );
        let got = read_rows(layout, &out, rows, width);
        assert_close(&got, want, HALF, &format!("{what}: the norm, {layout:?}"));
    }
}

/// 70 rows of a layer as one segment and in parts, with the state in other blocks or the same between them: the bits are the same. `run`
/// gives the results, rows of `width`, of a segment from a row on.
pub(crate) fn check_division(
    blocks: &Blocks,
    width: usize,
    what: &str,
    run: impl Fn(usize, Segment) -> DeviceBuffer,
) {
    let whole = run(0, (70, 1, 2));
    let mut divided = Vec::new();
    let mut first = 0;
    for segment in [(1, 1, 3), (2, 3, 3), (5, 3, 4), (9, 4, 4), (53, 4, 3)] {
        let results = run(first, segment);
        divided.extend(read_f32(&results, segment.0 * width));
        first += segment.0;
    }
    let whole = read_f32(&whole, 70 * width);
    assert!(same_bits(&divided, &whole), "{what}: results");
    let after = blocks.read();
    let same = same_bits(blocks.state(&after, 3), blocks.state(&after, 2));
    assert!(same, "{what}: the state");
}
