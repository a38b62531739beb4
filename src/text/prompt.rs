//! A conversation as the tokens of a prompt: rendered by the chat template, split at the template's special tokens, and matched with the
//! tokens that a sequence already holds.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::{Map, Value};

use super::tokenizer::{Piece, with_tokenizers};
use super::{ChatTemplate, Content, Message, Tokenizer, messages_to_json};
use crate::base::Result;
use crate::base::alloc::Budget;

/// A rendered conversation. The contents of its messages are plain text: names of special tokens in them do not become
/// special tokens.
#[derive(Debug)]
pub struct Prompt {
    /// The rendered text, with [`Prompt::mark`] inserted into the names of special tokens that occur in messages.
    text: String,
    mark: Option<char>,
}

/// A prompt matched with the tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aligned {
    /// Number of tokens that the sequence keeps: the prompt begins with them.
    pub kept: usize,
    /// The tokens after them in the prompt.
    pub added: Vec<u32>,
}

impl Aligned {
    /// Number of tokens of the prompt.
    pub fn len(&self) -> usize {
        self.kept + self.added.len()
    }

    /// Whether the prompt has no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Prompt {
    /// Renders `messages`; with `add_generation_prompt` up to where the assistant's answer begins. `variables` are those of
    /// [`ChatTemplate::render_with`].
    pub fn new(
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        messages: &[Message],
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<Prompt> {
        with_tokenizers("looking for special tokens", Budget::SMALL, || {
            let mut spelled = Spelled {
                tokenizer,
                bytes: 0,
                any: false,
            };
            messages.iter().for_each(|m| spelled.look_at_message(m));
            for (_, value) in texts(variables) {
                spelled.look_at(value);
            }
            let _copies = Budget::rewritten(spelled.bytes).set_aside()?;
            if !spelled.any {
                let text = template.render_with(messages, add_generation_prompt, variables)?;
                return Ok(Prompt { text, mark: None });
            }
            let mark = free_mark(&template.sources(), messages, variables);
            let marked: Vec<Message> = messages
                .iter()
                .map(|m| marked_message(tokenizer, m, mark))
                .collect();
            let mut with_marks = variables.clone();
            for (name, value) in texts(variables) {
                with_marks.insert(name.clone(), marked_value(tokenizer, value, mark));
            }
            Ok(Prompt {
                text: template.render_with(&marked, add_generation_prompt, &with_marks)?,
                mark: Some(mark),
            })
        })
    }

    /// The prompt's text.
    pub fn text(&self) -> Cow<'_, str> {
        self.plain(&self.text)
    }

    /// Bytes of the rendered text: a length for comparing prompts, and a position in them.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Whether the rendered text is empty.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// The end of `content`, which was passed to the template, in the rendered text; None unless it occurs exactly once.
    pub fn end_of_only(&self, content: &str) -> Option<usize> {
        let (before, after) = self.text.split_once(content)?;
        (!after.contains(content)).then_some(before.len() + content.len())
    }

    /// Whether the prompt begins with `other`.
    pub fn begins_with(&self, other: &Prompt) -> bool {
        self.text.starts_with(&other.text)
    }

    /// The rest after its first `bytes` bytes.
    pub fn after(mut self, bytes: usize) -> Prompt {
        self.text.drain(..bytes);
        self
    }

    /// The bytes `range` of the rendered text, which lie between characters.
    pub fn part(&self, range: Range<usize>) -> Prompt {
        Prompt {
            text: self.text[range].to_owned(),
            mark: self.mark,
        }
    }

    /// Prepends `first`.
    pub fn preceded_by(mut self, first: &Prompt) -> Prompt {
        self.text.insert_str(0, &first.plain(&first.text));
        self
    }

    fn plain<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.mark {
            Some(mark) if text.contains(mark) => Cow::Owned(text.replace(mark, "")),
            _ => Cow::Borrowed(text),
        }
    }

    /// Its tokens; `follows` says that other tokens precede it.
    pub fn tokens(&self, tokenizer: &Tokenizer, follows: bool) -> Result<Vec<u32>> {
        with_tokenizers("encoding with it", Budget::SMALL, || {
            self.encode(tokenizer, &tokenizer.split(&self.text), follows)
        })
    }

    /// Matches the prompt's tokens, which follow those of `start`, with the tokens `held` by a sequence. Returns how many of these stay,
    /// and the tokens after them.
    ///
    /// A text has several encodings, and a model need not choose the tokenizer's. A text between special tokens that `held` contains
    /// completely therefore keeps its tokens. Only if a text differs at its end do the tokenizer's tokens decide how much of it stays. Text
    /// that stays is not tokenized again.
    pub fn align(&self, tokenizer: &Tokenizer, start: &[u32], held: &[u32]) -> Result<Aligned> {
        with_tokenizers("encoding with it", Budget::SMALL, || {
            self.aligned(tokenizer, start, held)
        })
    }

    fn aligned(&self, tokenizer: &Tokenizer, start: &[u32], held: &[u32]) -> Result<Aligned> {
        let pieces = tokenizer.split(&self.text);
        let mut kept = common(start, held);
        if kept < start.len() {
            let mut added = start[kept..].to_vec();
            added.extend(self.encode(tokenizer, &pieces, false)?);
            return Ok(Aligned { kept, added });
        }
        for (i, piece) in pieces.iter().enumerate() {
            let rest = &held[kept..];
            let spelled = match piece.token {
                Some(token) => (rest.first() == Some(&token)).then_some(1),
                None => spelled_by(
                    tokenizer,
                    self.plain(&self.text[piece.range.clone()]).as_bytes(),
                    rest,
                ),
            };
            if let Some(count) = spelled {
                kept += count;
                continue;
            }
            let tokens = self.encode(tokenizer, std::slice::from_ref(piece), false)?;
            let same = common(&tokens, rest);
            kept += same;
            if same < tokens.len() {
                let mut added = tokens[same..].to_vec();
                added.extend(self.encode(tokenizer, &pieces[i + 1..], false)?);
                return Ok(Aligned { kept, added });
            }
        }
        Ok(Aligned {
            kept,
            added: Vec::new(),
        })
    }

    fn encode(&self, tokenizer: &Tokenizer, pieces: &[Piece], follows: bool) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for piece in pieces {
            match piece.token {
                Some(token) => tokens.push(token),
                None => {
                    let text = self.plain(&self.text[piece.range.clone()]);
                    let follows = follows || piece.range.start > 0;
                    tokens.extend(tokenizer.encode_between(&text, follows)?);
                }
            }
        }
        Ok(tokens)
    }
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Number of leading `tokens` that give exactly `text`; `None` if no number does, or if there are none.
fn spelled_by(tokenizer: &Tokenizer, text: &[u8], tokens: &[u32]) -> Option<usize> {
    let mut left = text;
    let mut count = 0;
    while !left.is_empty() {
        let &token = tokens.get(count)?;
        let bytes = tokenizer.bytes_of(token).ok()?;
        if tokenizer.is_special(token) || bytes.is_empty() {
            return None;
        }
        left = left.strip_prefix(bytes)?;
        count += 1;
    }
    Some(count)
}

