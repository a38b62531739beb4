//! From logits to a token: greedy, or drawn from a distribution that temperature, top-k, top-p and min-p have shaped. A pure
//! function of logits, history, options and the number of draws so far, so the same seed gives the same text.

use crate::base::Result;
use crate::base::error::bail;
use crate::format::random;

/// How tokens are chosen. The default is greedy.
///
/// The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits before the softmax; 0 takes the likeliest token.
    pub temperature: f32,
    /// Draws from this many of the likeliest tokens; 0 from all.
    pub top_k: usize,
    /// Draws from the fewest of the likeliest tokens whose probabilities reach this sum; the one that crosses it is kept. 1
    /// draws from all.
    pub top_p: f32,
    /// Leaves out tokens less likely than this share of the likeliest; 0 leaves out none.
    pub min_p: f32,
    /// Divides the positive logits of tokens that have occurred, and multiplies the negative ones; 1 changes none.
    pub repetition_penalty: f32,
    /// Fixes the draws.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl SamplingOptions {
    /// Refuses values that no distribution comes from.
    pub fn check(&self) -> Result<()> {
        let finite = |name: &str, value: f32, fits: bool, range: &str| {
            if !fits {
                bail!(InvalidArgument, "{name} is {value}; it must be {range}");
            }
            Ok(())
        };
        let (t, p, m, r) = (
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
        );
        finite(
            "temperature",
            t,
            t.is_finite() && t >= 0.0,
            "0 or a positive number",
        )?;
        finite("top_p", p, p > 0.0 && p <= 1.0, "above 0 and at most 1")?;
        finite("min_p", m, (0.0..=1.0).contains(&m), "from 0 to 1")?;
        finite(
            "repetition_penalty",
            r,
            r.is_finite() && r > 0.0,
            "a positive number",
        )
    }
}

/// Chooses tokens one after the other.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    draws: u64,
    logits: Vec<f32>,
    order: Vec<u32>,
}

impl Sampler {
    /// A sampler that has drawn nothing yet.
    pub fn new(options: &SamplingOptions) -> Result<Self> {
        options.check()?;
        Ok(Sampler {
            options: options.clone(),
            draws: 0,
            logits: Vec::new(),
            order: Vec::new(),
        })
    }

    /// The same sampler with `draws` draws behind it. A generation begins with as many as there are tokens before it, so
    /// that its draws do not depend on how a text was divided into calls.
    pub fn after(mut self, draws: usize) -> Self {
        self.draws = draws as u64;
        self
    }

    /// The next token, given its logits and the tokens before it. A logit of minus infinity rules its token out.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        if let Some(i) = logits
            .iter()
            .position(|x| x.is_nan() || *x == f32::INFINITY)
        {
            bail!(
                InvalidArgument,
                "the logit of token {i} is {}; no token can be chosen",
                logits[i]
            );
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.penalize(history);
        let top = likeliest(&self.logits);
        let Some(top) = top.filter(|&t| self.logits[t] > f32::NEG_INFINITY) else {
            bail!(
                InvalidArgument,
                "none of {} logits is finite; no token can be chosen",
                logits.len()
            );
        };
        if self.options.temperature == 0.0 || self.options.top_k == 1 {
            return Ok(top as u32);
        }
        Ok(self.draw(self.logits[top]))
    }

    fn penalize(&mut self, history: &[u32]) {
        let penalty = self.options.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        let mut seen = vec![false; self.logits.len()];
        for &token in history {
            // A token without a logit has nothing to change.
            if let Some(seen) = seen.get_mut(token as usize)
                && !std::mem::replace(seen, true)
            {
                let x = &mut self.logits[token as usize];
                let penalized = if *x > 0.0 { *x / penalty } else { *x * penalty };
                // An extreme penalty neither rules a token out nor makes a logit that nothing can be compared with.
                if x.is_finite() {
                    *x = penalized.clamp(f32::MIN, f32::MAX);
                }
            }
        }
    }

