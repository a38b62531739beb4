//! Tensors in the memory of a GPU: number formats against the processor, bit by bit, into outputs that are poisoned first and
//! longer than needed; products and weights against those of host memory; copies, strides, DLPack, managed memory, and order
//! with the default stream.

mod formats;
mod order;
mod places;
mod products;
mod weights;

use std::sync::Arc;

use cudarc::driver::{result, sys};
use half::{bf16, f16};

use NVFP4::base::{Error, ErrorKind};
use NVFP4::cuda::{DeviceBuffer, Gpu};
use NVFP4::format::random;
use NVFP4::ops::tensors::Nvfp4Tensor;
use NVFP4::ops::transfer;
use NVFP4::tensor::{DType, Shape, Tensor};

use crate::support::upload;

/// The floating types of inputs and of dense weights.
const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// The byte that fills outputs, and the bytes behind them that must keep it.
const POISON: u8 = 0xaa;
const BEYOND: usize = 96;

fn poisoned(gpu: &Arc<Gpu>, bytes: usize) -> DeviceBuffer {
    upload(gpu, &vec![POISON; bytes + BEYOND])
}

/// The first `bytes` bytes of a buffer; the bytes behind them must be untouched.
#[track_caller]
fn written(buffer: &DeviceBuffer, bytes: usize, what: &str) -> Vec<u8> {
    let mut out = vec![0; bytes + BEYOND];
    buffer.read(0, &mut out).unwrap();
    assert!(
        out[bytes..].iter().all(|&b| b == POISON),
        "{what}: written past its end"
    );
    out.truncate(bytes);
    out
}

#[track_caller]
fn assert_same(got: &[u8], want: &[u8], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    if let Some(i) = (0..got.len()).find(|&i| got[i] != want[i]) {
        let wrong = (0..got.len()).filter(|&i| got[i] != want[i]).count();
        panic!(
            "{what}: byte {i} of {} is {:#04x}, not {:#04x}; {wrong} bytes differ",
            got.len(),
            got[i],
            want[i]
        );
    }
}

/// Values that a type holds, of many magnitudes, with ties, zeros of both signs and a few of the smallest and largest.
fn values(seed: u64, count: usize, dtype: DType) -> Vec<f32> {
    (0..count as u64)
        .map(|i| {
            let bits = random::bits(seed, i);
            let block = random::bits(seed ^ 0x5555, i / 16);
            let unit = random::uniform(seed + 1, i) * 2.0 - 1.0;
            let value = match block % 8 {
                // Quarters up to six: ties of every threshold, where the scale is a power of two.
                0 => ((bits % 49) as f32 - 24.0) * 0.25 * (2f32).powi((block >> 8) as i32 % 9 - 6),
                1 => unit * (2f32).powi((bits >> 8) as i32 % 20 - 12),
                2 if bits.is_multiple_of(4) => 0.0,
                2 if bits % 4 == 1 => -0.0,
                // Too small for a scale of its own.
                3 => unit * (2f32).powi(-12 - (block >> 8) as i32 % 12),
                4 if block & 0x100 != 0 => unit * (2f32).powi(-130 - (bits >> 8) as i32 % 20),
                5 if block & 0x100 != 0 => -0.0,
                _ => unit,
            };
            in_type(value, dtype)
        })
        .collect()
}

fn in_type(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// The error that the device has found in the calls so far, which is reported once.
#[track_caller]
fn found(gpu: &Arc<Gpu>) -> Error {
    gpu.synchronize().unwrap();
    let e = gpu.check_calls().unwrap_err();
    gpu.check_calls().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    assert!(
        e.message().contains("what that call gave is undefined"),
        "{e}"
    );
    e
}

fn bytes_tensor(bytes: &[u8], sizes: &[usize], dtype: DType) -> Tensor {
    Tensor::build(sizes, dtype, |out| {
        out.copy_from_slice(bytes);
        Ok(())
    })
    .unwrap()
}

fn bytes(t: &Tensor) -> Vec<u8> {
    let mut out = vec![0; t.bytes()];
    transfer::copy_to_host(t, &mut out).unwrap();
    out
}

/// Memory of the host program on the device: its default stream, as it would use it.
struct Foreign {
    address: u64,
    bytes: usize,
}

impl Foreign {
    fn new(bytes: usize) -> Foreign {
        // SAFETY: a plain allocation in the device's context, which a tensor made before it has made current.
        let address = unsafe { result::malloc_sync(bytes) }.unwrap();
        Foreign { address, bytes }
    }

    /// Enqueues 32-bit words on the legacy default stream.
    fn fill(&self, word: u32) {
        let stream = std::ptr::without_provenance_mut(1);
        // SAFETY: within the allocation.
        unsafe { sys::cuMemsetD32Async(self.address, word, self.bytes / 4, stream) }
            .result()
            .unwrap();
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`.
        unsafe { result::free_sync(self.address) }.unwrap();
    }
}

/// Copies of host tensors in the memory of device 0: with gaps between rows and at addresses of no alignment, if `apart`.
fn there(host: &Tensor, apart: bool) -> Tensor {
    if !apart {
        return transfer::copy(host, Some(0)).unwrap();
    }
    let (rows, cols) = host.shape().matrix();
    let (stride, offset, element) = (cols + 13, 5, host.dtype().bytes());
    let mut packed = vec![0; host.bytes()];
    host.copy_to(&mut packed).unwrap();
    // Around the values stands what would be seen: NaN, if it is a scale or a float.
    let whole = Tensor::build(&[rows * stride + offset], host.dtype(), |out| {
        out.fill(0xff);
        for row in 0..rows {
            out[(offset + row * stride) * element..][..cols * element]
                .copy_from_slice(&packed[row * cols * element..][..cols * element]);
        }
        Ok(())
    })
    .unwrap();
    let gapped = Shape::contiguous(&host.shape().with_last(stride)).unwrap();
    let shape = Shape::strided(host.shape().sizes(), gapped.strides()).unwrap();
    let whole = transfer::copy(&whole, Some(0)).unwrap();
    whole.view(shape, offset).unwrap()
}

fn parts_there(q: &Nvfp4Tensor, apart: bool) -> Nvfp4Tensor {
    Nvfp4Tensor {
        codes: there(&q.codes, apart),
        scales: there(&q.scales, apart),
        ..q.clone()
    }
}

/// A copy of both parts in managed memory; nothing, visibly, where there is none.
fn parts_managed(q: &Nvfp4Tensor) -> Option<Nvfp4Tensor> {
    if let Err(e) = transfer::check_managed(0) {
        println!("SKIPPED managed memory: {e}");
        return None;
    }
    let managed = |t: &Tensor| transfer::to_managed(t, 0, Some(0), true).unwrap();
    Some(Nvfp4Tensor {
        codes: managed(&q.codes),
        scales: managed(&q.scales),
        ..q.clone()
    })
}
