//! GEMMs of many rows, by cuBLASLt on an f16 copy of part of the weight; and the scratch memory of GEMMs.

use std::sync::Arc;

use super::hardware::Hardware;
use super::int8;
use super::limits::{HALF_SM_ROWS, SKINNY_ROWS, TILED};
use super::matrix::{CHUNK_ROWS, Matrix, by_words, chunk_offset};
use super::output::Output;
use super::tiles::TileKernel;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::cuda::blas::{Blas, Element, Store};
use crate::cuda::convert;
use crate::cuda::driver::{DeviceBuffer, Gpu, int};
use crate::cuda::kernel::kernels;
use crate::tensor::WeightType;

kernels! {
    /// Decodes rows of chunks to f16.
    enum Dequantize(DequantizeArguments) {
        Dequantize { Packed = "dequantize_packed" }
    }
}

/// Bytes of the workspace of cuBLASLt.
pub(in crate::cuda) const WORKSPACE: usize = 32 << 20;
/// Bytes of the f16 copy of a weight's rows, for a single product.
const COPY: usize = 64 << 20;

/// Scratch memory for products of more rows than the skinny GEMM takes.
#[derive(Debug)]
pub struct LinearScratch {
    /// An f16 copy of one weight or of some of its rows, for cuBLASLt; or the scratch of a tiled kernel, see [`TileKernel::scratch`]. No
    /// product needs both.
    room: DeviceBuffer,
    /// The workspace of cuBLASLt.
    workspace: DeviceBuffer,
    deterministic: bool,
}

#[repr(C)]
struct DequantizeArguments {
    chunks: u64,
    out: u64,
    rows: i32,
    k: i32,
}

/// Properties of a device on which the size of scratch memory depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchDevice {
    /// Compute capability, major and minor.
    pub arch: (i32, i32),
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Whether cuBLASLt was found.
    pub cublas: bool,
    /// Whether plans are deterministic: see [`Hardware::deterministic`](super::Hardware::deterministic).
    pub deterministic: bool,
}

impl ScratchDevice {
    /// The properties of an open device.
    pub fn of(gpu: &Gpu) -> ScratchDevice {
        ScratchDevice {
            arch: gpu.arch(),
            multiprocessors: gpu.multiprocessors(),
            cublas: gpu.blas().is_some(),
            deterministic: false,
        }
    }

    /// This device, with deterministic plans.
    pub fn deterministic(self) -> ScratchDevice {
        ScratchDevice {
            cublas: false,
            deterministic: true,
            ..self
        }
    }
}

impl LinearScratch {
    /// Bytes of the room of kernels, and of the workspace of cuBLASLt.
    fn sizes(device: ScratchDevice, rows: usize, k: usize, bytes: usize) -> [usize; 2] {
        if device.deterministic {
            let kernel = TileKernel::deterministic(device.arch);
            return [kernel.undivided_scratch(rows, k), 0];
        }
        let workspace = if bytes > 0 && device.cublas {
            WORKSPACE
        } else {
            0
        };
        let tiled = match device.cublas {
            true => rows.min(TILED),
            false => rows,
        };
        let kernels = TileKernel::all(device.arch)
            .iter()
            .filter(|_| rows > HALF_SM_ROWS)
            .map(|kernel| kernel.scratch(tiled, k, device.multiprocessors));
        [kernels.max().unwrap_or(0).max(bytes), workspace]
    }

    /// Bytes of the scratch that [`LinearScratch::new`] allocates.
    pub fn bytes_of(device: ScratchDevice, rows: usize, k: usize, bytes: usize) -> usize {
        Self::sizes(device, rows, k, bytes).iter().sum()
    }

    /// Allocates scratch for products of up to `rows` rows of up to `k` elements, with `bytes` for the f16 copy, which cuBLASLt needs.
    pub fn new(gpu: &Arc<Gpu>, rows: usize, k: usize, bytes: usize) -> Result<LinearScratch> {
        Self::new_on(gpu, ScratchDevice::of(gpu), rows, k, bytes)
    }

