//! Parses the header of a GGUF file: key-value pairs and the tensor directory, checked against the file's size.

use std::collections::HashMap;

use super::types;
use crate::base::error::{bail, err};
use crate::base::{Result, alloc, memory};
use crate::checkpoint::source::{Cursor, Source, Span};
use crate::checkpoint::tensors::Raw;

pub(super) const MAGIC: &[u8] = b"GGUF";

/// More dimensions than GGUF allows (4).
const MAX_DIMS: u32 = 4;

/// More elements than the longest array of a real file, its list of tokens or merges. Elements take more room in memory than in the file.
const MAX_ELEMENTS: u64 = 1 << 24;

/// Arrays may hold arrays; real files never go deeper than this.
const MAX_DEPTH: u32 = 4;

/// A metadata value. Arrays are kept only in the kinds that are used.
#[derive(Debug)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    Other,
}

/// The key-value pairs of a header.
#[derive(Default)]
pub(super) struct Pairs {
    values: HashMap<String, Value>,
}

/// The complete header of a file.
#[derive(Default)]
pub(super) struct Header {
    pub(super) pairs: Pairs,
    pub(super) raws: Vec<Raw>,
    pub(super) unreadable: Vec<Unread>,
}

/// A tensor that cannot be read: it is empty, or its type is not supported.
#[derive(Debug)]
pub(super) struct Unread {
    pub(super) key: String,
    /// Name of its type.
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Offset of its data within the file's data, and bytes up to the next tensor's data.
    start: usize,
    pub(super) bytes: usize,
    /// Index of the part that holds it, in a split model.
    pub(super) source: usize,
}

pub(super) fn read_header(source: &Source) -> Result<Header> {
    let mut cursor = Cursor::new(source);
    let magic = cursor.take(4, "the magic number")?;
    if magic != MAGIC {
        bail!(CorruptFile, "it does not start with 'GGUF'");
    }
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        _ if version.swap_bytes() <= 0xffff => bail!(
            Unsupported,
            "it is a big-endian GGUF file; convert it to little-endian first"
        ),
        _ => bail!(
            Unsupported,
            "GGUF version {version} is not supported; 2 and 3 are"
        ),
    }
    let tensor_count = cursor.u64("the tensor count")?;
    let pair_count = cursor.u64("the key-value count")?;
    let pairs = read_pairs(&mut cursor, pair_count)?;
    let alignment = pairs.integer("general.alignment")?.unwrap_or(32);
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        bail!(
            CorruptFile,
            "general.alignment is {alignment}; it is a power of two"
        );
    }
    let (raws, unreadable) = read_tensors(&mut cursor, tensor_count, alignment as usize)?;
    Ok(Header {
        pairs,
        raws,
        unreadable,
    })
}

/// The double with the fewest digits that rounds to the same f32: 1e-6 stored as an f32 reads 1e-6 again.
pub(super) fn shortest(value: f64) -> f64 {
    let single = value as f32;
    if f64::from(single) == value {
        single.to_string().parse().unwrap_or(value)
    } else {
        value
    }
}

fn read_pairs(cursor: &mut Cursor<'_>, count: u64) -> Result<Pairs> {
    // A pair takes at least a key length, a value type and one byte.
    if count > (cursor.left() / 13) as u64 {
        bail!(
            CorruptFile,
            "{count} key-value pairs do not fit in the {} bytes after the counts",
            cursor.left()
        );
    }
    let mut values = HashMap::new();
    for number in 0..count {
        let key = text(cursor, "a metadata key")
            .map_err(|e| e.within(format_args!("key-value pair {number} of {count}")))?;
        let value = cursor
            .u32("the value type")
            .and_then(|kind| value(cursor, kind, 0))
            .map_err(|e| e.within(format_args!("'{key}'")))?;
        if values.contains_key(&key) {
            bail!(CorruptFile, "the key '{key}' stands twice");
        }
        values.insert(key, value);
    }
    Ok(Pairs { values })
}

