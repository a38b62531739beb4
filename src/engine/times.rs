//! How long passes take, and from that how many tokens of prompts run beside steps. Pure: knows times and counts.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Weight of a new time in a running mean.
const NEW: f64 = 0.25;
/// Tokens of prompts prolong a pass by this, or by [`STEPS`] steps, whichever is longer.
const LONGEST: Duration = Duration::from_millis(20);
const STEPS: f64 = 3.0;
/// Tokens of prompts that are measured; fewer take as long as a step.
const MEASURED: usize = 32;

/// Running means of the times of passes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassTimes {
    /// Seconds of a pass of steps alone.
    step: Option<f64>,
    /// Seconds of a token of a prompt.
    token: Option<f64>,
}

impl PassTimes {
    /// The time of a pass of steps alone, once there was one.
    pub(super) fn step(&self) -> Option<Duration> {
        self.step.map(Duration::from_secs_f64)
    }

    /// Records the time of a pass of `rows` tokens. Prompts beside steps take what is beyond a step.
    pub(super) fn record(&mut self, rows: usize, prompts: bool, steps: bool, time: Duration) {
        let seconds = time.as_secs_f64();
        let of_steps = match steps {
            true => self.step.unwrap_or(0.0).min(seconds / 2.0),
            false => 0.0,
        };
        let (mean, new) = match prompts {
            false => (&mut self.step, seconds),
            true if rows >= MEASURED => (&mut self.token, (seconds - of_steps) / rows as f64),
            true => return,
        };
        *mean = Some(mean.map_or(new, |mean| mean + NEW * (new - mean)));
    }

    /// Tokens of prompts that run in a pass beside steps, within these limits.
    pub(super) fn budget(&self, limits: RangeInclusive<usize>) -> usize {
        let (least, most) = limits.into_inner();
        let Some(token) = self.token else {
            return MEASURED.clamp(least, most);
        };
        let longest = LONGEST.as_secs_f64().max(STEPS * self.step.unwrap_or(0.0));
        ((longest / token.max(1e-9)) as usize).clamp(least, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_follow_the_times_of_passes() {
        let mut times = PassTimes::default();
        assert_eq!(times.budget(1..=4096), MEASURED);
        let after = |seconds| Duration::from_secs_f64(seconds);
        // A GPU: 20 us a token, of which 20 ms hold 1,000.
        (0..50).for_each(|_| times.record(2000, true, false, after(0.04)));
        let about = |times: &PassTimes, count: usize| times.budget(1..=4096).abs_diff(count) <= 1;
        assert!(about(&times, 1000), "{}", times.budget(1..=4096));
        assert_eq!(times.budget(1..=512), 512);
        assert_eq!(times.budget(2048..=4096), 2048);
        // Few tokens say nothing of the time of one.
        times.record(8, true, false, after(1.0));
        assert!(about(&times, 1000), "{}", times.budget(1..=4096));
        // A processor: steps of 50 ms, three of which hold 75 tokens of 2 ms. A prompt beside steps is what is beyond a step.
        (0..50).for_each(|_| times.record(4, false, true, after(0.05)));
        assert_eq!(times.step(), Some(after(0.05)));
        (0..50).for_each(|_| times.record(100, true, true, after(0.25)));
        assert!(about(&times, 75), "{}", times.budget(1..=4096));
    }
}
