//! From logits to a token: greedy, or drawn from a distribution that temperature, top-k, top-p and min-p have shaped. A pure
//! function of logits, history, options and the number of draws so far, so the same seed gives the same text.

use std::collections::HashSet;

use crate::base::Result;
use crate::base::error::bail;
use crate::format::random;
use crate::model::Shortlist;

/// Logits that a device's shortlist holds, where there are so many.
const LISTED: usize = 256;
/// What two sums of the same weights may differ by, as a share of them, in whatever order they are made. Where a decision would
/// hang on less, all logits are asked for.
const SLACK: f64 = 1e-9;

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

    /// Whether the likeliest tokens alone may be enough to choose from.
    pub(super) fn takes_shortlists(&self) -> bool {
        let o = &self.options;
        let draws_from_few = match o.top_k {
            0 => o.repetition_penalty == 1.0 && (o.top_p < 1.0 || o.min_p > 0.0),
            k => k <= LISTED,
        };
        // A penalty below 1 lifts tokens from anywhere in the ranking.
        o.repetition_penalty >= 1.0 && (o.temperature == 0.0 || draws_from_few)
    }

    /// The temperature that a shortlist must have been made for.
    pub(super) fn temperature(&self) -> f32 {
        self.options.temperature
    }

    /// What [`Sampler::sample`] gives for the logits that `list` comes from, if that is certain; if not, nothing was drawn.
    pub(super) fn sample_shortlist(&mut self, list: &Shortlist, history: &[u32]) -> Option<u32> {
        let (options, n) = (&self.options, list.vocabulary);
        if !self.takes_shortlists() || list.temperature != options.temperature {
            return None;
        }
        let ranked = self.known_ranks(list, history);
        let largest = ranked.first()?.1;
        // Zeros of both signs are equal as logits, and not in the ranking.
        if largest == f32::NEG_INFINITY || largest == 0.0 {
            return None;
        }
        if options.temperature == 0.0 || options.top_k == 1 {
            return Some(ranked[0].0);
        }
        let (largest, temperature) = (f64::from(largest), f64::from(options.temperature));
        let weight = |x: f32| ((f64::from(x) - largest) / temperature).exp();
        let most = match options.top_k {
            0 => n,
            k => k.min(n),
        };
        // A draw from all tokens goes through them by token, and a penalty changes the sum over all.
        let from_all = options.top_p == 1.0 && options.min_p == 0.0;
        if most == n && (from_all || options.repetition_penalty != 1.0) {
            return None;
        }
        let (total, slack) = if most < n {
            let kept = ranked.get(..most)?;
            (kept.iter().map(|&(_, x)| weight(x)).sum(), 0.0)
        } else {
            (list.total, SLACK * list.total)
        };
        let at = |rank: usize| ranked.get(rank).copied();
        let (kept, sum) = kept(options, most, total, slack, at, weight)?;
        let u = uniform(options.seed, self.draws);
        self.draws += 1;
        let drawn = ranked[..kept].iter();
        Some(pick(drawn.map(|&(token, x)| (token, weight(x))), u * sum))
    }

    /// The beginning of the ranking after the penalty, as far as the shortlist tells it.
    fn known_ranks(&self, list: &Shortlist, history: &[u32]) -> Vec<(u32, f32)> {
        let mut ranked = list.largest.clone();
        let penalty = self.options.repetition_penalty;
        if penalty == 1.0 {
            return ranked;
        }
        let occurred: HashSet<u32> = history.iter().copied().collect();
        let floor = ranked.last().map_or(f32::NEG_INFINITY, |&(_, x)| x);
        for (token, x) in &mut ranked {
            if occurred.contains(token) {
                *x = penalized(*x, penalty);
            }
        }
        ranked.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        // Tokens that are not listed have at most the least of the listed logits, and a penalty lowers it further.
        if list.largest.len() < list.vocabulary {
            ranked.truncate(ranked.partition_point(|&(_, x)| x > floor));
        }
        ranked
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
                *x = penalized(*x, penalty);
            }
        }
    }

    /// Draws from the tokens that the options leave; `largest` is the largest logit.
    fn draw(&mut self, largest: f32) -> u32 {
        let options = &self.options;
        let u = uniform(options.seed, self.draws);
        self.draws += 1;
        let (largest, temperature) = (f64::from(largest), f64::from(options.temperature));
        let weight = |x: f32| ((f64::from(x) - largest) / temperature).exp();

        let n = self.logits.len();
        let most = match options.top_k {
            0 => n,
            k => k.min(n),
        };
        if most == n && options.top_p == 1.0 && options.min_p == 0.0 {
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
        let at = |rank| Some(ranking.at(rank));
        let (kept, sum) = kept(options, most, total, 0.0, at, weight).expect("every rank is known");
        pick(
            (0..kept).map(|i| {
                let (token, logit) = ranking.at(i);
                (token, weight(logit))
            }),
            u * sum,
        )
    }
}

