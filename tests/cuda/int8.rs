//! int8 rows on a GPU against f64 and the processor: products of few and of many rows with every output, rows of tables on the device and
//! in host memory, norms, and models whose tables are int8.

use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::base::threads::Pool;
use NVFP4::cuda::{self, DeviceSlice, Gpu, Input, LinearScratch, Matrix, Output};
use NVFP4::engine::Served;
use NVFP4::format::int8;
use NVFP4::format::nvfp4::Recipe;
use NVFP4::model::convert::{Container, ConvertOptions, Tables, convert};
use NVFP4::model::{self, Device};
use NVFP4::ops::linear::Linear;

use crate::common::{golden, options, some_tokens};
use crate::support::{
    EXACT, HALF, HalfRows, Product, as_f64, assert_close, gpu, load_on, logits, normal, poisoned,
    product, read_f16, read_f32, sums, upload, with_bias,
};

/// Codes, scales, and the values that they hold.
struct Rows {
    codes: Vec<u8>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

fn rows(seed: u64, n: usize, k: usize) -> Rows {
    let (mut codes, mut scales) = (vec![0; n * k], vec![0.0; n]);
    int8::quantize_rows(&normal(seed, n * k), k, 0, &mut codes, &mut scales).unwrap();
    // Rows of different magnitude, and the code that quantizing never gives.
    for (i, scale) in scales.iter_mut().enumerate() {
        *scale *= [1.0, 0.01, 8.0][i % 3];
    }
    codes[k + 3] = 0x80;
    let mut values = vec![0.0; n * k];
    int8::dequantize_rows(&codes, &scales, k, &mut values).unwrap();
    Rows {
        codes,
        scales,
        values,
    }
}

fn matrix(gpu: &Arc<Gpu>, w: &Rows, n: usize, k: usize) -> Matrix {
    Matrix::int8(gpu, n, k, &mut |range, codes, scales| {
        codes.copy_from_slice(&w.codes[range.start * k..range.end * k]);
        scales.copy_from_slice(&w.scales[range]);
        Ok(())
    })
    .unwrap()
}

/// Rows of `n` elements, each followed by zeros up to the stride.
fn with_gaps(values: &[f32], n: usize, stride: usize) -> Vec<f32> {
    let mut rows = vec![0f32; values.len() / n * stride];
    for (row, values) in rows.chunks_exact_mut(stride).zip(values.chunks_exact(n)) {
        row[..n].copy_from_slice(values);
    }
    rows
}

fn without_gaps(values: &[f32], n: usize, stride: usize) -> Vec<f32> {
    let rows = values.chunks_exact(stride);
    rows.flat_map(|row| &row[..n]).copied().collect()
}

/// Every number of rows that another kernel serves, and a weight that is taken in parts.
#[test]
fn int8_products_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (case, (m, n, k)) in [
        (1, 101, 96),
        (1, 37, 1040),
        (2, 100, 96),
        (9, 100, 528),
        (16, 33, 16),
        (17, 100, 96),
        (40, 130, 336),
        (70, 333, 272),
        (256, 129, 80),
        (300, 100, 96),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = 4000 + 10 * case as u64;
        let w = rows(seed, n, k);
        let device_w = matrix(&gpu, &w, n, k);
        assert_eq!(device_w.bytes(), n * (k + 4));
        let x = HalfRows::new(&gpu, &normal(seed + 1, m * k));
        let (bias, before) = (normal(seed + 2, n), normal(seed + 3, m * n));
        let device_bias = upload(&gpu, &bias);
        let (factor, stride) = (0.5, n + 3);
        let products = product(&x.exact, &w.values, k);
        let products: Vec<f64> = products.iter().map(|p| p * f64::from(factor)).collect();
        let exact = with_bias(&products, &bias);
        let added = sums(&exact, &before);
        let whole = LinearScratch::for_product(&gpu, &device_w, m).unwrap();
        // Room for few rows of the weight at a time.
        let parts = LinearScratch::new(&gpu, m, k, 2 * k * 40).unwrap();
        for (scratch, output, bar) in [
            (&whole, Output::F32, EXACT),
            (&parts, Output::F32, EXACT),
            (&whole, Output::F16, HALF),
            (&whole, Output::Add, EXACT),
        ] {
            let adds = output == Output::Add;
            let out = match adds {
                true => upload(&gpu, &with_gaps(&before, n, stride)),
                false => poisoned(&gpu, m * stride * 4),
            };
            let input = Input::Plain(&x.device, factor);
            Product::of(&gpu, scratch, input, m, &[(&device_w, Some(&device_bias))])
                .output(output)
                .stride(stride)
                .write(&out);
            let got = match output {
                Output::F16 => read_f16(&out, m * stride),
                _ => read_f32(&out, m * stride),
            };
            let got = without_gaps(&got, n, stride);
            let what = format!("int8 [{m}, {k}] x [{n}, {k}] as {output:?}");
            let want = if adds { &added } else { &exact };
            assert_close(&got, want, bar, &what);
        }
    }
}

