//! The file of packed weights beside a model's own: matrices in the layout of the CPU's kernels, which loading maps instead of packing them
//! again. Knows sizes and places; what the bytes of a matrix mean is known to who packed them.
//!
//! The file is [sealed](crate::base::sealed). Its header, as JSON, lists matrices and tables. The bytes of each matrix begin at a multiple of
//! [`ALIGN`], with zeros before it. After the last come the checksums of the source weights, one for each matrix and each table, and then an
//! XXH3 checksum of all bytes up to the end of the header and of these checksums. Opening a file checks all of that, and reads no matrix;
//! the checksum of the whole file is left to [`PackedFile::verify`].

use std::collections::{HashMap, HashSet};
use std::fs;
use std::hash::Hasher;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::Checkpoint;
use crate::base::error::{Error, bail, err};
use crate::base::file::{self, Temporary};
use crate::base::mapping::Mapping;
use crate::base::sealed::{self, Format, Reader, Writer};
use crate::base::{Result, alloc, call, memory};
use crate::tensor::WeightType;

/// Name of the file in the model's directory.
pub const PACKED_FILE: &str = "packed.nvfp4";

/// Alignment of each matrix in the file, in bytes.
const ALIGN: u64 = 64;
/// Bytes of a checksum.
const SUM: u64 = 8;
/// Bytes that are read at a time to verify a file.
const PIECE: u64 = 1 << 20;

const FORMAT: Format = Format {
    magic: *b"NVFP4PAK",
    version: 1,
    name: "a file of packed weights",
    older: "an older library wrote it; write it again with `nvfp4 quantize DIR DIR --packed`",
    newer: "a newer library wrote it; write it again with this one's `nvfp4 quantize DIR DIR --packed`",
};

/// A file of source weights, as it was when they were packed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// Its name, without folders.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Time of its last write, in seconds since 1970 and nanoseconds.
    pub modified: (i64, i64),
}

impl SourceFile {
    /// The files that a checkpoint reads, as they are now; none if it was opened from memory.
    pub fn all(checkpoint: &dyn Checkpoint) -> Result<Vec<SourceFile>> {
        let of = |path: &Path| {
            let info = fs::metadata(path)
                .map_err(|e| Error::io(format_args!("looking at {}", path.display()), e))?;
            let name = path.file_name().unwrap_or_default();
            Ok(SourceFile::new(&name.to_string_lossy(), &info))
        };
        checkpoint.files().into_iter().map(of).collect()
    }

    /// A file of this name with this metadata.
    pub(super) fn new(name: &str, info: &fs::Metadata) -> SourceFile {
        SourceFile {
            name: name.to_owned(),
            bytes: info.len(),
            modified: (info.mtime(), info.mtime_nsec()),
        }
    }
}

/// The place of the packed weights of a checkpoint, whether they are there or not: [`PACKED_FILE`] beside its first file. `None` for a
/// checkpoint that was opened from memory.
pub fn packed_place(checkpoint: &dyn Checkpoint) -> Option<PathBuf> {
    let files = checkpoint.files();
    Some(files.first()?.with_file_name(PACKED_FILE))
}

/// A matrix before it is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackedShape {
    /// Its name in the model.
    pub name: String,
    /// Name of its [`WeightType`].
    pub kind: String,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Bits of the global scale; those of 1 for weights without one.
    pub global: u32,
    /// Packed bytes.
    pub bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MatrixHeader {
    #[serde(rename = "matrix")]
    shape: PackedShape,
    /// From the end of the header, rounded up to a multiple of [`ALIGN`].
    offset: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    /// Number of the layout of the packed bytes.
    layout: u32,
    sources: Vec<SourceFile>,
    matrices: Vec<MatrixHeader>,
    /// Names of tables that stay in the source files, whose checksums are here.
    tables: Vec<String>,
}

/// Offsets of matrices of these sizes, and the end of the last.
fn offsets(sizes: impl Iterator<Item = u64>) -> Result<(Vec<u64>, u64)> {
    let (mut offsets, mut end) = (Vec::new(), 0u64);
    for bytes in sizes {
        let at = end.checked_next_multiple_of(ALIGN);
        let place = at.and_then(|at| Some((at, at.checked_add(bytes)?)));
        let Some((at, next)) = place else {
            bail!(CorruptFile, "its matrices have more than 2^64 bytes");
        };
        offsets.push(at);
        end = next;
    }
    Ok((offsets, end))
}

