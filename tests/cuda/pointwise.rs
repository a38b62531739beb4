//! Norms, activations and other operations on elements and rows, against f64.

use NVFP4::base::ErrorKind;
use NVFP4::cuda::{
    self, Activation, BlockInputs, DeviceBuffer, DeviceSlice, GatedUnit, Glu, Gpu, Hardware,
    HostTable, Layout, Matrix, NextNorm, NextRows, NormedAddend, ProjectedInputs, StreamRows,
};
use NVFP4::tensor::WeightType;
use half::{bf16, f16};
use std::sync::Arc;

use crate::common::expect_kind;
use crate::support::{
    DENSE, Dense, EPS, EXACT, F16, Weight, as_f16, as_f64, assert_close, gpu, norm_factor, normal,
    poisoned, read_f16, read_f32, read_rows, rms_norm, rounded, upload,
};

fn silu(g: f64) -> f64 {
    g / (1.0 + (-g).exp())
}

fn gelu_tanh(g: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
    0.5 * g * (1.0 + u.tanh())
}

/// Elementwise operations that no other test of the device has.
#[test]
fn unfused_operations_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, width) = (7, 300);
    let (x, y) = (normal(31, m * width), normal(32, m * width));
    let check = |what: &str, run: &dyn Fn(DeviceSlice<'_>), want: &dyn Fn(usize) -> f64| {
        let on_device = upload(&gpu, &x);
        run((&on_device).into());
        let want: Vec<f64> = (0..m * width).map(want).collect();
        assert_close(&read_f32(&on_device, m * width), &want, EXACT, what);
    };
    let (all, row) = (upload(&gpu, &y), upload(&gpu, &y[..width]));
    let (x, y) = (as_f64(&x), as_f64(&y));
    let add = |y: &DeviceBuffer, x: DeviceSlice<'_>| cuda::add(x, y.into()).unwrap();
    check("add", &|x| add(&all, x), &|i| x[i] + y[i]);
    check("add a row", &|x| add(&row, x), &|i| x[i] + y[i % width]);
    check("scale", &|x| cuda::scale(x, -2.5).unwrap(), &|i| {
        -2.5 * x[i]
    });
    check("fill", &|x| cuda::fill(x, 3.5).unwrap(), &|_| 3.5);
    check("cap", &|x| cuda::cap_f32(x, 0.5).unwrap(), &|i| {
        0.5 * (x[i] / 0.5).tanh()
    });
    check(
        "squared ReLU",
        &|x| cuda::relu_squared_f32(x).unwrap(),
        &|i| x[i].max(0.0).powi(2),
    );
    let glu = |unit, x: DeviceSlice<'_>| cuda::glu_f32(unit, x, (&all).into()).unwrap();
    let plain = |activation, x: DeviceSlice<'_>| glu(GatedUnit::Plain(activation), x);
    check("SwiGLU", &|x| plain(Activation::Silu, x), &|i| {
        silu(x[i]) * y[i]
    });
    check("GeGLU", &|x| plain(Activation::GeluTanh, x), &|i| {
        gelu_tanh(x[i]) * y[i]
    });
    let (alpha, limit) = (1.702, 0.5);
    let clamped = GatedUnit::Clamped { alpha, limit };
    check("clamped SwiGLU", &|x| glu(clamped, x), &|i| {
        let limit = f64::from(limit);
        let g = x[i].min(limit);
        (y[i].clamp(-limit, limit) + 1.0) * g / (1.0 + (-f64::from(alpha) * g).exp())
    });
    for wrong in [
        cuda::add(
            (&all).into(),
            DeviceSlice::from(&row).part(0..4 * 299).unwrap(),
        ),
        cuda::glu_f32(
            GatedUnit::Plain(Activation::Silu),
            (&all).into(),
            (&row).into(),
        ),
        cuda::rotate((&all).into(), 3, 64, (&row).into(), (&row).into()),
    ] {
        expect_kind(wrong, ErrorKind::Internal, "elements");
    }
}

