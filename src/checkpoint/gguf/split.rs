//! Joins a model in several GGUF files, as written by llama-gguf-split: the first file has the metadata, and each has some of the tensors.
//! Finds the other parts beside any one of them, and checks that they belong together.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::header::{Header, Pairs, read_header};
use crate::base::Result;
use crate::base::error::bail;
use crate::base::files::Files;
use crate::checkpoint::folder;
use crate::checkpoint::source::Source;

const TENSORS: &str = "split.tensors.count";
const ARCHITECTURE: &str = "general.architecture";

/// Metadata of one part about its set.
pub(super) struct Split {
    /// The part's number, from 0.
    no: u64,
    count: u64,
    /// Number of tensors in all parts, if given.
    tensors: Option<u64>,
}

impl Split {
    /// Reads it; `None` for a file that is complete by itself.
    pub(super) fn read(pairs: &Pairs) -> Result<Option<Self>> {
        let Some(count) = pairs.integer("split.count")?.filter(|&n| n > 1) else {
            return Ok(None);
        };
        match pairs.integer("split.no")? {
            Some(no) if no < count => Ok(Some(Split {
                no,
                count,
                tensors: pairs.integer(TENSORS)?,
            })),
            Some(no) => bail!(
                CorruptFile,
                "its split.no is {no}; with a split.count of {count} it must be 0 to {}",
                count - 1
            ),
            None => bail!(
                CorruptFile,
                "its split.count is {count}, but it has no split.no, 0 to {}",
                count - 1
            ),
        }
    }
}

/// Opens the parts beside `source`, whose header has been read. `place` is where it was opened, or `None` if it is bytes alone. Returns the
/// parts in order, and the metadata of the first with the tensors of all.
pub(super) fn join(
    source: Source,
    header: Header,
    split: &Split,
    place: Option<(&Files, &Path)>,
) -> Result<(Vec<Source>, Header)> {
    let (files, paths, own) = find(split, place).map_err(|e| e.within(source.name()))?;
    let mut given = Some((source, header));
    let mut parts = Vec::with_capacity(paths.len());
    for (number, path) in paths.iter().enumerate() {
        parts.push(match given.take_if(|_| number == own) {
            Some(given) => given,
            None => {
                let source = Source::open(files, path)?;
                let header = read_header(&source).map_err(|e| e.within(source.name()))?;
                (source, header)
            }
        });
    }
    let mut announced: Option<(usize, u64)> = None;
    for (number, (source, header)) in parts.iter().enumerate() {
        let split = check(header, number, &parts).map_err(|e| e.within(source.name()))?;
        match (announced, split.tensors) {
            (None, Some(tensors)) => announced = Some((number, tensors)),
            (Some((other, tensors)), Some(own)) if own != tensors => bail!(
                CorruptFile,
                "{}: its {TENSORS} is {own}, but that of {} is {tensors}; they are not of one model",
                source.name(),
                parts[other].0.name()
            ),
            _ => {}
        }
    }
    let (sources, whole) = merge(parts)?;
    let held = whole.raws.len() + whole.unreadable.len();
    match announced {
        Some((number, tensors)) if tensors != held as u64 => bail!(
            CorruptFile,
            "{}: its {TENSORS} is {tensors}, but the {} parts hold {held} tensors",
            sources[number].name(),
            sources.len()
        ),
        _ => Ok((sources, whole)),
    }
}

/// Combines the metadata of the first part with the tensors of all. Fails if a tensor is in two parts.
fn merge(parts: Vec<(Source, Header)>) -> Result<(Vec<Source>, Header)> {
    let (sources, headers): (Vec<Source>, Vec<Header>) = parts.into_iter().unzip();
    let mut whole = Header::default();
    for (number, mut header) in headers.into_iter().enumerate() {
        header.raws.iter_mut().for_each(|r| r.span.source = number);
        header.unreadable.iter_mut().for_each(|u| u.source = number);
        whole.raws.append(&mut header.raws);
        whole.unreadable.append(&mut header.unreadable);
        if number == 0 {
            whole.pairs = header.pairs;
        }
    }
    let mut seen = HashMap::with_capacity(whole.raws.len());
    let raws = whole.raws.iter().map(|r| (&r.key, r.span.source));
    let unreadable = whole.unreadable.iter().map(|u| (&u.key, u.source));
    for (key, part) in raws.chain(unreadable) {
        if let Some(other) = seen.insert(key, part) {
            bail!(
                CorruptFile,
                "{}: the tensor '{key}' is in {} too",
                sources[part].name(),
                sources[other].name()
            );
        }
    }
    Ok((sources, whole))
}

/// Where all parts are, their paths, and the index of the one at `place`.
fn find<'a>(
    split: &Split,
    place: Option<(&'a Files, &Path)>,
) -> Result<(&'a Files, Vec<PathBuf>, usize)> {
    let (number, count) = (split.no + 1, split.count);
    let Some((files, path)) = place else {
        bail!(
            Unsupported,
            "it is part {number} of {count} of a model, and the other parts are missing; open it by its path, with all parts in one directory, or join them with llama-gguf-split --merge"
        );
    };
    let file_name = path.file_name().unwrap_or_default();
    let name = file_name.to_string_lossy();
    let names = folder::gguf_parts(&name).unwrap_or_default();
    let Some(own) = names.iter().position(|n| **n == *name) else {
        bail!(
            NotFound,
            "it is part {number} of {count} of a model, and its name does not tell those of the others; it must be PREFIX-{number:05}-of-{count:05}.gguf"
        );
    };
    if names.len() as u64 != count {
        bail!(
            CorruptFile,
            "its split.count is {count}, but its name says {} parts",
            names.len()
        );
    }
    let numbered = |name: &String| path.with_file_name(renumbered(file_name, name));
    let paths: Vec<PathBuf> = names.iter().map(numbered).collect();
    if let Some(missing) = files.missing(&paths)? {
        bail!(
            NotFound,
            "it is part {number} of {count} of a model, and {} is missing",
            missing.display()
        );
    }
    Ok((files, paths, own))
}

/// The file name of another part: its end is replaced by `part`. What comes before need not be UTF-8.
fn renumbered(file_name: &OsStr, part: &str) -> OsString {
    let stem = part.rsplitn(4, '-').nth(3).map_or(0, str::len);
    let end = &part[stem..];
    let own = file_name.as_bytes();
    let stem = &own[..own.len().saturating_sub(end.len())];
    OsString::from_vec([stem, end.as_bytes()].concat())
}

/// Fails unless part `number` has the metadata that its name implies, and the architecture of the first part.
fn check(header: &Header, number: usize, parts: &[(Source, Header)]) -> Result<Split> {
    let count = parts.len();
    let Some(split) = Split::read(&header.pairs)? else {
        bail!(
            CorruptFile,
            "its name says that it is one of {count} parts of a model, but it has no such split.count"
        );
    };
    if split.count != count as u64 {
        bail!(
            CorruptFile,
            "its split.count is {}, but its name says {count} parts",
            split.count
        );
    }
    if split.no != number as u64 {
        bail!(
            CorruptFile,
            "its split.no is {}, but its name says part {}, whose split.no is {number}",
            split.no,
            number + 1
        );
    }
    // Only the first part must name it.
    let (first, model) = (parts[0].0.name(), &parts[0].1.pairs);
    if let (Some(own), Some(other)) = (header.pairs.text(ARCHITECTURE)?, model.text(ARCHITECTURE)?)
        && own != other
    {
        bail!(
            CorruptFile,
            "its {ARCHITECTURE} is '{own}', but that of {first} is '{other}'; they are not of one model"
        );
    }
    Ok(split)
}
