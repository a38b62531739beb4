//! How many tokens a session drafts at a time. Pure: knows times and counts.

use super::options::MOST_DRAFTS;

/// After so many steps, one of the numbers that are not the fastest is tried again.
const RETRY: usize = 64;
/// Weight of a new time in the running mean of its number.
const NEW: f64 = 0.25;
/// A step that takes longer than so many steps for each of its rows has done something once, such as loading kernels.
const SLOW: f64 = 2.0;
/// Factor of the counts of compared tokens with each further step that compares some.
const KEPT: f64 = 0.98;

/// Where drafted tokens come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// The model's drafter.
    #[default]
    Drafter,
    /// Earlier places in the session's tokens.
    Lookup,
    /// A draft model.
    Model,
}

/// How a session has been fastest with drafts, by their source.
#[derive(Clone, Debug, Default)]
pub(super) struct Paces {
    drafter: Pace,
    lookup: Pace,
    model: Pace,
}

impl Paces {
    pub(super) fn of(&mut self, source: Source) -> &mut Pace {
        match source {
            Source::Drafter => &mut self.drafter,
            Source::Lookup => &mut self.lookup,
            Source::Model => &mut self.model,
        }
    }

    /// Forgets what a source has shown.
    pub(super) fn forget(&mut self, source: Source) {
        *self.of(source) = Pace::default();
    }
}

/// The number of drafted tokens by which a session has been fastest, of some. Each that may pay is tried once, and twice if it is none or took
/// suspiciously long: the first step of a kind may load kernels. Then the one is taken with the most tokens a second: the tokens that a step
/// with it gives on average by the share of drafted tokens that were right, over the running mean of the measured times of its steps. Every
/// [`RETRY`] steps the next number is tried again, so that drafts that do not pay cost little, and begin again when they do.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// The running mean of the seconds of a step, by the number of drafted tokens.
    seconds: [Option<f64>; MOST_DRAFTS + 1],
    /// Whether the mean is one of several steps.
    is_mean: [bool; MOST_DRAFTS + 1],
    /// Drafted tokens that were right.
    right: f64,
    /// Drafted tokens that were compared with the model's choice: those that were right, and the first wrong one of a step.
    compared: f64,
    steps: usize,
}

impl Pace {
    /// The number of tokens to draft in the next step, one of `numbers`, which rise.
    pub(super) fn count(&mut self, numbers: &[usize]) -> usize {
        self.steps += 1;
        let mut untried = numbers.iter().filter(|count| self.is_untried(**count));
        let untried = untried.find(|count| self.may_pay(numbers, **count));
        if let Some(count) = untried {
            return *count;
        }
        if self.steps.is_multiple_of(RETRY) {
            return numbers[self.steps / RETRY % numbers.len()];
        }
        let speed = |count: usize| {
            self.tokens(count) / self.seconds[count].unwrap_or(f64::INFINITY).max(1e-9)
        };
        // The first of equal ones: fewer drafts.
        let fastest = numbers
            .iter()
            .rev()
            .max_by(|a, b| speed(**a).total_cmp(&speed(**b)));
        fastest.copied().unwrap_or(0)
    }

    /// Whether the time of a step with `count` drafted tokens is not known yet.
    fn is_untried(&self, count: usize) -> bool {
        match (self.seconds[count], self.seconds[0]) {
            (Some(_), _) if self.is_mean[count] => false,
            (Some(first), Some(step)) if count > 0 => first > SLOW * step * (count + 1) as f64,
            _ => true,
        }
    }

    /// Whether `count` drafted tokens would be the fastest number if a step took no longer than with fewer of `numbers`.
    fn may_pay(&self, numbers: &[usize], count: usize) -> bool {
        let tried = |count: &usize| self.seconds[*count].map(|seconds| (*count, seconds));
        let fewer = numbers.iter().take_while(|fewer| **fewer < count);
        let least = fewer.filter_map(tried).map(|(_, s)| s).fold(0.0, f64::max);
        let speeds = numbers.iter().filter_map(tried);
        let fastest = speeds
            .map(|(count, s)| self.tokens(count) / s)
            .fold(0.0, f64::max);
        self.tokens(count) > fastest * least
    }

