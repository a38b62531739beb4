//! The rows of a file, as its format holds them.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::options::Format;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::text::{Message, messages_from_json, tools_from_json, utf8};

/// What a row says.
#[derive(Debug, PartialEq)]
pub(super) enum Row {
    /// A question, and the answer to be learned.
    Pair { prompt: String, target: String },
    /// A conversation, whose assistant is learned, with the tools that were offered in it.
    Chat {
        messages: Vec<Message>,
        tools: Vec<serde_json::Value>,
    },
    /// A text that is learned as a whole.
    Text(String),
}

/// A row with the number of the line that it begins in.
pub(super) type Numbered = (usize, Result<Row>);

/// The rows of a file with this content. Lines that cannot be read are errors among them.
pub(super) fn rows(content: &[u8], format: Format, separator: Option<&str>) -> Vec<Numbered> {
    let content = content
        .strip_prefix("\u{feff}".as_bytes())
        .unwrap_or(content);
    if format == Format::Text {
        return texts(content, separator);
    }
    let lines = content.split(|&b| b == b'\n').enumerate();
    let lines = lines.map(|(i, line)| (i + 1, line.strip_suffix(b"\r").unwrap_or(line)));
    lines
        .filter_map(|(number, line)| {
            let row = match utf8("the line", line) {
                Err(e) => Err(e),
                Ok(line) if line.trim().is_empty() => return None,
                Ok(line) if format == Format::Jsonl => json(line),
                Ok(line) if line.starts_with('#') => return None,
                Ok(line) => pair(line),
            };
            Some((number, row))
        })
        .collect()
}

fn texts(content: &[u8], separator: Option<&str>) -> Vec<Numbered> {
    let text = match utf8("the text", content) {
        Ok(text) => text,
        Err(e) => return vec![(1, Err(e))],
    };
    let parts: Vec<&str> = match separator {
        Some(separator) if !separator.is_empty() => text.split(separator).collect(),
        _ => vec![text],
    };
    let mut found = Vec::new();
    for part in parts {
        if !part.trim().is_empty() {
            let before = part.as_ptr() as usize - text.as_ptr() as usize;
            let line = 1 + text[..before].matches('\n').count();
            found.push((line, Ok(Row::Text(part.to_owned()))));
        }
    }
    found
}

fn pair(line: &str) -> Result<Row> {
    let fields: Vec<&str> = line.split('\t').collect();
    match fields[..] {
        [prompt, target] if prompt.trim().is_empty() || target.trim().is_empty() => bail!(
            InvalidArgument,
            "the {} is empty",
            if prompt.trim().is_empty() {
                "prompt"
            } else {
                "target"
            }
        ),
        [prompt, target] => Ok(Row::Pair {
            prompt: prompt.to_owned(),
            target: target.to_owned(),
        }),
        _ => bail!(
            InvalidArgument,
            "{} tabs, where one is to stand between prompt and target",
            fields.len() - 1
        ),
    }
}

/// A line of JSON; other keys than these are left alone.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    prompt: Option<String>,
    completion: Option<String>,
    text: Option<String>,
}

fn json(line: &str) -> Result<Row> {
    let line: Line<'_> =
        serde_json::from_str(line).map_err(|e| err!(InvalidArgument, "not a row of JSON: {e}"))?;
    match line {
        Line {
            messages: Some(messages),
            tools,
            ..
        } => {
            let messages = messages_from_json(messages.get())?;
            if !messages.iter().any(|m| m.role == "assistant") {
                bail!(
                    InvalidArgument,
                    "none of its {} messages is the assistant's, so there is nothing to learn",
                    messages.len()
                );
            }
            let tools = match tools.map(RawValue::get) {
                None | Some("null") => Vec::new(),
                Some(tools) => tools_from_json(tools)?,
            };
            Ok(Row::Chat { messages, tools })
        }
        Line {
            prompt: Some(prompt),
            completion: Some(target),
            ..
        } if !target.is_empty() => Ok(Row::Pair { prompt, target }),
        Line {
            prompt: Some(_),
            completion: Some(_),
            ..
        } => bail!(InvalidArgument, "the completion is empty"),
        Line {
            text: Some(text), ..
        } if !text.trim().is_empty() => Ok(Row::Text(text)),
        Line { text: Some(_), .. } => bail!(InvalidArgument, "the text is empty"),
        _ => bail!(
            InvalidArgument,
            "it has neither \"messages\", nor \"prompt\" and \"completion\", nor \"text\""
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &str, format: Format) -> Vec<(usize, std::result::Result<Row, String>)> {
        rows(content.as_bytes(), format, None)
            .into_iter()
            .map(|(line, row)| (line, row.map_err(|e| e.to_string())))
            .collect()
    }

    fn pair(prompt: &str, target: &str) -> Row {
        Row::Pair {
            prompt: prompt.to_owned(),
            target: target.to_owned(),
        }
    }

    #[test]
    fn lines_of_pairs() {
        let found = read(
            "\u{feff}# a comment\n\na\tb\r\nno tab\nx\ty\tz\n \tq\nc \t d\n",
            Format::Tsv,
        );
        assert_eq!(found[0], (3, Ok(pair("a", "b"))));
        assert_eq!(
            found[1],
            (
                4,
                Err("0 tabs, where one is to stand between prompt and target".to_owned())
            )
        );
        assert!(found[2].1.as_ref().unwrap_err().starts_with("2 tabs"));
        assert_eq!(found[3], (6, Err("the prompt is empty".to_owned())));
        assert_eq!(found[4], (7, Ok(pair("c ", " d"))));
        assert_eq!(found.len(), 5);
        let broken = rows(b"a\tb\n\xff\tc\n", Format::Tsv, None);
        assert!(broken[1].0 == 2 && broken[1].1.is_err());
    }

    #[test]
    fn lines_of_json() {
        let found = read(
            "{\"prompt\": \"a\", \"completion\": \"b\", \"id\": 3}\n{\"text\": \"t\"}\n{\"messages\": [{\"role\": \"user\", \
             \"content\": \"q\"}]}\n{\"text\": 3}\n[1]\n{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \
             \"assistant\", \"content\": \"a\"}], \"tools\": null}\n{}\n",
            Format::Jsonl,
        );
        assert_eq!(found[0], (1, Ok(pair("a", "b"))));
        assert_eq!(found[1], (2, Ok(Row::Text("t".to_owned()))));
        for (at, words) in [
            (2, "none of its 1 messages is the assistant's"),
            (3, "not a row of JSON"),
            (4, "not a row of JSON"),
            (6, "neither \"messages\""),
        ] {
            let error = found[at].1.as_ref().unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let chat = Row::Chat {
            messages: vec![Message::new("user", "q"), Message::new("assistant", "a")],
            tools: Vec::new(),
        };
        assert_eq!(found[5], (6, Ok(chat)));
    }

    #[test]
    fn texts_are_split_where_they_are_asked_to_be() {
        assert_eq!(
            read("a\nb\n", Format::Text),
            [(1, Ok(Row::Text("a\nb\n".to_owned())))]
        );
        let found = rows(b"a\n---\nb\n---\n \n---\nc", Format::Text, Some("---\n"));
        let lines: Vec<usize> = found.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [1, 3, 7]);
        assert!(rows(b"", Format::Text, None).is_empty());
    }
}
