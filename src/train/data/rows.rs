//! Parses the rows of a file in its format.

use aho_corasick::{AhoCorasick, MatchKind};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::fields::{Fields, without_place};
use super::options::Format;
use super::row::Row;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::text::utf8;

/// A row, with the number of its first line.
pub(super) type Numbered = (usize, Result<Row>);

/// The rows of a file. Unreadable rows are errors among them; a file that cannot be divided into rows is an error.
pub(super) fn rows(
    content: &[u8],
    format: Format,
    separator: Option<&str>,
) -> Result<Vec<Numbered>> {
    let content = without_mark(content);
    match format {
        Format::Text => texts(content, separator),
        Format::Tsv => Ok(lines(content, |line| match line.starts_with('#') {
            true => None,
            false => Some(pair(line)),
        })),
        Format::Jsonl => Ok(lines(content, |line| {
            Some(Fields::of_line(line).and_then(Fields::row))
        })),
        Format::Json => array(utf8("the file", content)?),
        Format::Csv => records(content),
    }
}

/// The content without its byte order mark.
pub(super) fn without_mark(content: &[u8]) -> &[u8] {
    content
        .strip_prefix("\u{feff}".as_bytes())
        .unwrap_or(content)
}

/// Parses the lines that are not blank with `read`, and numbers them.
pub(super) fn lines<T>(
    content: &[u8],
    read: impl Fn(&str) -> Option<Result<T>>,
) -> Vec<(usize, Result<T>)> {
    let lines = content.split(|&b| b == b'\n').enumerate();
    let lines = lines.map(|(i, line)| (i + 1, line.strip_suffix(b"\r").unwrap_or(line)));
    lines
        .filter_map(|(number, line)| {
            let row = match utf8("the line", line) {
                Err(e) => Err(e),
                Ok(line) if line.trim().is_empty() => return None,
                Ok(line) => read(line)?,
            };
            Some((number, row))
        })
        .collect()
}

/// Line numbers for rising positions in a text.
struct Places<'a> {
    text: &'a [u8],
    at: usize,
    line: usize,
}

impl<'a> Places<'a> {
    fn new(text: &'a [u8]) -> Self {
        Places {
            text,
            at: 0,
            line: 1,
        }
    }

    /// The line that contains a byte.
    fn line(&mut self, at: usize) -> usize {
        let passed = &self.text[self.at..at];
        self.line += passed.iter().filter(|&&b| b == b'\n').count();
        self.at = at;
        self.line
    }
}

fn texts(content: &[u8], separator: Option<&str>) -> Result<Vec<Numbered>> {
    let text = match utf8("the text", content) {
        Ok(text) => text,
        Err(e) => return Ok(vec![(1, Err(e))]),
    };
    let parts = match separator {
        Some(separator) => split(text, separator)?,
        None => vec![text],
    };
    let mut places = Places::new(content);
    let written = parts.into_iter().filter(|part| !part.trim().is_empty());
    let rows = written.map(|part| {
        let line = places.line(part.as_ptr() as usize - text.as_ptr() as usize);
        (line, Ok(Row::Text(part.to_owned())))
    });
    Ok(rows.collect())
}

/// The parts of a text between separators. The separator's line ends match as given, or as all LF, or as all CRLF.
fn split<'a>(text: &'a str, separator: &str) -> Result<Vec<&'a str>> {
    let lf = separator.replace("\r\n", "\n");
    let crlf = lf.replace('\n', "\r\n");
    let separators = AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostLongest)
        .build([separator, &lf, &crlf])
        .map_err(|e| err!(InvalidArgument, "the separator {separator:?}: {e}"))?;
    let (mut parts, mut at) = (Vec::new(), 0);
    for found in separators.find_iter(text) {
        parts.push(&text[at..found.start()]);
        at = found.end();
    }
    if parts.is_empty() && !text.trim().is_empty() {
        bail!(
            InvalidArgument,
            "the separator {separator:?} does not occur in it; give one that does, or none for a file that is one text (--separator)"
        );
    }
    parts.push(&text[at..]);
    Ok(parts)
}

/// The prompt of a TSV line, with the backslash removed that keeps an initial `#` from starting a comment.
fn unescaped(prompt: &str) -> &str {
    match prompt.trim_start_matches('\\').starts_with('#') {
        true => prompt.strip_prefix('\\').unwrap_or(prompt),
        false => prompt,
    }
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
            prompt: unescaped(prompt).to_owned(),
            target: target.to_owned(),
        }),
        _ => bail!(
            InvalidArgument,
            "{} tabs, where one is to stand between prompt and target",
            fields.len() - 1
        ),
    }
}