    /// The tokens that a step with `count` drafted ones gives on average.
    fn tokens(&self, count: usize) -> f64 {
        let right = (self.right + 1.0) / (self.compared + 2.0);
        (0..=count).map(|n| right.powi(n as i32)).sum()
    }

    /// Records the time of a step that drafted `count` tokens.
    pub(super) fn record(&mut self, count: usize, seconds: f64) {
        let mean = self.seconds[count].map(|mean| match self.is_mean[count] {
            true => mean + NEW * (seconds - mean),
            false => mean.min(seconds),
        });
        self.is_mean[count] = mean.is_some();
        self.seconds[count] = Some(mean.unwrap_or(seconds));
    }

    /// Records how many drafted tokens of a step were right, and whether one was wrong.
    pub(super) fn record_drafts(&mut self, right: usize, is_wrong: bool) {
        if right == 0 && !is_wrong {
            return;
        }
        self.right = self.right * KEPT + right as f64;
        self.compared = self.compared * KEPT + (right + usize::from(is_wrong)) as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes steps in which `share` of 100 drafted tokens are right, and that take `seconds`. Returns the numbers drafted.
    fn drafted(
        pace: &mut Pace,
        steps: usize,
        share: u64,
        mut seconds: impl FnMut(usize) -> f64,
    ) -> Vec<usize> {
        let mut draws = 0;
        let mut is_right = || {
            draws += 1;
            crate::format::random::bits(3, draws) % 100 < share
        };
        (0..steps)
            .map(|_| {
                let count = pace.count(&[0, 1, 2, 3]);
                let right = (0..count).take_while(|_| is_right()).count();
                pace.record_drafts(right, right < count);
                pace.record(count, seconds(count));
                count
            })
            .collect()
    }

    fn share(counts: &[usize], count: usize) -> f64 {
        counts.iter().filter(|c| **c == count).count() as f64 / counts.len() as f64
    }

    #[test]
    fn cheap_verification_of_good_drafts_takes_all_and_bad_drafts_take_none() {
        let cheap = |count: usize| 1.0 + 0.1 * count as f64;
        let good = drafted(&mut Pace::default(), 640, 90, cheap);
        assert_eq!(good[..5], [0, 0, 1, 2, 3]);
        assert!(share(&good[64..], 3) > 0.95, "{good:?}");
        let bad = drafted(&mut Pace::default(), 640, 2, cheap);
        assert!(share(&bad[64..], 0) > 0.95, "{bad:?}");
    }

    #[test]
    fn verification_that_takes_as_long_as_steps_turns_itself_off() {
        let counts = drafted(&mut Pace::default(), 640, 90, |count| 1.0 + count as f64);
        assert!(share(&counts[64..], 0) > 0.95, "{counts:?}");
    }

    #[test]
    fn steps_that_do_something_once_do_not_decide() {
        for (share_right, each, tries, fastest) in [
            (90, 0.1, &[0, 0, 1, 1, 2, 2, 3, 3][..], 3),
            // More than one drafted token cannot pay.
            (2, 1.0, &[0, 0, 1, 1], 0),
        ] {
            let mut seen = [false; 4];
            let seconds = |count: usize| {
                let once = if seen[count] { 0.0 } else { 100.0 };
                seen[count] = true;
                once + 1.0 + each * count as f64
            };
            let counts = drafted(&mut Pace::default(), 63, share_right, seconds);
            let (tried, others) = counts.split_at(tries.len());
            assert_eq!(tried, tries);
            assert_eq!(share(others, fastest), 1.0, "{counts:?}");
        }
    }

    #[test]
    fn drafts_begin_again_when_they_pay() {
        let mut pace = Pace::default();
        drafted(&mut pace, 640, 90, |count| 1.0 + count as f64);
        let counts = drafted(&mut pace, 1280, 90, |count| 1.0 + 0.1 * count as f64);
        assert!(share(&counts[1024..], 0) < 0.05, "{counts:?}");
    }
}
