//! Tensors where they are: calls on tensors of the device, copies, memory of the host program, and managed memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use cudarc::driver::result;

use NVFP4::base::memory::{self, Tag};
use NVFP4::base::{ErrorKind, Result};
use NVFP4::cuda::{self, Gpu, ManagedBuffer};
use NVFP4::format::nvfp4::{BLOCK, QuantizeOptions};
use NVFP4::format::random;
use NVFP4::ops::tensors::{self, Nvfp4Tensor, ScaleLayout};
use NVFP4::ops::transfer::{self, ManagedPolicy};
use NVFP4::ops::{Device, Workspace};
use NVFP4::tensor::{DLManagedTensor, DType, Place, Release, Shape, Tensor};

use super::{Foreign, POISON, TYPES, assert_same, bytes, bytes_tensor, values};
use crate::common::expect_kind;
use crate::support::gpu;

/// Calls that work on host tensors work on tensors of the device, give tensors there, and the same bytes.
#[test]
fn operations_run_where_the_tensors_are() {
    let Some(gpu) = gpu() else { return };
    let cpu = Device::cpu(Some(2)).unwrap();
    let before = memory::usage(Tag::DeviceTensor).current;
    let (rows, cols) = (37, 96);
    for dtype in TYPES {
        let host =
            Tensor::from_f32(&values(30, 2 * rows * cols, dtype), &[2, rows, cols], dtype).unwrap();
        let x = transfer::copy(&host, Some(0)).unwrap();
        assert_eq!(x.place(), Place::Cuda(0));
        let there = tensors::device_of(&x, || unreachable!()).unwrap();
        let options = QuantizeOptions::default();
        for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let want = tensors::quantize(&cpu, &host, &options, layout).unwrap();
            let got = tensors::quantize(&there, &x, &options, layout).unwrap();
            assert_eq!(got.global, want.global);
            for (got, want) in [(&got.codes, &want.codes), (&got.scales, &want.scales)] {
                assert_eq!(got.place(), Place::Cuda(0));
                assert_eq!(got.dtype(), want.dtype());
                assert_eq!(got.shape().sizes(), want.shape().sizes());
                assert_same(&bytes(got), &bytes(want), "through the door");
            }
            let want = tensors::dequantize(&cpu, &want, dtype).unwrap();
            let back = tensors::dequantize(&there, &got, dtype).unwrap();
            assert_eq!(back.place(), Place::Cuda(0));
            assert_eq!(back.shape().sizes(), [2, rows, cols]);
            assert_same(&bytes(&back), &bytes(&want), "through the door and back");
            if layout == ScaleLayout::Linear {
                let swizzled = tensors::swizzle_scales(&got.scales).unwrap();
                let linear = tensors::unswizzle_scales(&swizzled, 2 * rows, cols / BLOCK).unwrap();
                assert_eq!(linear.place(), Place::Cuda(0));
                assert_same(&bytes(&linear), &bytes(&got.scales), "scales");
            }
            refused_on_the_processor(&cpu, &x, &got);
        }
        // A type that no kernel takes is refused, and not computed elsewhere.
        let f64s = Tensor::zeros(&[1, 16], DType::F64).unwrap();
        let f64s = transfer::copy(&f64s, Some(0)).unwrap();
        let e = tensors::quantize(&there, &f64s, &options, ScaleLayout::Linear).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        let e = tensors::quantize(&there, &host, &options, ScaleLayout::Linear).unwrap_err();
        assert!(e.message().contains("memory of the host"), "{e}");
    }
    gpu.synchronize().unwrap();
    assert_eq!(memory::usage(Tag::DeviceTensor).current, before);
}

