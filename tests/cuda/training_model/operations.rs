//! Attention of training and operands in few bits, against the CPU.

use std::time::Instant;

use NVFP4::model::Device;
use NVFP4::ops::training::array;
use NVFP4::ops::training::attention::{Documents, attention, attention_backward};
use NVFP4::ops::training::operand::{
    OperandRounding, ScaleRule, round_columns, round_int8_rows, round_rows,
};
use NVFP4::ops::{Array, Mixed};
use NVFP4::tensor::AttentionShape;
use half::bf16;

use super::{bf16_values, error, on, read};
use crate::support::gpu;

struct Attended {
    out: Vec<f32>,
    lse: Vec<f32>,
    dqkv: Vec<f32>,
}

fn attend(device: &Device, options: &AttentionShape, lengths: &[usize], again: bool) -> Attended {
    let rows: usize = lengths.iter().sum();
    let documents = Documents::new(device, lengths).unwrap();
    let qkv: Array<Mixed> = on(device, &bf16_values(1, rows * options.width()));
    let dout: Array<Mixed> = on(device, &bf16_values(2, rows * options.q_width()));
    let mut out: Array<Mixed> = on(device, &vec![9.0; rows * options.q_width()]);
    let mut dqkv: Array<Mixed> = on(device, &vec![9.0; rows * options.width()]);
    let mut lse: Array = on(device, &vec![9.0; rows * options.heads]);
    for _ in 0..if again { 2 } else { 1 } {
        attention(
            device,
            options,
            &documents,
            qkv.all(),
            out.all_mut(),
            lse.all_mut(),
        )
        .unwrap();
        let forward = (qkv.all(), out.all(), lse.all());
        attention_backward(
            device,
            options,
            &documents,
            forward,
            dout.all(),
            dqkv.all_mut(),
        )
        .unwrap();
    }
    let mut sums = read(&lse);
    if !device.is_cuda() {
        // Rows of heads here, heads of rows there.
        let by_row = sums.clone();
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = by_row[i % rows * options.heads + i / rows];
        }
    }
    Attended {
        out: read(&out),
        lse: sums,
        dqkv: read(&dqkv),
    }
}

#[track_caller]
fn assert_near(found: &[f32], exact: &[f32], bar: f64, what: &str) {
    let error = error(found, exact);
    assert!(error < bar, "{what}: {error}");
}

/// The gradients of values alone.
fn of_values(dqkv: &[f32], options: &AttentionShape) -> Vec<f32> {
    let value = options.kv_heads * options.dim;
    let rows = dqkv.chunks(options.width());
    rows.flat_map(|row| &row[row.len() - value..])
        .copied()
        .collect()
}

/// Compares attention of documents, and its gradients, on the CPU and on the GPU.
fn check_attention(cpu: &Device, gpu: &Device, options: &AttentionShape, lengths: &[usize]) {
    let exact = attend(cpu, options, lengths, false);
    let found = attend(gpu, options, lengths, false);
    let what = format!("{options:?} {lengths:?}");
    // bf16 keeps 8 bits: 2^-9 is 2e-3, and probabilities and gradients of scores are rounded too.
    assert_near(&found.out, &exact.out, 4e-3, &what);
    assert_near(&found.lse, &exact.lse, 1e-5, &what);
    let [own, right] = [&found, &exact].map(|of| of_values(&of.dqkv, options));
    assert_near(&own, &right, 6e-3, &format!("{what}: values"));
    // A document of one row, or a window of one, has no gradients of queries and keys but rounding.
    if options.window != Some(1) && lengths != [1] {
        assert_near(&found.dqkv, &exact.dqkv, 8e-3, &what);
    }
    let again = attend(gpu, options, lengths, true);
    assert!(
        again.out == found.out && again.dqkv == found.dqkv,
        "{what}: other bits"
    );
}

#[test]
fn attention_of_training_gives_what_the_cpu_gives() {
    let Some(gpu) = gpu() else { return };
    let (cpu, gpu) = (Device::cpu(None).unwrap(), Device::Cuda(gpu));
    for dim in [16, 32, 64, 80, 96, 128] {
        for (heads, kv_heads) in [(4, 2), (3, 3), (4, 1)] {
            for (window, score_cap) in [
                (None, None),
                (Some(33), None),
                (Some(1), Some(3.0)),
                (None, Some(3.0)),
            ] {
                let options = AttentionShape {
                    heads,
                    kv_heads,
                    dim,
                    scale: 0.6 / (dim as f32).sqrt(),
                    window,
                    score_cap,
                };
                for lengths in [&[5, 1, 130, 64, 77][..], &[1], &[200]] {
                    check_attention(&cpu, &gpu, &options, lengths);
                }
            }
        }
    }
}

