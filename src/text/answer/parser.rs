//! The parser: a buffer of undecided text, a cursor in it, and a stage.

use super::form::{AnswerForm, Reasoning};
use super::harmony::{self, Header, Kind};
use super::section::{Scan, SectionStep, ToolCallForm, Written, search};
use crate::text::ToolCall;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A complete tool call.
    ToolCall(ToolCall),
}

/// Stage of an answer, by its next text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerStage<'a> {
    /// Reasoning or content.
    Undecided,
    /// Reasoning.
    Reasoning,
    /// Content.
    Content,
    /// A tool call, of which this text is there so far, with its mark.
    Call(&'a str),
    /// The header of a message, of which this text is there so far, in a form whose answers are series of messages.
    Header(&'a str),
}

/// Splits an answer into events while it streams.
pub struct AnswerParser {
    reasoning: Option<&'static Reasoning>,
    calls: Option<&'static dyn ToolCallForm>,
    /// Whether the answer is a series of messages, each with a header.
    has_headers: bool,
    /// Whether there was reasoning, and content.
    has_reasoned: bool,
    has_answered: bool,
    /// The number of the next call in the conversation.
    next_call: usize,
    stage: Stage,
    /// Text that is not decided yet.
    text: String,
    /// The text of the current stretch that is held back, and how the stretch began.
    edges: Edges,
}

enum Stage {
    /// Only this many bytes of white space so far: reasoning or content may begin.
    Undecided(usize),
    Reasoning,
    /// Content; `is_first` while it has only white space.
    Content {
        is_first: bool,
    },
    Section(Scan),
    /// The header of a message, or the space before one.
    Header,
}

/// White space that is dropped at both ends of a stretch of text.
struct Edges {
    drops_first: fn(char) -> bool,
    drops_last: fn(char) -> bool,
    is_begun: bool,
    /// Text between an earlier stretch of the same kind and this one.
    gap: &'static str,
    /// Characters that are dropped if the stretch ends here.
    held: String,
}

impl Edges {
    fn new(drops_first: fn(char) -> bool, drops_last: fn(char) -> bool) -> Self {
        Edges {
            drops_first,
            drops_last,
            is_begun: false,
            gap: "",
            held: String::new(),
        }
    }

    /// Adds `text` to the stretch, and returns the text that can be emitted.
    fn push(&mut self, mut text: &str) -> String {
        if !self.is_begun {
            text = text.trim_start_matches(self.drops_first);
            self.is_begun = !text.is_empty();
        }
        let shown = text.trim_end_matches(self.drops_last);
        let mut out = String::new();
        if !shown.is_empty() {
            out.push_str(std::mem::take(&mut self.gap));
            out.push_str(&std::mem::take(&mut self.held));
            out.push_str(shown);
        }
        self.held.push_str(&text[shown.len()..]);
        out
    }
}

fn is_newline(c: char) -> bool {
    matches!(c, '\n' | '\r')
}

fn is_none(_: char) -> bool {
    false
}

/// The text between two messages of one kind.
fn gap(is_second: bool) -> &'static str {
    if is_second { "\n\n" } else { "" }
}

impl AnswerParser {
    /// A parser at the beginning of an answer. `prompt` is the rendered text up to it: its end shows whether the answer begins inside
    /// reasoning, after empty reasoning, or undecided. Without `tools` nothing is parsed as a call. `first_call` is the number of calls in
    /// the conversation so far, from which ids are derived.
    pub fn new(form: &AnswerForm, prompt: &str, tools: bool, first_call: usize) -> Self {
        let mut parser = Self::with(form.reasoning, form.calls.filter(|_| tools), first_call);
        let prompt = prompt.trim_end();
        if form.has_headers {
            parser.has_headers = true;
            parser.stage = Stage::Header;
            parser.text = harmony::begun_message(prompt).to_owned();
            parser.run(false);
            return parser;
        }
        match parser.reasoning {
            Some(marks) if prompt.ends_with(marks.end) => parser.begin_content(is_newline),
            Some(marks) if prompt.ends_with(marks.begin) => parser.begin_reasoning(),
            Some(_) => parser.stage = Stage::Undecided(0),
            None => {}
        }
        parser
    }

