//! Mixture of experts: routing, and the gather and scatter of rows for each expert, forward and backward.

use std::ops::Range;

use super::training::upload;
use super::{Array, Device, Element, Mixed, Slice, SliceMut};
use crate::base::error::{Result, bail};
use crate::cuda::training as cuda;
use crate::tensor::SigmoidScoring;

/// The rows of a batch assigned to each expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// Row indices by expert, ascending within each expert.
    rows: Vec<u32>,
    /// The routing weight of each entry of `rows`.
    weights: Vec<f32>,
    /// Index of the first row of each expert, and the end of the last one.
    offsets: Vec<usize>,
}

impl Routes {
    fn new(by_expert: &[Vec<(u32, f32)>]) -> Routes {
        let all = || by_expert.iter().flatten();
        let mut offsets = vec![0];
        for rows in by_expert {
            offsets.push(offsets[offsets.len() - 1] + rows.len());
        }
        Routes {
            rows: all().map(|&(row, _)| row).collect(),
            weights: all().map(|&(_, weight)| weight).collect(),
            offsets,
        }
    }

    /// Routes no row.
    pub fn none() -> Routes {
        Routes::every_row(Vec::new())
    }

    /// Routes every row to the shared expert. The weights are 1 or, with a gate, the sigmoid of its logits.
    pub fn shared(rows: usize, gate: Option<&[f32]>) -> Routes {
        let sigmoid = |x: &f32| 1.0 / (1.0 + (-x).exp());
        Routes::every_row(match gate {
            Some(logits) => logits.iter().map(sigmoid).collect(),
            None => vec![1.0; rows],
        })
    }

    fn every_row(weights: Vec<f32>) -> Routes {
        Routes {
            rows: (0..weights.len() as u32).collect(),
            offsets: vec![0, weights.len()],
            weights,
        }
    }

    /// Multiplies the weights of each expert by its factor.
    pub fn scaled(mut self, factors: &[f32]) -> Result<Routes> {
        if factors.len() + 1 != self.offsets.len() {
            bail!(
                InvalidArgument,
                "{} factors of {} experts; expected one for each",
                factors.len(),
                self.offsets.len() - 1
            );
        }
        for (expert, factor) in factors.iter().enumerate() {
            let range = self.range(expert);
            self.weights[range].iter_mut().for_each(|w| *w *= factor);
        }
        Ok(self)
    }

    /// Number of rows of an expert.
    pub fn count(&self, expert: usize) -> usize {
        self.range(expert).len()
    }

    /// The rows of an expert, ascending, each with its routing weight.
    pub fn of(&self, expert: usize) -> impl Iterator<Item = (usize, f32)> {
        let range = self.range(expert);
        let rows = self.rows[range.clone()].iter().map(|&row| row as usize);
        rows.zip(self.weights[range].iter().copied())
    }

    fn range(&self, expert: usize) -> Range<usize> {
        self.offsets[expert]..self.offsets[expert + 1]
    }
}

/// Routes each row by its logits, `[rows, count]`, to its top `per_token` experts, weighted with their softmax probabilities over all
/// experts. Of equal logits the lower index wins. `normalized` divides the weights of a row by their sum.
pub fn route(logits: &[f32], count: usize, per_token: usize, normalized: bool) -> Result<Routes> {
    if per_token == 0 || per_token > count || !logits.len().is_multiple_of(count) {
        bail!(
            InvalidArgument,
            "{} logits of {count} experts, of which {per_token} are chosen; there must be whole rows, and enough experts",
            logits.len()
        );
    }
    let mut by_expert = vec![Vec::new(); count];
    let mut order: Vec<usize> = Vec::with_capacity(count);
    for (row, logits) in logits.chunks_exact(count).enumerate() {
        check_logits(logits)?;
        order.clear();
        order.extend(0..count);
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let chosen = &order[..per_token];
        let probability = softmax(logits);
        let total: f32 = match normalized {
            true => chosen.iter().map(|&expert| probability(expert)).sum(),
            false => 1.0,
        };
        for &expert in chosen {
            by_expert[expert].push((row as u32, probability(expert) / total));
        }
    }
    Ok(Routes::new(&by_expert))
}

/// The softmax of the logits of a row, by expert.
fn softmax(logits: &[f32]) -> impl Fn(usize) -> f32 {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f32 = logits.iter().map(|l| (l - largest).exp()).sum();
    move |expert| (logits[expert] - largest).exp() / sum
}

/// How the logits of a router score experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// By their softmax: [`route`].
    Softmax,
    /// Each by its own sigmoid: [`route_by_sigmoid`].
    Sigmoid(SigmoidScoring),
}