/// Norms of the rows of a matrix of every storage, with columns weighted and not.
#[test]
fn norms_of_rows_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (rows, cols) = (37, 336);
    let columns = normal(5, cols);
    let on_device = upload(&gpu, &columns);
    let check = |matrix: &Matrix, values: &[f32]| {
        for weighted in [false, true] {
            let out = poisoned(&gpu, rows * 4);
            let by = weighted.then_some(DeviceSlice::from(&on_device));
            cuda::row_norms(matrix, by, (&out).into()).unwrap();
            let norm = |row: &[f32]| {
                let squares = row.iter().zip(&columns).map(|(&w, &c)| {
                    let c = if weighted { f64::from(c) } else { 1.0 };
                    (f64::from(w) * c).powi(2)
                });
                squares.sum::<f64>().sqrt()
            };
            let want: Vec<f64> = values.chunks_exact(cols).map(norm).collect();
            let what = format!("norms of rows of {:?}", matrix.storage());
            assert_close(&read_f32(&out, rows), &want, EXACT, &what);
        }
    };
    let packed = Weight::new(&gpu, rows, cols, 6);
    check(&packed.device, &packed.values);
    // Eight bits of mantissa, which every storage holds.
    let values: Vec<f32> = normal(7, rows * cols)
        .iter()
        .map(|&v| bf16::from_f32(v).to_f32())
        .collect();
    for storage in DENSE {
        let dense = Dense::new(&gpu, [rows, cols], storage, &values);
        check(&dense.device, &values);
    }
}

/// A residual stream `[m, width]` and the norms around its sum.
struct Residual<'a> {
    gpu: &'a Arc<Gpu>,
    m: usize,
    width: usize,
    y: DeviceBuffer,
    post: DeviceBuffer,
    stream: DeviceBuffer,
    /// The numbers by which the rows of `y` were divided, and the factor of the sum.
    divisors: Option<DeviceBuffer>,
    scale: Option<DeviceBuffer>,
    /// The layers that overflowed.
    overflow: DeviceBuffer,
}

impl Residual<'_> {
    /// Adds the norm of `y` to the stream, and returns the stream.
    fn add(&self, next: Option<NextRows<'_>>) -> Vec<f32> {
        let (m, width) = (self.m, self.width);
        let (scale, stream) = (self.scale.as_ref(), &self.stream);
        let addend = NormedAddend {
            y: &self.y,
            divisors: self.divisors.as_ref(),
            weight: &self.post,
            overflow: &self.overflow,
            layer: 4,
        };
        cuda::post_norm(self.gpu, addend, scale, EPS, m, width, stream, next).unwrap();
        read_f32(stream, m * width)
    }

    /// The layers that overflowed.
    fn noted(&self) -> Vec<u32> {
        let mut noted = vec![0u32; self.m];
        self.overflow.read(0, &mut noted).unwrap();
        noted
    }

    /// Rows as they are, for what takes them without a norm.
    fn as_they_are<'a>(&'a self, layout: Layout, rows: &'a DeviceBuffer) -> StreamRows<'a> {
        StreamRows {
            layout,
            rows,
            overflow: &self.overflow,
            layer: 6,
        }
    }

    /// Rows without a norm: after the sum, and alone, with a value in one that f16 does not hold.
    fn check_rows_as_they_are(&self, layout: Layout, rows: &DeviceBuffer) {
        let Residual { gpu, m, width, .. } = *self;
        let check = |sum: &[f32], odd: Option<usize>| {
            let (got, want) = (read_rows(layout, rows, m, width), rounded(sum));
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                let is_same = f64::from(*got) == want || want.abs() > 65_504.0;
                assert!(is_same, "{got} and {want}");
            }
            let mut want = vec![0; m];
            odd.into_iter().for_each(|row| want[row] = 7);
            assert_eq!(self.noted(), want, "{m} rows of {width}");
        };
        let follows = self.as_they_are(layout, rows);
        let mut sum = self.add(Some(NextRows::Stream(follows)));
        check(&sum, None);
        sum[(m - 1) * width + 5] = -65_520.0;
        let odd = upload(gpu, &sum);
        cuda::stream_rows(gpu, &odd, m, width, follows).unwrap();
        check(&sum, Some(m - 1));
    }

    /// An addend whose squares have no finite sum, which is no fault of what takes the sum.
    fn check_odd_addends(&mut self, y: &[f32], x: &[f32], layout: Layout, rows: &DeviceBuffer) {
        let Residual { gpu, m, width, .. } = *self;
        for odd in [1e20, f32::NEG_INFINITY, f32::NAN] {
            let mut y = y.to_vec();
            y[(m - 1) * width + 5] = odd;
            self.y = upload(gpu, &y);
            self.stream = upload(gpu, x);
            self.overflow = upload(gpu, &vec![0u32; m]);
            let follows = self.as_they_are(layout, rows);
            let sum = self.add(Some(NextRows::Stream(follows)));
            assert!(sum[(m - 1) * width..].iter().all(|v| v.is_nan()), "{odd}");
            let mut want = vec![0; m];
            want[m - 1] = 5;
            assert_eq!(self.noted(), want, "{odd} in {m} rows of {width}");
        }
    }
}