/// Writes a file of packed weights.
pub struct PackedWriter {
    writer: Writer<'static>,
    shapes: Vec<PackedShape>,
    tables: usize,
    /// Checksum of what comes before the matrices.
    front: XxHash3_64,
    sums: Vec<u64>,
}

impl PackedWriter {
    /// Begins the file that `create` creates, given the bytes for which it reserves room: for matrices in the layout of this number and for
    /// checksums of some tables.
    pub fn create(
        create: impl FnOnce(u64) -> Result<Temporary>,
        layout: u32,
        sources: Vec<SourceFile>,
        shapes: Vec<PackedShape>,
        tables: Vec<String>,
    ) -> Result<Self> {
        let (offsets, end) = offsets(shapes.iter().map(|shape| shape.bytes))?;
        let count = (shapes.len() + tables.len()) as u64;
        let header = Header {
            layout,
            sources,
            matrices: std::iter::zip(shapes.iter().cloned(), offsets)
                .map(|(shape, offset)| MatrixHeader { shape, offset })
                .collect(),
            tables,
        };
        let json = serde_json::to_vec(&header)
            .map_err(|e| err!(Internal, "writing the header of packed weights: {e}"))?;
        let content = end.saturating_add(ALIGN + (count + 1) * SUM);
        let mut writer = Writer::in_file(
            create(sealed::size(json.len(), content))?,
            &FORMAT,
            &json,
            content,
        )?;
        pad(&mut writer)?;
        Ok(PackedWriter {
            front: front(&json),
            writer,
            shapes,
            tables: header.tables.len(),
            sums: Vec::new(),
        })
    }

    /// Writes the next matrix, with the checksum of its source weights.
    pub fn matrix(&mut self, bytes: &[u8], sum: u64) -> Result<()> {
        match self.shapes.get(self.sums.len()) {
            Some(shape) if shape.bytes == bytes.len() as u64 => {}
            Some(shape) => bail!(
                Internal,
                "{}: {} packed bytes, planned as {}",
                shape.name,
                bytes.len(),
                shape.bytes
            ),
            None => bail!(Internal, "a packed matrix that was not planned"),
        }
        pad(&mut self.writer)?;
        for piece in bytes.chunks(PIECE as usize) {
            self.writer.write(piece)?;
        }
        self.sums.push(sum);
        Ok(())
    }

    /// Completes the file with the checksums of the tables. Returns it, synced and not in its place yet, and its size.
    pub fn complete(mut self, tables: &[u64]) -> Result<(Temporary, u64)> {
        if self.sums.len() != self.shapes.len() || tables.len() != self.tables {
            bail!(
                Internal,
                "{} packed matrices and {} tables, planned as {} and {}",
                self.sums.len(),
                tables.len(),
                self.shapes.len(),
                self.tables
            );
        }
        for sum in self.sums.iter().chain(tables) {
            let sum = sum.to_le_bytes();
            self.front.write(&sum);
            self.writer.write(&sum)?;
        }
        self.writer.write(&self.front.finish().to_le_bytes())?;
        let bytes = self.writer.at() + SUM;
        match self.writer.complete()? {
            Some(file) => Ok((file, bytes)),
            None => Err(err!(Internal, "packed weights without a file")),
        }
    }
}

/// The checksum of the header, to which those of the source weights are added.
fn front(json: &[u8]) -> XxHash3_64 {
    let mut front = XxHash3_64::new();
    front.write(&FORMAT.magic);
    front.write(&FORMAT.version.to_le_bytes());
    front.write(json);
    front
}

/// Writes zeros up to a multiple of [`ALIGN`].
fn pad(writer: &mut Writer<'_>) -> Result<()> {
    let zeros = writer.at().next_multiple_of(ALIGN) - writer.at();
    writer.write(&[0; ALIGN as usize][..zeros as usize])
}

/// A matrix in a file of packed weights.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedMatrix {
    /// Form of the weights.
    pub kind: WeightType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// The global scale; 1 for weights without one. Not checked: a file may have any.
    pub global: f32,
    /// The place of its bytes, within the file and aligned. That they are as many as the matrix takes is not checked.
    pub range: Range<usize>,
    /// Checksum of the source weights.
    pub sum: u64,
}