/// Routes each row by its logits, `[rows, count]`. The scores of experts are the sigmoids of their logits. A row chooses the `per_token`
/// experts with the largest sums of score and `correction` within its best groups; the weights are the scores alone, divided by their sum
/// if `normalized`. Of equal sums the lower index wins.
pub fn route_by_sigmoid(
    logits: &[f32],
    per_token: usize,
    normalized: bool,
    scoring: &SigmoidScoring,
    correction: &[f32],
) -> Result<Routes> {
    let count = correction.len();
    scoring.check(count, per_token)?;
    if !logits.len().is_multiple_of(count) {
        bail!(
            InvalidArgument,
            "{} logits of {count} experts; there must be whole rows",
            logits.len()
        );
    }
    let mut by_expert = vec![Vec::new(); count];
    for (row, logits) in logits.chunks_exact(count).enumerate() {
        check_logits(logits)?;
        let scores: Vec<f32> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        let corrected: Vec<f32> = scores.iter().zip(correction).map(|(s, c)| s + c).collect();
        let chosen = best_in_groups(&corrected, per_token, scoring);
        let total: f32 = match normalized {
            // Keeps the quotient finite if no score is above zero, as the models were trained.
            true => chosen.iter().map(|&expert| scores[expert]).sum::<f32>() + 1e-20,
            false => 1.0,
        };
        for expert in chosen {
            let weight = scores[expert] / total * scoring.scale;
            by_expert[expert].push((row as u32, weight));
        }
    }
    Ok(Routes::new(&by_expert))
}

/// The `per_token` experts with the largest values in the groups with the largest sum of their two largest values.
fn best_in_groups(values: &[f32], per_token: usize, scoring: &SigmoidScoring) -> Vec<usize> {
    let size = values.len() / scoring.groups;
    let largest_first = |values: &[f32]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
        order
    };
    let groups: Vec<f32> = values
        .chunks_exact(size)
        .map(|group| {
            let order = largest_first(group);
            order.iter().take(2).map(|&expert| group[expert]).sum()
        })
        .collect();
    let best = &largest_first(&groups)[..scoring.top_groups];
    let mut chosen = largest_first(values);
    chosen.retain(|expert| best.contains(&(expert / size)));
    chosen.truncate(per_token);
    chosen
}

/// Fails if the logits of a row are not finite.
pub fn check_logits(logits: &[f32]) -> Result<()> {
    match logits.iter().position(|l| !l.is_finite()) {
        None => Ok(()),
        Some(expert) => bail!(
            InvalidArgument,
            "the router gives expert {expert} a logit of {}, by which nothing can be chosen",
            logits[expert]
        ),
    }
}

/// Backward of [`route`]: the gradients of the logits `[rows, count]` from the gradients of the weights, expert by expert.
///
/// The weights of a row are a softmax `w = p`, over all experts or, if `normalized`, over the chosen ones:
/// `dlogit_j = p_j (dw_j - sum_e p_e dw_e)`, where `dw = 0` for experts that were not chosen.
pub fn route_backward(
    logits: &[f32],
    count: usize,
    routes: &Routes,
    dweights: &[f32],
    normalized: bool,
) -> Vec<f32> {
    let mut dlogits = vec![0.0; logits.len()];
    let mut dots = vec![0.0; logits.len() / count];
    let routed = |expert: usize| routes.of(expert).zip(&dweights[routes.range(expert)]);
    for expert in 0..count {
        for ((row, weight), &dweight) in routed(expert) {
            dots[row] += weight * dweight;
            dlogits[row * count + expert] = weight * dweight;
        }
    }
    let rows = dlogits.chunks_exact_mut(count);
    for ((row, logits), dot) in rows.zip(logits.chunks_exact(count)).zip(&dots) {
        if !normalized {
            let probability = softmax(logits);
            for (expert, d) in row.iter_mut().enumerate() {
                *d -= probability(expert) * dot;
            }
        }
    }
    if normalized {
        for expert in 0..count {
            for (row, weight) in routes.of(expert) {
                dlogits[row * count + expert] -= weight * dots[row];
            }
        }
    }
    dlogits
}

/// Routing in the memory of a device.
#[derive(Debug)]
pub struct RoutedRows {
    routes: Routes,
    /// The rows and weights on a GPU.
    on_gpu: Option<(Array<u32>, Array)>,
}

impl RoutedRows {
    /// Places the routing on a device.
    pub fn new(device: &Device, routes: Routes) -> Result<RoutedRows> {
        let on_gpu = match device {
            Device::Cpu(_) => None,
            Device::Cuda(_) => Some((
                upload(device, &routes.rows)?,
                upload(device, &routes.weights)?,
            )),
        };
        Ok(RoutedRows { routes, on_gpu })
    }

