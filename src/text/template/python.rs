//! Values in Python's notation, which templates assume: `str`, `repr` and JSON; and tuples, whose notation differs from lists.

use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Value, ValueKind};
use minijinja::{ErrorKind, Output, State};
use serde::Serialize;

/// A Python tuple.
#[derive(Debug)]
pub(super) struct Tuple(pub(super) Vec<Value>);

impl Object for Tuple {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = python_text(&Value::from_dyn_object(self.clone()));
        f.write_str(&text.map_err(|_| std::fmt::Error)?)
    }
}

/// The tuple of `values`.
pub(super) fn tuple(values: Rest<Value>) -> Value {
    Value::from_object(Tuple(values.0))
}

/// The pairs in `pairs` as tuples.
pub(super) fn as_tuples(pairs: &Value) -> std::result::Result<Vec<Value>, minijinja::Error> {
    let tuples = pairs.try_iter()?.map(|pair| {
        let values = pair.try_iter()?.collect();
        Ok(Value::from_object(Tuple(values)))
    });
    tuples.collect()
}

/// Prints a value as Python does.
pub(super) fn print_like_python(
    out: &mut Output<'_>,
    state: &State<'_, '_>,
    value: &Value,
) -> std::result::Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => {
            let text = python_text(value)?;
            out.write_str(&text).map_err(minijinja::Error::from)
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// Python's `str` of a value.
pub(super) fn python_text(value: &Value) -> std::result::Result<String, minijinja::Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => out = value.to_string(),
        _ => python_repr(value, DEEPEST, &mut out)?,
    }
    Ok(out)
}

/// Python's `repr` of a value.
pub(super) fn python_repr_of(value: &Value) -> std::result::Result<String, minijinja::Error> {
    let mut out = String::new();
    python_repr(value, DEEPEST, &mut out)?;
    Ok(out)
}

/// The deepest nesting that is printed; Python's own limit is not much higher.
const DEEPEST: usize = 256;

/// Appends Python's `repr` of a value.
fn python_repr(
    value: &Value,
    depth: usize,
    out: &mut String,
) -> std::result::Result<(), minijinja::Error> {
    if depth == 0 {
        return Err(minijinja::Error::new(
            ErrorKind::InvalidOperation,
            format!("prints arrays within arrays, more than {DEEPEST} deep"),
        ));
    }
    match value.kind() {
        ValueKind::String => quote_like_python(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&python_float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::Seq => {
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            out.push(if is_tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()? {
                out.push_str(if count > 0 { ", " } else { "" });
                python_repr(&item, depth - 1, out)?;
                count += 1;
            }
            out.push_str(match (is_tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                python_repr(&key, depth - 1, out)?;
                out.push_str(": ");
                python_repr(&value.get_item(&key)?, depth - 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Appends `text` as Python's `repr` writes it: in single quotes, unless there are only single quotes in it.
fn quote_like_python(text: &str, out: &mut String) {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
}

pub(super) fn raise_exception(message: String) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// The most spaces of JSON indentation.
const WIDEST: usize = 64;

/// JSON as Python's `json.dumps` writes it.
pub(super) fn to_json(
    value: &Value,
    options: Kwargs,
) -> std::result::Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    if let Some(width) = indent.filter(|&width| width > WIDEST) {
        return Err(minijinja::Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson indents by {width}, and {WIDEST} is the most"),
        ));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    // The default in Python, but not in transformers.
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut form = PythonJson::with_indent(indent);
    form.ascii = ascii == Some(true);
    if let Some(separators) = separators {
        let [item, key] = <[String; 2]>::try_from(separators).map_err(|given| {
            let text = format!("tojson takes two separators, not {}", given.len());
            minijinja::Error::new(ErrorKind::InvalidOperation, text)
        })?;
        (form.between_items, form.after_key) = (item, key);
    }
    let json = match sorted {
        Some(true) => serde_json::to_value(value).and_then(|mut v| {
            v.sort_all_objects();
            python_json(&v, form)
        }),
        _ => python_json(value, form),
    };
    json.map(Value::from)
        .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, "tojson").with_source(e))
}

pub(super) fn python_json(value: &impl Serialize, form: PythonJson) -> serde_json::Result<String> {
    let mut out = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, form))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Formats JSON like Python's `json.dumps`.
pub(super) struct PythonJson {
    between_items: String,
    after_key: String,
    indent: Option<usize>,
    /// Whether non-ASCII characters are escaped.
    ascii: bool,
    depth: usize,
    /// Whether the current array or object has any elements.
    filled: bool,
}

impl PythonJson {
    pub(super) fn with_indent(indent: Option<usize>) -> Self {
        PythonJson {
            between_items: if indent.is_some() { "," } else { ", " }.to_owned(),
            after_key: ": ".to_owned(),
            indent,
            ascii: false,
            depth: 0,
            filled: false,
        }
    }

    fn new_line<W: std::io::Write + ?Sized>(&self, writer: &mut W) -> std::io::Result<()> {
        let Some(width) = self.indent else {
            return Ok(());
        };
        writer.write_all(b"\n")?;
        (0..width * self.depth).try_for_each(|_| writer.write_all(b" "))
    }

    fn begin<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        mark: &[u8],
    ) -> std::io::Result<()> {
        self.depth += 1;
        self.filled = false;
        if self.depth > DEEPEST {
            return Err(std::io::Error::other(format!(
                "arrays within arrays, more than {DEEPEST} deep"
            )));
        }
        writer.write_all(mark)
    }

    fn begin_item<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if !first {
            writer.write_all(self.between_items.as_bytes())?;
        }
        self.new_line(writer)
    }

    fn end<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        mark: &[u8],
    ) -> std::io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.new_line(writer)?;
        }
        self.filled = true;
        writer.write_all(mark)
    }
}

impl serde_json::ser::Formatter for PythonJson {
    fn begin_array<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(writer, first)
    }

    fn end_array_value<W: std::io::Write + ?Sized>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: std::io::Write + ?Sized>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(writer, first)
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(self.after_key.as_bytes())
    }

    fn end_object_value<W: std::io::Write + ?Sized>(&mut self, _: &mut W) -> std::io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn write_f64<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        value: f64,
    ) -> std::io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> std::io::Result<()> {
        if !self.ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            match c.is_ascii() {
                true => writer.write_all(&[c as u8])?,
                false => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(writer, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// A number as Python's `repr` writes it: the digits that Rust writes, with an exponent of two digits or more at 1e16 and above
/// and below 1e-4.
fn python_float(value: f64) -> String {
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        if let Some((digits, exponent)) = text.split_once('e')
            && let Ok(exponent) = exponent.parse::<i32>()
        {
            let sign = if exponent < 0 { '-' } else { '+' };
            return format!("{digits}e{sign}{:02}", exponent.abs());
        }
    }
    format!("{value:?}")
}