/// Operands in NVFP4 have the bits of the CPU, and columns go where they should.
#[test]
fn operands_of_training_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let devices = [Device::cpu(Some(2)).unwrap(), Device::Cuda(gpu)];
    let (rows, width) = (37, 1040);
    let mut values = bf16_values(5, rows * width);
    values[..16].fill(0.0);
    // Eighths, whose sums f32 holds in any order.
    let eighths: Vec<f32> = values.iter().map(|v| (v * 8.0).round() / 8.0).collect();
    for rounding in [
        OperandRounding::Nearest(ScaleRule::Amax),
        OperandRounding::Nearest(ScaleRule::FourOverSix),
        OperandRounding::Stochastic(0x1234_5678_9abc_def0),
    ] {
        let [a, b] = devices.each_ref().map(|device| {
            let x: Array<Mixed> = on(device, &values);
            let mut y: Array<Mixed> = on(device, &values);
            round_rows(device, x.all(), width, rounding, y.all_mut()).unwrap();
            let x: Array<Mixed> = on(device, &eighths);
            let mut z: Array<Mixed> = on(device, &vec![9.0; 48 * width]);
            round_columns(device, x.all(), width, Some(rounding), z.all_mut()).unwrap();
            (read(&y), read(&z))
        });
        assert!(a == b, "{rounding:?}");
    }
    let [a, b] = devices.each_ref().map(|device| {
        let mut x: Array<Mixed> = on(device, &values);
        round_int8_rows(device, x.all_mut(), width).unwrap();
        let rounded = read(&x).into_iter().map(|v| bf16::from_f32(v).to_f32());
        rounded.collect::<Vec<_>>()
    });
    assert!(a == b && a != values, "int8 rows");
    let [a, b] = devices.each_ref().map(|device| {
        let mut all: Array<Mixed> = on(device, &values);
        let mut part: Array<Mixed> = on(device, &vec![9.0; rows * 48]);
        array::copy_columns(device, all.all(), width, 512, part.all_mut()).unwrap();
        let copied = read(&part);
        array::add_columns(device, all.all_mut(), width, 16, part.all()).unwrap();
        let sums = read(&all).into_iter().map(|v| bf16::from_f32(v).to_f32());
        (copied, sums.collect::<Vec<_>>())
    });
    assert!(a == b);
}

/// TFLOP/s of attention, with the operations that are not masked: `--ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn attention_of_training_speed() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let options = AttentionShape {
        heads: 32,
        kv_heads: 8,
        dim: 128,
        scale: 0.088,
        window: None,
        score_cap: None,
    };
    let lengths = [2048; 4];
    let rows = 8192;
    let documents = Documents::new(&device, &lengths).unwrap();
    let qkv: Array<Mixed> = on(&device, &bf16_values(1, rows * options.width()));
    let dout: Array<Mixed> = on(&device, &bf16_values(2, rows * options.q_width()));
    let mut out: Array<Mixed> = on(&device, &vec![0.0; rows * options.q_width()]);
    let mut dqkv: Array<Mixed> = on(&device, &vec![0.0; rows * options.width()]);
    let mut lse: Array = on(&device, &vec![0.0; rows * options.heads]);
    let operations = 4.0 * (rows * 1024 * options.heads * options.dim) as f64;
    for (name, backward, factor) in [("forward", false, 1.0), ("backward", true, 2.5)] {
        let mut times: Vec<f64> = (0..20)
            .map(|_| {
                gpu.synchronize().unwrap();
                let start = Instant::now();
                if backward {
                    let forward = (qkv.all(), out.all(), lse.all());
                    attention_backward(
                        &device,
                        &options,
                        &documents,
                        forward,
                        dout.all(),
                        dqkv.all_mut(),
                    )
                    .unwrap();
                } else {
                    attention(
                        &device,
                        &options,
                        &documents,
                        qkv.all(),
                        out.all_mut(),
                        lse.all_mut(),
                    )
                    .unwrap();
                }
                gpu.synchronize().unwrap();
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: {:.3} ms, {:.0} TFLOP/s",
            times[10] * 1e3,
            factor * operations / times[10] / 1e12
        );
    }
}
