//! Floor 7 of the library, as far as hand-overs use it.

#[path = "../../../src/session/forks.rs"]
mod forks;
pub mod programs;
#[path = "../../../src/session/queue.rs"]
mod queue;

use crate::base::call;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Length,
    Cancelled,
    Deadline,
}

impl Finish {
    pub(super) fn of_ended_call() -> Finish {
        match call::is_late() {
            true => Finish::Deadline,
            false => Finish::Cancelled,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    #[default]
    Content,
}

/// No program asks for any.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenProbabilities;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece<'a> {
    pub token: Option<u32>,
    pub part: Part,
    pub text: &'a str,
    pub probabilities: Option<&'a TokenProbabilities>,
}
