//! Distillation loss of a student against its teacher: the KL divergence of the next-token distributions, mixed with the cross-entropy of
//! labels. Both heads are computed in the same chunks of the vocabulary, once for the loss and again for the gradients.

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::loss::{Chunk, Targets};
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::training::{Divergence as Row, RowSums, TeacherColumns};
use crate::cuda::training as cuda;

/// Weights of the terms of a student's loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Divides both models' logits. The divergence is multiplied by its square, which preserves the size of gradients (Hinton et al., arXiv
    /// 1503.02531).
    pub temperature: f32,
    /// Share of the labels' cross-entropy in the loss.
    pub label_share: f32,
}

impl Default for Mixture {
    /// The divergence alone, in nats.
    fn default() -> Self {
        Mixture {
            temperature: 1.0,
            label_share: 0.0,
        }
    }
}

/// Weighted sums over rows, in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// `(1 - label_share) temperature² divergence + label_share cross_entropy`.
    pub loss: f64,
    /// The cross-entropy of the labels.
    pub cross_entropy: f64,
    /// KL(teacher || student), at the temperature.
    pub divergence: f64,
}

/// Results of one row, in nats, at temperature 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowDivergence {
    /// KL(teacher || student).
    pub divergence: f64,
    /// The student's cross-entropy of the label.
    pub cross_entropy: f64,
    /// The log-sum-exp of the student's logits.
    pub student: f64,
    /// The log-sum-exp of the teacher's logits.
    pub teacher: f64,
}

/// A chunk of a teacher's logits, `[T, width]`.
#[derive(Clone, Copy, Debug)]
pub struct TeacherLogits<'a> {
    /// The logits.
    pub values: Slice<'a>,
    /// Soft cap of the logits: `cap * tanh(logit / cap)`.
    pub cap: Option<f32>,
}

/// Running sums on a GPU.
#[derive(Debug)]
struct OnGpu {
    found: Array,
    sums: Array,
    begun: bool,
}

/// The loss of rows, accumulated over chunks of both models' logits.
#[derive(Debug)]
pub struct Divergence {
    mixture: Mixture,
    /// Running sums on the CPU.
    rows: Vec<Row>,
    sums: Vec<RowSums>,
    on_gpu: Option<OnGpu>,
}

impl Divergence {
    /// Bytes of working memory for `rows` rows on a device. Working memory on the CPU is small beside a row's logits, and is not counted.
    pub fn bytes(device: &Device, rows: usize) -> usize {
        let floats = cuda::DIVERGENCE_FOUND + cuda::DIVERGENCE_SUMS;
        if device.is_cuda() {
            size_of::<f32>() * rows * floats
        } else {
            0
        }
    }

    /// The loss of `rows` rows, before the first chunk.
    pub fn new(device: &Device, rows: usize, mixture: Mixture) -> Result<Divergence> {
        let on_gpu = match device {
            Device::Cpu(_) => None,
            Device::Cuda(_) => Some(OnGpu {
                found: Array::scratch(device, rows * cuda::DIVERGENCE_FOUND)?,
                sums: Array::scratch(device, rows * cuda::DIVERGENCE_SUMS)?,
                begun: false,
            }),
        };
        let on_cpu = if device.is_cuda() { 0 } else { rows };
        Ok(Divergence {
            mixture,
            rows: vec![Row::START; on_cpu],
            sums: vec![RowSums::default(); on_cpu],
            on_gpu,
        })
    }

    fn of_gpu<'a>(&'a self, targets: &'a Targets) -> Result<cuda::Divergence<'a>> {
        let Some(on_gpu) = &self.on_gpu else {
            bail!(Internal, "a divergence of the cpu was given to a GPU");
        };
        Ok(cuda::Divergence {
            labels: targets.labels().cuda()?,
            weights: targets.weights().cuda()?,
            found: on_gpu.found.all().cuda()?,
            sums: on_gpu.sums.all().cuda()?,
            temperature: self.mixture.temperature,
            label_share: self.mixture.label_share,
        })
    }

