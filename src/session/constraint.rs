//! A generation that is held to a grammar: decides before each token whether it is given, chosen freely, or chosen by a mask. In a chat the
//! reasoning is free, and the grammar begins with the content; tool calls are held from the mark that begins each.

use std::sync::Arc;

use super::options::{GenerateOptions, ToolCalls};
use crate::base::Result;
use crate::base::error::bail;
use crate::engine::Served;
use crate::model::TokenMask;
use crate::text::{AnswerForm, AnswerStage, Grammar, GrammarState};

/// How the next token comes about.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// It is chosen freely.
    Free,
    /// It is chosen by the [mask](Constraint::mask).
    Masked,
    /// These tokens come next.
    Given(Vec<u32>),
    /// None: nothing can follow the text.
    Over,
}

/// The grammar of one generation.
pub(super) struct Constraint {
    grammar: Arc<Grammar>,
    scope: Scope,
    phase: Phase,
    /// State of the held part; `None` before it begins.
    state: Option<GrammarState>,
    mask: Vec<u32>,
    /// Tokens that end the text, of the model and of the options.
    stops: Vec<u32>,
    /// Tokens of the model that end a text, but are to be ignored.
    ignored: Vec<u32>,
    opening: Opening,
    form: Option<AnswerForm>,
}

/// The part of an answer that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// All of the content.
    Content,
    /// Each tool call; with `first`, the content begins with one.
    Calls { first: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The held part has not begun.
    Before,
    /// The next token begins either reasoning or the held part.
    Open,
    Held,
}

/// How the content of an answer begins.
#[derive(Default)]
struct Opening {
    /// The mark that begins reasoning, if it is one token.
    begin: Option<u32>,
    /// Tokens that begin an answer that is a series of messages.
    header: Vec<u32>,
    /// Tokens that end the reasoning, with those up to the content.
    end: Vec<u32>,
    /// Tokens between the end of the reasoning and the held part.
    lead: Vec<u32>,
    /// Whether there was reasoning, which `lead` has not followed.
    is_due: bool,
}

impl Opening {
    fn of(model: &Served, form: &AnswerForm, call_must_come: bool) -> Result<Opening> {
        let (Some(marks), Some(end)) = (form.reasoning(), form.early_end(call_must_come)) else {
            return Ok(Opening::default());
        };
        let tokenizer = model.tokenizer()?;
        let end = &end[end.find(marks.end).unwrap_or_default()..];
        let header = tokenizer.encode(marks.begin, false)?;
        Ok(Opening {
            begin: <[u32; 1]>::try_from(&*header).ok().map(|[token]| token),
            header,
            end: tokenizer.encode(end, false)?,
            lead: tokenizer.encode(&end[marks.end.len()..], false)?,
            is_due: false,
        })
    }
}

impl Constraint {
    /// The constraint of a generation with `options`, if there is one. In a chat `form` is the one of answers, and `calls` the grammar of a tool
    /// call, if those are held.
    pub(super) fn new(
        model: &Served,
        options: &GenerateOptions,
        form: Option<&AnswerForm>,
        calls: Option<Arc<Grammar>>,
    ) -> Result<Option<Constraint>> {
        let scope = match calls {
            Some(_) => Scope::Calls {
                first: options.tool_calls == ToolCalls::Required,
            },
            None => Scope::Content,
        };
        let Some(grammar) = calls.or_else(|| options.grammar.clone()) else {
            return Ok(None);
        };
        let ignored = match options.ignore_model_stops {
            true => model.stop_tokens(),
            false => &[],
        };
        Ok(Some(Constraint {
            grammar,
            scope,
            phase: Phase::Before,
            state: None,
            mask: Vec::new(),
            stops: options.ends(model),
            ignored: ignored.to_vec(),
            opening: match form {
                Some(form) => Opening::of(model, form, scope != Scope::Content)?,
                None => Opening::default(),
            },
            form: form.cloned(),
        }))
    }

    /// Decides how the next token comes about. `stage` is what it belongs to.
    pub(super) fn next(&mut self, model: &Served, stage: AnswerStage<'_>) -> Result<Next> {
        if self.phase == Phase::Before
            && let Some(next) = self.before(model, stage)?
        {
            return Ok(next);
        }
        let state = started(&mut self.state, &self.grammar)?;
        if self.phase == Phase::Held {
            if state.is_over() {
                return Ok(self.over());
            }
            let forced = state.forced()?;
            if !forced.is_empty() {
                self.check_forced(&forced)?;
                return Ok(Next::Given(forced));
            }
        }
        self.choose()
    }

    /// Whether tool calls are held, and `text` begins one.
    fn holds_call(&self, text: &str) -> bool {
        let form = self.form.as_ref().filter(|_| self.scope != Scope::Content);
        form.is_some_and(|form| form.holds_call(text))
    }

