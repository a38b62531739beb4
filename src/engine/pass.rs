//! A pass over the weights for the requests of several callers: takes blocks, runs the model, and commits what ran. Nothing of a sequence
//! changes before its tokens have run, and a request that fails leaves the others as they are.

use std::ops::AddAssign;

use super::schedule::Waiting;
use super::sequence::{PartOf, Sequence};
use crate::base::{Error, Result, memory};
use crate::model::{Batch, HiddenBefore, Output, Scratch, Segment, Wanted};

/// Tokens that continue a sequence.
#[derive(Debug)]
pub struct NewTokens<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Holds `tokens` afterwards, if they run without a fault; otherwise it is as it was.
    pub sequence: &'a mut Sequence,
    /// The requested output.
    pub wanted: Wanted<'a>,
}

/// The tokens of different sequences that a caller waits for.
pub(super) struct Request<'a> {
    items: Vec<Item<'a>>,
    /// The error of the whole request.
    error: Option<Error>,
    /// Rows of logits so far.
    logits: Vec<f32>,
}

/// Tokens of one sequence.
struct Item<'a> {
    work: NewTokens<'a>,
    /// Tokens that older weights have run and those of `work` after them, all of which run; empty if there are none of the former.
    renewed: Vec<u32>,
    /// Positions of the sequence before the tokens of `work`.
    before: usize,
    /// Tokens that have run, or that blocks of other sequences held.
    done: usize,
    /// Whether tokens that had run for it run again.
    is_thrown_back: bool,
    output: Option<Result<Output>>,
    tally: Tally,
}

/// Numbers of tokens that were appended to sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Tokens of requests for more than one of a sequence, without drafted ones.
    pub(super) prompt: u64,
    /// Prompt tokens that did not run, because blocks of other sequences held them.
    pub(super) found: u64,
    /// Tokens that came one by one, and drafted ones that were right.
    pub(super) steps: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.prompt += other.prompt;
        self.found += other.found;
        self.steps += other.steps;
    }
}

/// The part of a request that a pass runs: all of it, or the next `count` tokens of its only sequence.
pub(super) struct Part<'r, 'a> {
    request: &'r mut Request<'a>,
    count: usize,
}

impl<'a> Request<'a> {
    pub(super) fn new(work: Vec<NewTokens<'a>>) -> Request<'a> {
        let items = work.into_iter().map(|work| Item {
            renewed: Vec::new(),
            before: work.sequence.len(),
            done: 0,
            is_thrown_back: false,
            output: None,
            tally: Tally::default(),
            work,
        });
        Request {
            items: items.collect(),
            error: None,
            logits: Vec::new(),
        }
    }

    /// Its tokens that have not run, as the schedule sees them.
    pub(super) fn waiting(&self) -> Waiting {
        Waiting {
            left: self.items.iter().map(Item::left).sum(),
            from: match &self.items[..] {
                [item] if item.is_divisible() => Some(item.work.sequence.len()),
                _ => None,
            },
        }
    }

    /// The items without an output.
    fn open_items(&self) -> impl Iterator<Item = &Item<'a>> {
        self.items.iter().filter(|item| item.output.is_none())
    }