    fn teacher<'a>(&self, teacher: TeacherLogits<'a>) -> Result<TeacherColumns<'a>> {
        Ok(TeacherColumns {
            logits: teacher.values.host()?,
            cap: teacher.cap,
            temperature: self.mixture.temperature,
        })
    }

    /// Accumulates a chunk's logits `[T, width]`.
    pub fn add(
        &mut self,
        device: &Device,
        targets: &Targets,
        chunk: Chunk,
        logits: Slice<'_>,
        teacher: TeacherLogits<'_>,
    ) -> Result<()> {
        if let Device::Cpu(cpu) = device {
            let (columns, teacher) = (targets.columns(chunk)?, self.teacher(teacher)?);
            return cpu.divergence_chunk(&columns, &teacher, logits.host()?, &mut self.rows);
        }
        let begun = self.on_gpu.as_ref().is_some_and(|g| g.begun);
        let of_both = [&chunk.on_gpu(logits)?, &chunk.of_teacher(teacher)?];
        cuda::divergence_chunk(&self.of_gpu(targets)?, of_both, !begun)?;
        if let Some(on_gpu) = &mut self.on_gpu {
            on_gpu.begun = true;
        }
        Ok(())
    }

    /// After the last chunk: the sums over rows. Waits for a GPU.
    pub fn finish(&mut self, device: &Device, targets: &Targets) -> Result<Totals> {
        if device.is_cuda() {
            let mut totals =
                Array::<u8>::scratch(device, size_of::<f64>() * cuda::DIVERGENCE_TOTALS)?;
            cuda::divergence_finish(&self.of_gpu(targets)?, totals.all_mut().cuda()?)?;
            let mut bytes = [0; size_of::<f64>() * cuda::DIVERGENCE_TOTALS];
            totals.all().read(&mut bytes)?;
            let [loss, cross_entropy, divergence] = [0, 1, 2].map(|i| {
                let mut number = [0; size_of::<f64>()];
                number.copy_from_slice(&bytes[8 * i..8 * (i + 1)]);
                f64::from_le_bytes(number)
            });
            return Ok(Totals {
                loss,
                cross_entropy,
                divergence,
            });
        }
        let (labels, weights) = (targets.labels().host()?, targets.weights().host()?);
        let Mixture {
            temperature,
            label_share,
        } = self.mixture;
        let mut totals = Totals::default();
        let rows = self.rows.iter().zip(&mut self.sums);
        for (((row, sums), label), weight) in rows.zip(labels).zip(weights) {
            if *label < 0 {
                continue;
            }
            *sums = row.sums(temperature);
            let weight = f64::from(*weight);
            totals.cross_entropy += weight * row.cross_entropy();
            totals.divergence += weight * row.divergence(temperature);
        }
        let share = f64::from(label_share);
        let factor = (1.0 - share) * f64::from(temperature).powi(2);
        totals.loss = factor * totals.divergence + share * totals.cross_entropy;
        Ok(totals)
    }

    /// After the last chunk: the results of each row at temperature 1. Rows without a label have unspecified values. Waits for a GPU.
    pub fn rows(&self) -> Result<Vec<RowDivergence>> {
        let found = match &self.on_gpu {
            None => self.rows.clone(),
            Some(on_gpu) => {
                let mut found = vec![0.0; on_gpu.found.len()];
                on_gpu.found.all().read(&mut found)?;
                found
                    .chunks_exact(cuda::DIVERGENCE_FOUND)
                    .map(of_kernel)
                    .collect()
            }
        };
        let results = found.iter().map(|row| RowDivergence {
            divergence: row.divergence(1.0),
            cross_entropy: row.cross_entropy(),
            student: f64::from(row.largest) + row.sum.ln(),
            teacher: f64::from(row.teacher_largest) + row.teacher_sum.ln(),
        });
        Ok(results.collect())
    }

    /// After [`Divergence::finish`]: the gradients of a chunk's logits.
    pub fn gradients(
        &self,
        device: &Device,
        targets: &Targets,
        chunk: Chunk,
        (logits, teacher): (Slice<'_>, TeacherLogits<'_>),
        gradients: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        let Device::Cpu(cpu) = device else {
            let of_both = [&chunk.on_gpu(logits)?, &chunk.of_teacher(teacher)?];
            let rows = self.of_gpu(targets)?;
            return cuda::divergence_gradient(&rows, of_both, gradients.cuda()?);
        };
        let gradients = gradients.host()?;
        gradients.copy_from_slice(logits.host()?);
        let (columns, teacher) = (targets.columns(chunk)?, self.teacher(teacher)?);
        let rows = (
            &self.sums[..],
            targets.weights().host()?,
            self.mixture.label_share,
        );
        cpu.divergence_gradient(&columns, &teacher, gradients, rows)
    }
}

/// Converts the sums of a row from the kernel's order.
fn of_kernel(row: &[f32]) -> Row {
    Row {
        largest: row[0],
        sum: f64::from(row[1]),
        target: row[2],
        warm_sum: f64::from(row[3]),
        teacher_largest: row[4],
        teacher_sum: f64::from(row[5]),
        difference: f64::from(row[6]),
    }
}

