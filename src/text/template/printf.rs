//! Python's operator `%`: formats text, and computes remainders of numbers.

use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::python::{Tuple, python_repr_of, python_text};

type Result<T> = std::result::Result<T, Error>;

fn error<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOperation, text.into()))
}

/// `left % right`, as in Python.
pub(super) fn percent(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value> {
    if let Some(format) = left.as_str() {
        let tuple = right.downcast_object_ref::<Tuple>();
        let arguments = match tuple {
            Some(tuple) => Arguments::positional(&tuple.0),
            None => Arguments::one(right),
        };
        return formatted(state, format, arguments).map(Value::from);
    }
    let of_numbers = |value: &Value| match value.kind() {
        ValueKind::Bool => Ok(Value::from(i64::from(value.is_true()))),
        ValueKind::Number => Ok(value.clone()),
        kind => error(format!(
            "% takes numbers, or a text on its left, not {kind}"
        )),
    };
    let (left, right) = (of_numbers(left)?, of_numbers(right)?);
    let whole = |value: &Value| {
        i128::try_from(value.clone())
            .ok()
            .filter(|_| value.is_integer())
    };
    if let (Some(left), Some(right)) = (whole(&left), whole(&right)) {
        let remainder = left.checked_rem(right);
        let remainder = remainder.map(|r| match r != 0 && (r < 0) != (right < 0) {
            true => r + right,
            false => r,
        });
        return match remainder {
            Some(remainder) => Ok(Value::from(remainder)),
            None => error("% by zero"),
        };
    }
    let (left, right) = (f64::try_from(left)?, f64::try_from(right)?);
    if right == 0.0 {
        return error("% by zero");
    }
    let remainder = left % right;
    Ok(Value::from(
        match remainder != 0.0 && (remainder < 0.0) != (right < 0.0) {
            true => remainder + right,
            false => remainder,
        },
    ))
}

/// The filter `format`: `value % arguments`.
pub(super) fn format_filter(
    state: &State<'_, '_>,
    value: &Value,
    arguments: Rest<Value>,
) -> Result<Value> {
    let format = python_text(value)?;
    let named = arguments.first().filter(|a| a.is_kwargs());
    let arguments = match named {
        Some(named) if arguments.len() == 1 => Arguments::one(named),
        _ => Arguments::positional(&arguments),
    };
    formatted(state, &format, arguments).map(Value::from)
}

/// The values for a format.
struct Arguments<'a> {
    positional: &'a [Value],
    next: usize,
    /// A value whose named parts may be used. It need not be used up.
    container: Option<&'a Value>,
}

impl<'a> Arguments<'a> {
    fn positional(values: &'a [Value]) -> Self {
        Arguments {
            positional: values,
            next: 0,
            container: None,
        }
    }

    fn one(value: &'a Value) -> Self {
        Arguments {
            container: matches!(value.kind(), ValueKind::Map | ValueKind::Seq).then_some(value),
            ..Self::positional(std::slice::from_ref(value))
        }
    }

    fn next(&mut self) -> Result<Value> {
        let Some(value) = self.positional.get(self.next) else {
            return error("not enough arguments for format string");
        };
        self.next += 1;
        Ok(value.clone())
    }

    fn named(&self, name: &str) -> Result<Value> {
        match self.container.filter(|c| c.kind() == ValueKind::Map) {
            None => error("format requires a mapping"),
            Some(map) => match map.get_attr(name)? {
                value if value.is_undefined() => {
                    error(format!("the format names '{name}', which there is not"))
                }
                value => Ok(value),
            },
        }
    }
}

/// A conversion such as `%-8.3f`.
struct Conversion<'a> {
    /// The name in `%(name)s`.
    name: Option<&'a str>,
    /// Flags, width and precision.
    middle: &'a str,
    letter: char,
    /// Its bytes, the percent sign among them.
    len: usize,
}

