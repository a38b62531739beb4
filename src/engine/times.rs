//! How long passes take, and from that how many tokens of prompts run beside steps. Pure: knows times and counts.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::schedule::Waiting;
use crate::model::LONG_PROMPT;

/// Weight of a new time in a running mean.
const NEW: f64 = 0.25;
/// Tokens of prompts prolong a pass by this, or by [`STEPS`] steps, whichever is longer.
const LONGEST: Duration = Duration::from_millis(20);
const STEPS: f64 = 3.0;
/// Where prompts have a small share, they prolong a pass by so many steps, which makes less than two in all.
const LATENCY_STEPS: f64 = 0.9;
/// The longest pass beside steps for whose end a short prompt waits.
const SHORT_WAIT: Duration = Duration::from_millis(45);
/// Tokens of prompts that are measured; fewer take as long as a step.
const MEASURED: usize = 32;

/// The share that prompts have in passes while sequences generate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PromptShare {
    /// Whether prompts hold up steps as little as possible, rather than end soon.
    pub(super) is_small: bool,
    /// Most tokens of prompts in a pass, whatever the times are.
    pub(super) most: Option<usize>,
    /// Whether prompts run beside steps.
    pub(super) beside: bool,
}

impl PromptShare {
    /// Whether tokens are those of a prompt that runs beside steps: any where prompts have a small share, else a long one. Several shorter ones run
    /// in one pass between two of steps, which takes less time in all.
    pub(super) fn goes_beside(&self, waiting: &Waiting) -> bool {
        self.beside && waiting.is_prompt() && (self.is_small || waiting.left > LONG_PROMPT)
    }

    /// Most tokens of a prompt in a pass beside steps, which has room for `most`.
    pub(super) fn part_beside(&self, most: usize) -> usize {
        self.most.unwrap_or(most).min(most)
    }

    /// Whether a short prompt waits for the end of a pass beside steps, rather than run with these.
    pub(super) fn waits_beside(pass: Duration) -> bool {
        pass <= SHORT_WAIT
    }
}

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
    pub(super) fn budget(&self, limits: RangeInclusive<usize>, share: PromptShare) -> usize {
        let (least, most) = limits.into_inner();
        let (Some(token), step) = (self.token, self.step.unwrap_or(0.0)) else {
            return MEASURED.clamp(least, most);
        };
        let longest = match share.is_small {
            true => LATENCY_STEPS * step,
            false => LONGEST.as_secs_f64().max(STEPS * step),
        };
        ((longest / token.max(1e-9)) as usize).clamp(least, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_follow_the_times_of_passes() {
        let mut times = PassTimes::default();
        let large = PromptShare::default();
        assert_eq!(times.budget(1..=4096, large), MEASURED);
        let after = |seconds| Duration::from_secs_f64(seconds);
        // A GPU: 20 us a token, of which 20 ms hold 1,000.
        (0..50).for_each(|_| times.record(2000, true, false, after(0.04)));
        let about =
            |times: &PassTimes, count: usize| times.budget(1..=4096, large).abs_diff(count) <= 1;
        assert!(about(&times, 1000), "{}", times.budget(1..=4096, large));
        assert_eq!(times.budget(1..=512, large), 512);
        assert_eq!(times.budget(2048..=4096, large), 2048);
        // Few tokens say nothing of the time of one.
        times.record(8, true, false, after(1.0));
        assert!(about(&times, 1000), "{}", times.budget(1..=4096, large));
        // A processor: steps of 50 ms, three of which hold 75 tokens of 2 ms. A prompt beside steps is what is beyond a step.
        (0..50).for_each(|_| times.record(4, false, true, after(0.05)));
        assert_eq!(times.step(), Some(after(0.05)));
        (0..50).for_each(|_| times.record(100, true, true, after(0.25)));
        assert!(about(&times, 75), "{}", times.budget(1..=4096, large));
        // A small share prolongs a step of 50 ms by 45.
        let small = PromptShare {
            is_small: true,
            ..PromptShare::default()
        };
        assert!(times.budget(1..=4096, small).abs_diff(22) <= 1);
        assert_eq!(times.budget(64..=4096, small), 64);
    }

    #[test]
    fn long_prompts_run_beside_steps() {
        let prompt = |left| Waiting {
            left,
            from: Some(0),
        };
        let large = PromptShare {
            beside: true,
            ..PromptShare::default()
        };
        assert!(
            large.goes_beside(&prompt(LONG_PROMPT + 1)) && !large.goes_beside(&prompt(LONG_PROMPT))
        );
        let small = PromptShare {
            is_small: true,
            ..large
        };
        assert!(small.goes_beside(&prompt(2)) && !small.goes_beside(&prompt(1)));
        assert!(!PromptShare::default().goes_beside(&prompt(LONG_PROMPT + 1)));
        // The host may want smaller parts.
        let limited = PromptShare {
            most: Some(256),
            ..large
        };
        assert_eq!(
            (large.part_beside(4096), limited.part_beside(4096)),
            (4096, 256)
        );
    }
}