    /// Draws from the tokens that the options leave; `largest` is the largest logit.
    fn draw(&mut self, largest: f32) -> u32 {
        let options = &self.options;
        let bits = random::bits(options.seed, self.draws);
        self.draws += 1;
        // All of the mantissa: a multiple of 2^-53 in [0, 1).
        let u = (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64);
        let (largest, temperature) = (f64::from(largest), f64::from(options.temperature));
        let weight = |x: f32| ((f64::from(x) - largest) / temperature).exp();

        let n = self.logits.len();
        let most = match options.top_k {
            0 => n,
            k => k.min(n),
        };
        let (top_p, min_p) = (f64::from(options.top_p), f64::from(options.min_p));
        if most == n && top_p == 1.0 && min_p == 0.0 {
            let weights = || self.logits.iter().map(|&x| weight(x));
            let total: f64 = weights().sum();
            return pick((0..).zip(weights()), u * total);
        }
        let mut ranking = Ranking::new(&self.logits, &mut self.order);
        // Probabilities are shares of what top-k keeps.
        let total: f64 = if most < n {
            (0..most).map(|i| weight(ranking.at(i).1)).sum()
        } else {
            self.logits.iter().map(|&x| weight(x)).sum()
        };
        // What is kept is the beginning of the ranking; the likeliest, of weight 1, always is.
        let (mut kept, mut sum) = (0, 0.0);
        while kept < most {
            let w = weight(ranking.at(kept).1);
            if kept > 0 && (sum >= top_p * total || w < min_p) {
                break;
            }
            sum += w;
            kept += 1;
        }
        pick(
            (0..kept).map(|i| {
                let (token, logit) = ranking.at(i);
                (token, weight(logit))
            }),
            u * sum,
        )
    }
}

/// Tokens from the likeliest down, equal ones by id. Sorts only as far as it is asked: of a hundred thousand tokens, the few
/// that matter are found in linear time.
struct Ranking<'a> {
    logits: &'a [f32],
    order: &'a mut Vec<u32>,
    sorted: usize,
}

impl<'a> Ranking<'a> {
    fn new(logits: &'a [f32], order: &'a mut Vec<u32>) -> Self {
        order.clear();
        order.extend(0..logits.len() as u32);
        Ranking {
            logits,
            order,
            sorted: 0,
        }
    }

    fn at(&mut self, rank: usize) -> (u32, f32) {
        if rank >= self.sorted {
            let logits = self.logits;
            let descending = |a: &u32, b: &u32| {
                let by_logit = logits[*b as usize].total_cmp(&logits[*a as usize]);
                by_logit.then(a.cmp(b))
            };
            let wanted = (4 * rank).max(64).min(logits.len());
            let rest = &mut self.order[self.sorted..];
            let more = wanted - self.sorted;
            if more < rest.len() {
                rest.select_nth_unstable_by(more, descending);
            }
            rest[..more].sort_unstable_by(descending);
            self.sorted = wanted;
        }
        let token = self.order[rank];
        (token, self.logits[token as usize])
    }
}

/// The index of the largest logit, the first of equals.
pub(super) fn likeliest(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).reduce(|best, i| if logits[i] > logits[best] { i } else { best })
}

