//! Reads the user's messages, from a keyboard or line by line from a pipe.

use std::io::{BufRead, IsTerminal, StdinLock};

use NVFP4::base::error::bail;
use NVFP4::base::{Error, Result};

use super::editor::{Editor, Typed};

/// Begins and ends a message of several lines.
const MARK: &str = "\"\"\"";

/// One message or command.
pub(super) enum Entry {
    /// A line, which may be a command.
    Line(String),
    /// Several lines, which are always a message.
    Message(String),
    End,
}

pub(super) enum Input {
    Keyboard(Box<Editor>),
    Pipe(StdinLock<'static>),
}

impl Input {
    pub(super) fn new() -> Result<Input> {
        let stdin = std::io::stdin();
        Ok(match stdin.is_terminal() {
            true => Input::Keyboard(Box::new(Editor::new()?)),
            false => Input::Pipe(stdin.lock()),
        })
    }

    pub(super) fn is_keyboard(&self) -> bool {
        matches!(self, Input::Keyboard(_))
    }

    /// The next message or command.
    pub(super) fn entry(&mut self) -> Result<Entry> {
        let mut interrupted = false;
        loop {
            let line = match self.line("> ")? {
                Typed::Line(line) => line,
                Typed::Interrupt { was_empty: true } if interrupted => return Ok(Entry::End),
                Typed::Interrupt { was_empty } => {
                    if was_empty {
                        eprintln!("Ctrl-C again or Ctrl-D ends the program");
                    }
                    interrupted = was_empty;
                    continue;
                }
                Typed::End => return Ok(Entry::End),
            };
            interrupted = false;
            let Some(first) = line.trim_start().strip_prefix(MARK) else {
                self.remember(line.trim());
                return Ok(Entry::Line(line));
            };
            if let Some(message) = self.message(first)? {
                self.remember(&format!("{MARK}\n{message}\n{MARK}"));
                return Ok(Entry::Message(message));
            }
        }
    }

    /// The lines from `first` to the closing mark, as one message; `None` if it is abandoned.
    fn message(&mut self, first: &str) -> Result<Option<String>> {
        let mut text = first.to_owned();
        loop {
            if let Some(whole) = text.trim_end().strip_suffix(MARK) {
                return Ok(Some(whole.trim_matches('\n').to_owned()));
            }
            match self.line("... ")? {
                Typed::Line(line) => {
                    text.push('\n');
                    text.push_str(&line);
                }
                Typed::End if !self.is_keyboard() => {
                    bail!(InvalidArgument, "the input ends within {MARK}")
                }
                Typed::End | Typed::Interrupt { .. } => return Ok(None),
            }
        }
    }

    fn remember(&mut self, text: &str) {
        match self {
            Input::Keyboard(editor) if !text.is_empty() => editor.remember(text),
            _ => {}
        }
    }

    /// A line without its line break. Shows no prompt if the input is a pipe.
    pub(super) fn line(&mut self, prompt: &str) -> Result<Typed> {
        let pipe = match self {
            Input::Keyboard(editor) => return editor.read(prompt),
            Input::Pipe(pipe) => pipe,
        };
        let mut bytes = Vec::new();
        let read = pipe
            .read_until(b'\n', &mut bytes)
            .map_err(|e| Error::io("reading standard input", e))?;
        if read == 0 {
            return Ok(Typed::End);
        }
        let line = NVFP4::text::utf8("the line", &bytes)?;
        let line = line.strip_suffix('\n').unwrap_or(line);
        Ok(Typed::Line(
            line.strip_suffix('\r').unwrap_or(line).to_owned(),
        ))
    }
}