    fn open_items_mut(&mut self) -> impl Iterator<Item = &mut Item<'a>> {
        self.items.iter_mut().filter(|item| item.output.is_none())
    }

    /// Lets tokens run again that older weights than those of the coming pass have run. Returns how many.
    pub(super) fn renew(&mut self) -> Result<usize> {
        self.items
            .iter_mut()
            .try_fold(0, |sum, item| Ok(sum + item.renew()?))
    }

    /// Whether tokens of it that had run run again, because the weights have changed between its passes.
    pub(super) fn is_thrown_back(&self) -> bool {
        self.items.iter().any(|item| item.is_thrown_back)
    }

    /// Lets its sequences begin with blocks of others that hold the same tokens. Returns the number of tokens that need not run.
    pub(super) fn adopt(&mut self) -> usize {
        self.items.iter_mut().map(Item::adopt).sum()
    }

    /// Removes the numbers of tokens appended since the last call.
    pub(super) fn take_tally(&mut self) -> Tally {
        let mut all = Tally::default();
        let tallies = self
            .items
            .iter_mut()
            .map(|item| std::mem::take(&mut item.tally));
        tallies.for_each(|tally| all += tally);
        all
    }

    /// Whether nothing of it is left to run.
    pub(super) fn is_over(&self) -> bool {
        self.error.is_some() || self.items.iter().all(|item| item.output.is_some())
    }

    /// Its sequences.
    pub(super) fn sequences(&self) -> impl Iterator<Item = u64> {
        self.items.iter().map(|item| item.work.sequence.id())
    }

    /// The part with its next `count` tokens.
    pub(super) fn part(&mut self, count: usize) -> Part<'_, 'a> {
        Part {
            request: self,
            count,
        }
    }

    /// Ends it with an error. No sequence has more positions than before.
    pub(super) fn fail(&mut self, error: Error) {
        let undone = self.items.iter_mut().map(Item::undo);
        let failed = undone.fold(Ok(()), Result::and);
        self.error = Some(failed.err().unwrap_or(error));
    }

    /// Its outputs, and their rows of logits after those of `logits`, which have `vocabulary` numbers each.
    pub(super) fn finish(
        self,
        logits: &mut Vec<f32>,
        vocabulary: usize,
    ) -> Result<Vec<Result<Output>>> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let rows = logits.len() / vocabulary;
        match logits.is_empty() {
            true => *logits = self.logits,
            false => logits.extend_from_slice(&self.logits),
        }
        let outputs = self.items.into_iter().map(|item| match item.output {
            Some(Ok(Output::Logits(own))) => Ok(Output::Logits(own.start + rows..own.end + rows)),
            Some(output) => output,
            None => Ok(Output::Cached),
        });
        Ok(outputs.collect())
    }
}

impl<'a> Item<'a> {
    /// All of its tokens.
    fn tokens(&self) -> &[u32] {
        all_of(self.work.tokens, &self.renewed)
    }

    /// Its tokens before those of `work`.
    fn again(&self) -> usize {
        self.tokens().len() - self.work.tokens.len()
    }

    /// Whether output of more tokens than the last is wanted.
    fn wants_several(&self) -> bool {
        match self.work.wanted {
            Wanted::Nothing | Wanted::Last | Wanted::LastHidden | Wanted::Token(_) => false,
            Wanted::All | Wanted::AllHidden | Wanted::Likelihoods(_) | Wanted::Verified(_) => true,
        }
    }

    /// Whether the tokens that are left may run in several passes: no output of any but the last is wanted.
    fn is_divisible(&self) -> bool {
        !self.wants_several() || self.done < self.again()
    }

    /// Tokens to run next. Those of which several outputs are wanted run alone.
    fn left(&self) -> usize {
        let end = match self.wants_several() && self.done < self.again() {
            true => self.again(),
            false => self.tokens().len(),
        };
        end - self.done
    }

    /// Whether the next `count` tokens are the last.
    fn ends_with(&self, count: usize) -> bool {
        self.done + count == self.tokens().len()
    }

    fn part_of(&self) -> PartOf {
        PartOf {
            all: self.tokens().len(),
            done: self.done,
        }
    }

    /// Takes up the tokens of a sequence that older weights have run. Returns how many.
    fn renew(&mut self) -> Result<usize> {
        if self.output.is_some() {
            return Ok(0);
        }
        let mut tokens = self.work.sequence.renew()?;
        let count = tokens.len();
        if count > 0 {
            let left = &self.tokens()[self.done..];
            memory::make_room(&mut tokens, left.len())?;
            tokens.extend_from_slice(left);
            self.is_thrown_back |= self.done > 0;
            self.renewed = tokens;
            self.done = 0;
        }
        Ok(count)
    }