/// Variables with text from outside.
fn texts(variables: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    let of_others = |name: &str| matches!(name, "tools" | "documents");
    variables.iter().filter(move |(name, _)| of_others(name))
}

/// The texts of a conversation, and whether they contain names of special tokens.
struct Spelled<'a> {
    tokenizer: &'a Tokenizer,
    bytes: usize,
    any: bool,
}

impl Spelled<'_> {
    fn look_at_message(&mut self, message: &Message) {
        for text in strings(message) {
            self.look_at_text(text);
        }
        for call in &message.tool_calls {
            for (name, value) in &call.arguments {
                self.look_at_text(name);
                self.look_at(value);
            }
        }
    }

    fn look_at(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.look_at_text(text),
            Value::Array(items) => items.iter().for_each(|item| self.look_at(item)),
            Value::Object(map) => map.iter().for_each(|(name, value)| {
                self.look_at_text(name);
                self.look_at(value);
            }),
            _ => {}
        }
    }

    fn look_at_text(&mut self, text: &str) {
        self.bytes = self.bytes.saturating_add(text.len());
        self.any = self.any || !self.tokenizer.special_names_in(text).is_empty();
    }
}

/// A private-use character that occurs in none of the texts, if there is one.
fn free_mark(template: &str, messages: &[Message], variables: &Map<String, Value>) -> char {
    // As JSON text, so that it is found anywhere in a value.
    let said = messages_to_json(messages).to_string();
    let others: String = texts(variables)
        .map(|(_, value)| value.to_string())
        .collect();
    let free = |c: &char| {
        [template, &said, &others]
            .iter()
            .all(|text| !text.contains(*c))
    };
    ('\u{e000}'..='\u{f8ff}').find(free).unwrap_or('\u{f8ff}')
}

/// The texts of a message, without the arguments of calls.
fn strings(message: &Message) -> impl Iterator<Item = &str> {
    let content: &[String] = match &message.content {
        Content::None => &[],
        Content::Text(text) => std::slice::from_ref(text),
        Content::Parts(parts) => parts,
    };
    let calls = message.tool_calls.iter();
    content
        .iter()
        .chain(&message.reasoning_content)
        .chain(&message.tool_call_id)
        .chain(&message.name)
        .chain(calls.flat_map(|call| [&call.id, &call.name]))
        .map(String::as_str)
}

fn marked_message(tokenizer: &Tokenizer, message: &Message, mark: char) -> Message {
    let text = |text: &String| marked(tokenizer, text, mark);
    let mut out = message.clone();
    match &mut out.content {
        Content::None => {}
        Content::Text(content) => *content = text(content),
        Content::Parts(parts) => parts.iter_mut().for_each(|part| *part = text(part)),
    }
    for field in [
        &mut out.reasoning_content,
        &mut out.tool_call_id,
        &mut out.name,
    ] {
        *field = field.as_ref().map(text);
    }
    for call in &mut out.tool_calls {
        call.id = text(&call.id);
        call.name = text(&call.name);
        call.arguments = match marked_value(tokenizer, &Value::Object(call.arguments.clone()), mark)
        {
            Value::Object(map) => map,
            _ => Map::new(),
        };
    }
    out
}

fn marked_value(tokenizer: &Tokenizer, value: &Value, mark: char) -> Value {
    let again = |value: &Value| marked_value(tokenizer, value, mark);
    match value {
        Value::String(text) => Value::String(marked(tokenizer, text, mark)),
        Value::Array(items) => Value::Array(items.iter().map(again).collect()),
        Value::Object(map) => {
            let entries = map.iter();
            let entries = entries.map(|(name, v)| (marked(tokenizer, name, mark), again(v)));
            Value::Object(entries.collect())
        }
        other => other.clone(),
    }
}

/// `text` with a mark after the first character of each name of a special token.
fn marked(tokenizer: &Tokenizer, text: &str, mark: char) -> String {
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    for start in tokenizer.special_names_in(text) {
        let first = text[start..].chars().next().map_or(0, char::len_utf8);
        out.push_str(&text[from..start + first]);
        out.push(mark);
        from = start + first;
    }
    out.push_str(&text[from..]);
    out
}