/// Products of tensors of the device, on a stream of the program's own, give the bytes of products of host tensors there, also for
/// operands that begin at an odd address or have gaps.
#[test]
fn products_run_where_the_tensors_are() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let mut ws = Workspace::new();
    let options = QuantizeOptions::default();
    gpu.synchronize().unwrap();
    // The call before made the device's context current on this thread, which the stream belongs to.
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    for (m, n, k) in [(1, 16, 32), (19, 40, 96), (133, 80, 256)] {
        let cpu = Device::cpu(Some(2)).unwrap();
        let quantized = |rows, seed, layout| {
            let x = Tensor::from_f32(&values(seed, rows * k, DType::F16), &[rows, k], DType::F16);
            tensors::quantize(&cpu, &x.unwrap(), &options, layout).unwrap()
        };
        let a = quantized(m, 80, ScaleLayout::Swizzled);
        let b = quantized(n, 81, ScaleLayout::Linear);
        let moved = |q: &Nvfp4Tensor, gap: usize| {
            let bytes = bytes(&q.codes);
            let (rows, row) = (bytes.len() / (k / 2), k / 2 + gap);
            let mut spread = vec![POISON; gap + rows * row];
            for (r, bytes) in bytes.chunks_exact(k / 2).enumerate() {
                spread[gap + r * row..][..k / 2].copy_from_slice(bytes);
            }
            let codes = bytes_tensor(&spread, &[spread.len()], DType::U8);
            let shape = Shape::strided(&[rows, k / 2], &[row, 1]).unwrap();
            Nvfp4Tensor {
                codes: cuda::upload(&gpu, &codes)
                    .unwrap()
                    .view(shape, gap)
                    .unwrap(),
                scales: cuda::upload(&gpu, &q.scales).unwrap(),
                ..q.clone()
            }
        };
        for dtype in TYPES {
            let want = tensors::scaled_mm(&device, &a, &b, dtype, &mut ws).unwrap();
            assert_eq!(want.place(), Place::Host);
            for gap in [0, 3] {
                let (a, b) = (moved(&a, gap), moved(&b, gap));
                // SAFETY: the stream lives longer.
                let order = unsafe { cuda::HostStream::new(0, stream.cast()) };
                let got = tensors::scaled_mm(&device, &a, &b, dtype, &mut ws).unwrap();
                assert_eq!(got.place(), Place::Cuda(0));
                assert_same(&bytes(&got), &bytes(&want), "a product");
                drop(order);
            }
        }
        let there = moved(&a, 0);
        let e = tensors::scaled_mm(&device, &there, &b, DType::F32, &mut ws).unwrap_err();
        assert!(e.message().contains("memory of the host"), "{e}");
    }
    gpu.synchronize().unwrap();
    // SAFETY: nothing uses it any more.
    unsafe { result::stream::destroy(stream) }.unwrap();
}

/// Functions of host memory refuse a tensor of the device, and say where it is.
fn refused_on_the_processor(cpu: &Device, x: &Tensor, q: &Nvfp4Tensor) {
    let mut ws = Workspace::new();
    let options = QuantizeOptions::default();
    let product = tensors::scaled_mm(cpu, q, q, DType::F32, &mut ws);
    let refused: [(ErrorKind, Result<()>); 7] = [
        (
            ErrorKind::Unsupported,
            tensors::quantize(cpu, x, &options, ScaleLayout::Linear).map(drop),
        ),
        (
            ErrorKind::Unsupported,
            tensors::dequantize(cpu, q, DType::F32).map(drop),
        ),
        (
            ErrorKind::Unsupported,
            tensors::quantize_nf4(x, 64).map(drop),
        ),
        (ErrorKind::Unsupported, tensors::weight(cpu, q).map(drop)),
        (
            ErrorKind::Unsupported,
            tensors::dense_weight(cpu, x).map(drop),
        ),
        // The operands are out of place, or the result, which would be in host memory.
        (ErrorKind::InvalidArgument, product.map(drop)),
        (ErrorKind::Unsupported, x.to_f32().map(drop)),
    ];
    for (i, (kind, result)) in refused.into_iter().enumerate() {
        let e = result.unwrap_err();
        assert_eq!(e.kind(), kind, "{i}: {e}");
        assert!(e.message().contains("the memory of cuda:0"), "{i}: {e}");
    }
}