/// The contents of a file of packed weights, without the bytes of its matrices.
#[derive(Debug)]
pub struct PackedContents {
    /// The files whose weights were packed.
    pub sources: Vec<SourceFile>,
    /// Matrices by their names in the model.
    pub matrices: HashMap<String, PackedMatrix>,
    /// Checksums of the tables that stay in their files, by their names in the model.
    pub tables: HashMap<String, u64>,
}

impl PackedContents {
    /// Reads the contents of a whole file. Fails unless it is intact but for the bytes of matrices, which are not read, and has matrices in the
    /// layout of this number. Any bytes are safe to read.
    pub fn parse(bytes: &[u8], layout: u32) -> Result<PackedContents> {
        let (reader, json) = call::in_silence(|| Reader::of_memory(bytes, &FORMAT))?;
        let _names = alloc::Budget::fields(json.len()).set_aside()?;
        let header: Header =
            serde_json::from_slice(&json).map_err(|e| err!(CorruptFile, "its header: {e}"))?;
        if header.layout != layout {
            bail!(
                Unsupported,
                "its weights have layout {}, and this library's kernels read layout {layout}; write it again with `nvfp4 quantize DIR DIR --packed`",
                header.layout
            );
        }
        let start = reader.at().next_multiple_of(ALIGN);
        let (offsets, end) = offsets(header.matrices.iter().map(|m| m.shape.bytes))?;
        let count = (header.matrices.len() + header.tables.len()) as u64;
        let sums_at = start.checked_add(end);
        let expected = sums_at.and_then(|at| at.checked_add((count + 2) * SUM));
        let size = bytes.len() as u64;
        let (Some(sums_at), true) = (sums_at, expected == Some(size)) else {
            bail!(
                CorruptFile,
                "it has {size} bytes, but by its header it would have {}; it is damaged or cut off",
                expected.map_or("too many".to_owned(), |n| n.to_string())
            );
        };
        // Within the file, whose size is that of a slice.
        let sums = &bytes[sums_at as usize..];
        let (sums, _) = sums.as_chunks::<{ SUM as usize }>();
        let mut sum_of_all = front(&json);
        let mut sums = sums.iter();
        let mut next = || match sums.next() {
            Some(sum) => u64::from_le_bytes(*sum),
            None => 0,
        };
        let sums: Vec<u64> = (0..count).map(|_| next()).collect();
        sums.iter().for_each(|s| sum_of_all.write(&s.to_le_bytes()));
        if next() != sum_of_all.finish() {
            bail!(
                CorruptFile,
                "the checksum of its header is not that of its content; it is damaged"
            );
        }
        let mut names = HashSet::new();
        let mut is_new = |name: &String| match names.insert(name.clone()) {
            true => Ok(()),
            false => Err(err!(CorruptFile, "it has '{name}' twice")),
        };
        let mut matrices = HashMap::with_capacity(header.matrices.len());
        let places = offsets.into_iter().zip(&sums);
        for (MatrixHeader { shape, offset }, (expected, &sum)) in
            header.matrices.into_iter().zip(places)
        {
            is_new(&shape.name)?;
            if offset != expected {
                bail!(
                    CorruptFile,
                    "'{}' is at offset {offset}; after the matrix before it, it would be at {expected}",
                    shape.name
                );
            }
            let Some(kind) = WeightType::from_name(&shape.kind) else {
                bail!(
                    CorruptFile,
                    "'{}' is of the unknown type '{}'",
                    shape.name,
                    shape.kind
                );
            };
            let at = (start + offset) as usize;
            let matrix = PackedMatrix {
                kind,
                rows: shape.rows,
                cols: shape.cols,
                global: f32::from_bits(shape.global),
                range: at..at + shape.bytes as usize,
                sum,
            };
            matrices.insert(shape.name, matrix);
        }
        header.tables.iter().try_for_each(&mut is_new)?;
        let of_tables = sums.into_iter().skip(matrices.len());
        Ok(PackedContents {
            sources: header.sources,
            tables: header.tables.into_iter().zip(of_tables).collect(),
            matrices,
        })
    }
}

/// An opened file of packed weights, mapped read-only.
#[derive(Debug)]
pub struct PackedFile {
    path: PathBuf,
    mapping: Arc<Mapping>,
    contents: PackedContents,
}