/// The token at which the running sum of weights passes `at`.
fn pick(weighted: impl Iterator<Item = (u32, f64)>, at: f64) -> u32 {
    let (mut sum, mut last) = (0.0, 0);
    for (token, weight) in weighted {
        if weight > 0.0 {
            sum += weight;
            last = token;
            if sum > at {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The logarithms of these probabilities.
    fn logits(p: &[f32]) -> Vec<f32> {
        p.iter().map(|p| p.ln()).collect()
    }

    /// How often each token comes in `n` draws.
    fn counts(options: SamplingOptions, logits: &[f32], n: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(&options).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..n {
            counts[sampler.sample(logits, &[]).unwrap() as usize] += 1;
        }
        counts
    }

    fn warm() -> SamplingOptions {
        SamplingOptions {
            temperature: 1.0,
            ..SamplingOptions::default()
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let p = [0.1, 0.4, 0.2, 0.3];
        for top_p in [1.0, 0.999_999] {
            let got = counts(SamplingOptions { top_p, ..warm() }, &logits(&p), 20_000);
            for (got, want) in got.iter().zip(p) {
                // Five standard deviations of a count.
                let slack = 5.0 * (20_000.0 * want * (1.0 - want)).sqrt();
                assert!(
                    (*got as f32 - 20_000.0 * want).abs() < slack,
                    "{got} {want}"
                );
            }
        }
        // Temperature 1/2 squares probabilities: 1, 16, 4, 9 of 30.
        let cold = SamplingOptions {
            temperature: 0.5,
            ..warm()
        };
        let got = counts(cold, &logits(&p), 30_000);
        assert!(
            got[1].abs_diff(16_000) < 500 && got[0].abs_diff(1_000) < 200,
            "{got:?}"
        );
    }

    #[test]
    fn the_token_that_crosses_top_p_is_kept() {
        let l = logits(&[0.1, 0.4, 0.2, 0.3]);
        let kept = |top_p| -> Vec<bool> {
            let options = SamplingOptions { top_p, ..warm() };
            counts(options, &l, 2000).iter().map(|&c| c > 0).collect()
        };
        assert_eq!(kept(0.01), [false, true, false, false]);
        assert_eq!(kept(0.39), [false, true, false, false]);
        assert_eq!(kept(0.5), [false, true, false, true]);
        assert_eq!(kept(0.75), [false, true, true, true]);
        assert_eq!(kept(0.95), [true; 4]);
    }

    #[test]
    fn top_k_and_min_p() {
        let l = logits(&[0.1, 0.4, 0.2, 0.3]);
        let two = counts(SamplingOptions { top_k: 2, ..warm() }, &l, 7000);
        assert_eq!((two[0], two[2]), (0, 0));
        assert!(two[1].abs_diff(4000) < 250, "{two:?}");
        let half = counts(
            SamplingOptions {
                min_p: 0.51,
                ..warm()
            },
            &l,
            2000,
        );
        assert!(half[0] == 0 && half[2] == 0 && half[1] > 0 && half[3] > 0);
        // top-p counts shares of what top-k leaves: 4/7 of the first.
        let both = SamplingOptions {
            top_k: 2,
            top_p: 0.55,
            ..warm()
        };
        assert_eq!(counts(both, &l, 500)[1], 500);
    }

    #[test]
    fn rankings_over_many_tokens() {
        // More tokens than are sorted at first, with many equal ones.
        let l: Vec<f32> = (0..5000)
            .map(|i| ((i * 7919) % 997) as f32 * 0.01)
            .collect();
        let mut order = Vec::new();
        let mut ranking = Ranking::new(&l, &mut order);
        let got: Vec<u32> = (0..5000).map(|i| ranking.at(i).0).collect();
        let mut want: Vec<u32> = (0..5000).collect();
        want.sort_by(|&a, &b| l[b as usize].total_cmp(&l[a as usize]).then(a.cmp(&b)));
        assert_eq!(got, want);
    }

    #[test]
    fn greedy_penalty_and_ruled_out_tokens() {
        let mut greedy = Sampler::new(&SamplingOptions::default()).unwrap();
        assert_eq!(greedy.sample(&[1.0, 3.0, 3.0], &[]).unwrap(), 1);
        assert_eq!(greedy.sample(&[f32::NEG_INFINITY, -5.0], &[]).unwrap(), 1);
        let mut penalized = Sampler::new(&SamplingOptions {
            repetition_penalty: 2.0,
            ..SamplingOptions::default()
        })
        .unwrap();
        assert_eq!(penalized.sample(&[1.0, 3.0, 2.0], &[1, 1, 9]).unwrap(), 2);
        assert_eq!(penalized.sample(&[-1.5, -1.0, -9.0], &[1]).unwrap(), 0);
        for (penalty, logits, want) in [
            (1e-40, [1.0, 3.0, 2.0], 2),
            (f32::MAX, [-2.0, -2.0, -2.0], 1),
        ] {
            for temperature in [0.0, 0.5] {
                let options = SamplingOptions {
                    repetition_penalty: penalty,
                    temperature,
                    ..SamplingOptions::default()
                };
                let mut extreme = Sampler::new(&options).unwrap();
                let history: &[u32] = if want == 2 { &[2] } else { &[0, 2] };
                assert_eq!(extreme.sample(&logits, history).unwrap(), want);
                let all = extreme.sample(&logits, &[0, 1, 2]);
                assert!(all.is_ok(), "{all:?}");
            }
        }
        let ruled = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        assert_eq!(counts(warm(), &ruled, 50), [0, 50, 0]);
        assert_eq!(
            counts(
                SamplingOptions {
                    top_p: 0.9,
                    ..warm()
                },
                &ruled,
                50
            ),
            [0, 50, 0]
        );
    }

    #[test]
    fn seeds_fix_the_draws() {
        let l = vec![0.0; 1000];
        let run = |seed| {
            let mut s = Sampler::new(&SamplingOptions { seed, ..warm() }).unwrap();
            (0..8)
                .map(|_| s.sample(&l, &[]).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn refusals() {
        let check = |change: fn(&mut SamplingOptions), expected: &str| {
            let mut options = SamplingOptions::default();
            change(&mut options);
            let e = Sampler::new(&options).unwrap_err();
            assert!(e.message().contains(expected), "{e}");
        };
        check(|o| o.temperature = -0.1, "temperature is -0.1");
        check(|o| o.temperature = f32::NAN, "temperature is NaN");
        check(|o| o.top_p = 0.0, "top_p is 0");
        check(|o| o.top_p = 1.5, "top_p is 1.5");
        check(|o| o.min_p = -1.0, "min_p is -1");
        check(|o| o.repetition_penalty = 0.0, "repetition_penalty is 0");
        let mut s = Sampler::new(&SamplingOptions::default()).unwrap();
        for bad in [
            &[][..],
            &[0.0, f32::NAN],
            &[f32::INFINITY],
            &[f32::NEG_INFINITY],
        ] {
            assert!(s.sample(bad, &[]).is_err());
        }
    }
}