/// How many of the `most` first of a ranking top-p and min-p keep, and the sum of their weights. The likeliest, of weight 1, is
/// always among them. `total` is known but for `slack`; nothing if that is not enough to tell, or a rank is not known.
fn kept(
    options: &SamplingOptions,
    most: usize,
    total: f64,
    slack: f64,
    mut at: impl FnMut(usize) -> Option<(u32, f32)>,
    weight: impl Fn(f32) -> f64,
) -> Option<(usize, f64)> {
    let (top_p, min_p) = (f64::from(options.top_p), f64::from(options.min_p));
    let (mut kept, mut sum) = (0, 0.0);
    while kept < most {
        let w = weight(at(kept)?.1);
        if kept > 0 {
            if w < min_p {
                break;
            }
            let missing = top_p * total - sum;
            if slack > 0.0 && missing.abs() <= slack {
                return None;
            }
            if missing <= 0.0 {
                break;
            }
        }
        sum += w;
        kept += 1;
    }
    Some((kept, sum))
}

/// Number `draw` of a seed's, in [0, 1): all of the mantissa, a multiple of 2^-53.
fn uniform(seed: u64, draw: u64) -> f64 {
    (random::bits(seed, draw) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// The logit of a token that has occurred. An extreme penalty neither rules it out nor makes a logit that nothing can be compared
/// with.
fn penalized(x: f32, penalty: f32) -> f32 {
    let penalized = if x > 0.0 { x / penalty } else { x * penalty };
    match x.is_finite() {
        true => penalized.clamp(f32::MIN, f32::MAX),
        false => x,
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
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

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

    /// The `kept` largest of some logits, as a device lists them.
    fn listed(logits: &[f32], kept: usize, temperature: f32) -> Shortlist {
        let mut order = Vec::new();
        let mut ranking = Ranking::new(logits, &mut order);
        let largest: Vec<_> = (0..kept.min(logits.len())).map(|i| ranking.at(i)).collect();
        let top = f64::from(largest[0].1);
        // Not in the order of the host.
        let weights = logits
            .iter()
            .rev()
            .map(|&x| ((f64::from(x) - top) / f64::from(temperature)).exp());
        Shortlist {
            total: if temperature > 0.0 {
                weights.sum()
            } else {
                0.0
            },
            largest,
            temperature,
            vocabulary: logits.len(),
        }
    }

    /// What a shortlist gives is what all logits give, and a shortlist that is not enough draws nothing.
    #[test]
    fn shortlists_give_the_same_tokens() {
        let (mut certain, mut open) = (0, 0);
        for case in 0..6000u64 {
            let pick = |salt: u64, of: u64| random::bits(77 + salt, case) % of;
            let n = [5, 60, 1000][pick(0, 3) as usize];
            // Steep and flat ones; some with many equal logits, some with tokens that are ruled out.
            let (width, coarse) = ([30.0, 8.0, 1.0][pick(1, 3) as usize], pick(2, 3) == 0);
            let logits: Vec<f32> = (0..n)
                .map(|i| {
                    let bits = random::bits(case, i);
                    let x = ((bits % 10_000) as f32 / 10_000.0 - 0.4) * width;
                    match bits >> 40 & 31 {
                        0 => f32::NEG_INFINITY,
                        _ if coarse => x.round(),
                        _ => x,
                    }
                })
                .collect();
            let options = SamplingOptions {
                temperature: [0.0, 0.3, 1.0, 1.7][pick(3, 4) as usize],
                top_k: [0, 1, 3, 40, 5000][pick(4, 5) as usize],
                top_p: [1.0, 0.95, 0.5][pick(5, 3) as usize],
                min_p: [0.0, 0.05, 0.9][pick(6, 3) as usize],
                repetition_penalty: [1.0, 1.0, 1.3, 0.8][pick(7, 4) as usize],
                seed: case,
            };
            let history: Vec<u32> = (0..pick(8, 30))
                .map(|i| (random::bits(9, i) % n) as u32)
                .collect();
            let list = listed(
                &logits,
                [4, 64, LISTED][pick(9, 3) as usize],
                options.temperature,
            );
            let mut short = Sampler::new(&options).unwrap().after(history.len());
            let mut long = short.clone();
            let Ok(want) = long.sample(&logits, &history) else {
                assert_eq!(short.sample_shortlist(&list, &history), None);
                continue;
            };
            match short.sample_shortlist(&list, &history) {
                Some(got) => {
                    assert_eq!((got, short.draws), (want, long.draws), "{options:?} of {n}");
                    certain += 1;
                }
                None => {
                    assert_eq!(short.draws, history.len() as u64);
                    open += 1;
                }
            }
        }
        assert!(certain > 1000 && open > 1000, "{certain} {open}");
    }

    #[test]
    fn what_a_shortlist_cannot_tell_is_left_open() {
        let l: Vec<f32> = (0..100).map(|i| 3.0 - i as f32 * 0.01).collect();
        let with = |change: fn(&mut SamplingOptions), kept: usize| {
            let mut options = warm();
            change(&mut options);
            let list = listed(&l, kept, options.temperature);
            Sampler::new(&options)
                .unwrap()
                .sample_shortlist(&list, &[0])
                .is_some()
        };
        assert!(with(|o| o.top_k = 20, 20) && !with(|o| o.top_k = 20, 19));
        assert!(with(|o| o.top_p = 0.1, 20) && !with(|o| o.top_p = 0.9, 20));
        assert!(with(|o| o.top_p = 0.9, 100) && !with(|_| (), 100));
        assert!(with(|o| o.min_p = 0.95, 20) && !with(|o| o.min_p = 0.5, 20));
        // A penalty changes the sum over all in a way that the list does not show.
        fn penalty(o: &mut SamplingOptions) {
            (o.top_p, o.repetition_penalty) = (0.1, 1.5);
        }
        assert!(!with(penalty, 20));
        assert!(with(|o| (o.top_k, o.repetition_penalty) = (5, 1.5), 20));
        // A sum that a decision hangs on: half of two equal tokens is reached by one, or not.
        let options = SamplingOptions {
            top_p: 0.5,
            ..warm()
        };
        let list = listed(&[1.0, 1.0], 2, 1.0);
        assert_eq!(
            Sampler::new(&options).unwrap().sample_shortlist(&list, &[]),
            None
        );
        // Another temperature's sum.
        let list = listed(&l, 100, 0.5);
        assert_eq!(
            Sampler::new(&options).unwrap().sample_shortlist(&list, &[]),
            None
        );
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
            expect_kind(
                s.sample(bad, &[]),
                ErrorKind::InvalidArgument,
                "no token can be chosen",
            );
        }
    }
}