#[test]
fn elements_of_any_size_and_stride_are_copied() {
    let Some(gpu) = gpu() else { return };
    for &dtype in DType::ALL {
        let host = Tensor::build(&[7, 6, 10], dtype, |out| {
            for (i, b) in out.iter_mut().enumerate() {
                *b = random::bits(70, i as u64) as u8;
            }
            Ok(())
        })
        .unwrap();
        let there = transfer::copy(&host, Some(0)).unwrap();
        assert_same(&bytes(&there), &bytes(&host), "there and back");
        for (sizes, strides, offset) in [
            (vec![10, 6, 7], vec![1, 10, 60], 0),
            (vec![3, 4], vec![60, 2], 5),
            (vec![5, 7], vec![0, 60], 9),
            (
                vec![2, 1, 3, 1, 1, 2, 1, 2],
                vec![60, 9, 10, 1, 1, 3, 0, 1],
                1,
            ),
            (vec![0, 3], vec![1, 1], 0),
        ] {
            let shape = Shape::strided(&sizes, &strides).unwrap();
            let want = host.view(shape.clone(), offset).unwrap();
            let view = there.view(shape, offset).unwrap();
            assert_same(&bytes(&view), &bytes(&want), "a view");
            let copy = transfer::copy(&view, Some(0)).unwrap();
            assert!(copy.shape().is_contiguous() || want.bytes() == 0);
            assert_same(&bytes(&copy), &bytes(&want), "a copy there");
            let up = transfer::copy(&want, Some(0)).unwrap();
            assert_same(&bytes(&up), &bytes(&want), "a copy of a host's view");
        }
        let zeros = transfer::zeros(&[3, 5], dtype, Some(0)).unwrap();
        assert!(bytes(&zeros).iter().all(|&b| b == 0));
        let down = transfer::copy(&there, None).unwrap();
        assert_eq!(down.place(), Place::Host);
        assert_same(&bytes(&down), &bytes(&host), "to the host");
    }
    drop(gpu);
}

#[test]
fn memory_of_the_host_program_is_used_and_given_back() {
    let Some(gpu) = gpu() else { return };
    gpu.synchronize().unwrap();
    let released = Arc::new(AtomicU32::new(0));
    let release = || -> Option<Release> {
        let count = released.clone();
        Some(Box::new(move || {
            count.fetch_add(1, Relaxed);
        }))
    };
    let foreign = Foreign::new(4096);
    foreign.fill(0x3f80_0000);
    let shape = Shape::contiguous(&[16, 64]).unwrap();
    let lend = |ordinal, address, release| {
        // SAFETY: the memory outlives the tensor; what is not the device's is refused.
        unsafe { transfer::lent(ordinal, address, shape.clone(), DType::F32, release) }
    };
    let t = lend(0, foreign.address, release()).unwrap();
    assert_eq!(t.place(), Place::Cuda(0));
    let exported: Box<DLManagedTensor> = t.clone().into_dlpack().unwrap();
    let device = exported.dl_tensor.device;
    assert_eq!((device.device_type, device.device_id), (2, 0));
    assert_eq!(exported.dl_tensor.data.addr() as u64, foreign.address);
    drop(t);
    // SAFETY: just made.
    let back = unsafe { transfer::from_dlpack(Box::into_raw(exported)) }.unwrap();
    assert_eq!(back.place(), Place::Cuda(0));
    let mut values = vec![0f32; 1024];
    transfer::copy_as_f32(&back, &mut values).unwrap();
    assert!(values.iter().all(|&v| v == 1.0));
    assert_eq!(released.load(Relaxed), 0);
    drop(back);
    assert_eq!(released.load(Relaxed), 1);

    // Host memory, page-locked host memory, and no device.
    let here = vec![0f32; 1024];
    let e = lend(0, here.as_ptr().addr() as u64, release()).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidArgument, "{e}");
    let mut pinned = cuda::Pinned::new(&gpu, Tag::Scratch, 4096).unwrap();
    let e = lend(0, pinned.bytes_mut().as_ptr().addr() as u64, release()).unwrap_err();
    assert!(e.message().contains("host tensor"), "{e}");
    let e = lend(99, foreign.address, release()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::DeviceUnavailable);
    expect_kind(
        lend(0, 0, release()),
        ErrorKind::InvalidArgument,
        "the data pointer",
    );
    assert_eq!(released.load(Relaxed), 1);
}