    /// As [`LinearScratch::new`], with what its size depends on. Products that are planned anew are as deterministic as `device`.
    pub fn new_on(
        gpu: &Arc<Gpu>,
        device: ScratchDevice,
        rows: usize,
        k: usize,
        bytes: usize,
    ) -> Result<LinearScratch> {
        let [room, workspace] = Self::sizes(device, rows, k, bytes);
        Ok(LinearScratch {
            room: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, room)?,
            workspace: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, workspace)?,
            deterministic: device.deterministic,
        })
    }

    /// The properties by which kernels for products in this scratch are chosen.
    pub(super) fn hardware(&self, gpu: &Gpu) -> Result<Hardware> {
        let hardware = Hardware::of(gpu)?;
        Ok(match self.deterministic {
            true => hardware.deterministic(),
            false => Hardware {
                cublas: hardware.cublas && self.workspace.bytes() > 0,
                ..hardware
            },
        })
    }

    /// The scratch of tiled kernels.
    pub(super) fn room(&self) -> &DeviceBuffer {
        &self.room
    }

    /// Whether it has the workspace of cuBLASLt.
    pub(super) fn has_workspace(&self) -> bool {
        self.workspace.bytes() > 0
    }

    /// Allocates scratch for a product of `m` rows with `w` alone.
    pub fn for_product(gpu: &Arc<Gpu>, w: &Matrix, m: usize) -> Result<LinearScratch> {
        let row = 2 * w.cols;
        let bytes = match w.storage {
            WeightType::F32 => 0,
            // The copy holds activations in the weight's type.
            WeightType::F16 | WeightType::BF16 if m > SKINNY_ROWS => {
                product("activations", &[m, row])?
            }
            WeightType::F16 | WeightType::BF16 => 0,
            WeightType::Nvfp4 if m <= TILED || gpu.blas().is_none() => 0,
            WeightType::Nvfp4 => row * w.rows.min(COPY / row).max(1).next_multiple_of(CHUNK_ROWS),
            WeightType::Int8 if m > int8::PRODUCT_ROWS => row * w.rows.min(COPY / row).max(1),
            WeightType::Int8 => 0,
        };
        Self::new(gpu, m, w.cols, bytes)
    }

    /// `m` rows of f16 `x`, divided by `factor`, times `w`, to the address `out`, by cuBLASLt; [`GemmPlan`](super::GemmPlan) checks sizes.
    pub(super) fn product(
        &self,
        gpu: &Arc<Gpu>,
        w: &Matrix,
        x: &DeviceBuffer,
        factor: f32,
        m: usize,
        output: Output,
        out: u64,
        stride: usize,
    ) -> Result<()> {
        let Some(blas) = gpu.blas().filter(|_| self.has_workspace()) else {
            bail!(
                Unsupported,
                "{m} rows of a weight with K = {} need cuBLASLt and its workspace",
                w.cols
            );
        };
        if matches!(w.storage, WeightType::BF16 | WeightType::F16) {
            // cuBLASLt takes operands of one type, and stores products of bf16 operands as bf16 or f32.
            let (kind, x) = match w.storage {
                WeightType::F16 => (Element::F16, x.address()),
                _ => {
                    convert::f16_to_bf16(gpu, x, m * w.cols, &self.room)?;
                    (Element::Bf16, self.room.address())
                }
            };
            let (rows, k, workspace) = (w.rows, w.cols, &self.workspace);
            if w.storage == WeightType::BF16 && output == Output::F16 {
                let store = Store::Bf16;
                blas.product(
                    gpu,
                    kind,
                    w.address(),
                    rows,
                    k,
                    factor,
                    x,
                    m,
                    store,
                    out,
                    stride,
                    workspace,
                )?;
                return convert::bf16_to_f16_at(gpu, out, m, rows, stride);
            }
            return blas.product(
                gpu,
                kind,
                w.address(),
                rows,
                k,
                factor,
                x,
                m,
                store(output)?,
                out,
                stride,
                workspace,
            );
        }
        if w.storage == WeightType::Int8 {
            return self.int8(gpu, &blas, w, x, factor, m, out, stride);
        }
        let step = self.room.bytes() / (2 * w.cols) / CHUNK_ROWS * CHUNK_ROWS;
        if step == 0 {
            bail!(
                Internal,
                "scratch of {} bytes for rows of {}",
                self.room.bytes(),
                2 * w.cols
            );
        }
        for first in (0..w.rows).step_by(step) {
            let rows = step.min(w.rows - first);
            let arguments = DequantizeArguments {
                chunks: w.address() + chunk_offset(first, w.cols),
                out: self.room.address(),
                rows: int("rows", rows)?,
                k: int("K", w.cols)?,
            };
            let planned = by_words(rows, w.cols).of(Dequantize::Packed);
            // SAFETY: the copy has room for `rows` rows.
            unsafe { planned.run(gpu, &arguments)? };
            let at = out + (first * output.bytes()) as u64;
            blas.product(
                gpu,
                Element::F16,
                self.room.address(),
                rows,
                w.cols,
                w.global * factor,
                x.address(),
                m,
                store(output)?,
                at,
                stride,
                &self.workspace,
            )?;
        }
        Ok(())
    }
}

impl LinearScratch {
    /// A product with int8 rows by cuBLASLt, as f32: first with the codes, which f16 holds exactly, then times the row scales.
    fn int8(
        &self,
        gpu: &Gpu,
        blas: &Blas,
        w: &Matrix,
        x: &DeviceBuffer,
        factor: f32,
        m: usize,
        out: u64,
        stride: usize,
    ) -> Result<()> {
        let step = self.room.bytes() / (2 * w.cols);
        if step == 0 {
            bail!(
                Internal,
                "scratch of {} bytes for rows of {}",
                self.room.bytes(),
                2 * w.cols
            );
        }
        for first in (0..w.rows).step_by(step) {
            let rows = step.min(w.rows - first);
            let at = out + (first * Output::F32.bytes()) as u64;
            // SAFETY: the weight has the rows, the room holds them as f16, and `out` has their products.
            unsafe { int8::to_halves(gpu, w, first, rows, self.room.address())? };
            blas.product(
                gpu,
                Element::F16,
                self.room.address(),
                rows,
                w.cols,
                factor,
                x.address(),
                m,
                Store::F32,
                at,
                stride,
                &self.workspace,
            )?;
            // SAFETY: as above.
            unsafe { int8::scale_products(gpu, w, first, rows, at, m, stride)? };
        }
        Ok(())
    }
}

/// How cuBLASLt stores a product with this output.
fn store(output: Output) -> Result<Store> {
    match output {
        Output::F32 => Ok(Store::F32),
        Output::Add => Ok(Store::Add),
        Output::F16 => Ok(Store::F16),
        Output::Glu(_) | Output::GluFragmentMajor(_) => {
            bail!(Internal, "only fused kernels apply SwiGLU")
        }
    }
}
