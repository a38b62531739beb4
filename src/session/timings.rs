//! How long the parts of a generation take.

use std::time::Duration;

use serde::Serialize;

use crate::base::sync::Instant;
use crate::engine::Sequence;

/// Durations of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// From the call, or from the submission to a queue, to the beginning of the first pass with tokens of it: the time for which it waited
    /// for its turn in the queue, for memory, and for passes of others.
    pub queue_seconds: f64,
    /// From the beginning of the first pass to the first token. 0 if no pass had to run for it.
    pub prefill_seconds: f64,
    /// From the call, or from the submission to a queue, to the first token.
    pub first_token_seconds: f64,
    /// From the first token to the end.
    pub decode_seconds: f64,
    /// The longest time from one token to the next. 0 with fewer than two.
    pub longest_gap_seconds: f64,
}

impl Timings {
    /// Adds the time for which the generation waited before its call.
    pub fn add_wait(&mut self, waited: Duration) {
        self.queue_seconds += waited.as_secs_f64();
        self.first_token_seconds += waited.as_secs_f64();
    }
}

/// Measures a generation.
#[derive(Debug)]
pub(super) struct Stopwatch {
    start: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    timings: Timings,
}

impl Stopwatch {
    /// Begins with the call of a generation. The sequence counts its work from now on.
    pub(super) fn start(sequence: &mut Sequence) -> Stopwatch {
        sequence.reset_work();
        Stopwatch {
            start: Instant::now(),
            first: None,
            last: None,
            timings: Timings::default(),
        }
    }

    /// Takes the time of a token. Returns whether it is the first.
    pub(super) fn token(&mut self, sequence: &Sequence) -> bool {
        let (now, times) = (Instant::now(), &mut self.timings);
        if let Some(last) = self.last.replace(now) {
            let gap = now.duration_since(last).as_secs_f64();
            times.longest_gap_seconds = times.longest_gap_seconds.max(gap);
            return false;
        }
        self.first = Some(now);
        times.first_token_seconds = now.duration_since(self.start).as_secs_f64();
        if let Some(pass) = sequence.work().first_pass {
            times.queue_seconds = pass.duration_since(self.start).as_secs_f64();
            times.prefill_seconds = now.duration_since(pass).as_secs_f64();
        }
        true
    }

    /// The durations of the generation, which ends now.
    pub(super) fn end(self) -> Timings {
        let decoding = self.first.map_or(Duration::ZERO, |first| first.elapsed());
        Timings {
            decode_seconds: decoding.as_secs_f64(),
            ..self.timings
        }
    }
}