impl Chunk {
    fn of_teacher<'a>(&self, teacher: TeacherLogits<'a>) -> Result<cuda::LogitChunk<'a>> {
        let own = Chunk {
            cap: teacher.cap,
            ..*self
        };
        own.on_gpu(teacher.values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random::uniform;

    const ROWS: usize = 5;
    const CHUNKS: [usize; 3] = [4, 1, 6];
    const LABELS: [i32; ROWS] = [3, -1, 4, 10, 7];
    const WEIGHTS: [f32; ROWS] = [1.0, 5.0, 0.25, 2.0, 0.5];

    /// Logits `[ROWS, 11]` in f64.
    fn logits(key: u64) -> Vec<Vec<f64>> {
        let at = |i| 12.0 * f64::from(uniform(key, i)) - 6.0;
        let row = |row| (0..11).map(|i| at(11 * row + i)).collect();
        (0..ROWS as u64).map(row).collect()
    }

    fn log_softmax(row: &[f64], cap: f64, temperature: f64) -> Vec<f64> {
        let capped = |l: f64| cap * (l / cap).tanh() / temperature;
        let sum: f64 = row.iter().map(|&l| capped(l).exp()).sum();
        row.iter().map(|&l| capped(l) - sum.ln()).collect()
    }

    fn exact(student: &[Vec<f64>], teacher: &[Vec<f64>], mixture: Mixture, cap: f64) -> f64 {
        let (t, share) = (
            f64::from(mixture.temperature),
            f64::from(mixture.label_share),
        );
        let of_row = |row: usize| {
            let Ok(label) = usize::try_from(LABELS[row]) else {
                return 0.0;
            };
            let expected = log_softmax(&teacher[row], cap, t);
            let predicted = log_softmax(&student[row], cap, t);
            let terms = expected.iter().zip(predicted);
            let divergence: f64 = terms.map(|(e, p)| e.exp() * (e - p)).sum();
            let entropy = -log_softmax(&student[row], cap, 1.0)[label];
            f64::from(WEIGHTS[row]) * ((1.0 - share) * t * t * divergence + share * entropy)
        };
        (0..ROWS).map(of_row).sum()
    }

    /// Compares with finite differences of the loss in f64.
    #[test]
    fn gradients_are_differences_of_the_loss() {
        let device = Device::cpu(Some(2)).unwrap();
        let targets = Targets::new(&device, &LABELS, &WEIGHTS).unwrap();
        for (temperature, label_share, cap) in [(1.0, 0.0, 1e6), (1.7, 0.3, 5.0), (0.5, 0.9, 30.0)]
        {
            let mixture = Mixture {
                temperature,
                label_share,
            };
            let (student, teacher) = (logits(1), logits(2));
            let part = |of: &[Vec<f64>], range: std::ops::Range<usize>| -> Vec<f32> {
                let rows = of.iter().flat_map(|row| row[range.clone()].to_vec());
                rows.map(|l| l as f32).collect()
            };
            let mut loss = Divergence::new(&device, ROWS, mixture).unwrap();
            let cap_of = Some(cap as f32);
            let chunks: Vec<_> = CHUNKS
                .iter()
                .scan(0, |first, width| {
                    *first += width;
                    Some(*first - width..*first)
                })
                .collect();
            let of_chunk = |range: &std::ops::Range<usize>| Chunk {
                first: range.start,
                width: range.len(),
                cap: cap_of,
            };
            for range in &chunks {
                let [own, taught] = [&student, &teacher].map(|of| part(of, range.clone()));
                let taught = TeacherLogits {
                    values: Slice::Host(&taught),
                    cap: cap_of,
                };
                let own = Slice::Host(&own[..]);
                loss.add(&device, &targets, of_chunk(range), own, taught)
                    .unwrap();
            }
            let totals = loss.finish(&device, &targets).unwrap();
            let wanted = exact(&student, &teacher, mixture, cap);
            assert!((totals.loss / wanted - 1.0).abs() < 1e-5, "{totals:?}");
            if temperature == 1.0 {
                let rows = loss.rows().unwrap();
                let labelled = rows.iter().zip(LABELS).zip(WEIGHTS);
                let labelled = labelled.filter(|((_, label), _)| *label >= 0);
                let (mut divergence, mut entropy) = (0.0, 0.0);
                for ((row, _), weight) in labelled {
                    divergence += f64::from(weight) * row.divergence;
                    entropy += f64::from(weight) * row.cross_entropy;
                }
                assert!((divergence / totals.divergence - 1.0).abs() < 1e-12);
                assert!((entropy / totals.cross_entropy - 1.0).abs() < 1e-12);
                let logits: Vec<f64> = teacher[0].iter().map(|l| l.exp()).collect();
                let lse = logits.iter().sum::<f64>().ln();
                assert!((rows[0].teacher - lse).abs() < 1e-5, "{rows:?}");
            }
            for range in &chunks {
                let [own, taught] = [&student, &teacher].map(|of| part(of, range.clone()));
                let taught = TeacherLogits {
                    values: Slice::Host(&taught),
                    cap: cap_of,
                };
                let mut gradients = vec![0.0; own.len()];
                let of_both = (Slice::Host(&own[..]), taught);
                let to = SliceMut::Host(&mut gradients);
                loss.gradients(&device, &targets, of_chunk(range), of_both, to)
                    .unwrap();
                for (i, got) in gradients.into_iter().enumerate() {
                    let (row, column) = (i / range.len(), range.start + i % range.len());
                    let moved = |by: f64| {
                        let mut moved = student.clone();
                        moved[row][column] += by;
                        exact(&moved, &teacher, mixture, cap)
                    };
                    let wanted = (moved(1e-4) - moved(-1e-4)) / 2e-4;
                    assert!(
                        (f64::from(got) - wanted).abs() < 1e-5,
                        "{row}, {column}: {got} and {wanted}"
                    );
                }
            }
        }
    }
}
