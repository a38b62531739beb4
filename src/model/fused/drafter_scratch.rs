//! Working memory of the drafter in fused passes. The hidden row of a sequence's last position belongs to the sequence, which may be forked,
//! cut or saved: a pass gets it from the host, and gives the host those of its own rows through page-locked memory. The passes that a device
//! runs one after the other, steps ahead and guesses after guesses, hand it on in device memory.

use std::sync::Arc;

use super::sizes::Sizes;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{Bytes, Tag, zeros};
use crate::cuda::{DeviceBuffer, DeviceSlice, Gpu, HiddenCopies, Pinned, StagedBuffer};

/// Positions whose hidden rows the host can read while the device runs ahead.
const COPIES: usize = 2;
/// Tokens that are guessed one after the other before the host reads them.
const GUESSES: usize = 16;

/// Working memory of the drafter.
pub(super) struct DrafterScratch {
    /// f32 `[batch + rows, hidden]`: the hidden rows of the positions before those of a pass, one of each sequence; then, unless they take
    /// the place of these, those of the pass.
    pub(super) hidden: DeviceBuffer,
    /// i32 `[rows]`: the hidden row before each row of a pass.
    sources: StagedBuffer,
    /// f32 `[COPIES, rows, hidden]`.
    copies: Pinned,
    /// i32 `[GUESSES, rows]`: guessed tokens, by position.
    pub(super) guesses: Pinned,
    /// Notes of values beyond f16, which nobody reads: they make bad guesses, and are no fault of a sequence.
    pub(super) faults: DeviceBuffer,
    batch: usize,
    width: usize,
}

impl DrafterScratch {
    /// Bytes of hidden rows, sources and faults on the device, and of copies and guesses in page-locked memory.
    fn sizes(sizes: &Sizes, rows: usize, batch: usize) -> ([usize; 3], [usize; 2]) {
        let (row, most) = (sizes.hidden * 4, rows.max(batch).max(1));
        (
            [(batch + most) * row, most * 4, most * 4],
            [COPIES * batch * row, GUESSES * batch * 4],
        )
    }

    /// Bytes for passes of `rows` rows, and for steps of `batch` rows.
    pub(super) fn bytes_of(sizes: &Sizes, rows: usize, batch: usize) -> Bytes {
        let (device, host) = Self::sizes(sizes, rows, batch);
        Bytes {
            host: host.iter().sum::<usize>() as u64,
            device: device.iter().sum::<usize>() as u64,
        }
    }

    /// Memory for passes of `rows` rows, and for steps of `batch` rows.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        rows: usize,
        batch: usize,
    ) -> Result<DrafterScratch> {
        let ([hidden, sources, faults], [copies, guesses]) = Self::sizes(sizes, rows, batch);
        Ok(DrafterScratch {
            hidden: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, hidden)?,
            sources: StagedBuffer::uninit(gpu, Tag::DeviceScratch, sources)?,
            copies: Pinned::new(gpu, Tag::Scratch, copies)?,
            guesses: Pinned::new(gpu, Tag::Scratch, guesses)?,
            faults: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, faults)?,
            batch,
            width: sizes.hidden,
        })
    }

    /// Writes the hidden rows of the positions before those of a pass, zeros for those that are not known.
    pub(super) fn write_before(&mut self, rows: &[Option<&[f32]>]) -> Result<()> {
        if rows.len() > self.batch {
            bail!(
                Internal,
                "{} hidden rows before a pass of {} sequences",
                rows.len(),
                self.batch
            );
        }
        let mut all = zeros(rows.len() * self.width)?;
        for (to, row) in all.chunks_exact_mut(self.width).zip(rows) {
            if let Some(row) = row {
                to.copy_from_slice(row);
            }
        }
        self.hidden.write(0, &all)
    }

    /// The number of the hidden row that is of row `row` of a pass, if they do not take the place of those before.
    pub(super) fn of_row(&self, row: usize) -> usize {
        self.batch + row
    }

    /// Enqueues a write of the number of the hidden row before each row of a pass.
    pub(super) fn write_sources(&mut self, sources: impl Iterator<Item = usize>) -> Result<()> {
        let sources: Vec<i32> = sources.map(|source| source as i32).collect();
        self.sources.write(&sources)
    }

    /// The number of the hidden row before each row of a pass, i32.
    pub(super) fn sources(&self) -> Result<DeviceSlice<'_>> {
        self.sources.from(0)
    }

    /// Hidden rows from number `first` on.
    pub(super) fn from(&self, first: usize) -> Result<DeviceSlice<'_>> {
        DeviceSlice::from(&self.hidden).part(first * self.width * 4..self.hidden.bytes())
    }

    /// The copies of hidden rows for the host, of rows at these positions (i32).
    pub(super) fn copies<'a>(&'a self, positions: &'a DeviceBuffer) -> HiddenCopies<'a> {
        HiddenCopies {
            rows: &self.copies,
            steps: COPIES,
            positions,
        }
    }

    /// The hidden row of row `row` of a pass of `rows` rows that has run, at `position`.
    pub(super) fn read(&self, row: usize, rows: usize, position: usize) -> Result<Vec<f32>> {
        let mut hidden = zeros(self.width)?;
        let at = (position % COPIES * rows + row) * self.width;
        self.copies.read_f32(at, &mut hidden)?;
        Ok(hidden)
    }

    /// The most tokens that are guessed one after the other for `rows` sequences before the host reads them.
    pub(super) fn guesses(&self, rows: usize) -> usize {
        self.guesses.bytes() / 4 / rows.max(1)
    }
}