    /// As [`next`](Self::next) for a token before the held part; `None` if the token may begin that part, which the phase then says.
    fn before(&mut self, model: &Served, stage: AnswerStage<'_>) -> Result<Option<Next>> {
        let begins = self.scope != Scope::Calls { first: false };
        let given = |tokens: &[u32]| match tokens {
            [] => None,
            tokens => Some(Next::Given(tokens.to_vec())),
        };
        match stage {
            AnswerStage::Reasoning => self.opening.is_due = true,
            AnswerStage::Call(text) | AnswerStage::Header(text) if self.holds_call(text) => {
                let tokens = model.tokenizer()?.encode(text, false)?;
                self.begin(&tokens)
                    .map_err(|e| e.within("the beginning of a tool call"))?;
                return Ok(None);
            }
            AnswerStage::Header(_) if begins => {
                if !std::mem::take(&mut self.opening.is_due) {
                    return Ok(Some(given(&self.opening.header).unwrap_or(Next::Free)));
                }
                let lead = given(&self.opening.lead);
                if lead.is_none() {
                    self.phase = Phase::Held;
                }
                return Ok(lead);
            }
            AnswerStage::Undecided if begins => {
                self.phase = match self.opening.begin {
                    Some(_) => Phase::Open,
                    None => Phase::Held,
                };
                return Ok(None);
            }
            AnswerStage::Content if begins => {
                if std::mem::take(&mut self.opening.is_due)
                    && let Some(lead) = given(&self.opening.lead)
                {
                    return Ok(Some(lead));
                }
                self.phase = Phase::Held;
                return Ok(None);
            }
            _ => {}
        }
        Ok(Some(Next::Free))
    }

    /// The next step where the grammar allows nothing more.
    fn over(&mut self) -> Next {
        match self.scope {
            Scope::Content => Next::Over,
            Scope::Calls { .. } => {
                self.scope = Scope::Calls { first: false };
                (self.phase, self.state) = (Phase::Before, None);
                Next::Free
            }
        }
    }

    /// Fills the mask, or does without a choice where there is none.
    fn choose(&mut self) -> Result<Next> {
        let state = started(&mut self.state, &self.grammar)?;
        let accepts = state.is_accepting()?;
        let mask = state.mask()?;
        for &token in &self.ignored {
            set(mask, token, false);
        }
        for &token in &self.stops {
            set(mask, token, false);
        }
        let is_open = self.phase == Phase::Open;
        if let (true, Some(begin)) = (is_open, self.opening.begin) {
            set(mask, begin, true);
        }
        let mut words = mask.iter();
        if words.all(|&word| word == 0) {
            if accepts {
                return Ok(self.over());
            }
            bail!(
                InvalidArgument,
                "the grammar goes on only with tokens that end the text: {:?}",
                self.stops
            );
        }
        if !accepts && let Some(only) = TokenMask(mask).only() {
            return Ok(Next::Given(vec![only]));
        }
        for &token in &self.stops {
            set(mask, token, accepts);
        }
        self.mask.clear();
        self.mask.extend_from_slice(mask);
        Ok(Next::Masked)
    }

    /// Refuses tokens that come next and end the text.
    fn check_forced(&self, forced: &[u32]) -> Result<()> {
        let mut ends = forced.iter().filter(|token| self.stops.contains(token));
        match ends.next() {
            None => Ok(()),
            Some(token) => bail!(
                InvalidArgument,
                "the grammar goes on only with token {token}, which ends the text"
            ),
        }
    }

    /// The tokens of the choice.
    pub(super) fn mask(&self) -> TokenMask<'_> {
        TokenMask(&self.mask)
    }

    /// Follows a token that was appended.
    pub(super) fn push(&mut self, token: u32) -> Result<()> {
        if self.phase == Phase::Open {
            if self.opening.begin == Some(token) {
                self.phase = Phase::Before;
                return Ok(());
            }
            self.phase = Phase::Held;
        }
        match self.phase {
            Phase::Held => started(&mut self.state, &self.grammar)?.push(token),
            _ => Ok(()),
        }
    }

    /// Follows content that came with the token that ended the reasoning.
    pub(super) fn push_content(&mut self, model: &Served, text: &str) -> Result<()> {
        if self.phase != Phase::Before || self.scope == (Scope::Calls { first: false }) {
            return Ok(());
        }
        let tokens = model.tokenizer()?.encode_plain(text)?;
        self.begin(&tokens)
            .map_err(|e| e.within("the end of the reasoning came with content"))
    }

    fn begin(&mut self, tokens: &[u32]) -> Result<()> {
        (self.phase, self.opening.is_due) = (Phase::Held, false);
        let state = started(&mut self.state, &self.grammar)?;
        tokens.iter().try_for_each(|&token| state.push(token))
    }

    /// The tokens that end the reasoning, if a token that ends the text was chosen within it: what is held must still come.
    pub(super) fn instead_of_stop(&mut self, stage: AnswerStage<'_>) -> Option<Vec<u32>> {
        let must_come = self.scope != Scope::Calls { first: false };
        if !must_come || stage != AnswerStage::Reasoning || self.opening.end.is_empty() {
            return None;
        }
        self.close_reasoning();
        Some(self.opening.end.clone())
    }

    /// Notes that tokens come which end the reasoning and lead to the held part.
    pub(super) fn close_reasoning(&mut self) {
        self.opening.is_due = self.opening.lead.is_empty();
    }
}

/// State of the held part, which begins now if it has not.
fn started<'a>(
    state: &'a mut Option<GrammarState>,
    grammar: &Grammar,
) -> Result<&'a mut GrammarState> {
    match state {
        Some(state) => Ok(state),
        None => Ok(state.insert(grammar.begin()?)),
    }
}

fn set(mask: &mut [u32], token: u32, allowed: bool) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        let bit = 1 << (token % 32);
        match allowed {
            true => *word |= bit,
            false => *word &= !bit,
        }
    }
}
