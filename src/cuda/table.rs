//! Embedding tables: a weight on the device, or rows in page-locked host memory, which the device reads over the bus. A token takes one
//! row, so an embedding need not fill device memory.

use super::driver::{DeviceBuffer, Gpu, Pinned};
use super::elementwise::{self, TableArgument};
use super::linear::Matrix;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::tensor::WeightType;

/// An immutable table `[rows, width]` in page-locked host memory: plain values, or int8 codes followed by the f32 scale of each row.
#[derive(Debug)]
pub struct HostTable {
    values: Pinned,
    storage: WeightType,
    rows: usize,
    width: usize,
}

impl HostTable {
    /// Bytes of `rows` rows of `width` values.
    pub fn bytes_of(rows: usize, width: usize, storage: WeightType) -> Result<usize> {
        match (storage, storage.element_bytes()) {
            (_, Some(element)) => product("a table", &[rows, width, element]),
            (WeightType::Int8, None) => product("a table", &[rows, width + 4]),
            _ => bail!(Internal, "a table of {storage:?} values in host memory"),
        }
    }

    /// `rows` rows of `width` values; `fill` writes the bytes of all of them.
    pub fn new(
        gpu: &Gpu,
        rows: usize,
        width: usize,
        storage: WeightType,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<HostTable> {
        let bytes = Self::bytes_of(rows, width, storage)?;
        let mut values = Pinned::new(gpu, Tag::Weights, bytes)?;
        fill(values.bytes_mut())?;
        Ok(HostTable {
            values,
            storage,
            rows,
            width,
        })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }
}

/// A table in either memory.
#[derive(Clone, Copy)]
pub enum Table<'a> {
    /// On the device.
    Device(&'a Matrix),
    /// In host memory.
    Host(&'a HostTable),
}

impl Table<'_> {
    /// The argument of a kernel that multiplies the values by `scale`.
    pub(super) fn argument(self, scale: f32) -> Result<TableArgument> {
        match self {
            Table::Device(w) => {
                let values = (w.address(), w.scales_address());
                TableArgument::new(w.storage(), values, w.global(), scale, w.cols())
            }
            Table::Host(t) => {
                let values = t.values.address();
                let values = (values, values + (t.rows * t.width) as u64);
                TableArgument::new(t.storage, values, 1.0, scale, t.width)
            }
        }
    }
}

/// Looks up `rows` tokens (i32, each less than the table's rows), multiplies their rows by `scale`, and writes them to f32 `out` `[rows,
/// width]`.
pub fn embed(
    gpu: &Gpu,
    table: Table<'_>,
    tokens: &DeviceBuffer,
    rows: usize,
    scale: f32,
    out: &DeviceBuffer,
) -> Result<()> {
    elementwise::embed(gpu, table.argument(scale)?, tokens, rows, out)
}

/// Copies the exact values of one row of a weight to `out` on the host; `out` has the length of a row.
pub fn table_row(table: &Matrix, row: usize, out: &mut [f32]) -> Result<()> {
    if row >= table.rows() || out.len() != table.cols() {
        bail!(
            InvalidArgument,
            "{} floats for row {row} of a matrix of [{}, {}]",
            out.len(),
            table.rows(),
            table.cols()
        );
    }
    let gpu = table.gpu();
    let token = DeviceBuffer::from_slice(
        gpu,
        Tag::DeviceScratch,
        &[super::driver::int("the row", row)?],
    )?;
    let values = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, out.len() * 4)?;
    embed(gpu, Table::Device(table), &token, 1, 1.0, &values)?;
    values.read(0, out)
}
