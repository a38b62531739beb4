//! Reads lines from a keyboard: editing, a history on disk, and completion of commands and file names.

use std::cell::Cell;
use std::fs;
use std::io::IsTerminal;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use NVFP4::base::error::err;
use NVFP4::base::{Result, env};
use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Behavior, CompletionType, Config, Context, Helper};

use super::command::COMMANDS;

/// Upper limit of lines in the history.
const HISTORY: usize = 1000;

/// The result of reading a line.
pub(super) enum Typed {
    Line(String),
    /// Ctrl-C, and whether the line was empty.
    Interrupt {
        was_empty: bool,
    },
    /// Ctrl-D on an empty line.
    End,
}

pub(super) struct Editor {
    inner: rustyline::Editor<Assistance, FileHistory>,
    /// The file of the history, if there is one.
    history: Option<PathBuf>,
}

impl Editor {
    pub(super) fn new() -> Result<Editor> {
        // The echo of a line must not go to standard output if that is a file or a pipe.
        let behavior = match std::io::stdout().is_terminal() {
            true => Behavior::Stdio,
            false => Behavior::PreferTerm,
        };
        let config = Config::builder()
            .max_history_size(HISTORY)
            .and_then(|config| config.history_ignore_dups(true))
            .map_err(failure)?
            .completion_type(CompletionType::List)
            .completion_show_all_if_ambiguous(true)
            .behavior(behavior)
            .build();
        let mut inner = rustyline::Editor::with_config(config).map_err(failure)?;
        inner.set_helper(Some(Assistance::default()));
        let history = history();
        if let Some(file) = &history {
            // A history that cannot be read counts as empty.
            let _ = inner.load_history(file);
        }
        Ok(Editor { inner, history })
    }

    pub(super) fn read(&mut self, prompt: &str) -> Result<Typed> {
        match self.inner.readline(prompt) {
            Ok(line) => Ok(Typed::Line(line)),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(ReadlineError::Interrupted) => Ok(Typed::Interrupt {
                was_empty: self.inner.helper().is_none_or(|h| h.is_empty.get()),
            }),
            Err(e) => Err(failure(e)),
        }
    }

    /// Adds to the history. A failure to write it does not end the conversation.
    pub(super) fn remember(&mut self, text: &str) {
        let added = self.inner.add_history_entry(text).unwrap_or(false);
        if let Some(file) = self.history.as_ref().filter(|_| added) {
            let _ = self.inner.append_history(file);
        }
    }
}

fn failure(e: ReadlineError) -> NVFP4::base::Error {
    err!(Io, "reading from the terminal: {e}")
}

/// The path of the history file, whose folder is created.
fn history() -> Option<PathBuf> {
    let folder = env::state()?.join("nvfp4");
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(&folder).ok()?;
    Some(folder.join("history"))
}

/// The helper of the line editor.
#[derive(Default)]
struct Assistance {
    /// Whether the line is still empty.
    is_empty: Cell<bool>,
}

impl Helper for Assistance {}
impl Highlighter for Assistance {}
impl Validator for Assistance {}

impl Hinter for Assistance {
    type Hint = String;

    /// Called whenever the line changes; gives no hint.
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.is_empty.set(line.is_empty());
        None
    }
}

impl Completer for Assistance {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        Ok(completions(&line[..position]))
    }
}

/// The position of the last word of `line`, and its completions.
fn completions(line: &str) -> (usize, Vec<Pair>) {
    let Some((name, word)) = line.split_once(' ') else {
        let named = COMMANDS.iter().filter(|(name, ..)| name.starts_with(line));
        let named = named.map(|(name, argument, _)| Pair {
            display: (*name).to_owned(),
            replacement: match argument.is_empty() {
                true => (*name).to_owned(),
                false => format!("{name} "),
            },
        });
        return match line.starts_with('/') {
            true => (0, named.collect()),
            false => (line.len(), Vec::new()),
        };
    };
    let start = line.len() - word.len();
    match COMMANDS.iter().find(|(known, ..)| *known == name) {
        Some((_, "FILE", _)) => {
            let (folder, begun) = word
                .rsplit_once('/')
                .map_or(("", word), |(folder, _)| word.split_at(folder.len() + 1));
            (start + folder.len(), files(folder, begun))
        }
        Some((_, "on|off", _)) => (
            start,
            ["on", "off"]
                .iter()
                .filter(|choice| choice.starts_with(word))
                .map(|choice| same(choice))
                .collect(),
        ),
        _ => (line.len(), Vec::new()),
    }
}

/// Files in `folder` whose names begin with `begun`.
fn files(folder: &str, begun: &str) -> Vec<Pair> {
    let path = match folder {
        "" => Path::new("."),
        folder => Path::new(folder),
    };
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| {
            let mut name = entry.file_name().into_string().ok()?;
            if entry.path().is_dir() {
                name.push('/');
            }
            Some(name)
        })
        .filter(|name| {
            name.starts_with(begun) && (!name.starts_with('.') || begun.starts_with('.'))
        })
        .collect();
    names.sort();
    names.iter().map(|name| same(name)).collect()
}

fn same(text: &str) -> Pair {
    Pair {
        display: text.to_owned(),
        replacement: text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_choices_and_files_are_completed() {
        let complete = |line: &str| {
            let (start, found) = completions(line);
            let found = found.into_iter().map(|pair| pair.replacement);
            (start, found.collect::<Vec<_>>())
        };
        let words = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
        assert_eq!(complete("/re"), (0, words(&["/reset", "/retry"])));
        assert_eq!(complete("/lo"), (0, words(&["/load "])));
        assert_eq!(complete("/think o"), (7, words(&["on", "off"])));
        assert_eq!(complete("/load src/ma"), (10, words(&["main.rs"])));
        assert_eq!(complete("/load sr"), (6, words(&["src/"])));
        for line in ["", "Hi", "/nothing ", "/edit s", "/load no/such/folder/"] {
            assert_eq!(complete(line).1, words(&[]), "{line}");
        }
    }
}