impl PackedFile {
    /// Maps the file at `path`, if there is one, and reads its contents: see [`PackedContents::parse`].
    pub fn open(path: &Path, layout: u32) -> Result<Option<PackedFile>> {
        let opening = |e| Error::io(format_args!("opening {}", path.display()), e);
        if !file::exists(path).map_err(opening)? {
            return Ok(None);
        }
        let mapping = Mapping::open(path)?;
        let contents =
            PackedContents::parse(&mapping, layout).map_err(|e| e.within(path.display()))?;
        Ok(Some(PackedFile {
            path: path.to_owned(),
            mapping: Arc::new(mapping),
            contents,
        }))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its contents.
    pub fn contents(&self) -> &PackedContents {
        &self.contents
    }

    /// Its bytes.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Reads it whole. Fails unless its checksum is that of its content. Reports progress to the thread's [`call`].
    pub fn verify(&self) -> Result<()> {
        let verify = || {
            let (mut reader, _) = Reader::of_memory(&self.mapping, &FORMAT)?;
            let mut piece = memory::zeros(PIECE.min(reader.left()) as usize)?;
            while reader.left() > 0 {
                let len = reader.left().min(PIECE) as usize;
                reader.read(&mut piece[..len])?;
            }
            reader.finish().map(drop)
        };
        verify().map_err(|e| e.within(self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    /// A header of two matrices, of 100 and 64 bytes, and a table.
    fn header() -> Value {
        let matrix = |name: &str, bytes: u64, offset: u64| {
            json!({
                "matrix": {"name": name, "kind": "int8", "rows": 3, "cols": 5, "global": 1.0f32.to_bits(), "bytes": bytes},
                "offset": offset,
            })
        };
        json!({
            "layout": 7,
            "sources": [{"name": "a.safetensors", "bytes": 9, "modified": [1, 2]}],
            "matrices": [matrix("a", 100, 0), matrix("b", 64, 128)],
            "tables": ["t"],
        })
    }

    /// A file with this header, so many bytes of matrices and these checksums of source weights, and with checksums that fit.
    fn file_with(header: &[u8], matrices: usize, sums: &[u64]) -> Vec<u8> {
        let mut content = vec![0; (16 + header.len()).next_multiple_of(64) - 16 - header.len()];
        content.extend((0..matrices).map(|i| i as u8));
        let mut sum = front(header);
        for s in sums {
            content.extend(s.to_le_bytes());
            sum.write(&s.to_le_bytes());
        }
        content.extend(sum.finish().to_le_bytes());
        let size = sealed::size(header.len(), content.len() as u64);
        let mut bytes = vec![0; size as usize];
        let len = content.len() as u64;
        let mut writer = Writer::in_memory(&mut bytes, &FORMAT, header, len).unwrap();
        writer.write(&content).unwrap();
        writer.finish().unwrap();
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<PackedContents> {
        PackedContents::parse(bytes, 7)
    }

    /// The file of a changed header.
    fn changed(change: impl FnOnce(&mut Value)) -> Result<PackedContents> {
        let mut header = header();
        change(&mut header);
        parse(&file_with(header.to_string().as_bytes(), 192, &[1, 2, 3]))
    }

    #[test]
    fn what_is_written_is_read() {
        let path = std::env::temp_dir().join(format!("nvfp4-pack-{}", std::process::id()));
        let shape = |name: &str, bytes| PackedShape {
            name: name.to_owned(),
            kind: "bf16".to_owned(),
            rows: 16,
            cols: 2,
            global: 0.5f32.to_bits(),
            bytes,
        };
        let sources = vec![SourceFile {
            name: "m".to_owned(),
            bytes: 3,
            modified: (4, 5),
        }];
        let shapes = vec![shape("a", 100), shape("b", 64)];
        let tables = vec!["t".to_owned()];
        let create = |len| Temporary::create(&path, len);
        let mut writer = PackedWriter::create(create, 7, sources.clone(), shapes, tables).unwrap();
        writer.matrix(&[1; 100], 11).unwrap();
        expect_kind(writer.matrix(&[2; 63], 12), ErrorKind::Internal, "63");
        writer.matrix(&[2; 64], 12).unwrap();
        expect_kind(writer.matrix(&[3], 13), ErrorKind::Internal, "not planned");
        let (new, bytes) = writer.complete(&[13]).unwrap();
        assert!(!path.exists());
        new.commit().unwrap();
        assert_eq!(bytes, fs::metadata(&path).unwrap().len());
        let file = PackedFile::open(&path, 7).unwrap().unwrap();
        file.verify().unwrap();
        let contents = file.contents();
        assert_eq!(contents.sources, sources);
        assert_eq!(contents.tables, HashMap::from([("t".to_owned(), 13)]));
        for (name, sum, content) in [("a", 11, vec![1; 100]), ("b", 12, vec![2; 64])] {
            let matrix = &contents.matrices[name];
            assert!((matrix.rows, matrix.cols, matrix.sum) == (16, 2, sum));
            assert!(matrix.kind == WeightType::BF16 && matrix.global == 0.5);
            assert!(matrix.range.start.is_multiple_of(64));
            assert_eq!(file.mapping()[matrix.range.clone()], content);
        }
        fs::remove_file(&path).unwrap();
        assert!(PackedFile::open(&path, 7).unwrap().is_none());
    }

    #[test]
    fn every_byte_but_those_of_matrices_is_checked() {
        let header = header().to_string();
        let good = file_with(header.as_bytes(), 192, &[1, 2, 3]);
        let contents = parse(&good).unwrap();
        assert_eq!(contents.matrices["b"].sum, 2);
        assert_eq!(contents.tables["t"], 3);
        let start = contents.matrices["a"].range.start;
        // The padding before matrices and the checksum of the whole file are left to `verify`.
        let read = (0..16 + header.len()).chain(start + 192..good.len() - 8);
        for at in read {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            assert!(parse(&bytes).is_err(), "byte {at}");
        }
        for len in 0..good.len() {
            assert!(parse(&good[..len]).is_err(), "{len} bytes");
        }
        let longer = [&good[..], &[0]].concat();
        expect_kind(parse(&longer), ErrorKind::CorruptFile, "damaged or cut off");
        expect_kind(
            PackedContents::parse(&good, 8),
            ErrorKind::Unsupported,
            "layout 7, and this library's kernels read layout 8",
        );
        let mut other = good.clone();
        other[0] = b'X';
        expect_kind(parse(&other), ErrorKind::CorruptFile, "it is not a file of");
        other = good.clone();
        other[8] = 9;
        expect_kind(parse(&other), ErrorKind::Unsupported, "of version 9");
    }

    /// Headers that are sealed as they should be, and say what cannot be.
    #[test]
    fn headers_of_strangers_are_refused() {
        let invalid = ErrorKind::CorruptFile;
        assert!(changed(|_| {}).is_ok());
        // Over the one before, between two, not aligned, and before the file.
        for offset in [0, 64, 100, 129, 192, u64::MAX] {
            let refused = changed(|h| h["matrices"][1]["offset"] = json!(offset));
            expect_kind(refused, invalid, "'b' is at offset");
        }
        for bytes in [0, 64, 129, 1 << 40, u64::MAX - 63, u64::MAX] {
            let refused = changed(|h| h["matrices"][0]["matrix"]["bytes"] = json!(bytes));
            assert_eq!(refused.unwrap_err().kind(), invalid, "{bytes}");
        }
        let twice = changed(|h| h["matrices"][1]["matrix"]["name"] = json!("a"));
        expect_kind(twice, invalid, "it has 'a' twice");
        let twice = changed(|h| h["tables"] = json!(["a"]));
        expect_kind(twice, invalid, "it has 'a' twice");
        let kind = changed(|h| h["matrices"][0]["matrix"]["kind"] = json!("q4"));
        expect_kind(kind, invalid, "the unknown type 'q4'");
        let more = changed(|h| h["tables"] = json!(["t", "u"]));
        expect_kind(more, invalid, "by its header it would have");
        let unknown = changed(|h| h["more"] = json!(1));
        expect_kind(unknown, invalid, "unknown field");
        let negative = changed(|h| h["matrices"][0]["matrix"]["rows"] = json!(-1));
        expect_kind(negative, invalid, "its header");
        for header in [&b"{}"[..], b"[", b"\xff", b""] {
            assert!(parse(&file_with(header, 192, &[1, 2, 3])).is_err());
        }
    }
}