fn text(cursor: &mut Cursor<'_>, what: &str) -> Result<String> {
    // Checked here because files have hundreds of thousands of these.
    alloc::check()?;
    let len = cursor.u64(what)?;
    let text = cursor.text(len, what)?;
    let mut out = memory::with_room(text.len())?;
    out.extend_from_slice(text.as_bytes());
    String::from_utf8(out).map_err(|e| err!(Internal, "{what}: {e}"))
}

/// Bytes of a fixed-size value type.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn number(kind: u32, bytes: &[u8]) -> Value {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(wide);
    match kind {
        0 | 2 | 4 | 10 => Value::Unsigned(unsigned),
        1 => Value::Signed(i64::from(unsigned as i8)),
        3 => Value::Signed(i64::from(unsigned as i16)),
        5 => Value::Signed(i64::from(unsigned as i32)),
        6 => Value::Float(f64::from(f32::from_bits(unsigned as u32))),
        7 => Value::Bool(unsigned != 0),
        11 => Value::Signed(unsigned as i64),
        _ => Value::Float(f64::from_bits(unsigned)),
    }
}

fn value(cursor: &mut Cursor<'_>, kind: u32, depth: u32) -> Result<Value> {
    if let Some(width) = width(kind) {
        return Ok(number(kind, cursor.take(width, "a value")?));
    }
    match kind {
        8 => text(cursor, "a text value").map(Value::Text),
        9 if depth < MAX_DEPTH => array(cursor, depth),
        9 => bail!(CorruptFile, "arrays lie more than {MAX_DEPTH} deep"),
        _ => bail!(CorruptFile, "value type {kind} is none of 0 to 12"),
    }
}

fn check_elements(len: u64) -> Result<()> {
    if len > MAX_ELEMENTS {
        bail!(
            CorruptFile,
            "an array of {len} elements; at most {MAX_ELEMENTS} are possible"
        );
    }
    Ok(())
}

fn array(cursor: &mut Cursor<'_>, depth: u32) -> Result<Value> {
    let kind = cursor.u32("an array's element type")?;
    let len = cursor.u64("an array's length")?;
    if let Some(width) = width(kind) {
        let bytes = len
            .checked_mul(width)
            .ok_or_else(|| err!(CorruptFile, "an array of {len} elements"))?;
        cursor.check(bytes, "an array")?;
        check_elements(len)?;
        let _items = alloc::Budget::numbers(len as usize).set_aside()?;
        let bytes = cursor.take(bytes, "an array")?;
        let items = bytes.chunks_exact(width as usize).map(|b| number(kind, b));
        return Ok(match kind {
            6 | 12 => Value::Floats(
                items
                    .map(|v| match v {
                        Value::Float(f) => f as f32,
                        _ => f32::NAN,
                    })
                    .collect(),
            ),
            _ => Value::Integers(
                items
                    .map(|v| match v {
                        Value::Unsigned(u) => u as i64,
                        Value::Signed(i) => i,
                        Value::Bool(b) => i64::from(b),
                        _ => 0,
                    })
                    .collect(),
            ),
        });
    }
    // A text takes at least its length, an array its type and length.
    if len > (cursor.left() / 8) as u64 {
        bail!(
            CorruptFile,
            "an array of {len} elements does not fit in the {} bytes left",
            cursor.left()
        );
    }
    check_elements(len)?;
    if kind == 8 {
        let mut texts = Vec::new();
        for i in 0..len {
            let text = text(cursor, "a text")
                .map_err(|e| e.within(format_args!("element {i} of {len}")))?;
            texts
                .try_reserve(1)
                .map_err(|e| err!(OutOfMemory, "{len} texts: {e}"))?;
            texts.push(text);
        }
        return Ok(Value::Texts(texts));
    }
    for _ in 0..len {
        value(cursor, kind, depth + 1)?;
    }
    Ok(Value::Other)
}

/// A line of the tensor directory.
enum Line {
    Tensor(Raw),
    Unreadable(Unread),
}

