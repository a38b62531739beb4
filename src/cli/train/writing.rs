//! `--teacher-writes`: rows of data that the teacher generates into the directory of the run before training. A command that ended
//! between two rows continues behind the last one.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, ErrorKind, Result};
use NVFP4::engine::Served;
use NVFP4::format::random::bits;
use NVFP4::model::LoadOptions;
use NVFP4::model::training::Source;
use NVFP4::ops::Device;
use NVFP4::session::{
    ChatOptions, GenerateOptions, Generation, SamplingOptions, Session, SessionOptions,
};
use NVFP4::text::{Message, messages_to_json};
use NVFP4::train;
use NVFP4::train::data::{self, Question};
use serde_json::{Value, json};

use super::options::Args;
use crate::cli::{model, output};

/// Files of the rows, and of the settings that they were written with.
pub(super) const ROWS: &str = "teacher.jsonl";
pub(super) const SETTINGS: &str = "teacher.json";
/// The stream of random bits of sampling.
const STREAM: u64 = 0x7772_6974;
/// Most tries for each row that is asked for; an empty text is no row.
const TRIES: usize = 4;

/// Has the teacher write what is missing of the rows that are asked for; gives the file with all of them. `lock` takes the directory of the
/// run before anything is written there.
pub(super) fn write(
    args: &Args,
    (device, window): (&Device, usize),
    teacher: &Source,
    count: usize,
    lock: impl FnOnce() -> Result<()>,
) -> Result<PathBuf> {
    let options = args.data_options(window);
    let questions = data::questions(&args.data, &options)?;
    if questions.is_empty() && !args.data.is_empty() {
        bail!(
            InvalidArgument,
            "--data has no question for the teacher to answer, as it holds texts alone; leave --data out for texts of the teacher's own, or \
             leave --teacher-writes out to learn from these"
        );
    }
    let text = teacher.text().map_err(|e| e.within("the teacher"))?;
    let mut start = text.tokenizer.encode("", true)?;
    if start.is_empty() {
        start.extend(text.eos);
    }
    let settings = json!({
        "teacher": train::fingerprint(teacher)?, "texts": count, "window": window, "seed": args.seed,
        "questions": data::fingerprint(&questions),
    });
    let rows = args.out.join(ROWS);
    lock()?;
    let mut written = earlier(&args.out, &settings)?;
    if written.len() < count {
        let writer = Writer {
            model: load(args, device)?,
            is_chat: text.template.is_some(),
            start,
            questions: &questions,
            window,
            seed: bits(args.seed, STREAM),
        };
        writer.fill(&rows, count, &mut written)?;
    }
    Ok(rows)
}

/// The number of the try of each row in a directory. Truncates a line that is not whole.
fn earlier(out: &Path, settings: &Value) -> Result<Vec<usize>> {
    let (place, rows) = (out.join(SETTINGS), out.join(ROWS));
    let failed =
        |what: &str, path: &Path, e| Error::io(format_args!("{what} {}", path.display()), e);
    if place.exists() {
        let text = fs::read_to_string(&place).map_err(|e| failed("reading", &place, e))?;
        let known: Value = serde_json::from_str(&text)
            .map_err(|e| err!(CorruptFile, "{}: {e}", place.display()))?;
        if known != *settings {
            bail!(
                InvalidArgument,
                "{} was written by another teacher or with other options ({known}, and now {settings}); give the options that it began with, \
                 or another --out",
                rows.display()
            );
        }
    } else {
        fs::create_dir_all(out).map_err(|e| failed("making", out, e))?;
        fs::write(&place, format!("{settings}\n")).map_err(|e| failed("writing", &place, e))?;
        fs::write(&rows, "").map_err(|e| failed("writing", &rows, e))?;
    }
    let text = fs::read_to_string(&rows).map_err(|e| failed("reading", &rows, e))?;
    let whole = text.rfind('\n').map_or(0, |end| end + 1);
    let file = OpenOptions::new().write(true).open(&rows);
    file.and_then(|file| file.set_len(whole as u64))
        .map_err(|e| failed("writing", &rows, e))?;
    let number = |line: &str| -> Result<usize> {
        let row: Value =
            serde_json::from_str(line).map_err(|e| err!(CorruptFile, "{}: {e}", rows.display()))?;
        Ok(row["number"].as_u64().unwrap_or_default() as usize)
    };
    text[..whole].lines().map(number).collect()
}

