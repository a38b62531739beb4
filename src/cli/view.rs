//! Prints an answer while it is generated. Content and calls go to standard output; reasoning is dimmed on a terminal, and otherwise goes
//! to standard error, so that a pipe gets only the answer.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;

use NVFP4::base::{Error, Result, env};
use NVFP4::session::{Part, Piece};
use serde_json::Value;

use super::output;

/// Prints one answer.
pub(super) struct View {
    terminal: bool,
    /// Whether reasoning is dimmed. Dimming ends after each piece, because a signal may end the program after any of them.
    dims: bool,
    /// The kind of the last piece, and whether it ended a line.
    last: Option<Part>,
    line_ended: bool,
    failed: Option<Error>,
}

impl View {
    pub(super) fn new() -> View {
        let terminal = std::io::stdout().is_terminal();
        let reasoning_seen = terminal || std::io::stderr().is_terminal();
        View {
            terminal,
            dims: reasoning_seen && !env::no_color(),
            last: None,
            line_ended: true,
            failed: None,
        }
    }

    /// Prints a piece. A failure ends the generation and is returned by [`View::end`].
    pub(super) fn show(&mut self, piece: Piece<'_>) -> ControlFlow<()> {
        if piece.text.is_empty() {
            return ControlFlow::Continue(());
        }
        match self.add(piece.part, piece.text) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                self.failed = Some(e);
                ControlFlow::Break(())
            }
        }
    }

    /// Ends the answer's last line.
    pub(super) fn end(mut self) -> Result<()> {
        if let Some(e) = self.failed.take() {
            return Err(e);
        }
        match self.last {
            Some(Part::ToolCall) => Ok(()),
            Some(Part::Reasoning) => self.end_reasoning(),
            Some(Part::Content) | None => output::line(""),
        }
    }

    fn add(&mut self, part: Part, text: &str) -> Result<()> {
        if self.last != Some(part) {
            self.turn_to(part)?;
        }
        match part {
            Part::Content if self.terminal => output::print(visible(text))?,
            Part::Content => output::print(text)?,
            Part::Reasoning => self.print_reasoning(text)?,
            Part::ToolCall if self.terminal => output::line(visible(&call(text)))?,
            Part::ToolCall => output::line(call(text))?,
        }
        self.last = Some(part);
        self.line_ended = part == Part::ToolCall || text.ends_with('\n');
        Ok(())
    }

    fn turn_to(&mut self, part: Part) -> Result<()> {
        match self.last {
            Some(Part::Reasoning) => {
                self.end_reasoning()?;
                if self.terminal {
                    output::line("")?;
                }
            }
            Some(Part::Content) if !self.line_ended => output::line("")?,
            _ => {}
        }
        if part == Part::Reasoning && self.terminal && !self.dims {
            output::line("<thinking>")?;
        }
        Ok(())
    }

    fn print_reasoning(&self, text: &str) -> Result<()> {
        let (on, off) = match self.dims {
            true => ("\x1b[2m", "\x1b[22m"),
            false => ("", ""),
        };
        if self.terminal {
            return output::print(format_args!("{on}{}{off}", visible(text)));
        }
        // Errors are ignored, so that an answer continues if nobody reads standard error.
        let mut err = std::io::stderr().lock();
        let _ = write!(err, "{on}{text}{off}").and_then(|()| err.flush());
        Ok(())
    }

    fn end_reasoning(&self) -> Result<()> {
        if !self.line_ended {
            self.print_reasoning("\n")?;
        }
        match self.terminal && !self.dims {
            true => output::line("</thinking>"),
            false => Ok(()),
        }
    }
}

/// Makes `text` safe for a terminal, which would execute a model's control characters.
fn visible(text: &str) -> Cow<'_, str> {
    let acts = |c: char| c.is_control() && c != '\n' && c != '\t';
    match text.contains(acts) {
        true => Cow::Owned(text.replace(acts, "\u{fffd}")),
        false => Cow::Borrowed(text),
    }
}

/// Formats the JSON of a call as `name(arguments)`.
fn call(json: &str) -> String {
    let call: Value = serde_json::from_str(json).unwrap_or_default();
    let function = &call["function"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!(
        "{}({})",
        text(&function["name"]),
        text(&function["arguments"])
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_act_on_a_terminal() {
        assert_eq!(visible("a\tb\n\u{1f980}"), "a\tb\n\u{1f980}");
        assert_eq!(visible("\x1b[2J\r\u{9b}x"), "\u{fffd}[2J\u{fffd}\u{fffd}x");
    }
}