fn read_tensors(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: usize,
) -> Result<(Vec<Raw>, Vec<Unread>)> {
    // A tensor takes at least a name length, a dimension count, one dimension, a type and an offset. The first of several parts may hold
    // only metadata.
    if count > (cursor.left() / 32) as u64 {
        bail!(
            CorruptFile,
            "{count} tensors do not fit in the {} bytes after the metadata",
            cursor.left()
        );
    }
    let (mut raws, mut unreadable) = (Vec::new(), Vec::new());
    for number in 0..count {
        let name = text(cursor, "a tensor name")
            .map_err(|e| e.within(format_args!("tensor {number} of {count}")))?;
        let line = tensor(cursor, name, alignment)
            .map_err(|e| e.within(format_args!("tensor {number} of {count}")))?;
        match line {
            Line::Tensor(raw) => raws.push(raw),
            Line::Unreadable(unread) => unreadable.push(unread),
        }
    }
    let header_end = cursor.position();
    let data_start = header_end
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| err!(CorruptFile, "the header is too long"))?;
    let file_len = header_end + cursor.left();
    let data_len = file_len.saturating_sub(data_start);
    let mut starts: Vec<usize> = raws.iter().map(|r| r.span.range.start).collect();
    starts.extend(unreadable.iter().map(|u| u.start));
    starts.sort_unstable();
    for unread in unreadable.iter_mut().filter(|u| !u.shape.contains(&0)) {
        if unread.start > data_len {
            bail!(
                CorruptFile,
                "'{}': its data begins at offset {}, past the file's {file_len} bytes",
                unread.key,
                unread.start
            );
        }
        let after = starts.partition_point(|&start| start <= unread.start);
        let next = starts
            .get(after)
            .map_or(data_len, |&start| start.min(data_len));
        unread.bytes = next - unread.start;
    }
    for raw in &mut raws {
        let range = &mut raw.span.range;
        let end = range.end.checked_add(data_start);
        match end.filter(|&end| end <= file_len) {
            Some(end) => *range = range.start + data_start..end,
            None => bail!(
                CorruptFile,
                "'{}': its {} bytes at offset {} of the data end past the file's {file_len} bytes",
                raw.key,
                range.len(),
                range.start
            ),
        }
    }
    let mut names = std::collections::HashSet::with_capacity(raws.len());
    let keys = raws.iter().map(|r| r.key.as_str());
    let mut keys = keys.chain(unreadable.iter().map(|u| u.key.as_str()));
    if let Some(twice) = keys.find(|key| !names.insert(*key)) {
        bail!(CorruptFile, "the tensor '{twice}' stands twice");
    }
    let mut by_start: Vec<&Raw> = raws.iter().collect();
    by_start.sort_by_key(|r| r.span.range.start);
    if let Some(pair) = by_start
        .windows(2)
        .find(|p| p[0].span.range.end > p[1].span.range.start)
    {
        bail!(
            CorruptFile,
            "the data of '{}' and '{}' overlap",
            pair[0].key,
            pair[1].key
        );
    }
    Ok((raws, unreadable))
}