    fn reserve(&mut self, count: usize) -> Result<()> {
        let verified = matches!(self.work.wanted, Wanted::Verified(_)) && self.ends_with(count);
        let of = self.part_of();
        self.work.sequence.reserve(count, of, verified)
    }

    fn segment(&self, count: usize) -> Segment<'_> {
        let sequence = &*self.work.sequence;
        Segment {
            tokens: &self.tokens()[self.done..self.done + count],
            first: sequence.len(),
            tables: sequence.tables(),
            context: sequence.capacity(),
            adapter: sequence.adapter().map(|adapter| &***adapter),
            wanted: match self.ends_with(count) {
                true => self.work.wanted,
                false => Wanted::Nothing,
            },
            drafts_after: sequence.drafts().then(|| HiddenBefore(sequence.hidden())),
        }
    }

    /// Begins with blocks of other sequences that hold the same tokens, instead of running these. Returns the number of tokens.
    fn adopt(&mut self) -> usize {
        let found = match self.is_divisible() && self.output.is_none() {
            true => {
                let next = self.done..self.done + self.left();
                let tokens = all_of(self.work.tokens, &self.renewed);
                self.work.sequence.adopt(&tokens[next])
            }
            false => 0,
        };
        self.done += found;
        self.tally.prompt += found as u64;
        self.tally.found += found as u64;
        found
    }

    /// Records that the next `count` tokens ran.
    fn commit(&mut self, count: usize, output: Output, hidden: Option<Vec<f32>>) {
        let (of, is_end) = (self.part_of(), self.ends_with(count));
        let sequence = &mut *self.work.sequence;
        let tokens = all_of(self.work.tokens, &self.renewed);
        let ran = &tokens[self.done..self.done + count];
        match &output {
            Output::Verified(chosen) => {
                sequence.advance_verified(&ran[..chosen.len()]);
                self.tally.steps += chosen.len() as u64;
            }
            _ if of.all > 1 => {
                sequence.advance(ran, of);
                self.tally.prompt += count as u64;
            }
            _ => {
                sequence.advance(ran, of);
                self.tally.steps += count as u64;
            }
        }
        sequence.set_hidden(hidden);
        sequence.publish();
        self.done += count;
        if is_end {
            self.output = Some(Ok(output));
        }
    }

    /// Removes what a pass that failed wrote, and drops the positions of earlier passes.
    fn undo(&mut self) -> Result<()> {
        let given_up = self.work.sequence.give_up();
        let kept = self.before.min(self.work.sequence.len());
        given_up.and(self.work.sequence.truncate(kept))
    }
}

/// The tokens of an item: those that a caller gave, or, if there are any, those that run again with them.
fn all_of<'t>(given: &'t [u32], renewed: &'t [u32]) -> &'t [u32] {
    match renewed.is_empty() {
        true => given,
        false => renewed,
    }
}