    /// A parser at the beginning of the content.
    pub(super) fn with(
        reasoning: Option<&'static Reasoning>,
        calls: Option<&'static dyn ToolCallForm>,
        first_call: usize,
    ) -> Self {
        let mut parser = AnswerParser {
            reasoning,
            calls,
            has_headers: false,
            has_reasoned: false,
            has_answered: false,
            next_call: first_call,
            stage: Stage::Undecided(0),
            text: String::new(),
            edges: Edges::new(is_none, is_none),
        };
        parser.begin_content(is_none);
        parser
    }

    /// The events of `text`, which may be cut anywhere.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        self.text.push_str(text);
        self.run(false)
    }

    /// The events of the text that was held back. `whole` says that the model ended the answer itself; otherwise it was cut off.
    pub fn finish(&mut self, whole: bool) -> Vec<Event> {
        let mut events = self.run(whole);
        let rest = std::mem::take(&mut self.text);
        match self.stage {
            // A call that was cut off is dropped, with the space before it.
            Stage::Section(_) => self.edges.held.clear(),
            Stage::Header => {
                if !harmony::has_opening(&rest) {
                    self.begin_content(is_none);
                    self.show(&rest, &mut events);
                }
            }
            _ => self.show(&rest, &mut events),
        }
        let held = std::mem::take(&mut self.edges.held);
        self.add(held, &mut events);
        events
    }

    /// Whether the answer is inside reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.stage, Stage::Reasoning)
    }

    /// The stage of the next text.
    pub fn stage(&self) -> AnswerStage<'_> {
        match self.stage {
            Stage::Undecided(_) => AnswerStage::Undecided,
            Stage::Reasoning => AnswerStage::Reasoning,
            Stage::Content { .. } => AnswerStage::Content,
            Stage::Section(_) => AnswerStage::Call(&self.text),
            Stage::Header => AnswerStage::Header(&self.text),
        }
    }

    fn begin_reasoning(&mut self) {
        self.stage = Stage::Reasoning;
        self.edges = Edges::new(is_newline, is_newline);
        self.edges.gap = gap(self.has_reasoned);
    }

    /// Begins content. Its first characters are dropped while they are `drops_first`.
    fn begin_content(&mut self, drops_first: fn(char) -> bool) {
        // Space before a call belongs to the call; without calls nothing is held back.
        let drops_last = match self.calls {
            Some(_) => char::is_whitespace,
            None => is_none,
        };
        self.stage = Stage::Content { is_first: true };
        self.edges = Edges::new(drops_first, drops_last);
        self.edges.gap = gap(self.has_answered);
    }

    /// Parses the buffer as far as it is decided.
    fn run(&mut self, whole: bool) -> Vec<Event> {
        let mut events = Vec::new();
        let mut text = std::mem::take(&mut self.text);
        let mut at = 0;
        loop {
            let rest = &text[at..];
            let (read, goes_on) = match &mut self.stage {
                Stage::Undecided(blank) => {
                    let body = rest[*blank..].trim_start();
                    *blank = rest.len() - body.len();
                    self.undecided(rest, body)
                }
                Stage::Reasoning | Stage::Content { .. } if self.has_headers => {
                    self.message(rest, &mut events)
                }
                Stage::Reasoning => self.reasoning(rest, &mut events),
                Stage::Content { .. } => self.content(rest, &mut events),
                Stage::Section(_) => self.section(rest, whole, &mut events),
                Stage::Header => self.header(rest, &mut events),
            };
            at += read;
            if !goes_on {
                break;
            }
        }
        text.drain(..at);
        self.text = text;
        events
    }

    /// Decides between reasoning and content. Like the functions of the other stages, it returns how many bytes were parsed
    /// and whether the rest can be parsed now.
    fn undecided(&mut self, text: &str, body: &str) -> (usize, bool) {
        match self.reasoning.map(|marks| marks.begin) {
            Some(begin) if body.starts_with(begin) => {
                self.begin_reasoning();
                (text.len() - body.len() + begin.len(), true)
            }
            Some(begin) if begin.starts_with(body) => (0, false),
            _ => {
                self.begin_content(is_none);
                (0, true)
            }
        }
    }

    /// Reads the header of a message. Text without one is content.
    fn header(&mut self, text: &str, events: &mut Vec<Event>) -> (usize, bool) {
        match harmony::read_header(text) {
            Header::More => (0, false),
            Header::Message(Kind::Call, _) if self.calls.is_some() => {
                self.stage = Stage::Section(Scan::default());
                (0, true)
            }
            Header::Message(Kind::Reasoning, len) => {
                self.begin_reasoning();
                (len, true)
            }
            Header::Message(_, len) => {
                self.begin_content(is_none);
                (len, true)
            }
            Header::No(len) => {
                self.begin_content(is_none);
                self.show(&text[..len], events);
                (len, true)
            }
        }
    }

    /// Reads the text of a message up to its end.
    fn message(&mut self, text: &str, events: &mut Vec<Event>) -> (usize, bool) {
        let (at, mark) = search(text, 0, &harmony::ENDS);
        self.show(&text[..at], events);
        match mark {
            Some(mark) => {
                self.stage = Stage::Header;
                let is_next = harmony::ENDS[..2].contains(&mark);
                (at + if is_next { 0 } else { mark.len() }, true)
            }
            None => (at, false),
        }
    }

    fn reasoning(&mut self, text: &str, events: &mut Vec<Event>) -> (usize, bool) {
        let end = self.reasoning.map(|marks| marks.end);
        let (at, mark) = search(text, 0, end.as_slice());
        self.show(&text[..at], events);
        match mark {
            Some(mark) => {
                self.begin_content(is_newline);
                (at + mark.len(), true)
            }
            None => (at, false),
        }
    }

    fn content(&mut self, text: &str, events: &mut Vec<Event>) -> (usize, bool) {
        let Some(form) = self.calls else {
            self.show(text, events);
            return (text.len(), false);
        };
        let body = text.trim_start();
        let Stage::Content { is_first } = &mut self.stage else {
            return (0, false);
        };
        if *is_first && form.is_bare() && body.starts_with('{') {
            let blank = text.len() - body.len();
            self.stage = Stage::Section(Scan::default());
            self.show(&text[..blank], events);
            return (blank, true);
        }
        let (at, mark) = search(text, 0, form.begins());
        *is_first &= text[..at].trim_start().is_empty();
        if mark.is_some() {
            self.stage = Stage::Section(Scan::default());
        }
        self.show(&text[..at], events);
        (at, mark.is_some())
    }

    fn section(&mut self, text: &str, whole: bool, events: &mut Vec<Event>) -> (usize, bool) {
        let (Some(form), Stage::Section(scan)) = (self.calls, &mut self.stage) else {
            return (0, false);
        };
        let step = match form.read(text, scan, whole) {
            SectionStep::More if whole => SectionStep::Malformed(text.len()),
            step => step,
        };
        match step {
            SectionStep::More => (0, false),
            SectionStep::Go(calls, read) => {
                *scan = Scan::after(scan.has_calls || !calls.is_empty());
                self.call(calls, events);
                (read, true)
            }
            SectionStep::Over(calls, read) => {
                self.stage = match self.has_headers {
                    true => Stage::Header,
                    false => Stage::Content { is_first: false },
                };
                self.call(calls, events);
                (read, true)
            }
            SectionStep::Malformed(read) => {
                match self.has_headers {
                    true => self.begin_content(is_none),
                    false => self.stage = Stage::Content { is_first: false },
                }
                self.show(&text[..read], events);
                (read, true)
            }
        }
    }

    /// Adds `calls`. The space before and after them is dropped.
    fn call(&mut self, calls: Vec<Written>, events: &mut Vec<Event>) {
        for Written { name, arguments } in calls {
            self.edges = Edges::new(char::is_whitespace, char::is_whitespace);
            // Nine letters and digits, which Mistral's templates require.
            let id = format!("call{:05}", self.next_call % 100_000);
            self.next_call = self.next_call.wrapping_add(1);
            events.push(Event::ToolCall(ToolCall {
                id,
                name,
                arguments,
            }));
        }
    }

    /// Adds `text` to the stretch of the stage, without the white space at its edges.
    fn show(&mut self, text: &str, events: &mut Vec<Event>) {
        let shown = self.edges.push(text);
        self.add(shown, events);
    }

    fn add(&mut self, text: String, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        match self.is_reasoning() {
            true => self.has_reasoned = true,
            false => self.has_answered = true,
        }
        match (self.is_reasoning(), events.last_mut()) {
            (true, Some(Event::Reasoning(last))) | (false, Some(Event::Content(last))) => {
                last.push_str(&text);
            }
            (true, _) => events.push(Event::Reasoning(text)),
            (false, _) => events.push(Event::Content(text)),
        }
    }
}