#[test]
fn int8_rows_are_looked_up_and_measured() {
    let Some(gpu) = gpu() else { return };
    let (n, k) = (45, 336);
    let w = rows(5000, n, k);
    let linear = Linear::int8(
        &Device::Cuda(gpu.clone()),
        n,
        k,
        &mut |range, codes, scales| {
            codes.copy_from_slice(&w.codes[range.start * k..range.end * k]);
            scales.copy_from_slice(&w.scales[range]);
            Ok(())
        },
    )
    .unwrap();
    let mut row = vec![f32::NAN; k];
    for r in [0, 1, n / 2, n - 1] {
        linear.row(r, &mut row).unwrap();
        assert_eq!(row, w.values[r * k..(r + 1) * k], "row {r}");
    }
    let device_w = matrix(&gpu, &w, n, k);
    let columns = normal(5001, k);
    let on_device = upload(&gpu, &columns);
    let out = poisoned(&gpu, n * 4);
    cuda::row_norms(
        &device_w,
        Some(DeviceSlice::from(&on_device)),
        (&out).into(),
    )
    .unwrap();
    let want: Vec<f64> = w
        .values
        .chunks_exact(k)
        .map(|row| {
            let products = row.iter().zip(&columns);
            let squares = products.map(|(&w, &c)| (f64::from(w) * f64::from(c)).powi(2));
            squares.sum::<f64>().sqrt()
        })
        .collect();
    assert_close(&read_f32(&out, n), &want, EXACT, "norms of int8 rows");
}

/// A tied table, which is the head; and one that has its own, whose embedding is in page-locked memory.
#[test]
fn models_with_int8_tables_agree_with_the_processor() {
    let Some(gpu) = gpu() else { return };
    let place = std::env::temp_dir().join(format!("nvfp4-int8-{}", std::process::id()));
    for case in ["qwen3_tied", "mistral_plain", "gemma3_wide"] {
        let _ = std::fs::remove_dir_all(&place);
        let convert_options = ConvertOptions {
            tables: Tables::Int8,
            ..ConvertOptions::new(Container::ModelOpt, Recipe::Amax)
        };
        let source = model::open(&golden(case)).unwrap();
        let pool = Pool::new(2).unwrap();
        convert(&*source, &place, &convert_options, &pool, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let cpu = Served::load(&place, &options()).unwrap();
        let model = load_on(Device::Cuda(gpu.clone()), &place);
        assert_eq!(model.info().formats["int8"].tensors, 1, "{case}");
        assert_eq!(model.fingerprint(), cpu.fingerprint(), "{case}");
        let tokens = some_tokens(&cpu, 60);
        let (want, _) = logits(&cpu, &tokens);
        let want = as_f64(&want);
        let (all, each) = logits(&model, &tokens);
        assert_close(&all, &want, 5e-3, &format!("{case}, one call"));
        assert_close(&each, &want, 5e-3, &format!("{case}, token by token"));
    }
    let _ = std::fs::remove_dir_all(&place);
}
