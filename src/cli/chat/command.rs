//! The commands of a conversation: lines that begin with a slash.

use std::path::PathBuf;

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Result, env};

/// Help for each command: its name, its argument and its meaning.
pub(super) const COMMANDS: [(&str, &str, &str); 12] = [
    ("/edit", "TEXT", "asks TEXT in place of the last question"),
    ("/exit", "", "ends the program, as Ctrl-D does"),
    ("/help", "", "shows this"),
    ("/load", "FILE", "loads the conversation in FILE"),
    ("/messages", "", "prints the conversation as JSON"),
    ("/reset", "", "starts a new conversation"),
    (
        "/retry",
        "",
        "answers the last question again, with a new seed",
    ),
    ("/save", "FILE", "saves the conversation to FILE"),
    ("/stats", "", "shows tokens, memory, speed and sampling"),
    (
        "/system",
        "TEXT",
        "sets the system prompt from the next turn on; without TEXT, removes it",
    ),
    ("/think", "on|off", "switches reasoning on or off"),
    (
        "/tools",
        "FILE",
        "offers the tools in FILE, a JSON array; without FILE, none",
    ),
];

/// A command with its argument.
#[derive(Debug, PartialEq)]
pub(super) enum Command<'a> {
    Edit(&'a str),
    Exit,
    Help,
    Load(PathBuf),
    Messages,
    Reset,
    Retry,
    Save(PathBuf),
    Stats,
    System(&'a str),
    Think(bool),
    Tools(Option<PathBuf>),
}

impl<'a> Command<'a> {
    /// Parses a line; `None` if it is not a command. A path or a program comment may begin with a slash too.
    pub(super) fn parse(line: &'a str) -> Result<Option<Command<'a>>> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if !name
            .strip_prefix('/')
            .is_some_and(|name| name.chars().all(is_name))
        {
            return Ok(None);
        }
        let file = || match rest {
            "" => Err(err!(InvalidArgument, "{name} takes a file: {name} FILE")),
            file => Ok(env::shell_path(file)),
        };
        let command = match name {
            "/edit" if rest.is_empty() => {
                bail!(InvalidArgument, "/edit takes the new question: /edit TEXT")
            }
            "/edit" => Command::Edit(rest),
            "/load" => Command::Load(file()?),
            "/save" => Command::Save(file()?),
            "/system" => Command::System(rest),
            "/think" => match rest {
                "on" => Command::Think(true),
                "off" => Command::Think(false),
                _ => bail!(InvalidArgument, "/think takes on or off"),
            },
            "/tools" => Command::Tools(file().ok()),
            "/exit" | "/quit" => Command::Exit,
            "/help" => Command::Help,
            "/messages" => Command::Messages,
            "/reset" => Command::Reset,
            "/retry" => Command::Retry,
            "/stats" => Command::Stats,
            _ => {
                let names: Vec<_> = COMMANDS.iter().map(|(name, ..)| *name).collect();
                bail!(
                    InvalidArgument,
                    "there is no command {name}; the commands are {}",
                    names.join(", ")
                )
            }
        };
        Ok(Some(command))
    }
}

/// The text of `/help`.
pub(super) fn help() -> String {
    let mut text = String::new();
    for (name, argument, meaning) in COMMANDS {
        text.push_str(&format!("{:<16}{meaning}\n", format!("{name} {argument}")));
    }
    text + "Lines between two of \"\"\" are one message, and so are lines that are pasted. Ctrl-C stops an answer."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_text() {
        for (line, command) in [
            ("/think on", Command::Think(true)),
            ("/edit  two\nlines ", Command::Edit("two\nlines")),
            ("/system", Command::System("")),
            ("/tools", Command::Tools(None)),
            ("/save a file", Command::Save(PathBuf::from("a file"))),
            ("/quit", Command::Exit),
        ] {
            assert_eq!(Command::parse(line).unwrap(), Some(command), "{line}");
        }
        for line in [
            "",
            "Hi /help",
            "/usr/bin is what?",
            "/* a */ int x;",
            "// a",
        ] {
            assert_eq!(Command::parse(line).unwrap(), None, "{line}");
        }
        for (line, needle) in [
            ("/", "there is no command /; the commands are /edit, "),
            ("/resett now", "there is no command /resett"),
            ("/think", "on or off"),
            ("/load", "/load FILE"),
            ("/edit ", "/edit TEXT"),
        ] {
            let e = Command::parse(line).unwrap_err();
            assert!(e.message().contains(needle), "{line}: {e}");
        }
    }

    #[test]
    fn listed_commands_are_known() {
        for (name, argument, _) in COMMANDS {
            let line = format!("{name} {}", argument.split('|').next().unwrap());
            assert!(Command::parse(&line).unwrap().is_some(), "{name}");
        }
        assert!(COMMANDS.is_sorted());
    }
}
