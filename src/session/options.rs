//! Options of a generation, and the reasons why one ends. Sessions, servers and the C API use them.

use std::sync::Arc;

use serde::Serialize;

use super::LogitAdjustments;
use super::probabilities::check_top;
use crate::base::error::bail;
use crate::base::{Result, call};
use crate::engine::Served;
use crate::model::SamplingOptions;
use crate::text::Grammar;

/// Policy for holding the tool calls of an answer to the schemas of the tools that the chat offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolCalls {
    /// None: the model writes what it likes.
    #[default]
    Free,
    /// Each call that the model begins.
    Held,
    /// As [`Held`](Self::Held), and the content of the answer begins with a call.
    Required,
}

/// Options of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Limit on the generated tokens. With the default, [`usize::MAX`], the text ends when the room that the context has at its beginning
    /// is used up; an answer in a chat may make more room by evicting old turns, and with a sliding window the text goes on.
    pub max_tokens: usize,
    /// Sampling settings.
    pub sampling: SamplingOptions,
    /// Changes of the logits before each choice. A generation with any drafts nothing. On a GPU its logits are copied to the host for each
    /// choice.
    pub adjustments: LogitAdjustments,
    /// Tokens that end the text, besides the model's own. The token that ends it is not part of the sequence.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the text, and are not part of it, looked for after the first [`min_tokens`](LogitAdjustments::min_tokens) tokens. Their
    /// tokens stay in the sequence. A generated special token gives no text, but
    /// matches a stop string that contains its name.
    pub stop_strings: Vec<String>,
    /// Treats the model's own stop tokens like any other token.
    pub ignore_model_stops: bool,
    /// Computes every token from the whole sequence, without cached keys and values; slow, for comparison.
    pub replay: bool,
    /// Reports each token's log-probability, and those of this many most probable tokens, at most [`MOST_TOP`](super::MOST_TOP), which
    /// copies its logits to the host. `None` reports neither.
    pub top_log_probabilities: Option<usize>,
    /// Most tokens that the model's drafter guesses in a step, up to [`MOST_DRAFTS`]; one pass of the model verifies them. 0 drafts none.
    /// The default, `None`, drafts if the model has a drafter, while that is faster. A number is refused for a model without a drafter. A generation with [`replay`](Self::replay) or [`top_log_probabilities`](Self::top_log_probabilities) drafts nothing.
    ///
    /// With a [`draft_model`](Self::draft_model) it is that which guesses.
    ///
    /// A generation has the same tokens with drafts and without, greedy or sampled: each is a function of its logits and of the number of
    /// its draw, which counts positions, and the logits of verified tokens have the bits of steps of one token. This is stronger than the
    /// same distribution.
    pub drafts: Option<usize>,
    /// Most tokens that a step drafts by prompt lookup, up to [`MOST_DRAFTS`]: where the last tokens of the session have occurred in it
    /// before, those that followed there. One pass of the model verifies them, as it does the drafter's, which drafts nothing then. How many
    /// are drafted follows from what has been fastest. 0, the default, looks nothing up. Not together with a number of `drafts`.
    pub prompt_lookup: usize,
    /// A model with the same tokens that guesses them: a smaller one, on any device. The session runs its own tokens through it too, from the
    /// first step that drafts, and keeps its keys and values until a generation without it. Fails for a model with other tokens, see
    /// [`Served::check_draft_model`]. The model's own drafter guesses nothing then. How many tokens are drafted follows from what has been
    /// fastest, up to 8, on a GPU 7, or is the number of `drafts`. Not together with `prompt_lookup`.
    ///
    /// Without memory for the draft model's keys and values, or with a token that it does not have, the generation goes on without drafts and
    /// logs a warning. Another fault of the draft model ends the generation with an error.
    pub draft_model: Option<Arc<Served>>,
    /// Holds the text to a grammar, in a chat the content of the answer. Tokens that the grammar forces are appended without a choice and run
    /// together with what follows. The model's stop tokens, and those of the options, are chosen only where the text may end, and the
    /// generation ends as [`Finish::Stop`] where nothing can follow. One that ends otherwise may leave a text that does not fit.
    ///
    /// A generation with a grammar drafts nothing.
    pub grammar: Option<Arc<Grammar>>,
    /// Tool calls that are held to their tools' schemas, in a chat. Not together with `grammar`.
    pub tool_calls: ToolCalls,
}

