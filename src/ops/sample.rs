//! From logits to a token: the argmax, or a draw from a distribution shaped by temperature, top-k, top-p and min-p. A pure
//! function of logits, history, options and the number of draws so far.
//!
//! Weights are whole numbers, so their sums do not depend on the order of summation, and a GPU chooses exactly the token that
//! the processor chooses from the same logits. A weight is 2^40 times the ratio of a token's probability to the largest
//! probability, with a relative error of at most 2e-6.
//!
//! Tokens are ranked by descending logit, +0 before -0, equal ones by id. top-k, top-p and min-p each keep a prefix of that ranking; the
//! shortest, which has the smallest sum of weights, decides. The token drawn is the first at which the running sum of weights exceeds a
//! random number below that sum. Nothing is sorted: tokens are put into buckets by their probability, and only the bucket in which a
//! running sum passes its target is searched.

use std::cmp::Reverse;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::base::error::{bail, err};
use crate::base::{Error, Result};
use crate::cpu::Cpu;
use crate::cpu::sample::{self, BUCKETS, bucket};
use crate::cuda::DrawRule;
use crate::format::random;

/// Sampling settings. The default is greedy.
///
/// The order of application is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits before the softmax; 0 takes the argmax.
    pub temperature: f32,
    /// Draws from this many of the most probable tokens; 0 draws from all.
    pub top_k: usize,
    /// Draws from the smallest set of most probable tokens whose probabilities reach this sum, including the token that reaches it. 1 draws
    /// from all, 0 takes the argmax.
    pub top_p: f32,
    /// Excludes tokens less probable than this fraction of the most probable one; 0 excludes none.
    pub min_p: f32,
    /// Divides the positive logits of tokens that have occurred, and multiplies their negative logits; 1 has no effect.
    pub repetition_penalty: f32,
    /// Makes the draws repeatable. A caller that draws repeatedly sets a missing seed ([`SamplingOptions::seeded_by`]); a single choice
    /// uses 0.
    pub seed: Option<u64>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions::GREEDY
    }
}

impl SamplingOptions {
    /// Greedy: the argmax.
    pub const GREEDY: SamplingOptions = SamplingOptions {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        seed: None,
    };

    /// Checks that the values describe a distribution.
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
        finite("top_p", p, (0.0..=1.0).contains(&p), "from 0 to 1")?;
        finite("min_p", m, (0.0..=1.0).contains(&m), "from 0 to 1")?;
        finite(
            "repetition_penalty",
            r,
            r.is_finite() && r > 0.0,
            "a positive number",
        )
    }

    /// Returns these settings with `seed` if they have none.
    pub fn seeded_by(&self, seed: u64) -> Self {
        SamplingOptions {
            seed: self.seed.or(Some(seed)),
            ..self.clone()
        }
    }

    /// Whether the settings take the argmax instead of drawing.
    fn takes_argmax(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1 || self.top_p == 0.0
    }

    /// Whether the largest logit is chosen, independent of the history.
    pub fn is_greedy(&self) -> bool {
        self.takes_argmax() && self.repetition_penalty == 1.0
    }
}

/// The tokens that may be chosen, a bit each: bit `i % 32` of word `i / 32` is that of token `i`. Tokens past the last word are excluded.
#[derive(Clone, Copy, Debug)]
pub struct TokenMask<'a>(pub &'a [u32]);

