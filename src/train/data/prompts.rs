//! Extracts questions without their answers from files of rows.

use std::hash::Hasher;
use std::path::PathBuf;

use twox_hash::XxHash3_64;

use super::content;
use super::options::{Format, Options};
use super::row::Row;
use super::rows::rows;
use crate::base::Result;
use crate::text::{Message, messages_to_json};

/// The question of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Question {
    /// A prompt.
    Prompt(String),
    /// A conversation up to the assistant's last turn.
    Conversation {
        /// The messages.
        messages: Vec<Message>,
        /// The tools offered in it.
        tools: Vec<serde_json::Value>,
    },
}

/// The questions of all rows, in order. Plain texts have none, and neither do conversations that begin with an assistant.
pub fn questions(files: &[PathBuf], options: &Options) -> Result<Vec<Question>> {
    let mut found = Vec::new();
    for path in files {
        let (_, content) = content::read(path)?;
        let format = match options.format {
            Some(format) => format,
            None => Format::of(path)?,
        };
        let rows = rows(&content.bytes, format, options.separator.as_deref())
            .map_err(|e| e.within(path.display()))?;
        for (line, row) in rows {
            match row {
                Ok(row) => found.extend(question(row)),
                Err(_) if options.skip_bad_rows => {}
                Err(e) => return Err(e.within(format_args!("{} line {line}", path.display()))),
            }
        }
    }
    Ok(found)
}

/// XXH3 of questions.
pub fn fingerprint(questions: &[Question]) -> String {
    let mut sum = XxHash3_64::new();
    for question in questions {
        match question {
            Question::Prompt(prompt) => sum.write(prompt.as_bytes()),
            Question::Conversation { messages, tools } => {
                sum.write(messages_to_json(messages).to_string().as_bytes());
                tools
                    .iter()
                    .for_each(|t| sum.write(t.to_string().as_bytes()));
            }
        }
        sum.write_u8(0);
    }
    format!("{:016x}", sum.finish())
}

fn question(row: Row) -> Option<Question> {
    match row {
        Row::Pair { prompt, .. } => Some(Question::Prompt(prompt)),
        Row::Chat {
            mut messages,
            tools,
            ..
        } => {
            let last = messages.iter().rposition(|m| m.role == "assistant")?;
            messages.truncate(last);
            (!messages.is_empty()).then_some(Question::Conversation { messages, tools })
        }
        Row::Text(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn questions_are_rows_without_their_answers() {
        let folder = std::env::temp_dir().join(format!("nvfp4-questions-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [pairs, lines] = ["a.tsv", "b.jsonl"].map(|name| folder.join(name));
        fs::write(&pairs, "what\tthat\n").unwrap();
        let of = |role: &str| format!("{{\"role\": \"{role}\", \"content\": \"{role}!\"}}");
        let [user, assistant] = ["user", "assistant"].map(of);
        let rows = [
            "{\"text\": \"t\"}".to_owned(),
            format!("{{\"messages\": [{user}, {assistant}, {user}, {assistant}]}}"),
            format!("{{\"messages\": [{assistant}]}}"),
        ];
        fs::write(&lines, rows.join("\n")).unwrap();
        let found = questions(&[pairs, lines.clone()], &Options::default()).unwrap();
        let roles = ["user", "assistant", "user"];
        let messages = roles.map(|role| Message::new(role, format!("{role}!")));
        assert_eq!(
            found,
            [
                Question::Prompt("what".to_owned()),
                Question::Conversation {
                    messages: messages.to_vec(),
                    tools: Vec::new()
                }
            ]
        );
        fs::write(&lines, "{}\n").unwrap();
        let error = questions(std::slice::from_ref(&lines), &Options::default()).unwrap_err();
        assert!(error.message().contains("b.jsonl line 1"), "{error}");
        let skips = Options {
            skip_bad_rows: true,
            ..Options::default()
        };
        assert!(questions(&[lines], &skips).unwrap().is_empty());
        fs::remove_dir_all(&folder).unwrap();
    }
}