/// A norm of what is added, and the norm of the sum: rows that fill registers and such that do not, in both layouts.
#[test]
fn norms_after_a_residual_sum_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (i, (m, width)) in [(1, 64), (3, 2560), (9, 1152), (40, 5376), (2, 8192)]
        .into_iter()
        .enumerate()
    {
        let seed = 600 + 10 * i as u64;
        let (y, x) = (normal(seed, m * width), normal(seed + 1, m * width));
        let (post, next) = (normal(seed + 2, width), normal(seed + 3, width));
        let mut residual = Residual {
            gpu: &gpu,
            m,
            width,
            y: upload(&gpu, &y),
            post: upload(&gpu, &post),
            stream: upload(&gpu, &x),
            divisors: None,
            scale: None,
            overflow: upload(&gpu, &vec![0u32; m]),
        };
        let layout = Layout::taken(&Hardware::of(&gpu).unwrap(), m);
        let normed = poisoned(&gpu, layout.elements(m, width) * 2);
        let weight = upload(&gpu, &next);
        let follows = NextNorm {
            weight: &weight,
            layout,
            rows: &normed,
            factors: None,
        };
        let addend = rms_norm(&y, &post);
        let added: Vec<f32> = addend.iter().zip(&x).map(|(a, b)| a + b).collect();
        let got = residual.add(Some(NextRows::Normalized(follows)));
        assert_close(&got, &as_f64(&added), EXACT, "what was added to");
        let got = read_rows(layout, &normed, m, width);
        let want = as_f64(&rms_norm(&added, &next));
        assert_close(&got, &want, F16, "the norm after");

        let got = residual.add(None);
        let twice: Vec<f32> = addend.iter().zip(&added).map(|(a, b)| a + b).collect();
        assert_close(&got, &as_f64(&twice), EXACT, "what was added to twice");

        residual.check_rows_as_they_are(layout, &normed);
        residual.check_odd_addends(&y, &x, layout, &normed);
    }
}

/// Rows of an addend that were divided, a factor of the sum, and the factors of the norm that follows.
#[test]
fn divided_addends_and_factors_of_a_residual_sum_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, width) = (5, 1536);
    let (y, x) = (normal(701, m * width), normal(702, m * width));
    let (post, next) = (normal(703, width), normal(704, width));
    // Numbers by which the epsilon of the norm counts, and ones by which it does not.
    let divisors = [1.0, 2.0, 0.000_976_562_5, 65_536.0, 0.25];
    let scale = 0.8125f32;
    let rows = y.chunks_exact(width).zip(divisors);
    let divided: Vec<f32> = rows
        .flat_map(|(row, d)| row.iter().map(move |v| v / d))
        .collect();
    let residual = Residual {
        gpu: &gpu,
        m,
        width,
        y: upload(&gpu, &divided),
        post: upload(&gpu, &post),
        stream: upload(&gpu, &x),
        divisors: Some(upload(&gpu, &divisors)),
        scale: Some(upload(&gpu, &[scale])),
        overflow: upload(&gpu, &[0u32; 5]),
    };
    let (normed, weight) = (poisoned(&gpu, m * width * 2), upload(&gpu, &next));
    let factors = poisoned(&gpu, m * 4);
    let got = residual.add(Some(NextRows::Normalized(NextNorm {
        weight: &weight,
        layout: Layout::RowMajor,
        rows: &normed,
        factors: Some(&factors),
    })));
    let addend = rms_norm(&y, &post);
    let sums = addend.iter().zip(&x).map(|(a, b)| (a + b) * scale);
    let sums: Vec<f32> = sums.collect();
    assert_close(&got, &as_f64(&sums), EXACT, "the scaled sum");
    let want = as_f64(&rms_norm(&sums, &next));
    assert_close(&read_f16(&normed, m * width), &want, F16, "the norm after");
    let want: Vec<f64> = sums.chunks_exact(width).map(norm_factor).collect();
    assert_close(&read_f32(&factors, m), &want, EXACT, "factors of the norm");
}

