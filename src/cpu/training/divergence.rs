//! The divergence of a student from its teacher, KL(teacher || student), with the cross-entropy of labels, over chunks of the heads'
//! columns. Both models use the same operations, so equal logits have a divergence and gradients of exactly zero.

use super::loss::{HeadColumns, capped};
use super::rows::by_parts;
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;

/// A chunk of a teacher's logits.
#[derive(Clone, Copy, Debug)]
pub struct TeacherColumns<'a> {
    /// The teacher's logits `[T, width]`, of the same columns.
    pub logits: &'a [f32],
    /// Soft cap of the teacher's logits, like [`HeadColumns::cap`] for the student's.
    pub cap: Option<f32>,
    /// Divides both models' logits.
    pub temperature: f32,
}

/// Running sums of a row over its chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// The student's largest logit.
    pub largest: f32,
    /// The sum of `exp(logit - largest)`.
    pub sum: f64,
    /// The label's logit.
    pub target: f32,
    /// The sum of `exp((logit - largest) / temperature)`.
    pub warm_sum: f64,
    /// The teacher's largest logit.
    pub teacher_largest: f32,
    /// The teacher's sum at the temperature.
    pub teacher_sum: f64,
    /// The sum of `exp((teacher - teacher_largest) / temperature) (teacher - student)`.
    pub difference: f64,
}

/// Log-sum-exps of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct RowSums {
    /// The student's logits.
    pub student: f32,
    /// The student's logits, at the temperature.
    pub warm: f32,
    /// The teacher's logits, at the temperature.
    pub teacher: f32,
}

impl Divergence {
    /// The sums before the first chunk.
    pub const START: Divergence = Divergence {
        largest: f32::NEG_INFINITY,
        sum: 0.0,
        target: 0.0,
        warm_sum: 0.0,
        teacher_largest: f32::NEG_INFINITY,
        teacher_sum: 0.0,
        difference: 0.0,
    };

    /// The logarithms of the sums.
    pub fn sums(&self, temperature: f32) -> RowSums {
        let at = |largest: f32, sum: f64| (f64::from(largest / temperature) + sum.ln()) as f32;
        RowSums {
            student: (f64::from(self.largest) + self.sum.ln()) as f32,
            warm: at(self.largest, self.warm_sum),
            teacher: at(self.teacher_largest, self.teacher_sum),
        }
    }

    /// The cross-entropy of the label.
    pub fn cross_entropy(&self) -> f64 {
        f64::from(self.largest) + self.sum.ln() - f64::from(self.target)
    }

    /// The divergence at the temperature.
    pub fn divergence(&self, temperature: f32) -> f64 {
        let temperature = f64::from(temperature);
        let apart = f64::from(self.largest) - f64::from(self.teacher_largest);
        self.difference / self.teacher_sum / temperature
            + (apart / temperature + (self.warm_sum.ln() - self.teacher_sum.ln()))
    }
}

impl Cpu {
    /// Accumulates a chunk of the student's logits, and of its teacher's.
    pub fn divergence_chunk(
        &self,
        columns: &HeadColumns<'_>,
        teacher: &TeacherColumns<'_>,
        logits: &[f32],
        rows: &mut [Divergence],
    ) -> Result<()> {
        columns.check(logits.len(), rows.len())?;
        teacher.check(logits.len())?;
        by_parts(self.pool(), rows, 1, |i, row| {
            let part = i * columns.width..(i + 1) * columns.width;
            let (row, logits, taught) = (&mut row[0], &logits[part.clone()], &teacher.logits[part]);
            let inverse = 1.0 / teacher.temperature;
            let student = || logits.iter().map(|&l| capped(columns.cap, l));
            let teacher = || taught.iter().map(|&l| capped(teacher.cap, l));
            let sum =
                |l: f32, largest: f32, inverse: f32| f64::from(((l - largest) * inverse).exp());

            let largest = student().fold(row.largest, f32::max);
            let kept = |inverse: f32| f64::from(((row.largest - largest) * inverse).exp());
            row.sum = row.sum * kept(1.0) + student().map(|l| sum(l, largest, 1.0)).sum::<f64>();
            row.warm_sum = row.warm_sum * kept(inverse)
                + student().map(|l| sum(l, largest, inverse)).sum::<f64>();
            row.largest = largest;

            let largest = teacher().fold(row.teacher_largest, f32::max);
            let kept = f64::from(((row.teacher_largest - largest) * inverse).exp());
            row.teacher_sum =
                row.teacher_sum * kept + teacher().map(|l| sum(l, largest, inverse)).sum::<f64>();
            let differences = teacher().zip(student());
            let difference: f64 = differences
                .map(|(t, s)| sum(t, largest, inverse) * f64::from(t - s))
                .sum();
            row.difference = row.difference * kept + difference;
            row.teacher_largest = largest;
            if let Some(column) = columns.column(i) {
                row.target = capped(columns.cap, logits[column]);
            }
        });
        Ok(())
    }

    /// Replaces a chunk of the student's logits by their gradients, `weight ((1 - label_share) T (softmax(s / T) - softmax(t / T)) +
    /// label_share (softmax(s) - onehot))`. Rows without a label get zeros. `sums` and `weights` have one entry per row.
    pub fn divergence_gradient(
        &self,
        columns: &HeadColumns<'_>,
        teacher: &TeacherColumns<'_>,
        logits: &mut [f32],
        (sums, weights, label_share): (&[RowSums], &[f32], f32),
    ) -> Result<()> {
        columns.check(logits.len(), sums.len())?;
        teacher.check(logits.len())?;
        let inverse = 1.0 / teacher.temperature;
        let factor = (1.0 - label_share) * teacher.temperature;
        by_parts(self.pool(), logits, columns.width, |i, logits| {
            if columns.labels[i] < 0 {
                return logits.fill(0.0);
            }
            let (target, sums) = (columns.column(i), sums[i]);
            let taught = &teacher.logits[i * columns.width..][..columns.width];
            for (column, (logit, &t)) in logits.iter_mut().zip(taught).enumerate() {
                let (s, t) = (capped(columns.cap, *logit), capped(teacher.cap, t));
                let slope = columns.cap.map_or(1.0, |cap| 1.0 - (s / cap) * (s / cap));
                let mut gradient =
                    factor * ((s * inverse - sums.warm).exp() - (t * inverse - sums.teacher).exp());
                if label_share > 0.0 {
                    let onehot = f32::from(u8::from(target == Some(column)));
                    gradient += label_share * ((s - sums.student).exp() - onehot);
                }
                *logit = weights[i] * gradient * slope;
            }
        });
        Ok(())
    }
}

impl TeacherColumns<'_> {
    fn check(&self, logits: usize) -> Result<()> {
        if self.logits.len() != logits {
            bail!(
                Internal,
                "{logits} logits of a student and {} of its teacher",
                self.logits.len()
            );
        }
        Ok(())
    }
}
