//! Reads files into documents, and reports unusable rows.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::content::{self, DataFile};
use super::document::{Document, Encoder};
use super::options::{Format, Long, Options};
use super::row::Row;
use super::rows::rows;
use super::window::Windows;
use crate::base::error::bail;
use crate::base::{Result, call};
use crate::format::random;
use crate::model::training::SourceText;

/// Upper limit of bad rows that a message names.
const NAMED: usize = 6;

/// Summary of a read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The files read.
    pub files: Vec<DataFile>,
    /// Rows in these files.
    pub rows: usize,
    /// Unusable rows, which were left out.
    pub bad_rows: usize,
    /// Rows with a document longer than a window, which was cut off.
    pub truncated: usize,
    /// Rows with a document that was left out, because it was longer than a window or would have been cut before its learned tokens.
    pub dropped: usize,
}

/// Documents read from files.
#[derive(Clone, Debug, PartialEq)]
pub struct Data {
    options: Options,
    report: Report,
    documents: Vec<Document>,
    /// The row of each document, because rows are set aside as a whole.
    rows: Vec<usize>,
}

/// Unusable rows: the first of them, and their number.
#[derive(Default)]
struct Refused {
    count: usize,
    named: Vec<String>,
    /// File and line of the last one, so that a row of several documents counts once.
    last: Option<(PathBuf, usize)>,
}

impl Refused {
    fn add(&mut self, path: &Path, line: usize, why: impl fmt::Display) {
        let row = (path.to_owned(), line);
        if self.last.as_ref() == Some(&row) {
            return;
        }
        self.last = Some(row);
        self.count += 1;
        if self.named.len() < NAMED {
            self.named
                .push(format!("{} line {line}: {why}", path.display()));
        }
    }

    fn check(&self, rows: usize, what: &str, remedy: &str) -> Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        let more = match self.count - self.named.len() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        bail!(
            InvalidArgument,
            "{} of {rows} rows {what}: {}{more}; {remedy}",
            self.count,
            self.named.join("; ")
        )
    }
}

/// Reads the rows of files for a model with a vocabulary of `vocabulary` tokens. Reports the bytes read to the thread's [`call`], and is
/// cancelled with it.
pub fn read(
    files: &[PathBuf],
    text: &SourceText,
    vocabulary: usize,
    options: &Options,
) -> Result<Data> {
    let mut reader = Reader::new(text, vocabulary, options)?;
    let formats = files.iter().map(|path| match options.format {
        Some(format) => Ok(format),
        None => Format::of(path),
    });
    let formats = formats.collect::<Result<Vec<_>>>()?;
    if let Some(separator) = &options.separator
        && !formats.contains(&Format::Text)
    {
        bail!(
            InvalidArgument,
            "the separator {separator:?} stands between documents of texts, and no file is a text; leave --separator out"
        );
    }
    for (path, format) in files.iter().zip(formats) {
        let (file, content) = content::read(path)?;
        reader.add(file, &content.bytes, format)?;
    }
    reader.finish()
}

/// Reads embedded rows in JSON Lines, see [`read`]. `name` stands for a path in errors.
pub fn read_embedded(
    name: &str,
    content: &str,
    text: &SourceText,
    vocabulary: usize,
    options: &Options,
) -> Result<Data> {
    let mut reader = Reader::new(text, vocabulary, options)?;
    let file = DataFile {
        path: PathBuf::from(name),
        bytes: content.len() as u64,
        checksum: String::new(),
    };
    reader.add(file, content.as_bytes(), Format::Jsonl)?;
    reader.finish()
}

/// Converts rows to documents.
struct Reader<'a> {
    text: &'a SourceText,
    vocabulary: usize,
    encoder: Encoder<'a>,
    data: Data,
    bad: Refused,
    long: Refused,
}

