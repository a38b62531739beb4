//! Losses of training: cross-entropy in chunks of the vocabulary, and differences of hidden states.

use std::sync::Arc;

use NVFP4::base::ErrorKind;
use NVFP4::cuda::training::{self, CrossEntropy, L1_PARTIAL, LogitChunk};
use NVFP4::cuda::{DeviceBuffer, DeviceSlice, Gpu};

use super::{Array, ROUNDING, assert_within, read_bf16, read_bits, values_of_f32};
use crate::common::expect_kind;
use crate::support::{gpu, normal, poisoned, upload};

/// Rows of logits in chunks of the vocabulary, with labels and weights.
struct Chunked<'a> {
    gpu: &'a Arc<Gpu>,
    rows: usize,
    columns: &'a [usize],
    /// The first column of each chunk, and the end of the last.
    firsts: Vec<usize>,
    cap: Option<f32>,
    logits: Vec<Array>,
    labels: Vec<i32>,
    weights: Array,
    /// The labels on the device, and all that the kernels keep of each row.
    device_labels: DeviceBuffer,
    known: [DeviceBuffer; 5],
}

impl<'a> Chunked<'a> {
    /// Every third row has no label; logits are about as large as `size`.
    fn new(
        gpu: &'a Arc<Gpu>,
        rows: usize,
        columns: &'a [usize],
        cap: Option<f32>,
        size: f32,
    ) -> Chunked<'a> {
        let vocabulary: usize = columns.iter().sum();
        let label = |row: usize| match row % 3 {
            1 => -1,
            _ => (row * 7919 % vocabulary) as i32,
        };
        let logits = |(seed, columns): (u64, &usize)| {
            let values = normal(62 + seed, rows * columns);
            let values: Vec<f32> = values.iter().map(|x| x * size / 3.0).collect();
            Array::of_f32(gpu, &values)
        };
        let mut firsts = vec![0];
        for count in columns {
            firsts.push(firsts[firsts.len() - 1] + count);
        }
        let labels: Vec<i32> = (0..rows).map(label).collect();
        Chunked {
            gpu,
            rows,
            columns,
            firsts,
            cap,
            logits: (0u64..).zip(columns).map(logits).collect(),
            device_labels: upload(gpu, &labels),
            labels,
            weights: Array::f32(gpu, 61, rows, 1.0),
            known: [(); 5].map(|()| poisoned(gpu, rows * 4)),
        }
    }

    fn of_rows(&self) -> CrossEntropy<'_> {
        let [max, sum, target, lse, losses] = self.known.each_ref().map(DeviceSlice::from);
        CrossEntropy {
            labels: (&self.device_labels).into(),
            weights: self.weights.slice(),
            max,
            sum,
            target,
            lse,
            losses,
        }
    }

    fn chunk(&self, c: usize) -> LogitChunk<'_> {
        LogitChunk {
            logits: self.logits[c].slice(),
            first_column: self.firsts[c],
            columns: self.columns[c],
            cap: self.cap,
        }
    }

    /// The loss of all rows.
    fn total(&self) -> f64 {
        let of_rows = self.of_rows();
        for c in 0..self.columns.len() {
            training::cross_entropy_chunk(&of_rows, &self.chunk(c), c == 0).unwrap();
        }
        let total = poisoned(self.gpu, 8);
        training::cross_entropy_finish(&of_rows, (&total).into()).unwrap();
        let mut got = [0u64];
        total.read(0, &mut got).unwrap();
        f64::from_bits(got[0])
    }

    /// The gradient of a chunk of logits.
    fn gradient(&self, c: usize) -> Vec<f64> {
        let dlogits = poisoned(self.gpu, self.rows * self.columns[c] * 2);
        let (of_rows, chunk) = (self.of_rows(), self.chunk(c));
        training::cross_entropy_gradient(&of_rows, &chunk, (&dlogits).into()).unwrap();
        read_bf16(&dlogits)
    }

    /// A logit in f64, bounded.
    fn at(&self, row: usize, column: usize) -> f64 {
        let c = self.firsts.partition_point(|&first| first <= column) - 1;
        let in_chunk = row * self.columns[c] + column - self.firsts[c];
        let l = self.logits[c].values[in_chunk];
        self.cap
            .map_or(l, |cap| f64::from(cap) * (l / f64::from(cap)).tanh())
    }

    /// The logarithm of the sum of each row's exponentials, in f64.
    fn expected_lse(&self) -> Vec<f64> {
        let vocabulary = self.firsts[self.columns.len()];
        let sum = |row: usize| (0..vocabulary).map(|i| self.at(row, i).exp()).sum::<f64>();
        (0..self.rows).map(|row| sum(row).ln()).collect()
    }

    /// The loss of a row in f64, where it has a label.
    fn expected_loss(&self, row: usize, lse: f64) -> Option<f64> {
        let label = usize::try_from(self.labels[row]).ok()?;
        Some(self.weights.values[row] * (lse - self.at(row, label)))
    }

    /// The gradient of a chunk in f64, and the sizes of the terms of each element; `size` is that of the logits.
    fn expected_gradient(&self, c: usize, lse: &[f64], size: f64) -> (Vec<f64>, Vec<f64>) {
        let (mut want, mut sizes) = (vec![], vec![]);
        for row in 0..self.rows {
            for column in self.firsts[c]..self.firsts[c + 1] {
                let (l, label) = (self.at(row, column), self.labels[row]);
                let (p, hot) = ((l - lse[row]).exp(), label == column as i32);
                let capped = |cap: f32| 1.0 - (l / f64::from(cap)).powi(2);
                let slope = self.cap.map_or(1.0, capped);
                let onehot = f64::from(u8::from(hot));
                want.push(match label {
                    ..0 => 0.0,
                    _ => self.weights.values[row] * (p - onehot) * slope,
                });
                // An error of the exponent is one of the factor.
                sizes.push((size + 4.0) * p + onehot);
            }
        }
        (want, sizes)
    }
}