/// The rows of a file that is a JSON array.
fn array(text: &str) -> Result<Vec<Numbered>> {
    /// Other keys are ignored.
    #[derive(Deserialize)]
    struct Wrapped<'a> {
        #[serde(borrow)]
        data: Vec<&'a RawValue>,
    }
    let begin = text.trim_start();
    let read = match begin.chars().next() {
        None => return Ok(Vec::new()),
        Some('{') => serde_json::from_str::<Wrapped<'_>>(text).map(|wrapped| wrapped.data),
        _ => serde_json::from_str::<Vec<&RawValue>>(text),
    };
    let items = read.map_err(|e| {
        let (first, rest) = begin.split_once('\n').unwrap_or((begin, ""));
        let first_is_whole = !rest.trim().is_empty() && Fields::of_line(first).is_ok();
        match first_is_whole {
            true => err!(
                InvalidArgument,
                "it is no array of JSON, and its first line is an object; if each line is one, name it .jsonl (or --data-format jsonl)"
            ),
            false => err!(
                InvalidArgument,
                "it is neither an array of JSON objects nor an object with one as \"data\": {}, line {}, column {}",
                without_place(&e),
                e.line(),
                e.column()
            ),
        }
    })?;
    let mut places = Places::new(text.as_bytes());
    let rows = items.into_iter().map(|item| {
        let item = item.get();
        let line = places.line(item.as_ptr() as usize - text.as_ptr() as usize);
        (line, Fields::of_line(item).and_then(Fields::row))
    });
    Ok(rows.collect())
}

/// The rows of a table; its first record names the columns.
fn records(content: &[u8]) -> Result<Vec<Numbered>> {
    let mut reader = csv::ReaderBuilder::new()
        .flexible(true)
        .has_headers(false)
        .from_reader(content);
    let mut record = csv::ByteRecord::new();
    let mut names: Option<Vec<String>> = None;
    let mut found = Vec::new();
    loop {
        let failed = |e: csv::Error| err!(InvalidArgument, "it is no table of fields: {e}");
        if !reader.read_byte_record(&mut record).map_err(failed)? {
            return Ok(found);
        }
        let Some(begin) = record
            .position()
            .map(|p| (p.byte() as usize, p.line() as usize))
        else {
            bail!(Internal, "a record of a table has no place");
        };
        let raw = &content[begin.0..reader.position().byte() as usize];
        // The reader skips blank lines before a record.
        let blank = raw.iter().take_while(|b| b"\r\n".contains(b));
        let line = begin.1 + blank.filter(|&&b| b == b'\n').count();
        let cells = cells(raw, &record);
        match &names {
            None => {
                names = Some(columns(
                    cells.map_err(|e| e.within(format_args!("line {line}")))?,
                )?)
            }
            Some(names) => {
                let row = cells.and_then(|cells| Fields::of_cells(names, cells)?.row());
                found.push((line, row));
            }
        }
    }
}

/// The fields of a record with the bytes `raw`.
fn cells(raw: &[u8], record: &csv::ByteRecord) -> Result<Vec<String>> {
    // The reader extends an unclosed quote to the end of the file.
    if raw.iter().filter(|&&b| b == b'"').count() % 2 != 0 {
        bail!(
            InvalidArgument,
            "a quote is not closed in the record that begins here; a field with quotes in it stands in quotes, with each of its own twice"
        );
    }
    record
        .iter()
        .map(|cell| utf8("the record", cell).map(str::to_owned))
        .collect()
}

/// Checks that columns of these names form rows.
fn columns(names: Vec<String>) -> Result<Vec<String>> {
    let names: Vec<String> = names.iter().map(|name| name.trim().to_owned()).collect();
    if let Some((i, name)) = names
        .iter()
        .enumerate()
        .find(|(i, n)| names[..*i].contains(n))
    {
        bail!(
            InvalidArgument,
            "columns {} and {} are both called {name:?}",
            1 + names.iter().position(|n| n == name).unwrap_or(0),
            i + 1
        );
    }
    let semicolons = match names.as_slice() {
        [one] if one.contains([';', '\t']) => "; commas stand between columns",
        _ => "",
    };
    Fields::check_names(&names).map_err(|e| {
        err!(
            InvalidArgument,
            "the first record names the columns, and {}{semicolons}",
            e.message()
        )
    })?;
    Ok(names)
}