impl<'a> Conversion<'a> {
    /// Parses the conversion at the beginning of `rest`, whose first character is a percent sign.
    fn read(rest: &'a str) -> Result<Self> {
        let mut at = 1;
        let mut name = None;
        if let Some(inside) = rest[1..].strip_prefix('(') {
            let Some(end) = inside.find(')') else {
                return error("incomplete format key");
            };
            name = Some(&inside[..end]);
            at += end + 2;
        }
        let middle = &rest[at..];
        let is_middle = |c: char| c.is_ascii_digit() || "#-+ .".contains(c);
        let length = middle.find(|c| !is_middle(c)).unwrap_or(middle.len());
        let middle = &middle[..length];
        let after = rest[at + length..].trim_start_matches(['h', 'l', 'L']);
        let Some(letter) = after.chars().next() else {
            return error("incomplete format");
        };
        Ok(Conversion {
            name,
            middle,
            letter,
            len: rest.len() - after.len() + letter.len_utf8(),
        })
    }

    /// The width and the precision.
    fn sizes(&self) -> Result<(usize, Option<usize>)> {
        let sizes = self.middle.trim_start_matches(['#', '-', '+', ' ', '0']);
        let (width, precision) = match sizes.split_once('.') {
            Some((width, precision)) => (width, Some(precision)),
            None => (sizes, None),
        };
        let size = |text: &str| match text {
            "" => Ok(0),
            text => match text.parse() {
                Ok(size) if size <= WIDEST => Ok(size),
                _ => error(format!("a format takes sizes up to {WIDEST}, not {text}")),
            },
        };
        Ok((size(width)?, precision.map(size).transpose()?))
    }

    /// Formats `value` by the conversion.
    fn write(&self, state: &State<'_, '_>, value: &Value) -> Result<String> {
        let (width, precision) = self.sizes()?;
        let text = match self.letter {
            's' => python_text(value)?,
            'r' => python_repr_of(value)?,
            letter => return self.write_number(state, letter, value),
        };
        let text: String = text.chars().take(precision.unwrap_or(usize::MAX)).collect();
        let flags = self.middle.chars();
        Ok(
            match flags.take_while(|c| "#-+ 0".contains(*c)).any(|c| c == '-') {
                true => format!("{text:<width$}"),
                false => format!("{text:>width$}"),
            },
        )
    }

    fn write_number(&self, state: &State<'_, '_>, letter: char, value: &Value) -> Result<String> {
        let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
        let letter = match letter {
            'd' | 'i' | 'u' => 'd',
            'o' | 'x' | 'X' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'c' => letter,
            other => return error(format!("unsupported format character '{other}'")),
        };
        if !is_number && letter != 'c' {
            let kind = value.kind();
            return error(format!(
                "%{letter} format: a number is required, not {kind}"
            ));
        }
        let value = match f64::try_from(value.clone()) {
            Ok(number) if letter == 'd' && !value.is_integer() => {
                if !number.is_finite() {
                    return error(format!("cannot convert {number} to a whole number"));
                }
                Value::from(number.trunc() as i128)
            }
            _ => value.clone(),
        };
        let format = Value::from(format!("%{}{letter}", self.middle));
        let written = minijinja::filters::format(state, &format, Rest(vec![value]))?;
        Ok(written.as_str().unwrap_or_default().to_owned())
    }
}

/// The largest width and precision.
const WIDEST: usize = 10_000;

fn formatted(state: &State<'_, '_>, format: &str, mut arguments: Arguments<'_>) -> Result<String> {
    let mut out = String::with_capacity(format.len());
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let conversion = Conversion::read(rest)?;
        rest = &rest[conversion.len..];
        if conversion.letter == '%' {
            out.push('%');
            continue;
        }
        let value = match conversion.name {
            Some(name) => arguments.named(name)?,
            None => arguments.next()?,
        };
        out.push_str(&conversion.write(state, &value)?);
    }
    out.push_str(rest);
    if arguments.container.is_none() && arguments.next < arguments.positional.len() {
        return error("not all arguments converted during string formatting");
    }
    Ok(out)
}