/// Rows with and without labels, in chunks of the vocabulary that are unlike each other.
#[test]
fn cross_entropy_in_chunks_agrees_with_f64() {
    let Some(gpu) = gpu() else { return };
    for (rows, chunks, cap, size) in [
        (37, vec![1028, 60, 4], None, 8.0),
        (37, vec![16384, 2000], Some(30.0), 10.0),
        (1024, vec![8192, 4096], None, 20.0),
        (37, vec![1028, 61, 1], Some(30.0), 8.0),
    ] {
        let chunked = Chunked::new(&gpu, rows, &chunks, cap, size);
        let total = chunked.total();
        assert_eq!(total.to_bits(), chunked.total().to_bits());

        let lse = chunked.expected_lse();
        let of_row = |row: usize| match chunked.expected_loss(row, lse[row]) {
            Some(loss) => (lse[row], loss),
            None => (0.0, 0.0),
        };
        let (shown, want): (Vec<f64>, Vec<f64>) = (0..rows).map(of_row).unzip();
        let what = format!("{rows} rows of {chunks:?}");
        let size = 2.0 * f64::from(size);
        let [.., got_lse, losses] = chunked.known.each_ref().map(values_of_f32);
        assert_within(&got_lse, &shown, 0.0, |_| size, &what);
        assert_within(&losses, &want, 0.0, |_| 2.0 * size, &what);
        let bound = 2.0 * size * rows as f64;
        assert_within(&[total], &[want.iter().sum()], 0.0, |_| bound, &what);

        for c in 0..chunks.len() {
            let got = chunked.gradient(c);
            let (want, sizes) = chunked.expected_gradient(c, &lse, size);
            assert_within(&got, &want, ROUNDING, |i| sizes[i], &what);
        }
        let wrong = LogitChunk {
            columns: 0,
            ..chunked.chunk(0)
        };
        expect_kind(
            training::cross_entropy_chunk(&chunked.of_rows(), &wrong, true),
            ErrorKind::InvalidArgument,
            "without logits",
        );
    }
}

#[test]
fn differences_of_hidden_states_agree_with_f64() {
    let Some(gpu) = gpu() else { return };
    for count in [8, 37 * 48, 1024 * 2560] {
        let (mut values, other) = (normal(81, count), normal(82, count));
        values
            .iter_mut()
            .zip(&other)
            .step_by(5)
            .for_each(|(x, y)| *x = *y);
        let (h, target) = (Array::of_bf16(&gpu, &values), Array::of_bf16(&gpu, &other));
        let weight = 0.375;
        let run = |h: DeviceSlice<'_>, d: DeviceSlice<'_>| {
            let (partial, total) = (poisoned(&gpu, L1_PARTIAL * 4), poisoned(&gpu, 4));
            training::l1_gradient(
                h,
                target.slice(),
                weight,
                d,
                (&partial).into(),
                (&total).into(),
            )
            .unwrap();
            total
        };
        let d = poisoned(&gpu, count * 2);
        let total = run(h.slice(), (&d).into());
        let again = run(h.slice(), h.slice());
        assert_eq!(read_bits(&total), read_bits(&again));
        assert_eq!(read_bits(&d), read_bits(&h.device));
        let differences = h.values.iter().zip(&target.values).map(|(h, t)| h - t);
        let weight = f64::from(weight);
        let want: Vec<f64> = differences
            .clone()
            .map(|x| match x {
                0.0 => 0.0,
                x => weight * x.signum(),
            })
            .collect();
        assert!(read_bf16(&d) == want, "signs of {count} differences");
        let sum: f64 = differences.map(|x| weight * x.abs()).sum();
        assert_within(&values_of_f32(&total), &[sum], 0.0, |_| sum, "an L1 loss");
    }
}
