//! Filters of logits by the shape of their distribution, before temperature: top-n-sigma, locally typical sampling and XTC. They leave at
//! least one token. The adjustments of logits use it.

use std::cmp::Reverse;
use std::f32::consts::LOG2_E;
use std::ops::ControlFlow;

use crate::base::{Result, memory};
use crate::cpu::sample::{largest, place, weigh};
use crate::format::random;
use crate::model::Choice;

/// Distinguishes the random numbers of XTC from those of the draws with the same seed and number.
const XTC_STREAM: u64 = u64::from_be_bytes(*b"xtc draw");

/// Softmax of a row of logits. The memory is used again.
#[derive(Clone, Debug, Default)]
pub(super) struct Softmax {
    /// Logarithms to base 2 of probabilities relative to the largest.
    logs: Vec<f32>,
    /// Probabilities relative to the sum of all, with a fraction.
    weights: Vec<f32>,
    /// Tokens in the order of a filter.
    order: Vec<u64>,
}

impl Softmax {
    /// Fills in the softmax of `logits`, the largest of which is `top`. Returns the sum of weights, which does not depend on their order.
    fn fill(&mut self, logits: &[f32], top: f32) -> Result<u64> {
        for values in [&mut self.logs, &mut self.weights] {
            values.clear();
            memory::make_room(values, logits.len())?;
            values.resize(logits.len(), 0.0);
        }
        weigh(logits, top, LOG2_E, &mut self.logs, &mut self.weights)?;
        Ok(self.weights.iter().map(|&weight| weight as u64).sum())
    }