/// Sizes of the blocks' own inputs: rows, blocks, the width of a block's, and tokens of the table.
const OWN_INPUTS: (usize, usize, usize, usize) = (3, 4, 48, 20);

/// A table in host memory with these values, which a type holds.
fn table_of(gpu: &Arc<Gpu>, storage: WeightType, values: &[f32]) -> HostTable {
    let (_, blocks, width, vocabulary) = OWN_INPUTS;
    let fill = |bytes: &mut [u8]| {
        let element = bytes.len() / values.len();
        for (to, v) in bytes.chunks_exact_mut(element).zip(values) {
            match storage {
                WeightType::F32 => to.copy_from_slice(&v.to_le_bytes()),
                WeightType::F16 => to.copy_from_slice(&f16::from_f32(*v).to_le_bytes()),
                _ => to.copy_from_slice(&bf16::from_f32(*v).to_le_bytes()),
            }
        }
        Ok(())
    };
    HostTable::new(gpu, vocabulary, blocks * width, storage, fill).unwrap()
}

/// The inputs of blocks from projections and tables of every type, and their gates, whose rows are divided to fit f16.
#[test]
fn per_layer_inputs_and_gates_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, blocks, width, vocabulary) = OWN_INPUTS;
    let all = blocks * width;
    let tokens = [7u32, 0, 19];
    let factors = [0.5f32, 3.0, 0.01];
    let (x, norm) = (normal(711, m * all), normal(712, width));
    // Eight bits of mantissa, which every type holds.
    let values = normal(713, vocabulary * all);
    let values: Vec<f32> = values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect();
    let (scale, table_scale) = (0.125f32, 4.0f32);
    let mut want = Vec::new();
    for (row, (&token, factor)) in tokens.iter().zip(factors).enumerate() {
        for block in 0..blocks {
            let at = block * width..(block + 1) * width;
            let projected = x[row * all..][at.clone()].iter();
            let projected: Vec<f32> = projected.map(|v| v * scale / factor).collect();
            let stored = &values[token as usize * all..][at];
            let normed = rms_norm(&projected, &norm);
            let sums = normed.iter().zip(stored);
            want.extend(sums.map(|(p, t)| {
                (f64::from(*p) + f64::from(t * table_scale)) * std::f64::consts::FRAC_1_SQRT_2
            }));
        }
    }
    let on_device = [upload(&gpu, &factors), upload(&gpu, &norm)];
    let tokens = upload(&gpu, &tokens);
    for storage in [WeightType::F32, WeightType::F16, WeightType::BF16] {
        let table = table_of(&gpu, storage, &values);
        let projected = ProjectedInputs {
            scale,
            factors: &on_device[0],
            norm: &on_device[1],
            eps: EPS,
        };
        let (out, scaled) = (upload(&gpu, &x), (&table, table_scale));
        cuda::per_layer_inputs(&gpu, projected, scaled, &tokens, (m, width), &out).unwrap();
        let inputs = read_f32(&out, m * all);
        assert_close(&inputs, &want, EXACT, &format!("inputs by {storage:?}"));
        check_gates(&gpu, &inputs);
    }
}

