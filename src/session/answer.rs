//! An answer while a chat turn generates it: divides the text into reasoning, content and tool calls, and enforces the reasoning budget.

use crate::base::Result;
use crate::engine::Served;
use crate::text::{AnswerForm, AnswerParser, AnswerStage, Content, Event, Message, ToolCall};

/// The kind of a piece of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// The answer itself; all text generated outside of a chat.
    #[default]
    Content,
    /// The reasoning before the answer.
    Reasoning,
    /// A complete tool call, as JSON.
    ToolCall,
}

/// The answer generated so far.
pub(super) struct Answer {
    parser: AnswerParser,
    budget: Option<Budget>,
    reasoning: String,
    content: String,
    calls: Vec<ToolCall>,
}

/// The limit on the length of the reasoning.
struct Budget {
    /// Remaining tokens.
    left: usize,
    /// Tokens that end the reasoning once the budget is used up.
    end: Vec<u32>,
}

impl Answer {
    /// The answer, in `form`, to a prompt whose text ends in `prompt`. `tools` says whether tools were offered; `calls` tool calls precede it.
    pub(super) fn new(form: &AnswerForm, prompt: &str, tools: bool, calls: usize) -> Answer {
        Answer {
            parser: AnswerParser::new(form, prompt, tools, calls),
            budget: None,
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
        }
    }

    /// Limits the reasoning to `tokens` tokens, if the model reasons. `call_must_come` says that a tool call follows it.
    pub(super) fn within(
        mut self,
        model: &Served,
        form: &AnswerForm,
        tokens: Option<usize>,
        call_must_come: bool,
    ) -> Result<Answer> {
        if let (Some(left), Some(end)) = (tokens, form.early_end(call_must_come)) {
            let end = model.tokenizer()?.encode(end, false)?;
            self.budget = Some(Budget { left, end });
        }
        Ok(self)
    }

    /// Adds the text of a token and returns the pieces that it completes, in order.
    pub(super) fn push(&mut self, text: &str) -> Vec<(Part, String)> {
        let thinking = self.parser.is_reasoning();
        let events = self.parser.push(text);
        if thinking
            && self.parser.is_reasoning()
            && let Some(budget) = &mut self.budget
        {
            budget.left = budget.left.saturating_sub(1);
        }
        self.take(events)
    }

    /// Ends the answer and returns the text that was held back. `whole` says that the model ended it.
    pub(super) fn finish(&mut self, whole: bool) -> Vec<(Part, String)> {
        let events = self.parser.finish(whole);
        self.take(events)
    }

    /// Stage of the answer that the next text belongs to.
    pub(super) fn stage(&self) -> AnswerStage<'_> {
        self.parser.stage()
    }

    /// The kind of the text now being generated.
    pub(super) fn part(&self) -> Part {
        match self.parser.is_reasoning() {
            true => Part::Reasoning,
            false => Part::Content,
        }
    }

    /// Returns the tokens that end the reasoning, once its budget is used up.
    pub(super) fn early_end(&mut self) -> Option<Vec<u32>> {
        let over = |budget: &mut Budget| budget.left == 0;
        match self.parser.is_reasoning() {
            true => self.budget.take_if(over).map(|budget| budget.end),
            false => None,
        }
    }

    fn take(&mut self, events: Vec<Event>) -> Vec<(Part, String)> {
        let mut told = Vec::with_capacity(events.len());
        for event in events {
            told.push(match event {
                Event::Reasoning(text) => {
                    self.reasoning.push_str(&text);
                    (Part::Reasoning, text)
                }
                Event::Content(text) => {
                    self.content.push_str(&text);
                    (Part::Content, text)
                }
                Event::ToolCall(call) => {
                    let json = call.to_json().to_string();
                    self.calls.push(call);
                    (Part::ToolCall, json)
                }
            });
        }
        told
    }

    /// The answer as a message.
    pub(super) fn into_message(self) -> Message {
        let content = match self.content.is_empty() && !self.calls.is_empty() {
            true => Content::None,
            false => Content::Text(self.content),
        };
        Message {
            content,
            reasoning_content: Some(self.reasoning).filter(|text| !text.is_empty()),
            tool_calls: self.calls,
            ..Message::new("assistant", "")
        }
    }
}