    /// Excludes tokens until those whose surprise differs least from the entropy have the probability `mass` together (locally typical
    /// sampling, Meister et al. 2022).
    pub(super) fn typical(&mut self, logits: &mut [f32], mass: f32) -> Result<()> {
        let Some(top) = finite_top(logits) else {
            return Ok(());
        };
        let total = self.fill(logits, top)?;
        let each = self.weights.iter().zip(&self.logs);
        let expected = each
            .filter(|(weight, _)| **weight >= 1.0)
            .map(|(&weight, &log)| f64::from(weight) * f64::from(log))
            .sum::<f64>()
            / total as f64;
        self.order.clear();
        memory::make_room(&mut self.order, logits.len())?;
        let tokens = (0u64..).zip(&self.logs).zip(&*logits);
        let finite = tokens.filter(|(_, logit)| logit.is_finite());
        // Floats that are not negative order as their bits do; of equal ones the lower token comes first.
        self.order.extend(finite.map(|((token, &log), _)| {
            let deviation = (f64::from(log) - expected).abs() as f32;
            u64::from(deviation.to_bits()) << 32 | token
        }));
        let weights = &self.weights;
        let wanted = (f64::from(mass) * total as f64).ceil() as u64;
        let weight = |key: u64| weights[key as u32 as usize] as u64;
        let last = reaching(&mut self.order, wanted, weight);
        for key in self.order.iter().filter(|&&key| Some(key) > last) {
            logits[*key as u32 as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }

    /// Excludes, for a share `probability` of choices, the tokens that have at least the probability `threshold`, but for the least probable of
    /// them (XTC by p-e-w, text-generation-webui, pull request 6335). Tokens that `min_p` leaves out are no part of it, nor of the result.
    pub(super) fn xtc(
        &mut self,
        logits: &mut [f32],
        (probability, threshold): (f32, f32),
        choice: &Choice<'_>,
    ) -> Result<()> {
        let rule = choice.rule();
        if random::uniform(rule.seed ^ XTC_STREAM, rule.draw) >= probability {
            return Ok(());
        }
        let Some(top) = finite_top(logits) else {
            return Ok(());
        };
        if rule.scale > 0.0 {
            exclude(logits, |logit| (logit - top) * rule.scale < rule.least_log);
        }
        let total = self.fill(logits, top)?;
        let least = f64::from(threshold) * total as f64;
        let tokens = self.weights.iter().zip(&*logits).enumerate();
        let probable =
            tokens.filter(|(_, (weight, logit))| f64::from(**weight) >= least && logit.is_finite());
        let mut probable: Vec<usize> = probable.map(|(token, _)| token).collect();
        // The last of equal ones is the least probable, as in a draw.
        let key = |&i: &usize| (place(logits[probable[i]]), Reverse(i));
        if let Some(kept) = (0..probable.len()).min_by_key(key) {
            probable.swap_remove(kept);
        }
        for token in probable {
            logits[token] = f32::NEG_INFINITY;
        }
        Ok(())
    }
}

/// Excludes tokens whose logit is more than `n` standard deviations of the finite logits below the largest (top-n-sigma, Tang et al. 2024).
pub(super) fn top_n_sigma(logits: &mut [f32], n: f32) {
    let Some(top) = finite_top(logits) else {
        return;
    };
    let (mut count, mut sum, mut squares) = (0u32, 0.0, 0.0);
    for below in logits
        .iter()
        .map(|&logit| f64::from(logit) - f64::from(top))
    {
        if below.is_finite() {
            (count, sum, squares) = (count + 1, sum + below, squares + below * below);
        }
    }
    let mean = sum / f64::from(count);
    let variance = (squares / f64::from(count) - mean * mean).max(0.0);
    let least = f64::from(top) - f64::from(n) * variance.sqrt();
    exclude(logits, |logit| f64::from(logit) < least);
}

/// The largest of `logits`, if it is finite.
fn finite_top(logits: &[f32]) -> Option<f32> {
    match largest(logits) {
        ControlFlow::Continue(top) if top.is_finite() => Some(top),
        _ => None,
    }
}

/// Excludes the tokens whose logits are `unwanted`.
fn exclude(logits: &mut [f32], unwanted: impl Fn(f32) -> bool) {
    for logit in logits {
        if unwanted(*logit) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// The last of the smallest `keys` whose weights reach the sum `wanted`, or the largest key. Reorders them, in time linear in their number.
fn reaching(keys: &mut [u64], mut wanted: u64, weight: impl Fn(u64) -> u64) -> Option<u64> {
    let mut rest = keys;
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable(middle);
        let (low, high) = rest.split_at_mut(middle);
        let sum: u64 = low.iter().map(|&key| weight(key)).sum();
        rest = match sum >= wanted {
            true => low,
            false => {
                wanted -= sum;
                high
            }
        };
    }
    rest.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SamplingOptions;
    use proptest::prelude::*;

    const NEVER: f32 = f32::NEG_INFINITY;

    /// Logits of some tokens, a part of which is excluded.
    fn rows() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![5 => -9.0f32..9.0, 1 => Just(NEVER), 1 => Just(2.5f32)];
        proptest::collection::vec(logit, 1..60)
    }

    /// Probabilities in f64.
    fn softmax(logits: &[f32]) -> Vec<f64> {
        let powers: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
        let sum: f64 = powers.iter().sum();
        powers.into_iter().map(|power| power / sum).collect()
    }

    fn kept(logits: &[f32]) -> Vec<usize> {
        (0..logits.len()).filter(|&i| logits[i] > NEVER).collect()
    }

    fn drawn(seed: u64) -> SamplingOptions {
        SamplingOptions {
            temperature: 1.0,
            seed: Some(seed),
            ..SamplingOptions::default()
        }
    }

    fn choice(options: &SamplingOptions, draw: u64) -> Choice<'_> {
        Choice {
            options,
            draw,
            history: &[],
            allowed: None,
        }
    }

    /// Filters leave the logits that they keep as they were.
    fn assert_filtered(before: &[f32], after: &[f32]) {
        assert!(after.iter().any(|x| x.is_finite()) || kept(before).is_empty());
        for (before, after) in before.iter().zip(after) {
            assert!(after == before || *after == NEVER);
        }
    }

    proptest! {
        #[test]
        fn top_n_sigma_is_that_of_the_definition(logits in rows(), n in 0.05f32..3.0) {
            let finite: Vec<f64> = logits.iter().map(|&x| f64::from(x)).filter(|x| x.is_finite()).collect();
            let count = finite.len() as f64;
            let mean = finite.iter().sum::<f64>() / count;
            let deviation = (finite.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
            let least = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max) - f64::from(n) * deviation;
            let mut got = logits.clone();
            top_n_sigma(&mut got, n);
            assert_filtered(&logits, &got);
            for (&before, after) in logits.iter().zip(got) {
                // Rounding decides at the edge.
                if before.is_finite() && (f64::from(before) - least).abs() > 1e-9 {
                    prop_assert_eq!(after > NEVER, f64::from(before) > least);
                }
            }
        }

        #[test]
        fn typical_tokens_are_those_of_the_definition(logits in rows(), mass in 0.0f32..1.0) {
            let mut got = logits.clone();
            Softmax::default().typical(&mut got, mass).unwrap();
            assert_filtered(&logits, &got);
            let probabilities = softmax(&logits);
            let surprise = |i: &usize| -probabilities[*i].ln();
            let entropy: f64 = kept(&logits).iter().map(|i| probabilities[*i] * surprise(i)).sum();
            let deviation = |i: &usize| (surprise(i) - entropy).abs();
            let mut order = kept(&logits);
            order.sort_by(|a, b| deviation(a).total_cmp(&deviation(b)));
            let (mut sum, mut most) = (0.0, 0.0f64);
            for i in &order {
                if sum >= f64::from(mass) && sum > 0.0 {
                    break;
                }
                (sum, most) = (sum + probabilities[*i], deviation(i));
            }
            let kept = kept(&got);
            // Rounding decides between equals, and where the sum is just reached.
            let total: f64 = kept.iter().map(|&i| probabilities[i]).sum();
            let largest = kept.iter().max_by(|a, b| deviation(a).total_cmp(&deviation(b)));
            if let Some(largest) = largest {
                prop_assert!(total > f64::from(mass) - 1e-6);
                prop_assert!(kept.len() == 1 || total - probabilities[*largest] < f64::from(mass) + 1e-6);
                let near = |x: f64| x < deviation(largest) - 1e-5;
                prop_assert!(order.iter().filter(|i| near(deviation(i))).all(|i| kept.contains(i)));
            }
            let is_clear = (total - sum).abs() < 1e-6;
            prop_assert!(!is_clear || largest.is_none_or(|i| (deviation(i) - most).abs() < 1e-5));
        }

        #[test]
        fn top_choices_are_those_of_the_definition(
            logits in rows(),
            threshold in 0.0f32..0.6,
            min_p in prop_oneof![Just(0.0f32), 0.001f32..0.5],
            temperature in prop_oneof![Just(0.0f32), Just(1.0), Just(0.5)],
        ) {
            let options = SamplingOptions { temperature, min_p, ..drawn(1) };
            let mut got = logits.clone();
            Softmax::default().xtc(&mut got, (1.0, threshold), &choice(&options, 0)).unwrap();
            assert_filtered(&logits, &got);
            // Min-p comes first, at the temperature of the draw.
            let top = logits.iter().copied().fold(NEVER, f32::max);
            let least = f64::from(temperature) * f64::from(min_p).ln();
            let mut left = logits.clone();
            for logit in &mut left {
                if temperature > 0.0 && f64::from(*logit - top) < least {
                    *logit = NEVER;
                }
            }
            let probabilities = softmax(&left);
            let is_clear = probabilities.iter().all(|p| (p - f64::from(threshold)).abs() > 1e-6)
                && logits.iter().all(|&x| (f64::from(x - top) - least).abs() > 1e-5);
            let mut probable = kept(&left);
            probable.retain(|&i| probabilities[i] >= f64::from(threshold));
            // The most probable first, of equal ones the lower id.
            probable.sort_by(|&a, &b| left[b].total_cmp(&left[a]).then(a.cmp(&b)));
            probable.pop();
            let mut want = kept(&left);
            want.retain(|i| !probable.contains(i));
            prop_assert!(!is_clear || kept(&got) == want, "{:?} and not {want:?}", kept(&got));
        }
    }

    #[test]
    fn numbers_by_hand() {
        // Probabilities 0.5, 0.25, 0.125, 0.125: an entropy of 1.75 bits, from which 0.25 differs least, then 0.5, then 0.125.
        let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
        for (mass, want) in [
            (0.0, &[1][..]),
            (0.2, &[1]),
            (0.3, &[0, 1]),
            (0.7, &[0, 1]),
            (0.8, &[0, 1, 2]),
            (0.9, &[0, 1, 2, 3]),
        ] {
            let mut got = logits;
            Softmax::default().typical(&mut got, mass).unwrap();
            assert_eq!(kept(&got), want, "{mass}");
        }
        let options = drawn(1);
        for (threshold, want) in [
            (0.6, &[0, 1, 2, 3][..]),
            (0.3, &[0, 1, 2, 3]),
            (0.2, &[1, 2, 3]),
            (0.1, &[3]),
        ] {
            let mut got = logits;
            let by = (1.0, threshold);
            Softmax::default()
                .xtc(&mut got, by, &choice(&options, 0))
                .unwrap();
            assert_eq!(kept(&got), want, "{threshold}");
        }
        // A mean of 2 and a standard deviation of the square root of 5.
        let mut got = [5.0, 3.0, NEVER, 1.0, -1.0];
        top_n_sigma(&mut got, 1.0);
        assert_eq!(kept(&got), [0, 1]);
        // No number, and nothing left to choose, are the choice's to refuse.
        for mut logits in [[NEVER; 3], [1.0, f32::NAN, 2.0], [1.0, f32::INFINITY, 2.0]] {
            let before = logits.map(f32::to_bits);
            top_n_sigma(&mut logits, 1.0);
            let mut softmax = Softmax::default();
            softmax.typical(&mut logits, 0.5).unwrap();
            softmax
                .xtc(&mut logits, (1.0, 0.1), &choice(&options, 0))
                .unwrap();
            assert_eq!(logits.map(f32::to_bits), before);
        }
    }

    #[test]
    fn the_share_of_choices_without_the_top_is_the_probability() {
        const DRAWS: u64 = 20_000;
        let excludes = |seed: u64, draw: u64, probability: f32| {
            let (options, mut logits) = (drawn(seed), [0.0f32, 0.0]);
            let choice = choice(&options, draw);
            let by = (probability, 0.1);
            Softmax::default().xtc(&mut logits, by, &choice).unwrap();
            logits[0] == NEVER
        };
        for probability in [0.05f32, 0.3, 0.5, 0.9] {
            let count = (0..DRAWS).filter(|&draw| excludes(7, draw, probability));
            let (p, n) = (f64::from(probability), DRAWS as f64);
            let deviation = (count.count() as f64 - p * n) / (p * (1.0 - p) * n).sqrt();
            assert!(deviation.abs() < 4.0, "{probability}: {deviation} sigma");
        }
        assert!((0..100).all(|draw| excludes(7, draw, 1.0)));
        // Another seed excludes at other draws, the same one at the same.
        let of_seed = |seed| (0..64).map(move |draw| excludes(seed, draw, 0.5));
        assert!(of_seed(7).eq(of_seed(7)) && !of_seed(7).eq(of_seed(8)));
        // It is independent of the number that the draw itself uses: chi-squared with three degrees of freedom is below 16.3 in 999 of 1000 cases.
        let mut cells = [0.0f64; 4];
        for draw in 0..DRAWS {
            let upper = random::uniform(7, draw) >= 0.5;
            cells[2 * usize::from(upper) + usize::from(excludes(7, draw, 0.5))] += 1.0;
        }
        let expected = DRAWS as f64 / 4.0;
        let chi: f64 = cells
            .iter()
            .map(|n| (n - expected).powi(2) / expected)
            .sum();
        assert!(chi < 16.3, "{chi}");
    }
}