/// Parses one line of the tensor directory. The span is relative to the start of the data until the directory has been read.
fn tensor(cursor: &mut Cursor<'_>, name: String, alignment: usize) -> Result<Line> {
    let ndim = cursor.u32("the number of dimensions")?;
    if ndim == 0 || ndim > MAX_DIMS {
        bail!(
            CorruptFile,
            "'{name}': it has {ndim} dimensions; 1 to {MAX_DIMS} are possible"
        );
    }
    let mut shape = Vec::with_capacity(ndim as usize);
    let mut elements = 1usize;
    for d in 0..ndim {
        let dim = cursor.u64("a dimension")?;
        let size = usize::try_from(dim)
            .ok()
            .filter(|&s| s <= isize::MAX as usize)
            .ok_or_else(|| err!(CorruptFile, "'{name}': dimension {d} is {}", dim as i64))?;
        elements = elements.checked_mul(size).ok_or_else(|| {
            err!(
                CorruptFile,
                "'{name}': its dimensions overflow the size of memory"
            )
        })?;
        shape.push(size);
    }
    // GGUF lists the innermost dimension first.
    shape.reverse();
    let code = cursor.u32("the tensor type")?;
    let known = types::encoding(code).filter(|_| elements > 0);
    let Some((encoding, block, block_bytes)) = known else {
        let dtype = match types::encoding(code) {
            Some((encoding, ..)) => encoding.name().to_owned(),
            None => types::unsupported_name(code),
        };
        let offset = cursor.u64("the data offset")?;
        let start = usize::try_from(offset)
            .map_err(|_| err!(CorruptFile, "'{name}': its data offset is {offset}"))?;
        return Ok(Line::Unreadable(Unread {
            key: name,
            dtype,
            shape,
            start,
            bytes: 0,
            source: 0,
        }));
    };
    let cols = shape.last().copied().unwrap_or(1);
    if !cols.is_multiple_of(block) {
        bail!(
            CorruptFile,
            "'{name}': its rows of {cols} elements are not whole {encoding} blocks of {block}"
        );
    }
    let bytes = (elements / block)
        .checked_mul(block_bytes)
        .ok_or_else(|| err!(CorruptFile, "'{name}': its size overflows"))?;
    let offset = cursor.u64("the data offset")?;
    let range = usize::try_from(offset)
        .ok()
        .and_then(|start| Some(start..start.checked_add(bytes)?))
        .ok_or_else(|| err!(CorruptFile, "'{name}': its data offset is {offset}"))?;
    if !range.start.is_multiple_of(alignment) {
        bail!(
            CorruptFile,
            "'{name}': its data offset {offset} is not a multiple of the alignment {alignment}"
        );
    }
    Ok(Line::Tensor(Raw {
        key: name,
        type_code: code,
        encoding,
        shape,
        span: Span { source: 0, range },
    }))
}

impl Pairs {
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    fn wrong<T>(&self, key: &str, want: &str) -> Result<T> {
        Err(err!(CorruptFile, "the metadata key '{key}' is not {want}"))
    }

    pub(super) fn integer(&self, key: &str) -> Result<Option<u64>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(u)) => Ok(Some(*u)),
            Some(Value::Signed(i)) if *i >= 0 => Ok(Some(*i as u64)),
            // Some converters write one number per layer even if all are equal.
            Some(Value::Integers(all)) => match all.first() {
                Some(&first) if first >= 0 && all.iter().all(|&i| i == first) => {
                    Ok(Some(first as u64))
                }
                _ => Err(err!(
                    Unsupported,
                    "'{key}' differs between layers, which is not supported"
                )),
            },
            Some(_) => self.wrong(key, "a whole number"),
        }
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(f)) => Ok(Some(*f)),
            Some(Value::Unsigned(u)) => Ok(Some(*u as f64)),
            Some(Value::Signed(i)) => Ok(Some(*i as f64)),
            Some(_) => self.wrong(key, "a number"),
        }
    }

    pub(super) fn boolean(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => self.wrong(key, "a truth value"),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(t)) => Ok(Some(t)),
            Some(_) => self.wrong(key, "text"),
        }
    }

    pub(super) fn integers(&self, key: &str) -> Option<&[i64]> {
        match self.get(key) {
            Some(Value::Integers(all)) => Some(all),
            _ => None,
        }
    }

    // Lists of a vocabulary are long, so they are moved out instead of copied.

    pub(super) fn take_texts(&mut self, key: &str) -> Result<Option<Vec<String>>> {
        match self.values.remove(key) {
            None => Ok(None),
            Some(Value::Texts(t)) => Ok(Some(t)),
            Some(_) => self.wrong(key, "a list of texts"),
        }
    }

    pub(super) fn take_integers(&mut self, key: &str) -> Result<Option<Vec<i64>>> {
        match self.values.remove(key) {
            None => Ok(None),
            Some(Value::Integers(i)) => Ok(Some(i)),
            Some(_) => self.wrong(key, "a list of whole numbers"),
        }
    }

    pub(super) fn take_floats(&mut self, key: &str) -> Result<Option<Vec<f32>>> {
        match self.values.remove(key) {
            None => Ok(None),
            Some(Value::Floats(f)) => Ok(Some(f)),
            Some(_) => self.wrong(key, "a list of numbers"),
        }
    }
}
