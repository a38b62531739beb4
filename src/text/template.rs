//! Conversations to prompts, by the Jinja template that a model ships, rendered under the same settings and with the same
//! extra functions as Hugging Face's `apply_chat_template`; ChatML for models without one.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, ErrorKind, Output, State};
use serde::{Deserialize, Serialize};
use serde_json::ser::PrettyFormatter;

use crate::base::error::err;
use crate::base::{Result, alloc, threads};

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template knows.
    pub role: String,
    /// The text of the turn.
    pub content: String,
}

impl Message {
    /// A turn of `role` that says `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// ChatML, which most open chat models without a template of their own were tuned on.
const CHATML: &str = "\
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

const NAME: &str = "chat";

/// Steps that rendering may take. A long conversation takes some hundreds for a message; a template in loops within loops takes
/// these in a few seconds.
const STEPS: u64 = 50_000_000;

/// Bytes that a prompt may have, far beyond any context.
const LONGEST: usize = 64 << 20;

/// Bytes that rendering may take for a byte of a message, of which templates make copies, and for a message beside its text.
const FOR_TEXT: usize = 16;
const FOR_MESSAGE: usize = 1024;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// The template `source`; `bos` and `eos` are what it may print as `bos_token` and `eos_token`.
    pub fn from_jinja(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(STEPS));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(print_like_python);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, without_generation_marks(source))
            .map_err(|e| {
                err!(
                    CorruptFile,
                    "the chat template does not parse: {}",
                    chain(&e)
                )
            })?;
        Ok(ChatTemplate {
            environment,
            bos: bos.map(str::to_owned),
            eos: eos.map(str::to_owned),
        })
    }

    /// ChatML: each turn between `<|im_start|>role` and `<|im_end|>`.
    pub fn chatml() -> Self {
        Self::from_jinja(CHATML, None, None).expect("the ChatML template parses")
    }

    /// The prompt for `messages`; with `add_generation_prompt` it ends where the assistant's next turn begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.render_with(messages, add_generation_prompt, &serde_json::Map::new())
    }

    /// As [`ChatTemplate::render`], with further variables for the template (`enable_thinking`, `tools`, ...).
    pub fn render_with(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String> {
        // Macros call each other, some hundred deep.
        threads::with_stack(|| self.render_here(messages, add_generation_prompt, variables))
    }

    fn render_here(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String> {
        let bytes = messages.iter().fold(0usize, |sum, m| {
            sum.saturating_add((m.role.len() + m.content.len()).saturating_mul(FOR_TEXT))
                .saturating_add(FOR_MESSAGE)
        });
        let _steps = alloc::set_aside(bytes)?;
        let mut context = vec![
            ("messages".to_owned(), Value::from_serialize(messages)),
            (
                "add_generation_prompt".to_owned(),
                add_generation_prompt.into(),
            ),
            // Templates written for transformers meet these as None, not as undefined.
            ("tools".to_owned(), Value::from(())),
            ("documents".to_owned(), Value::from(())),
        ];
        for (name, token) in [("bos_token", &self.bos), ("eos_token", &self.eos)] {
            if let Some(token) = token {
                context.push((name.to_owned(), token.as_str().into()));
            }
        }
        for (name, value) in variables {
            context.push((name.clone(), Value::from_serialize(value)));
        }
        let mut prompt = Prompt::default();
        self.environment
            .get_template(NAME)
            .and_then(|t| {
                t.render_captured_to(Value::from_iter(context), &mut prompt)
                    .map(drop)
            })
            .map_err(|e| match e.kind() {
                _ if prompt.has_no_memory => {
                    err!(OutOfMemory, "the system refused memory for the prompt")
                }
                _ if prompt.is_too_long => err!(
                    CorruptFile,
                    "the chat template prints more than {LONGEST} bytes; it may be in an endless loop"
                ),
                ErrorKind::OutOfFuel => err!(
                    CorruptFile,
                    "the chat template has not ended after {STEPS} steps; it may be in an endless loop"
                ),
                _ => err!(InvalidArgument, "the chat template: {}", chain(&e)),
            })?;
        String::from_utf8(prompt.text)
            .map_err(|e| err!(Internal, "the chat template prints no UTF-8: {e}"))
    }
}

/// What a template has printed so far, up to [`LONGEST`].
#[derive(Default)]
struct Prompt {
    text: Vec<u8>,
    is_too_long: bool,
    has_no_memory: bool,
}

impl std::io::Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.text.len() + bytes.len() > LONGEST {
            self.is_too_long = true;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        if self.text.try_reserve(bytes.len()).is_err() || alloc::check().is_err() {
            self.has_no_memory = true;
            return Err(std::io::ErrorKind::OutOfMemory.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn chain(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// `{% generation %}` marks the assistant's words for training masks and prints nothing itself. Jinja calls it an
/// extension; a condition that is always true has the same effect, white-space control included.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        out.push_str(&rest[..at]);
        let tag = &rest[at..];
        // Past the opening mark, whose percent sign `{%}` has in common with the closing one.
        let Some(inside) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(2 + inside + 2);
        let word = tag[2..2 + inside].trim_matches(['-', '+', ' ', '\t', '\n', '\r']);
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Prints `None`, `True` and `False` as Python does.
fn print_like_python(
    out: &mut Output<'_>,
    state: &State<'_, '_>,
    value: &Value,
) -> std::result::Result<(), minijinja::Error> {
    let word = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(word).map_err(minijinja::Error::from)
}

fn raise_exception(message: String) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// JSON as Python's `json.dumps` spaces it, with non-ASCII characters kept.
fn to_json(value: &Value, options: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let bad = |e: serde_json::Error| {
        minijinja::Error::new(ErrorKind::BadSerialization, "tojson").with_source(e)
    };
    let indent: Option<usize> = options.get("indent")?;
    // Accepted for templates that pass it; Python's other default, escaping non-ASCII, is off in transformers too.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let indent = " ".repeat(width);
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value
                .serialize(&mut serde_json::Serializer::with_formatter(
                    &mut out, formatter,
                ))
                .map_err(bad)?;
        }
        None => value
            .serialize(&mut serde_json::Serializer::with_formatter(
                &mut out,
                PythonSpacing,
            ))
            .map_err(bad)?,
    }
    Ok(Value::from(String::from_utf8_lossy(&out).into_owned()))
}

struct PythonSpacing;

impl serde_json::ser::Formatter for PythonSpacing {
    fn begin_array_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

fn strftime_now(format: &str) -> std::result::Result<String, minijinja::Error> {
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    strftime(format, seconds).map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e))
}

/// `format` for the moment `seconds` after 1970 in UTC, with the directives that templates use to tell a model the date.
fn strftime(format: &str, seconds: u64) -> std::result::Result<String, String> {
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (day, second) = (seconds / 86400, seconds % 86400);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let (year, month, date) = civil(day);
    let weekday = DAYS[(day % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let number = |n: u64| {
            if padded {
                format!("{n:02}")
            } else {
                n.to_string()
            }
        };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100),
            Some('m') => number(month),
            Some('d') => number(date),
            Some('H') => number(hour),
            Some('I') => number((hour + 11) % 12 + 1),
            Some('M') => number(minute),
            Some('S') => number(second % 60),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                return Err(format!(
                    "strftime_now('{format}'): directive %{} is not known; Y y m d H I M S p B b A a work",
                    other.map(String::from).unwrap_or_default()
                ));
            }
        });
    }
    Ok(out)
}