/// The gate of one block's inputs: a row of values beyond f16 after its factor, one of ordinary values, and one of zeros.
fn check_gates(gpu: &Arc<Gpu>, inputs: &[f32]) {
    let (m, blocks, width, _) = OWN_INPUTS;
    let (all, first) = (blocks * width, 2 * width);
    let mut gate = normal(714, m * width);
    gate[2 * width..].fill(0.0);
    let factors = [1e-6f32, 1.0, 5.0];
    let (y, divisors) = (poisoned(gpu, m * width * 2), poisoned(gpu, m * 4));
    let own = BlockInputs {
        all: &upload(gpu, inputs),
        stride: all,
        first,
    };
    let (gates, by) = (upload(gpu, &gate), upload(gpu, &factors));
    let (unit, sizes) = (Activation::GeluTanh, (m, width));
    cuda::per_layer_gate(gpu, unit, &gates, &by, own, sizes, &y, &divisors).unwrap();
    let (got, divisors) = (read_f16(&y, m * width), read_f32(&divisors, m));
    for (row, (got, divisor)) in got.chunks_exact(width).zip(divisors).enumerate() {
        let gate = &gate[row * width..][..width];
        let input = &inputs[row * all + first..][..width];
        let gated = gate.iter().zip(input).map(|(&g, &i)| {
            gelu_tanh(f64::from(g) / f64::from(factors[row])) * f64::from(i) / f64::from(divisor)
        });
        let gated: Vec<f64> = gated.collect();
        if row == 2 {
            assert!(got.iter().all(|v| *v == 0.0), "{got:?}");
            continue;
        }
        assert_close(got, &gated, F16, &format!("row {row} of a gated input"));
        let largest = gated.iter().fold(0f64, |a, b| a.max(b.abs()));
        assert!((0.99..2.01).contains(&largest), "{largest}");
    }
}

/// Rows without overflow, and one that has it, which is noted with its layer.
#[test]
fn squared_relus_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, width, divisor) = (5, 136, 4);
    let mut x = rounded(&normal(78, m * width));
    x[3 * width + 9] = f64::INFINITY;
    let halves: Vec<f32> = x.iter().map(|&v| v as f32).collect();
    let on_device = upload(&gpu, &as_f16(&halves));
    let (out, notes) = (poisoned(&gpu, m * width * 2), upload(&gpu, &[0u32; 5]));
    cuda::relu_squared(&gpu, divisor, &on_device, m, width, (&notes, 6), &out).unwrap();
    let noted: Vec<u32> = read_f32(&notes, m).iter().map(|v| v.to_bits()).collect();
    assert_eq!(noted, [0, 0, 0, 7, 0]);
    let want: Vec<f64> = x.iter().map(|x| x.max(0.0).powi(2) / 4.0).collect();
    let (got, fits) = (read_f16(&out, m * width), 3 * width);
    assert_close(&got[..fits], &want[..fits], F16, "squared ReLU");
    assert_eq!(got[fits + 9], f32::INFINITY);
}

#[test]
fn gated_activations_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    let (m, width, divisor) = (5, 136, 4);
    let gate_up: Vec<f32> = normal(77, m * 2 * width)
        .iter()
        .map(|v| rounded(&[4.0 * v])[0] as f32)
        .collect();
    let on_device = upload(&gpu, &as_f16(&gate_up));
    for (activation, function) in [
        (Activation::Silu, silu as fn(f64) -> f64),
        (Activation::GeluTanh, gelu_tanh),
    ] {
        let glu = Glu {
            activation,
            divisor,
        };
        let out = poisoned(&gpu, m * width * 2);
        cuda::glu(&gpu, glu, &on_device, m, width, None, &out).unwrap();
        let unit = |(&g, &u): (&f32, &f32)| function(g.into()) * f64::from(u) / f64::from(divisor);
        let want: Vec<f64> = gate_up
            .chunks_exact(2 * width)
            .flat_map(|row| {
                let (gate, up) = row.split_at(width);
                gate.iter().zip(up).map(unit)
            })
            .collect();
        let got = read_f16(&out, m * width);
        assert_close(&got, &want, F16, &format!("{activation:?}"));
    }
}