impl TokenMask<'_> {
    /// Whether `token` may be chosen.
    pub fn allows(self, token: u32) -> bool {
        let word = self.0.get(token as usize / 32);
        word.is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The only token that may be chosen, if there is one alone.
    pub fn only(self) -> Option<u32> {
        let mut words = (0u32..).zip(self.0).filter(|(_, word)| **word != 0);
        let (i, &word) = words.next()?;
        (word.is_power_of_two() && words.next().is_none()).then(|| 32 * i + word.trailing_zeros())
    }

    /// Sets the logits of excluded tokens to minus infinity.
    pub fn apply(self, logits: &mut [f32]) {
        for (i, chunk) in logits.chunks_mut(32).enumerate() {
            match self.0.get(i).copied().unwrap_or_default() {
                0 => chunk.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                word => {
                    for (bit, logit) in chunk.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

/// The inputs of the choice of one token, beside its logits.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// Sampling settings, already checked.
    pub options: &'a SamplingOptions,
    /// The number of the draw under its seed.
    pub draw: u64,
    /// The tokens before it, for the repetition penalty.
    pub history: &'a [u32],
    /// The tokens that it may be; all if there is no mask. Excluded tokens have no probability, whatever the settings.
    pub allowed: Option<TokenMask<'a>>,
}

impl Choice<'_> {
    /// The parameters of the draw that these settings imply.
    pub fn rule(&self) -> DrawRule {
        let options = self.options;
        let scale = std::f64::consts::LOG2_E / f64::from(options.temperature);
        DrawRule {
            seed: options.seed.unwrap_or_default(),
            draw: self.draw,
            scale: match options.takes_argmax() {
                true => 0.0,
                // At the smallest temperatures, any large factor leaves only the largest logits.
                false => (scale as f32).min(f32::MAX),
            },
            least_log: options.min_p.log2(),
            top_p: options.top_p,
            penalty: options.repetition_penalty,
            top_k: u32::try_from(options.top_k).unwrap_or(u32::MAX),
            reserved: 0,
        }
    }
}

/// Why no token can be chosen: the logit of `token` is not a number, or plus infinity.
pub fn unusable(token: usize) -> Error {
    err!(
        InvalidArgument,
        "the logit of token {token} is not a number, or plus infinity; no token can be chosen"
    )
}

/// Why no token can be chosen: every logit is minus infinity, of a vocabulary or of the tokens that `allowed` allows.
pub fn all_ruled_out(vocabulary: usize, allowed: Option<TokenMask<'_>>) -> Error {
    match allowed {
        None => err!(
            InvalidArgument,
            "none of {vocabulary} logits is finite; no token can be chosen"
        ),
        Some(TokenMask(words)) => err!(
            InvalidArgument,
            "none of the {} tokens that may come next has a finite logit; no token can be chosen",
            words.iter().map(|w| w.count_ones()).sum::<u32>()
        ),
    }
}

/// Memory reused between choices; it grows to the largest vocabulary seen.
#[derive(Clone, Debug, Default)]
pub struct SampleScratch {
    masked: Vec<f32>,
    penalized: Vec<f32>,
    seen: Vec<bool>,
    ranking: Ranking,
}

/// The token chosen from `logits`, which has one logit per token. A logit of minus infinity excludes its token.
pub fn sample(logits: &[f32], choice: &Choice<'_>, scratch: &mut SampleScratch) -> Result<u32> {
    let rule = choice.rule();
    let mut logits = logits;
    if let Some(allowed) = choice.allowed {
        let masked = &mut scratch.masked;
        masked.clear();
        masked.extend_from_slice(logits);
        allowed.apply(masked);
        logits = masked;
    }
    let mut largest = match sample::largest(logits) {
        ControlFlow::Continue(largest) => largest,
        ControlFlow::Break(token) => return Err(unusable(token)),
    };
    if largest == f32::NEG_INFINITY {
        return Err(all_ruled_out(logits.len(), choice.allowed));
    }
    if rule.penalty != 1.0 {
        let (penalized, seen) = (&mut scratch.penalized, &mut scratch.seen);
        penalized.clear();
        penalized.extend_from_slice(logits);
        penalize(penalized, choice.history, rule.penalty, seen);
        logits = penalized;
        if let ControlFlow::Continue(l) = sample::largest(logits) {
            largest = l;
        }
    }
    if rule.scale == 0.0 {
        // The first of equal logits; zeros of either sign are equal.
        let first = logits.iter().position(|&x| x == largest);
        return Ok(first.unwrap_or(0) as u32);
    }
    scratch.ranking.draw(logits, largest, &rule)
}

/// The tokens chosen from rows of `logits`, one for each choice, on the threads of `cpu`. Grows `scratches` to one for each thread.
pub fn sample_rows(
    logits: &[f32],
    choices: &[Choice<'_>],
    cpu: &Cpu,
    scratches: &mut Vec<Mutex<SampleScratch>>,
) -> Vec<Result<u32>> {
    let threads = cpu.pool().threads().min(choices.len());
    if scratches.len() < threads {
        scratches.resize_with(threads, Mutex::default);
    }
    let scratches = &*scratches;
    let chosen: Vec<OnceLock<Result<u32>>> = choices.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    cpu.pool().run(threads, |thread| {
        // A scratch left behind by a panic can be reused, because every choice refills it.
        let mut scratch = scratches[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        loop {
            let i = next.fetch_add(1, Relaxed);
            let Some(choice) = choices.get(i) else { break };
            let row = logits.len() / choices.len();
            let token = sample(&logits[i * row..][..row], choice, &mut scratch);
            let _ = chosen[i].set(token);
        }
    });
    let each = chosen.into_iter().map(OnceLock::into_inner);
    each.map(|token| token.expect("every row was taken"))
        .collect()
}

/// Applies a repetition penalty to the logits of tokens that have occurred. `seen` is scratch.
pub fn penalize(logits: &mut [f32], history: &[u32], penalty: f32, seen: &mut Vec<bool>) {
    seen.clear();
    seen.resize(logits.len(), false);
    for &token in history {
        // A token without a logit has nothing to change.
        if let Some(seen) = seen.get_mut(token as usize)
            && !std::mem::replace(seen, true)
        {
            let x = &mut logits[token as usize];
            *x = penalized(*x, penalty);
        }
    }
}

/// The penalized logit of a token that has occurred. An extreme penalty neither excludes the token nor produces NaN.
fn penalized(x: f32, penalty: f32) -> f32 {
    let penalized = if x > 0.0 { x / penalty } else { x * penalty };
    match x.is_finite() {
        true => penalized.clamp(f32::MIN, f32::MAX),
        false => x,
    }
}

/// A token within its bucket. Its key is larger for a larger logit, and among equal logits for the lower token id.
#[derive(Clone, Copy, Debug)]
struct Member {
    key: u64,
    weight: u64,
}

/// The quantity that a running sum over the ranking adds up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Measure {
    Tokens,
    Weight,
}

impl Measure {
    fn of(self, member: &Member) -> u64 {
        match self {
            Measure::Tokens => 1,
            Measure::Weight => member.weight,
        }
    }
}

/// Tokens by bucket, and the totals of each bucket.
#[derive(Clone, Debug, Default)]
struct Ranking {
    buckets: Vec<u16>,
    logs: Vec<f32>,
    /// Weights, before truncation to integers.
    weights: Vec<f32>,
    sums: Vec<u64>,
    counts: Vec<u64>,
    members: Vec<Member>,
}

impl Ranking {
    fn draw(&mut self, logits: &[f32], largest: f32, rule: &DrawRule) -> Result<u32> {
        self.fill(logits, largest, rule.scale)?;
        let most = u64::from(rule.top_k);
        let total = match most > 0 && most < logits.len() as u64 {
            true => self.through(logits, Measure::Tokens, most - 1),
            false => self.sums.iter().sum(),
        };
        let mut kept = total;
        if rule.top_p < 1.0 {
            let wanted = (total as f64 * f64::from(rule.top_p)).ceil() as u64;
            let wanted = wanted.clamp(1, total);
            kept = kept.min(self.through(logits, Measure::Weight, wanted - 1));
        }
        if rule.least_log > f32::NEG_INFINITY {
            kept = kept.min(self.down_to(rule.least_log));
        }
        let bits = random::bits(rule.seed, rule.draw);
        let at = (u128::from(bits) * u128::from(kept)) >> 64;
        let (drawn, _) = self.passing(logits, Measure::Weight, at as u64);
        Ok(!(drawn.key as u32))
    }

    fn fill(&mut self, logits: &[f32], largest: f32, scale: f32) -> Result<()> {
        let n = logits.len();
        self.buckets.resize(n, 0);
        self.logs.resize(n, 0.0);
        self.weights.resize(n, 0.0);
        for sums in [&mut self.sums, &mut self.counts] {
            sums.clear();
            sums.resize(BUCKETS, 0);
        }
        let (buckets, logs, weights) = (
            &mut self.buckets[..n],
            &mut self.logs[..n],
            &mut self.weights[..n],
        );
        sample::weigh(logits, largest, scale, logs, weights)?;
        // A separate loop, so that it is vectorized.
        for (place, &log) in buckets.iter_mut().zip(&*logs) {
            *place = bucket(log) as u16;
        }
        for (&bucket, &w) in buckets.iter().zip(&*weights) {
            self.sums[usize::from(bucket)] += weight(w);
            self.counts[usize::from(bucket)] += 1;
        }
        Ok(())
    }

    /// The sum of weights up to the token at which the running sum of `measure` passes `target`, that token included.
    fn through(&mut self, logits: &[f32], measure: Measure, target: u64) -> u64 {
        let (member, before) = self.passing(logits, measure, target);
        before + member.weight
    }

    /// The sum of weights of the tokens whose logarithm is not below `least`.
    fn down_to(&self, least: f32) -> u64 {
        let last = bucket(least);
        let before: u64 = self.sums[..last].iter().sum();
        let tokens = self.buckets.iter().zip(self.logs.iter().zip(&self.weights));
        let within =
            tokens.filter(|&(&bucket, (&log, _))| usize::from(bucket) == last && log >= least);
        before + within.map(|(_, (_, &w))| weight(w)).sum::<u64>()
    }

    /// The token at which the running sum of `measure` passes `target`, which is less than the total, and the sum of weights before it.
    fn passing(&mut self, logits: &[f32], measure: Measure, target: u64) -> (Member, u64) {
        let (mut bucket, mut passed, mut before) = (0, 0, 0);
        let of = |b: usize| match measure {
            Measure::Tokens => self.counts[b],
            Measure::Weight => self.sums[b],
        };
        while bucket + 1 < BUCKETS && passed + of(bucket) <= target {
            passed += of(bucket);
            before += self.sums[bucket];
            bucket += 1;
        }
        self.members.clear();
        let inside = self
            .buckets
            .iter()
            .enumerate()
            .filter(|&(_, &b)| usize::from(b) == bucket);
        self.members.extend(inside.map(|(i, _)| Member {
            key: key(logits[i], i as u32),
            weight: weight(self.weights[i]),
        }));
        within(&mut self.members, measure, target - passed, before)
    }
}

/// The member at which the running sum over `members`, by descending key, passes `target`; and the sum of weights before it. `before` is
/// the sum of all larger members of other buckets.
fn within(members: &mut [Member], measure: Measure, target: u64, before: u64) -> (Member, u64) {
    let (mut members, mut target, mut before) = (members, target, before);
    // Roughly halves the candidates until sorting them is cheap.
    while members.len() > 32 {
        let middle = members.len() / 2;
        let (upper, _, _) = members.select_nth_unstable_by_key(middle, |m| Reverse(m.key));
        let sum: u64 = upper.iter().map(|m| measure.of(m)).sum();
        if sum > target {
            members = &mut members[..middle];
        } else {
            before += upper.iter().map(|m| m.weight).sum::<u64>();
            target -= sum;
            members = &mut members[middle..];
        }
    }
    members.sort_unstable_by_key(|m| Reverse(m.key));
    let last = members.len() - 1;
    for member in &members[..last] {
        let own = measure.of(member);
        if own > target {
            return (*member, before);
        }
        target -= own;
        before += member.weight;
    }
    (members[last], before)
}

/// The integer part of a power from [`sample::weigh`], converted through i64, for which the CPU has an instruction.
fn weight(power: f32) -> u64 {
    (power as i64).cast_unsigned()
}

/// A token's place in the ranking: larger for a larger logit, and among equal logits for the lower token id, which is in the low half.
fn key(logit: f32, token: u32) -> u64 {
    let place = sample::place(logit).cast_unsigned() ^ 0x8000_0000;
    u64::from(place) << 32 | u64::from(!token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    /// The logarithms of these probabilities.
    fn logits(p: &[f32]) -> Vec<f32> {
        p.iter().map(|p| p.ln()).collect()
    }

    /// The number of times each token is chosen in `n` draws.
    fn counts(options: SamplingOptions, logits: &[f32], n: usize) -> Vec<usize> {
        let mut scratch = SampleScratch::default();
        let mut counts = vec![0; logits.len()];
        for draw in 0..n as u64 {
            let choice = Choice {
                options: &options,
                draw,
                history: &[],
                allowed: None,
            };
            counts[sample(logits, &choice, &mut scratch).unwrap() as usize] += 1;
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
        // top-p applies to the probabilities that remain after top-k: 4/7 for the first.
        let both = SamplingOptions {
            top_k: 2,
            top_p: 0.55,
            ..warm()
        };
        assert_eq!(counts(both, &l, 500)[1], 500);
    }

    /// The token that these options choose in the first draw, or the error.
    fn chosen(options: &SamplingOptions, logits: &[f32], history: &[u32]) -> Result<u32> {
        chosen_within(options, logits, history, None, 0)
    }

    /// As [`chosen`], in any draw, and within a mask.
    fn chosen_within(
        options: &SamplingOptions,
        logits: &[f32],
        history: &[u32],
        mask: Option<&[u32]>,
        draw: u64,
    ) -> Result<u32> {
        let choice = Choice {
            options,
            draw,
            history,
            allowed: mask.map(TokenMask),
        };
        sample(logits, &choice, &mut SampleScratch::default())
    }

    /// Bits of a mask that allows these tokens.
    fn mask(tokens: impl IntoIterator<Item = usize>, words: usize) -> Vec<u32> {
        let mut mask = vec![0u32; words];
        for token in tokens {
            mask[token / 32] |= 1 << (token % 32);
        }
        mask
    }

    #[test]
    fn masks_exclude_tokens_whatever_the_settings() {
        let tokens = 90;
        let logit = |i: usize| (random::bits(5, i as u64) % 4096) as f32 / 512.0;
        let logits: Vec<f32> = (0..tokens).map(logit).collect();
        let settings = [
            SamplingOptions::default(),
            warm(),
            SamplingOptions {
                top_k: 3,
                repetition_penalty: 1.4,
                ..warm()
            },
            SamplingOptions {
                top_p: 0.7,
                ..warm()
            },
            SamplingOptions {
                min_p: 0.2,
                temperature: 3.0,
                ..warm()
            },
        ];
        let all = mask(0..tokens, 3);
        for options in &settings {
            for draw in 0..200 {
                let seed = random::bits(draw, 1);
                let part = mask((0..tokens).filter(|i| seed >> (i % 61) & 1 == 1), 3);
                let chosen = |logits: &[f32], mask: Option<&[u32]>| {
                    chosen_within(options, logits, &[7, 8], mask, draw).unwrap()
                };
                let token = chosen(&logits, Some(&part));
                assert!(TokenMask(&part).allows(token), "{options:?}");
                assert_eq!(chosen(&logits, Some(&all)), chosen(&logits, None));
                // It is the choice from the logits of allowed tokens alone.
                let mut only = logits.clone();
                let excluded = |i: &usize| !TokenMask(&part).allows(*i as u32);
                for i in (0..tokens).filter(excluded) {
                    only[i] = f32::NEG_INFINITY;
                }
                assert_eq!(token, chosen(&only, None));
            }
        }
    }

    #[test]
    fn masks_are_short_or_empty() {
        let greedy = SamplingOptions::default();
        let logits = [1.0, f32::NAN, 3.0];
        let within = |mask: &[u32]| chosen_within(&greedy, &logits, &[], Some(mask), 0);
        // Excluded logits may be anything.
        assert_eq!(within(&[0b101]).unwrap(), 2);
        assert!(within(&[0b010]).unwrap_err().message().contains("token 1"));
        for none in [&[][..], &[0b1000]] {
            let e = within(none).unwrap_err();
            assert!(e.message().contains("that may come next"), "{e}");
        }
        let long = vec![0.0; 70];
        assert_eq!(
            chosen_within(&greedy, &long, &[], Some(&[0, 2]), 0).unwrap(),
            33
        );
        assert_eq!(TokenMask(&[0, 2, 0]).only(), Some(33));
        assert_eq!(TokenMask(&[1, 2]).only(), None);
        assert_eq!(TokenMask(&[0]).only(), None);
    }

    #[test]
    fn greedy_penalty_and_ruled_out_tokens() {
        let greedy = |logits: &[f32]| chosen(&SamplingOptions::default(), logits, &[]).unwrap();
        assert_eq!(greedy(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(greedy(&[f32::NEG_INFINITY, -5.0]), 1);
        assert_eq!(greedy(&[-1.0, -0.0, 0.0]), 1);
        let penalized = SamplingOptions {
            repetition_penalty: 2.0,
            ..SamplingOptions::default()
        };
        let penalized = |logits: &[f32], history: &[u32]| chosen(&penalized, logits, history);
        assert_eq!(penalized(&[1.0, 3.0, 2.0], &[1, 1, 9]).unwrap(), 2);
        assert_eq!(penalized(&[-1.5, -1.0, -9.0], &[1]).unwrap(), 0);
        for (penalty, logits, want) in [
            (1e-40, [1.0, 3.0, 2.0], 2),
            (f32::MAX, [-2.0, -2.0, -2.0], 1),
        ] {
            for temperature in [0.0, 0.5] {
                let extreme = SamplingOptions {
                    repetition_penalty: penalty,
                    temperature,
                    ..SamplingOptions::default()
                };
                let history: &[u32] = if want == 2 { &[2] } else { &[0, 2] };
                assert_eq!(chosen(&extreme, &logits, history).unwrap(), want);
                let all = chosen(&extreme, &logits, &[0, 1, 2]);
                assert!(all.is_ok(), "{all:?}");
            }
        }
        let ruled = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        assert_eq!(counts(warm(), &ruled, 50), [0, 50, 0]);
        for top_p in [0.9, 0.0] {
            let got = counts(SamplingOptions { top_p, ..warm() }, &ruled, 50);
            assert_eq!(got, [0, 50, 0]);
        }
        let l = logits(&[0.1, 0.4, 0.2, 0.3]);
        let none = SamplingOptions {
            top_p: 0.0,
            ..warm()
        };
        assert_eq!(counts(none, &l, 50), [0, 50, 0, 0]);
    }

    #[test]
    fn seeds_fix_the_draws() {
        let l = vec![0.0; 1000];
        let run = |seed| {
            let options = SamplingOptions {
                seed: Some(seed),
                ..warm()
            };
            let draws = (0..8).map(|draw| {
                let choice = Choice {
                    options: &options,
                    draw,
                    history: &[],
                    allowed: None,
                };
                sample(&l, &choice, &mut SampleScratch::default()).unwrap()
            });
            draws.collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    /// The logarithm and weight of each logit.
    fn weighed(logits: &[f32], largest: f32, scale: f32) -> Vec<(f32, u64)> {
        let (mut logs, mut weights) = (vec![0.0; logits.len()], vec![0.0; logits.len()]);
        sample::weigh(logits, largest, scale, &mut logs, &mut weights).unwrap();
        let weights = weights.into_iter().map(weight);
        logs.into_iter().zip(weights).collect()
    }

    /// The reference choice: sorts the whole ranking and sums it token by token.
    fn by_sorting(logits: &[f32], rule: &DrawRule) -> u32 {
        let ControlFlow::Continue(largest) = sample::largest(logits) else {
            panic!("unusable logits");
        };
        let weighed = weighed(logits, largest, rule.scale);
        let mut ranking: Vec<_> = (0u32..)
            .zip(weighed)
            .map(|(i, (log, weight))| (key(logits[i as usize], i), log, weight, i))
            .collect();
        ranking.sort_by_key(|&(key, ..)| Reverse(key));
        if rule.top_k > 0 {
            ranking.truncate(rule.top_k as usize);
        }
        let total: u64 = ranking.iter().map(|r| r.2).sum();
        let (mut sum, mut kept) = (0, 0);
        for &(_, log, weight, _) in &ranking {
            let reached = rule.top_p < 1.0 && sum as f64 >= total as f64 * f64::from(rule.top_p);
            if kept > 0 && (reached || log < rule.least_log) {
                break;
            }
            sum += weight;
            kept += 1;
        }
        let at = (u128::from(random::bits(rule.seed, rule.draw)) * u128::from(sum)) >> 64;
        let mut passed = 0;
        for &(_, _, weight, token) in &ranking[..kept] {
            passed += weight;
            if u128::from(passed) > at {
                return token;
            }
        }
        panic!("a draw of {at} from {sum}");
    }

    #[test]
    fn nothing_has_to_be_sorted() {
        let mut scratch = SampleScratch::default();
        let mut different = std::collections::BTreeSet::new();
        for case in 0..4000u64 {
            let pick = |salt: u64, of: u64| random::bits(77 + salt, case) % of;
            let n = [1, 5, 60, 1000, 5000][pick(0, 5) as usize];
            // Steep and flat distributions; some with many equal logits, some with excluded tokens.
            let (width, coarse) = ([30.0, 8.0, 1.0][pick(1, 3) as usize], pick(2, 3) == 0);
            let mut logits: Vec<f32> = (0..n)
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
            logits[0] = 0.0;
            let options = SamplingOptions {
                temperature: [1e-30, 0.3, 1.0, 1.7, 1e30][pick(3, 5) as usize],
                top_k: [0, 2, 3, 40, 900, 6000][pick(4, 6) as usize],
                top_p: [1.0, 0.95, 0.5, 1e-9][pick(5, 4) as usize],
                min_p: [0.0, 0.05, 0.9, 1.0, 1e-20][pick(6, 5) as usize],
                repetition_penalty: 1.0,
                seed: Some(case),
            };
            let choice = Choice {
                options: &options,
                draw: case % 7,
                history: &[],
                allowed: None,
            };
            let got = sample(&logits, &choice, &mut scratch).unwrap();
            assert_eq!(
                got,
                by_sorting(&logits, &choice.rule()),
                "{options:?} of {n}"
            );
            different.insert(got);
        }
        assert!(different.len() > 500, "{} tokens", different.len());
    }

    #[test]
    fn weights_are_those_of_a_softmax() {
        let logits: Vec<f32> = (0..4000).map(|i| 5.0 - i as f32 * 0.01).collect();
        for temperature in [0.2f32, 0.7, 1.0, 3.0] {
            let scale = std::f32::consts::LOG2_E / temperature;
            let mut last = (u64::MAX, 0);
            for (i, (log, weight)) in weighed(&logits, logits[0], scale).into_iter().enumerate() {
                let x = (f64::from(logits[i]) - 5.0) / f64::from(temperature);
                let want = x.exp() * 2f64.powi(40);
                assert!(
                    (weight as f64 - want).abs() <= 2e-6 * want + 1.0,
                    "{weight} {want}"
                );
                let now = (weight, bucket(log));
                assert!(now.0 <= last.0 && now.1 >= last.1, "{now:?} after {last:?}");
                last = now;
            }
        }
    }

    #[test]
    fn refusals() {
        let check = |change: fn(&mut SamplingOptions), expected: &str| {
            let mut options = SamplingOptions::default();
            change(&mut options);
            let e = options.check().unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.message().contains(expected), "{e}");
        };
        check(|o| o.temperature = -0.1, "temperature is -0.1");
        check(|o| o.temperature = f32::NAN, "temperature is NaN");
        check(|o| o.top_p = -0.5, "top_p is -0.5");
        check(|o| o.top_p = 1.5, "top_p is 1.5");
        check(|o| o.min_p = -1.0, "min_p is -1");
        check(|o| o.repetition_penalty = 0.0, "repetition_penalty is 0");
        for (bad, why) in [
            (&[][..], "none of 0 logits"),
            (&[0.0, f32::NAN], "token 1"),
            (&[0.0, 2.0, -f32::NAN], "token 2"),
            (&[f32::INFINITY], "token 0"),
            (&[f32::NEG_INFINITY; 3], "none of 3 logits"),
        ] {
            for options in [SamplingOptions::default(), warm()] {
                let e = chosen(&options, bad, &[]).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::InvalidArgument);
                assert!(e.message().contains(why), "{e}");
            }
        }
    }
}