impl<'a> Reader<'a> {
    fn new(text: &'a SourceText, vocabulary: usize, options: &Options) -> Result<Reader<'a>> {
        if options.window < 4 {
            bail!(
                InvalidArgument,
                "a window of {} tokens; it must have at least 4",
                options.window
            );
        }
        if options.separator.as_deref() == Some("") {
            bail!(
                InvalidArgument,
                "the separator is empty; give what stands between documents, or none (--separator)"
            );
        }
        Ok(Reader {
            text,
            vocabulary,
            encoder: Encoder::new(text, options.learn_all, options.empty_think)?,
            data: Data {
                options: options.clone(),
                report: Report::default(),
                documents: Vec::new(),
                rows: Vec::new(),
            },
            bad: Refused::default(),
            long: Refused::default(),
        })
    }

    /// Adds the rows of a file.
    fn add(&mut self, file: DataFile, content: &[u8], format: Format) -> Result<()> {
        let (number, path) = (self.data.report.files.len(), file.path.clone());
        self.data.report.files.push(file);
        let separator = self.data.options.separator.clone();
        let found =
            rows(content, format, separator.as_deref()).map_err(|e| e.within(path.display()))?;
        if found.is_empty() {
            bail!(
                InvalidArgument,
                "{} has no row: {}",
                path.display(),
                match content.is_empty() {
                    true => "it is empty",
                    false => match format {
                        Format::Json => "its array is empty",
                        Format::Csv => "it has only the names of columns",
                        _ => "it has only blank lines and comments",
                    },
                }
            );
        }
        call::expect(found.len() as u64);
        for (line, row) in found {
            call::check()?;
            call::add(1);
            self.data.report.rows += 1;
            let made = row.and_then(|row: Row| self.encoder.documents(&row, (number, line)));
            let (documents, cuts) = match made {
                Ok(made) => made,
                Err(e) => {
                    self.bad.add(&path, line, e);
                    continue;
                }
            };
            let unknown = documents
                .iter()
                .flat_map(|document| &document.tokens)
                .find(|&&id| id as usize >= self.vocabulary);
            if let Some(&id) = unknown {
                self.bad
                    .add(&path, line, without_a_row(self.text, id, self.vocabulary));
                continue;
            }
            let refused = (&mut self.bad, &mut self.long);
            self.data.add(documents, cuts, &path, refused)?;
        }
        Ok(())
    }

    /// Checks the unusable rows, and returns the documents.
    fn finish(self) -> Result<Data> {
        let Reader {
            encoder,
            mut data,
            bad,
            long,
            ..
        } = self;
        let rows = data.report.rows;
        if !data.options.skip_bad_rows {
            bad.check(
                rows,
                "cannot be used",
                "mend them, or have them left out (--skip-bad-rows, or `skip_bad_rows` in the options)",
            )?;
        }
        long.check(
            rows,
            "are too long",
            "take a longer window, or have them cut or left out (--long truncate or drop, or `long` in the options)",
        )?;
        encoder.check_empty_think()?;
        data.report.bad_rows = bad.count;
        if data.documents.is_empty() {
            bail!(
                InvalidArgument,
                "none of {rows} rows can be used{}",
                match bad.named.first() {
                    Some(first) => format!(": {first}"),
                    None =>
                        ", as all are longer than a window or were cut before what is to be learned"
                            .to_owned(),
                }
            );
        }
        Ok(data)
    }
}

/// The message for a token without a row in the embedding.
fn without_a_row(text: &SourceText, id: u32, rows: usize) -> String {
    let named = text.tokenizer.text_of(id).unwrap_or_default();
    format!("it has '{named}', token {id}, and the embedding has {rows} rows")
}

impl Data {
    /// Adds the documents of one row.
    fn add(
        &mut self,
        documents: Vec<Document>,
        cuts: bool,
        path: &Path,
        (bad, long): (&mut Refused, &mut Refused),
    ) -> Result<()> {
        let window = self.options.window;
        let row = self.rows.last().map_or(0, |row| row + 1);
        let (mut is_cut, mut is_dropped) = (false, false);
        for (i, mut document) in documents.into_iter().enumerate() {
            let line = document.origin.1;
            if document.targets() == 0 {
                bad.add(path, line, "nothing in it is to be learned");
                continue;
            }
            let len = document.tokens.len();
            if len > window && !cuts {
                match self.options.long {
                    Long::Refuse => {
                        long.add(
                            path,
                            line,
                            format_args!("{len} tokens, and a window has {window}"),
                        );
                        continue;
                    }
                    Long::Drop => {
                        is_dropped = true;
                        continue;
                    }
                    Long::Truncate => {
                        document.truncate(window);
                        if document.targets() == 0 {
                            is_dropped = true;
                            continue;
                        }
                        is_cut = true;
                    }
                }
            }
            for (part, document) in document.cut(window).into_iter().enumerate() {
                self.documents.push(document);
                // Parts of a plain text count as rows of their own; the turns of a conversation count as one.
                self.rows.push(row + if cuts { i + part } else { 0 });
            }
        }
        self.report.truncated += usize::from(is_cut);
        self.report.dropped += usize::from(is_dropped);
        Ok(())
    }

    /// Summary of the read.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Options of the read.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The documents.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// Splits off about this share of all rows for evaluation, at least one. Returns the remaining and the evaluation data.
    pub fn split(self, share: f64) -> Result<(Data, Data)> {
        let count = self.rows.last().map_or(0, |row| row + 1);
        let wanted = ((count as f64 * share).round() as usize).max(1);
        if !(share > 0.0 && share < 1.0) || wanted >= count {
            bail!(
                InvalidArgument,
                "a share of {share} of {count} rows cannot be set aside for evaluation; it must be more than 0 and leave rows to learn, of \
                 which there must be at least 2"
            );
        }
        // A random draw of rows.
        let mut drawn: Vec<usize> = (0..count).collect();
        let key = random::bits(self.options.seed, u64::MAX - 1);
        drawn.sort_by_key(|&row| random::bits(key, row as u64));
        let mut taken = vec![false; count];
        drawn[..wanted].iter().for_each(|&row| taken[row] = true);
        let empty = Data {
            options: self.options,
            report: self.report,
            documents: Vec::new(),
            rows: Vec::new(),
        };
        let mut parts = (empty.clone(), empty);
        for (document, row) in self.documents.into_iter().zip(self.rows) {
            let part = if taken[row] {
                &mut parts.1
            } else {
                &mut parts.0
            };
            part.documents.push(document);
            part.rows.push(row);
        }
        Ok(parts)
    }

    /// The documents as windows.
    pub fn windows(&self) -> Result<Windows> {
        let name = |(file, line): (usize, usize)| match self.report.files.get(file) {
            Some(file) => format!("{} line {line}", file.path.display()),
            None => format!("line {line}"),
        };
        match self.options.packed {
            true => Windows::pack(
                &self.documents,
                self.options.window,
                self.options.seed,
                &name,
            ),
            false => Windows::unpacked(&self.documents, &name),
        }
    }
}