impl<'a> Part<'_, 'a> {
    /// The number of tokens of each item that run.
    fn counts(&self) -> Vec<usize> {
        let items = self.request.open_items();
        items.map(|item| self.count(item)).collect()
    }

    /// The number of tokens of an item that run.
    fn count(&self, item: &Item<'a>) -> usize {
        match self.request.items.len() {
            1 => self.count,
            _ => item.left(),
        }
    }

    /// Takes blocks for its tokens.
    fn reserve(&mut self) -> Result<()> {
        let counts = self.counts();
        let alone = self.request.items.len() == 1;
        let items = self.request.items.iter_mut().enumerate();
        let items = items.filter(|(_, item)| item.output.is_none());
        for ((i, item), count) in items.zip(counts) {
            item.reserve(count).map_err(|e| match alone {
                true => e,
                false => e.within(format_args!("sequence {i}")),
            })?;
        }
        Ok(())
    }

    fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        let items = self.request.open_items();
        items.map(|item| item.segment(self.count(item)))
    }

    /// Records the outputs of a pass, whose rows of logits are in `logits` or, if that is `None`, those of the request already.
    fn commit(
        &mut self,
        outputs: Vec<Result<Output>>,
        hidden: impl Fn(&mut Scratch, usize) -> Option<Vec<f32>>,
        scratch: &mut Scratch,
        logits: Option<(&[f32], usize)>,
    ) {
        let counts = self.counts();
        let request = &mut *self.request;
        let faulty = request.open_items_mut().zip(&outputs);
        let faulty = faulty.filter(|(_, output)| output.is_err());
        // Values left past the end of a sequence may spoil its next tokens, so the request fails if they stay.
        let undone = faulty.map(|(item, _)| item.undo());
        if let Err(e) = undone.fold(Ok(()), Result::and) {
            return request.fail(e);
        }
        let open = request.items.iter_mut();
        let open = open.filter(|item| item.output.is_none());
        let items = open.zip(outputs).zip(counts);
        for (i, ((item, output), count)) in items.enumerate() {
            match (output, logits) {
                (Err(fault), _) => item.output = Some(Err(fault)),
                (Ok(Output::Logits(rows)), Some((logits, vocabulary))) => {
                    let first = request.logits.len() / vocabulary;
                    let own = &logits[rows.start * vocabulary..rows.end * vocabulary];
                    request.logits.extend_from_slice(own);
                    let rows = first..first + rows.len();
                    item.commit(count, Output::Logits(rows), hidden(scratch, i));
                }
                (Ok(output), _) => item.commit(count, output, hidden(scratch, i)),
            }
        }
    }
}

/// Runs parts of different requests in one call of `run`, whose rows of logits have `vocabulary` numbers. With `look_ahead` a GPU runs the
/// step after this one at once, with the tokens that it chose.
pub(super) fn pass(
    mut parts: Vec<Part<'_, '_>>,
    look_ahead: bool,
    vocabulary: usize,
    scratch: &mut Scratch,
    run: impl FnOnce(Batch<'_>, &mut Scratch, &mut Vec<f32>) -> Result<Vec<Result<Output>>>,
) {
    for part in &mut parts {
        if let Err(e) = part.reserve() {
            part.request.fail(e);
        }
    }
    parts.retain(|part| part.request.error.is_none());
    if parts.is_empty() {
        return;
    }
    if look_ahead {
        // Without a block for it, the step after this one does not run ahead.
        for item in parts
            .iter_mut()
            .flat_map(|part| part.request.open_items_mut())
        {
            let sequence = &mut *item.work.sequence;
            if sequence.room() > 1 {
                let _ = sequence.reserve_ahead(item.work.tokens.len());
            }
        }
    }
    let mut logits = match &mut parts[..] {
        [part] => std::mem::take(&mut part.request.logits),
        _ => Vec::new(),
    };
    let segments = parts.iter().flat_map(Part::segments).collect();
    let batch = Batch {
        segments,
        look_ahead,
    };
    let outputs = match run(batch, scratch, &mut logits) {
        Ok(outputs) => outputs,
        Err(e) => {
            parts
                .iter_mut()
                .for_each(|part| part.request.fail(e.clone()));
            return;
        }
    };
    let (mut outputs, mut slot) = (outputs.into_iter(), 0);
    let rows = match &mut parts[..] {
        [part] => {
            part.request.logits = logits;
            None
        }
        _ => Some((&*logits, vocabulary)),
    };
    for part in &mut parts {
        let count = part.request.open_items().count();
        let own = outputs.by_ref().take(count).collect();
        let hidden = |scratch: &mut Scratch, i: usize| scratch.take_hidden(slot + i);
        part.commit(own, hidden, scratch, rows);
        slot += count;
    }
}