fn load(args: &Args, device: &Device) -> Result<Arc<Served>> {
    let Some(name) = args.teacher.name(args.model.as_ref()) else {
        bail!(Internal, "clap requires --teacher with --teacher-writes");
    };
    Served::load(&model::resolve(name)?, &LoadOptions::new(device.clone()))
}

struct Writer<'a> {
    model: Arc<Served>,
    /// Whether a prompt is a user's message.
    is_chat: bool,
    /// Tokens that begin a text without a question.
    start: Vec<u32>,
    questions: &'a [Question],
    window: usize,
    seed: u64,
}

impl Writer<'_> {
    /// Adds rows to a file until it has `count`. `written` has the number of each row's try.
    fn fill(&self, rows: &Path, count: usize, written: &mut Vec<usize>) -> Result<()> {
        let failed = |e| Error::io(format_args!("writing {}", rows.display()), e);
        let mut file: File = OpenOptions::new().append(true).open(rows).map_err(failed)?;
        let bar = output::count_bar("the teacher writes", count as u64);
        let mut number = written.last().map_or(0, |last| last + 1);
        while written.len() < count {
            bar.set_position(written.len() as u64);
            if number >= TRIES * count {
                bail!(
                    InvalidArgument,
                    "the teacher wrote {} texts in {number} tries, and nothing in the others; {count} were asked for",
                    written.len()
                );
            }
            if let Some(mut row) = self.row(number)? {
                row["number"] = json!(number);
                file.write_all(format!("{row}\n").as_bytes())
                    .map_err(failed)?;
                written.push(number);
            }
            number += 1;
        }
        bar.finish_and_clear();
        file.sync_all().map_err(failed)
    }

    /// The row of a try; none if the teacher ends at once.
    fn row(&self, number: usize) -> Result<Option<Value>> {
        let mut session = Session::new(
            self.model.clone(),
            &SessionOptions {
                // The token that ends a text follows it.
                context: self.window - 1,
                ..SessionOptions::default()
            },
        )?;
        let options = GenerateOptions {
            sampling: SamplingOptions {
                temperature: 1.0,
                seed: Some(bits(self.seed, number as u64)),
                ..SamplingOptions::default()
            },
            ..GenerateOptions::default()
        };
        let question = match self.questions.len() {
            0 => None,
            all => Some(&self.questions[number % all]),
        };
        let row = match question {
            None => {
                let text = self.goes_on(&mut session, &self.start, &options)?.text;
                (!text.trim().is_empty()).then(|| json!({"text": text}))
            }
            Some(Question::Prompt(prompt)) if !self.is_chat => {
                let tokens = self.model.tokenizer()?.encode(prompt, true)?;
                let answer = self.goes_on(&mut session, &tokens, &options)?.text;
                (!answer.is_empty()).then(|| json!({"prompt": prompt, "completion": answer}))
            }
            Some(Question::Prompt(prompt)) => {
                self.answer(&mut session, &[Message::new("user", prompt)], &[], &options)?
            }
            Some(Question::Conversation { messages, tools }) => {
                self.answer(&mut session, messages, tools, &options)?
            }
        };
        Ok(row)
    }

    fn goes_on(
        &self,
        session: &mut Session,
        tokens: &[u32],
        options: &GenerateOptions,
    ) -> Result<Generation> {
        session.prefill(tokens)?;
        session.generate(options, &mut |_| ControlFlow::Continue(()))
    }

    /// A conversation with its answer. A question that fills a window has none.
    fn answer(
        &self,
        session: &mut Session,
        messages: &[Message],
        tools: &[Value],
        options: &GenerateOptions,
    ) -> Result<Option<Value>> {
        let chat = ChatOptions {
            tools: tools.to_vec(),
            ..ChatOptions::default()
        };
        let goes_on = &mut |_: NVFP4::session::Piece<'_>| ControlFlow::Continue(());
        let answered = session.chat_messages(messages, Some(&chat), options, goes_on);
        match answered {
            Err(e) if e.kind() == ErrorKind::ContextFull => return Ok(None),
            answered => answered?,
        };
        let said = session.messages()?;
        let is_empty = said
            .last()
            .is_none_or(|m| m.text().is_empty() && m.tool_calls.is_empty());
        if is_empty {
            return Ok(None);
        }
        let mut row = json!({"messages": messages_to_json(&said)});
        if !tools.is_empty() {
            row["tools"] = json!(tools);
        }
        Ok(Some(row))
    }
}