/// Largest number of tokens drafted in a step.
pub const MOST_DRAFTS: usize = 16;

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: usize::MAX,
            sampling: SamplingOptions::default(),
            adjustments: LogitAdjustments::default(),
            stop_tokens: Vec::new(),
            stop_strings: Vec::new(),
            ignore_model_stops: false,
            replay: false,
            top_log_probabilities: None,
            drafts: None,
            prompt_lookup: 0,
            draft_model: None,
            grammar: None,
            tool_calls: ToolCalls::Free,
        }
    }
}

impl GenerateOptions {
    /// Whether a grammar decides on tokens.
    fn is_held(&self) -> bool {
        self.grammar.is_some() || self.tool_calls != ToolCalls::Free
    }

    /// Whether the generation drafts nothing: the host needs the logits of each choice, or its mask does not reach past the next token.
    pub(super) fn excludes_drafts(&self) -> bool {
        self.replay
            || self.top_log_probabilities.is_some()
            || self.is_held()
            || !self.adjustments.is_none(&self.sampling)
    }

    /// The tokens that end a text of `model`.
    pub(super) fn ends(&self, model: &Served) -> Vec<u32> {
        let own = match self.ignore_model_stops {
            true => &[][..],
            false => model.stop_tokens(),
        };
        [own, &self.stop_tokens].concat()
    }

    /// Checks them for a generation of `model`, or with `is_chat` for a chat turn: refuses a grammar of another model, tokens that the
    /// model does not have, and options that exclude each other.
    pub fn check(&self, model: &Served, is_chat: bool) -> Result<()> {
        self.sampling.check()?;
        self.adjustments.check(model.spec().vocab_size)?;
        check_top(self.top_log_probabilities)?;
        let least = self.adjustments.min_tokens;
        if least > self.max_tokens {
            bail!(
                InvalidArgument,
                "min_tokens is {least} and max_tokens {}; at least as many tokens must be allowed",
                self.max_tokens
            );
        }
        if self.prompt_lookup > MOST_DRAFTS {
            bail!(
                InvalidArgument,
                "prompt lookup drafts {} tokens in a step; expected at most {MOST_DRAFTS}",
                self.prompt_lookup
            );
        }
        if let (1.., Some(drafts @ 1..)) = (self.prompt_lookup, self.drafts) {
            bail!(
                InvalidArgument,
                "{drafts} tokens of the drafter and {} of prompt lookup in a step; choose one of them",
                self.prompt_lookup
            );
        }
        if let Some(draft) = &self.draft_model {
            if self.prompt_lookup > 0 {
                bail!(
                    InvalidArgument,
                    "a draft model and {} tokens of prompt lookup in a step; choose one of them",
                    self.prompt_lookup
                );
            }
            model.check_draft_model(draft)?;
        }
        if let Some(grammar) = &self.grammar {
            model.check_grammar(grammar)?;
        }
        if self.tool_calls == ToolCalls::Free {
            return Ok(());
        }
        if !is_chat {
            bail!(
                InvalidArgument,
                "tool calls can be held in a chat, which offers tools, and not in other generations"
            );
        }
        if self.grammar.is_some() {
            bail!(
                InvalidArgument,
                "a generation holds either its tool calls or all of its text, to a grammar; choose one"
            );
        }
        Ok(())
    }

    /// The defaults, with the sampling settings recommended by the model's maker.
    pub fn of(model: &Served) -> Self {
        GenerateOptions {
            sampling: model.sampling().clone(),
            ..Self::default()
        }
    }
}

/// The reason why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop token, or the end of a text that is held to a grammar.
    Stop,
    /// A stop string.
    StopString,
    /// The limit on its tokens.
    Length,
    /// The context is full, and eviction is off or has nothing left to drop.
    Context,
    /// The callback, or cancellation of the [call](crate::base::call) that generated it.
    Cancelled,
    /// The deadline of its submission to a [queue](super::Queue) has passed.
    Deadline,
}

impl Finish {
    /// How a generation ends whose call is over.
    pub(super) fn of_ended_call() -> Finish {
        match call::is_late() {
            true => Finish::Deadline,
            false => Finish::Cancelled,
        }
    }

    /// Whether something outside the generation has ended it.
    pub(super) fn is_from_outside(self) -> bool {
        matches!(self, Finish::Cancelled | Finish::Deadline)
    }
}
