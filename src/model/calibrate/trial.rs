//! The choice between the candidates of a block's matrices, by the error of the block's output.

use std::ops::Range;

use super::options::{CalibratedMatrix, Done};
use super::search::{Candidate, Found};
use crate::base::{Result, call};
use crate::cpu::Cpu;
use crate::format::nvfp4::{BLOCK, dequantize};
use crate::model::training::{MatrixId, Observer};

/// Matrices with the same inputs, with their candidates.
pub(super) type Group = Vec<(MatrixId, Found)>;

/// A block in which candidates replace the matrices.
struct Trial<'a> {
    observer: &'a mut Observer,
    host: &'a Cpu,
    groups: &'a [Group],
    /// Index of the candidate that the block currently has, for each group; `None` before the first trial.
    placed: Vec<Option<usize>>,
}

impl Trial<'_> {
    /// The error of the block's output with these candidates.
    fn error(&mut self, picks: &[usize]) -> Result<f64> {
        for (group, &pick) in picks.iter().enumerate() {
            if self.placed[group] == Some(pick) {
                continue;
            }
            for (id, found) in &self.groups[group] {
                let matrix = &candidate(found, pick).matrix;
                let (rows, cols) = (matrix.rows, matrix.cols);
                let mut values = vec![0f32; rows * cols];
                let read = |rows: Range<usize>, out: &mut [f32]| {
                    let codes = &matrix.codes[rows.start * cols / 2..rows.end * cols / 2];
                    let scales = &matrix.scales[rows.start * cols / BLOCK..rows.end * cols / BLOCK];
                    dequantize(codes, scales, matrix.global, out)
                };
                self.host.read_rows(0..rows, cols, &read, &mut values)?;
                self.observer.put(*id, &values)?;
            }
            self.placed[group] = Some(pick);
        }
        call::check()?;
        self.observer.error()
    }
}

fn candidate(found: &Found, pick: usize) -> &Candidate {
    &found.candidates[pick.min(found.candidates.len() - 1)]
}

/// Chooses a candidate for each group of the last block that the observer ran. First takes the search that gives the best output if all
/// groups use it; then, group by group, switches to the other candidate if that improves the output. The divergence of the model's
/// predictions follows the error of a block's output, not the errors of its products: see docs/numerics.md.
pub(super) fn choose(
    observer: &mut Observer,
    host: &Cpu,
    groups: Vec<Group>,
    name: impl Fn(MatrixId) -> String,
) -> Result<Vec<Done>> {
    let has_choice = |group: &Group| group.iter().any(|(_, found)| found.candidates.len() > 1);
    let mut picks = vec![0; groups.len()];
    if groups.iter().any(has_choice) {
        let mut trial = Trial {
            observer,
            host,
            placed: vec![None; groups.len()],
            groups: &groups,
        };
        let mut least = trial.error(&picks)?;
        let others = vec![1; groups.len()];
        let error = trial.error(&others)?;
        if error < least {
            (least, picks) = (error, others);
        }
        for group in 0..groups.len() {
            if !has_choice(&groups[group]) {
                continue;
            }
            let mut other = picks.clone();
            other[group] = 1 - picks[group];
            let error = trial.error(&other)?;
            if error < least {
                (least, picks) = (error, other);
            }
        }
    }
    let mut done = Vec::new();
    for (group, pick) in groups.into_iter().zip(picks) {
        for (id, mut found) in group {
            let last = found.candidates.len() - 1;
            let chosen = found.candidates.swap_remove(pick.min(last));
            done.push(Done {
                id,
                report: CalibratedMatrix {
                    name: name(id),
                    choice: chosen.choice,
                    error_of_sweep: found.error_of_sweep,
                    error: chosen.error,
                },
                matrix: chosen.matrix,
            });
        }
    }
    Ok(done)
}
