//! A stand-in of requests and passes, each request of one sequence that is no more than a number of tokens.

use std::marker::PhantomData;
use std::ops::AddAssign;

use super::schedule::Waiting;
use crate::base::{Error, Result};
use crate::model::{Batch, Fault, Output, Scratch, Segment};

pub struct Sequence {
    pub id: u64,
    /// Tokens that have run.
    pub len: usize,
    /// The epoch of the weights that ran them.
    pub epoch: u64,
}

/// Tokens that continue a sequence.
pub struct NewTokens<'a> {
    pub sequence: &'a mut Sequence,
    pub count: usize,
    pub fault: Fault,
    /// Gives the epoch of the weights.
    pub epoch: &'a (dyn Fn() -> u64 + Sync),
}

pub(super) struct Request<'a> {
    work: NewTokens<'a>,
    /// Tokens before those of the request.
    before: usize,
    left: usize,
    is_thrown_back: bool,
    is_over: bool,
    output: Option<Result<Output>>,
    error: Option<Error>,
    tally: Tally,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally(pub(super) u64);

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.0 += other.0;
    }
}

pub(super) struct Part<'r, 'a> {
    request: &'r mut Request<'a>,
    count: usize,
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.is_over = true;
    }
}

impl<'a> Request<'a> {
    pub(super) fn new(mut work: Vec<NewTokens<'a>>) -> Request<'a> {
        let work = work.pop().expect("one sequence");
        Request {
            before: work.sequence.len,
            left: work.count,
            is_thrown_back: false,
            is_over: false,
            output: None,
            error: None,
            tally: Tally::default(),
            work,
        }
    }

    pub(super) fn waiting(&self) -> Waiting {
        Waiting {
            left: self.left,
            from: Some(self.work.sequence.len),
        }
    }

    pub(super) fn renew(&mut self) -> Result<usize> {
        let (sequence, epoch) = (&mut *self.work.sequence, (self.work.epoch)());
        if sequence.epoch == epoch {
            return Ok(0);
        }
        sequence.epoch = epoch;
        let again = std::mem::take(&mut sequence.len);
        self.is_thrown_back |= again > self.before;
        self.left += again;
        Ok(again)
    }

    pub(super) fn is_thrown_back(&self) -> bool {
        self.is_thrown_back
    }

    pub(super) fn adopt(&mut self) -> usize {
        0
    }

    pub(super) fn take_tally(&mut self) -> Tally {
        std::mem::take(&mut self.tally)
    }

    pub(super) fn is_over(&self) -> bool {
        assert!(!self.is_over, "a request whose caller has returned");
        self.error.is_some() || self.output.is_some()
    }

    pub(super) fn sequences(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.work.sequence.id)
    }

    pub(super) fn part(&mut self, count: usize) -> Part<'_, 'a> {
        Part {
            request: self,
            count,
        }
    }

    pub(super) fn fail(&mut self, error: Error) {
        assert!(!self.is_over(), "a second end");
        self.work.sequence.len = self.work.sequence.len.min(self.before);
        self.error = Some(error);
    }

    pub(super) fn finish(mut self, _: &mut Vec<f32>, _: usize) -> Result<Vec<Result<Output>>> {
        match (self.error.take(), self.output.take()) {
            (Some(error), _) => Err(error),
            (None, Some(output)) => Ok(vec![output]),
            (None, None) => panic!("a request without an end"),
        }
    }
}

pub(super) fn pass(
    mut parts: Vec<Part<'_, '_>>,
    _look_ahead: bool,
    _vocabulary: usize,
    scratch: &mut Scratch,
    run: impl FnOnce(Batch<'_>, &mut Scratch, &mut Vec<f32>) -> Result<Vec<Result<Output>>>,
) {
    let segments = parts.iter().map(|part| Segment {
        sequence: part.request.work.sequence.id,
        count: part.count,
        fault: part.request.work.fault,
        epoch: part.request.work.sequence.epoch,
    });
    let batch = Batch {
        segments: segments.collect(),
        lifetime: PhantomData,
    };
    match run(batch, scratch, &mut Vec::new()) {
        Ok(outputs) => {
            for (part, output) in parts.iter_mut().zip(outputs) {
                let request = &mut *part.request;
                assert!(!request.is_over(), "tokens of a request that has ended");
                if output.is_ok() {
                    request.work.sequence.len += part.count;
                    request.tally.0 += part.count as u64;
                }
                request.left -= part.count;
                if output.is_err() || request.left == 0 {
                    request.output = Some(output);
                }
            }
        }
        Err(e) => parts
            .iter_mut()
            .for_each(|part| part.request.fail(e.clone())),
    }
}