/// Year, month and day of the `day`th day after 1970-01-01.
fn civil(day: u64) -> (u64, u64, u64) {
    let (mut year, mut left) = (1970, day);
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 1;
    for length in lengths {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        // 2024-02-29 13:05:09 UTC.
        let t = 1_709_211_909;
        assert_eq!(
            strftime("%A %a %d %B %b %Y %y %m %H:%M:%S %I%p %-d%%", t).unwrap(),
            "Thursday Thu 29 February Feb 2024 24 02 13:05:09 01PM 29%"
        );
        assert_eq!(strftime("%Y-%m-%d", 0).unwrap(), "1970-01-01");
        assert_eq!(strftime("%Y-%m-%d", 4_107_542_399).unwrap(), "2100-02-28");
        assert_eq!(strftime("%Y-%m-%d", 4_107_542_400).unwrap(), "2100-03-01");
        let e = strftime("%Q", 0).unwrap_err();
        assert!(e.to_string().contains("%Q"), "{e}");
    }

    #[test]
    fn chatml() {
        let text = ChatTemplate::chatml()
            .render(
                &[
                    Message::new("system", "Be brief."),
                    Message::new("user", "Hi\n"),
                ],
                true,
            )
            .unwrap();
        assert_eq!(
            text,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn a_template_may_refuse_and_may_be_broken() {
        let refusing = ChatTemplate::from_jinja(
            "{% if messages[0].role != 'user' %}{{ raise_exception('starts with ' + messages[0].role) }}{% endif %}ok",
            None,
            None,
        )
        .unwrap();
        let e = refusing
            .render(&[Message::new("system", "")], true)
            .unwrap_err();
        assert!(e.message().contains("starts with system"), "{e}");
        assert_eq!(
            refusing.render(&[Message::new("user", "")], true).unwrap(),
            "ok"
        );
        let e = ChatTemplate::from_jinja("{% for %}", None, None).unwrap_err();
        assert!(e.message().contains("does not parse"), "{e}");
    }

    #[test]
    fn generation_marks_print_nothing() {
        let t = ChatTemplate::from_jinja(
            "a {%- generation -%} b {% endgeneration %} c {{ '{% generation' }}",
            None,
            None,
        )
        .unwrap();
        assert_eq!(t.render(&[], false).unwrap(), "ab  c {% generation");
    }
}
