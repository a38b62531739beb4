//! An answer while it is generated: which parts of it are reasoning, content and tool calls, and when the reasoning has used up
//! its budget.

use crate::base::Result;
use crate::engine::Served;
use crate::text::{AnswerParser, Content, Event, Message, ToolCall};

/// What a piece of an answer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// The answer itself; all that is generated outside of a chat.
    #[default]
    Content,
    /// What the model thinks before it answers.
    Reasoning,
    /// A call of a tool, whole, as JSON.
    ToolCall,
}

/// An answer as far as it has come.
pub(super) struct Answer {
    parser: AnswerParser,
    budget: Option<Budget>,
    reasoning: String,
    content: String,
    calls: Vec<ToolCall>,
}

/// How long the reasoning may be.
struct Budget {
    /// Tokens of it that are left.
    left: usize,
    /// What ends it then.
    end: Vec<u32>,
}

impl Answer {
    /// One that follows the prompt whose text ends in `prompt`, where tools were offered or not, after `calls` calls of tools.
    pub(super) fn new(model: &Served, prompt: &str, tools: bool, calls: usize) -> Answer {
        Answer {
            parser: AnswerParser::new(model.answer_form(), prompt, tools, calls),
            budget: None,
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
        }
    }

    /// The same with at most `tokens` tokens of reasoning, if the model is one that reasons.
    pub(super) fn within(mut self, model: &Served, tokens: Option<usize>) -> Result<Answer> {
        if let (Some(left), Some(marks)) = (tokens, model.answer_form().reasoning()) {
            let end = model.tokenizer()?.encode(marks.early_end, false)?;
            self.budget = Some(Budget { left, end });
        }
        Ok(self)
    }

    /// Adds the text of a token: what that tells, in order.
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

    /// Ends the answer: what was held back. `whole` says that the model ended it.
    pub(super) fn finish(&mut self, whole: bool) -> Vec<(Part, String)> {
        let events = self.parser.finish(whole);
        self.take(events)
    }

    /// What is being said.
    pub(super) fn part(&self) -> Part {
        match self.parser.is_reasoning() {
            true => Part::Reasoning,
            false => Part::Content,
        }
    }

    /// The tokens that end the reasoning, once its budget is used up.
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

    /// As a message.
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