    /// The routing.
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    fn gpu(&self, expert: usize) -> Result<cuda::RowsOfExpert<'_>> {
        let Some((rows, weights)) = &self.on_gpu else {
            bail!(Internal, "routes of the host were asked for on a GPU");
        };
        let range = self.routes.range(expert);
        Ok(cuda::RowsOfExpert {
            rows: rows.part(range.clone())?.cuda()?,
            weights: weights.part(range)?.cuda()?,
        })
    }

    /// Gathers the rows of `x` `[T, width]` assigned to an expert into `taken` `[n, width]`.
    pub fn take<E: Element<Host = f32>>(
        &self,
        device: &Device,
        expert: usize,
        x: Slice<'_, E>,
        width: usize,
        taken: SliceMut<'_, E>,
    ) -> Result<()> {
        match device {
            Device::Cpu(_) => {
                let (x, taken) = (x.host()?, taken.host()?.chunks_exact_mut(width));
                for ((row, _), taken) in self.routes.of(expert).zip(taken) {
                    taken.copy_from_slice(&x[row * width..][..width]);
                }
                Ok(())
            }
            Device::Cuda(_) => {
                let rows = self.gpu(expert)?;
                cuda::take_rows(x.cuda()?, &rows, width * E::GPU_BYTES, taken.cuda()?)
            }
        }
    }

    /// Adds an expert's results `x` `[n, width]`, multiplied by their routing weights, to its rows of `sum` `[T, width]`.
    pub fn add<E: Element<Host = f32>>(
        &self,
        device: &Device,
        expert: usize,
        x: Slice<'_, E>,
        width: usize,
        sum: SliceMut<'_>,
    ) -> Result<()> {
        match device {
            Device::Cpu(_) => {
                let (sum, x) = (sum.host()?, x.host()?.chunks_exact(width));
                for ((row, weight), x) in self.routes.of(expert).zip(x) {
                    let sum = &mut sum[row * width..][..width];
                    sum.iter_mut().zip(x).for_each(|(s, x)| *s += weight * x);
                }
                Ok(())
            }
            Device::Cuda(_) => {
                let rows = self.gpu(expert)?;
                match E::GPU_BYTES == Mixed::GPU_BYTES {
                    true => cuda::add_rows(x.cuda()?, &rows, width, sum.cuda()?),
                    false => cuda::add_rows_f32(x.cuda()?, &rows, width, sum.cuda()?),
                }
            }
        }
    }

    /// Backward of [`RoutedRows::take`]: adds the gradients `dx` `[n, width]` of an expert's rows to those rows of `sum` `[T, width]`.
    pub fn take_backward(
        &self,
        device: &Device,
        expert: usize,
        dx: Slice<'_, Mixed>,
        width: usize,
        sum: SliceMut<'_>,
    ) -> Result<()> {
        match device {
            Device::Cpu(_) => {
                let (sum, dx) = (sum.host()?, dx.host()?.chunks_exact(width));
                for ((row, _), dx) in self.routes.of(expert).zip(dx) {
                    let sum = &mut sum[row * width..][..width];
                    sum.iter_mut().zip(dx).for_each(|(s, x)| *s += x);
                }
                Ok(())
            }
            Device::Cuda(_) => {
                let rows = self.gpu(expert)?;
                cuda::add_rows_unweighted(dx.cuda()?, &rows, width, sum.cuda()?)
            }
        }
    }

    /// Backward of [`RoutedRows::add`] for an expert whose results were `x` `[n, width]`. From the gradients `dsum` `[T, width]` computes
    /// `dx` `[n, width]`, the gradients of the results, and `dweights` `[n]`, the gradients of the weights.
    pub fn add_backward(
        &self,
        device: &Device,
        expert: usize,
        (x, dsum): (Slice<'_, Mixed>, Slice<'_, Mixed>),
        width: usize,
        dx: SliceMut<'_, Mixed>,
        dweights: SliceMut<'_>,
    ) -> Result<()> {
        match device {
            Device::Cpu(_) => {
                let (x, dsum) = (x.host()?.chunks_exact(width), dsum.host()?);
                let made = dx.host()?.chunks_exact_mut(width).zip(dweights.host()?);
                for (((row, weight), x), (dx, dweight)) in self.routes.of(expert).zip(x).zip(made) {
                    let dsum = &dsum[row * width..][..width];
                    *dweight = dsum.iter().zip(x).map(|(d, x)| d * x).sum();
                    dx.iter_mut().zip(dsum).for_each(|(dx, d)| *dx = weight * d);
                }
                Ok(())
            }
            Device::Cuda(_) => {
                let (rows, operands) = (self.gpu(expert)?, (x.cuda()?, dsum.cuda()?));
                cuda::add_rows_backward(operands, &rows, width, dx.cuda()?, dweights.cuda()?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn the_most_probable_are_chosen_and_of_equals_the_first() {
        let third = (1.0f32 / 3.0).ln();
        // Probabilities 3, 1, 1, 3 of 8; and two chosen among four equal ones.
        let logits = [0.0, third, third, 0.0, 1.0, 1.0, 1.0, 1.0];
        let routes = route(&logits, 4, 2, false).unwrap();
        let close = |routes: &Routes, expert: usize, expected: &[(usize, f32)]| {
            let found: Vec<_> = routes.of(expert).collect();
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.iter().zip(expected) {
                assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-6, "{a:?} {b:?}");
            }
        };
        close(&routes, 0, &[(0, 0.375), (1, 0.25)]);
        close(&routes, 1, &[(1, 0.25)]);
        close(&routes, 2, &[]);
        close(&routes, 3, &[(0, 0.375)]);
        let routes = route(&logits, 4, 2, true).unwrap();
        close(&routes, 0, &[(0, 0.5), (1, 0.5)]);
    }

    /// The first group has the best expert, and the second the two that are best together.
    #[test]
    fn a_correction_and_groups_choose_and_scores_weigh() {
        let logit = |p: f32| (p / (1.0 - p)).ln();
        let logits = [0.9, 0.1, 0.6, 0.7].map(logit);
        let scoring = |top_groups, scale| SigmoidScoring {
            groups: 2,
            top_groups,
            scale,
        };
        let close = |routes: &Routes, expected: [&[(usize, f32)]; 4]| {
            for (expert, expected) in expected.into_iter().enumerate() {
                let found: Vec<_> = routes.of(expert).collect();
                assert_eq!(found.len(), expected.len(), "expert {expert}");
                for (a, b) in found.iter().zip(expected) {
                    assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-6, "{a:?} {b:?}");
                }
            }
        };
        let none = [0.0; 4];
        let routes = route_by_sigmoid(&logits, 2, false, &scoring(2, 1.0), &none).unwrap();
        close(&routes, [&[(0, 0.9)], &[], &[], &[(0, 0.7)]]);
        let routes = route_by_sigmoid(&logits, 2, false, &scoring(1, 1.0), &none).unwrap();
        close(&routes, [&[], &[], &[(0, 0.6)], &[(0, 0.7)]]);
        let routes = route_by_sigmoid(&logits, 2, true, &scoring(1, 2.5), &none).unwrap();
        let of = |score: f32| [(0, score / 1.3 * 2.5)];
        close(&routes, [&[], &[], &of(0.6), &of(0.7)]);
        let correction = [0.0, 0.5, 0.0, 0.0];
        let routes = route_by_sigmoid(&logits, 2, false, &scoring(1, 1.0), &correction).unwrap();
        close(&routes, [&[(0, 0.9)], &[(0, 0.1)], &[], &[]]);
        for (per_token, top_groups) in [(3, 1), (1, 3), (0, 1)] {
            let refused =
                route_by_sigmoid(&logits, per_token, true, &scoring(top_groups, 1.0), &none);
            expect_kind(refused, ErrorKind::InvalidArgument, "of 4 experts in");
        }
    }

    #[test]
    fn refusals() {
        let invalid = ErrorKind::InvalidArgument;
        expect_kind(route(&[0.0; 4], 4, 5, true), invalid, "4 logits of 4");
        expect_kind(route(&[0.0; 5], 4, 1, true), invalid, "5 logits of 4");
        let nan = [0.0, f32::NAN];
        expect_kind(route(&nan, 2, 1, true), invalid, "expert 1 a logit of NaN");
    }

    /// Compares with differences of the weights in f64 for small steps of a logit that do not change the chosen experts.
    #[test]
    fn gradients_of_logits_are_differences_of_weights() {
        let logits = [0.4f32, -0.3, 1.1, 0.2, -0.5, 0.9, 0.1, 0.7];
        let pull = |expert: usize, row: usize| (expert as f64 - 1.3) * (row as f64 + 0.7);
        for normalized in [false, true] {
            let routes = route(&logits, 4, 2, normalized).unwrap();
            let order = |expert| {
                routes
                    .of(expert)
                    .map(move |(row, _)| pull(expert, row) as f32)
            };
            let dweights: Vec<f32> = (0..4).flat_map(order).collect();
            let found = route_backward(&logits, 4, &routes, &dweights, normalized);
            let pulled = |logits: &[f32]| -> f64 {
                let routes = route(logits, 4, 2, normalized).unwrap();
                let each = |e| routes.of(e).map(move |(r, w)| f64::from(w) * pull(e, r));
                (0..4).flat_map(each).sum()
            };
            for (i, found) in found.iter().enumerate() {
                let (mut above, mut below) = (logits, logits);
                above[i] += 0.01;
                below[i] -= 0.01;
                let expected = (pulled(&above) - pulled(&below)) / 0.02;
                assert!(
                    (f64::from(*found) - expected).abs() < 2e-4,
                    "{normalized} {i}: {found} {expected}"
                );
            }
        }
    }
}
