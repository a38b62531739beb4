//! A compiled template, with the settings and functions of Hugging Face's `apply_chat_template`, and its output for
//! messages in its own form.

use std::collections::HashSet;

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Environment, ErrorKind, State};
use serde_json::Map;

use super::date::strftime_now;
use super::operators::{PERCENT, TUPLE, with_calls};
use super::printf::{format_filter, percent};
use super::python::{as_tuples, print_like_python, python_text, raise_exception, to_json, tuple};
use crate::base::error::err;
use crate::base::{Result, alloc};

const NAME: &str = "chat";

/// Upper limit of rendering steps, in all and additionally per message; templates take some hundreds per message. Values cannot be nested
/// more deeply than steps allow.
const STEPS: u64 = 2_000_000;
const STEPS_FOR_MESSAGE: u64 = 2_000;

/// Upper limit of a prompt's bytes, far beyond any context.
const LONGEST: usize = 64 << 20;

/// A compiled template.
#[derive(Debug)]
pub(super) struct Compiled {
    environment: Environment<'static>,
    pub(super) source: String,
    bos: Option<String>,
    eos: Option<String>,
    /// The variables that it reads.
    read: HashSet<String>,
}

impl Compiled {
    /// Compiles the template `source`. `bos` and `eos` are the texts of its `bos_token` and `eos_token`.
    pub(super) fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(python_method);
        environment.set_formatter(print_like_python);
        environment.add_filter("tojson", to_json);
        environment.add_filter("string", python_text);
        environment.add_filter("format", format_filter);
        environment.add_filter("items", |map: &Value| {
            as_tuples(&minijinja::filters::items(map)?)
        });
        environment.add_filter("dictsort", |map: &Value, options: Kwargs| {
            as_tuples(&minijinja::filters::dictsort(map, options)?)
        });
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });
        environment.add_test("sequence", |value: &Value| {
            matches!(
                value.kind(),
                ValueKind::Seq | ValueKind::String | ValueKind::Map
            )
        });
        environment.add_test("number", |value: &Value| {
            matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
        });
        environment.add_function(PERCENT, percent);
        environment.add_function(TUPLE, tuple);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        let read = environment
            .add_template_owned(
                NAME,
                with_calls(&without_generation_marks(source)).into_owned(),
            )
            .and_then(|()| environment.get_template(NAME))
            .map(|template| template.undeclared_variables(false))
            .map_err(|e| {
                err!(
                    CorruptFile,
                    "the chat template does not parse: {}",
                    chain(&e)
                )
            })?;
        Ok(Compiled {
            environment,
            source: source.to_owned(),
            bos: bos.map(str::to_owned),
            eos: eos.map(str::to_owned),
            read,
        })
    }

    /// Whether it reads the variable `name`.
    pub(super) fn reads(&self, name: &str) -> bool {
        // The search misses a variable that is only read to set itself: `{% set x = x or 1 %}`.
        self.read.contains(name) || reads_to_set(&self.source, name)
    }

    /// Renders messages that are already in its own form.
    pub(super) fn print(
        &self,
        messages: Vec<Value>,
        add_generation_prompt: bool,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String> {
        let steps = STEPS + STEPS_FOR_MESSAGE * messages.len() as u64;
        self.print_within(steps, messages, add_generation_prompt, variables)
    }

    /// Renders in at most `steps` steps.
    pub(super) fn print_within(
        &self,
        steps: u64,
        messages: Vec<Value>,
        add_generation_prompt: bool,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String> {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        let mut context = vec![
            ("messages".to_owned(), Value::from(messages)),
            (
                "add_generation_prompt".to_owned(),
                add_generation_prompt.into(),
            ),
            // Templates written for transformers get these as None, not as undefined.
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
        environment
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
                    "the chat template has not ended after {steps} steps; it may be in an endless loop"
                ),
                _ => err!(InvalidArgument, "the chat template: {}", chain(&e)),
            })?;
        String::from_utf8(prompt.text)
            .map_err(|e| err!(Internal, "the chat template prints no UTF-8: {e}"))
    }
}

/// The methods of Python's values.
fn python_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    let result =
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)?;
    match (value.kind(), method) {
        (ValueKind::Map, "items") => {
            let () = from_args(arguments)?;
            Ok(Value::make_iterable(move || {
                as_tuples(&result).unwrap_or_default().into_iter()
            }))
        }
        _ => Ok(result),
    }
}

/// Whether `source` sets `name` to an expression that contains `name`.
fn reads_to_set(source: &str, name: &str) -> bool {
    let tags = source.split("{%").skip(1);
    tags.filter_map(|tag| tag.split("%}").next())
        .filter_map(|tag| {
            tag.trim_start_matches(['-', '+'])
                .trim_start()
                .strip_prefix("set ")
        })
        .filter_map(|set| set.split_once('='))
        .any(|(to, value)| {
            let mut words = value.split(|c: char| !c.is_alphanumeric() && c != '_');
            to.trim() == name && words.any(|word| word == name)
        })
}

/// The output of a template so far, up to [`LONGEST`].
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

/// The messages of an error and of its causes, in one line, with the line of the template.
fn chain(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text.replace(&format!("(in {NAME}:"), "(line ")
        .replace('\n', " ")
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