/// Moves `source`, which is `host` or a view of it in some place, to managed memory, and checks every use of the result.
fn check_managed(
    gpu: &Arc<Gpu>,
    host: &Tensor,
    source: &Tensor,
    prefetch: Option<usize>,
    read_mostly: bool,
) {
    let t = transfer::to_managed(source, 0, prefetch, read_mostly).unwrap();
    assert_eq!(t.place(), Place::Managed(0));
    assert_eq!(t.dtype(), source.dtype());
    assert_eq!(t.shape().sizes(), source.shape().sizes());
    // SAFETY: managed memory of this size, which nothing on the device uses now.
    let direct = unsafe { std::slice::from_raw_parts(t.data(), t.bytes()) };
    assert_same(direct, &bytes(source), "read by the host");
    let again = transfer::to_managed(&t, 0, prefetch, read_mostly).unwrap();
    assert_eq!(again.data(), t.data());
    transfer::prefetch(&t, Some(0)).unwrap();
    transfer::prefetch(&t, None).unwrap();
    assert_same(&bytes(&t), &bytes(source), "copied to the host");
    assert_eq!(cuda::find(0, t.data().addr() as u64).unwrap().0, t.place());
    let exported: Box<DLManagedTensor> = t.clone().into_dlpack().unwrap();
    // SAFETY: just made.
    let back = unsafe { transfer::from_dlpack(Box::into_raw(exported)) }.unwrap();
    assert_eq!(back.place(), Place::Managed(0));
    if source.shape().sizes()[1] == 64 {
        let device = Device::Cuda(gpu.clone());
        let cpu = Device::cpu(Some(1)).unwrap();
        let options = QuantizeOptions::default();
        let got = tensors::quantize(&device, &t, &options, ScaleLayout::Linear).unwrap();
        let want = tensors::quantize(&cpu, host, &options, ScaleLayout::Linear).unwrap();
        assert_same(&bytes(&got.codes), &bytes(&want.codes), "of managed memory");
    }
}

#[test]
fn tensors_move_to_managed_memory_and_back() {
    let Some(gpu) = gpu() else { return };
    let host = Tensor::from_f32(&values(80, 8 * 64, DType::F16), &[8, 64], DType::F16).unwrap();
    if let Err(e) = transfer::check_managed(0) {
        println!("SKIPPED managed memory: {e}");
        let e = transfer::to_managed(&host, 0, None, false).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        return;
    }
    let before = memory::usage(Tag::DeviceTensor).current;
    let there = transfer::copy(&host, Some(0)).unwrap();
    let shape = Shape::strided(&[64, 8], &[1, 64]).unwrap();
    for source in [
        host.clone(),
        there.clone(),
        host.view(shape.clone(), 0).unwrap(),
        there.view(shape, 0).unwrap(),
    ] {
        for (prefetch, read_mostly) in [(None, false), (Some(0), false), (Some(0), true)] {
            check_managed(&gpu, &host, &source, prefetch, read_mostly);
        }
        expect_kind(
            transfer::prefetch(&source, Some(0)),
            ErrorKind::InvalidArgument,
            "only one in managed memory can be moved",
        );
    }
    assert_eq!(
        transfer::by_policy(&host, 0, true).unwrap().place(),
        Place::Managed(0)
    );
    transfer::set_managed_policy(ManagedPolicy::Disabled);
    let kept = transfer::by_policy(&host, 0, true).unwrap();
    transfer::set_managed_policy(ManagedPolicy::default());
    assert_eq!(kept.data(), host.data());

    // Never more than there is room for, and under the budget.
    let e = ManagedBuffer::zeroed(&gpu, Tag::DeviceTensor, 1 << 46).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OutOfMemory);
    memory::set_budget(Some(memory::total().current + 100));
    let e = ManagedBuffer::zeroed(&gpu, Tag::DeviceTensor, 101).unwrap_err();
    memory::set_budget(None);
    assert_eq!(e.kind(), ErrorKind::OverBudget);
    drop(there);
    gpu.synchronize().unwrap();
    assert_eq!(memory::usage(Tag::DeviceTensor).current, before);
}
