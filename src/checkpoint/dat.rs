//! Reads TorchSharp's `.dat`: LEB128 headers and raw payloads in sequence, with no magic number and no alignment. Knows only the container;
//! `layout` groups its tensors.

use super::layout;
use super::source::{Cursor, Source, Span};
use super::tensors::{Raw, Tensors};
use super::{Encoding, Metadata};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::tensor::DType;

/// elemType of float8 e4m3fn bytes, as the exporting scripts write it.
pub(super) const E4M3: u32 = 101;

/// elemType of packed 4-bit codes.
pub(super) const PACKED: u32 = 0;

/// The smallest possible entry: lengths of key, elemType, ndim and a one-byte payload of one dimension.
const SMALLEST_ENTRY: usize = 5;

/// More dimensions than any tensor here has.
const MAX_DIMS: u64 = 8;

/// Encoding of the values of an elemType. Types 0 to 45 are torch's own numbers; packed codes are bytes here.
fn encoding(elem_type: u64) -> Option<Encoding> {
    let dtype = match elem_type {
        45 | 100 => DType::U8,
        101 => DType::F8E4M3,
        torch => DType::from_code(i32::try_from(torch).ok()?).ok()?,
    };
    Some(Encoding::Dense(dtype))
}

/// The elemType of a dense encoding.
pub(super) fn elem_type(encoding: Encoding) -> Option<u32> {
    match encoding {
        Encoding::Dense(DType::F8E4M3) => Some(E4M3),
        Encoding::Dense(DType::F4E2M1x2) => None,
        Encoding::Dense(dtype) => u32::try_from(dtype.code()).ok(),
        Encoding::Int8
        | Encoding::Int4
        | Encoding::Nvfp4
        | Encoding::Mxfp4
        | Encoding::Nf4
        | Encoding::Ggml(_) => None,
    }
}

pub(super) fn open(source: Source, metadata: Metadata) -> Result<Tensors> {
    let raws = entries(&source).map_err(|e| e.within(source.name()))?;
    let sources = vec![source];
    let layout = layout::group(&sources, &raws, true, metadata.config.as_ref())?;
    Tensors::new("dat", sources, raws, layout.logical, metadata)
}

fn entries(source: &Source) -> Result<Vec<Raw>> {
    let mut cursor = Cursor::new(source);
    let count = cursor.leb128("the entry count")?;
    if count == 0 || count > (cursor.left() / SMALLEST_ENTRY) as u64 {
        bail!(
            CorruptFile,
            "{count} entries do not fit in the {} bytes after the entry count",
            cursor.left()
        );
    }
    let mut raws = Vec::new();
    for number in 0..count {
        let raw =
            entry(&mut cursor).map_err(|e| e.within(format_args!("entry {number} of {count}")))?;
        raws.push(raw);
    }
    if cursor.left() > 0 {
        bail!(
            CorruptFile,
            "{} bytes follow the last of its {count} entries",
            cursor.left()
        );
    }
    Ok(raws)
}

fn entry(cursor: &mut Cursor<'_>) -> Result<Raw> {
    let key_len = cursor.leb128("the key length")?;
    let key = cursor.text(key_len, "the key")?.to_owned();
    if key.is_empty() {
        bail!(CorruptFile, "its key is empty");
    }
    let elem_type = cursor
        .leb128("the elemType")
        .map_err(|e| e.within(format_args!("'{key}'")))?;
    let Some(encoding) = encoding(elem_type) else {
        bail!(
            CorruptFile,
            "'{key}': elemType {elem_type} is none of 0-7, 11, 15, 24, 45, 100 and 101"
        );
    };
    let ndim = cursor
        .leb128("the number of dimensions")
        .map_err(|e| e.within(format_args!("'{key}'")))?;
    if ndim > MAX_DIMS {
        bail!(
            CorruptFile,
            "'{key}': it has {ndim} dimensions; at most {MAX_DIMS} are possible"
        );
    }
    let mut shape = Vec::with_capacity(ndim as usize);
    let mut bytes = encoding.element_bytes().unwrap_or(1);
    for d in 0..ndim {
        let dim = cursor
            .leb128("a dimension")
            .map_err(|e| e.within(format_args!("'{key}'")))?;
        let size = usize::try_from(dim)
            .ok()
            .filter(|&s| s > 0 && s <= isize::MAX as usize)
            .ok_or_else(|| err!(CorruptFile, "'{key}': dimension {d} is {}", dim as i64))?;
        bytes = bytes.checked_mul(size).ok_or_else(|| {
            err!(
                CorruptFile,
                "'{key}': dimensions {shape:?} and {size} overflow the size of memory"
            )
        })?;
        shape.push(size);
    }
    let start = cursor.position();
    cursor
        .skip(bytes as u64, "the payload")
        .map_err(|e| e.within(format_args!("'{key}' of shape {shape:?}")))?;
    Ok(Raw {
        key,
        type_code: elem_type as u32,
        encoding,
        shape,
        span: Span {
            source: 0,
            range: start..start + bytes,
        },
    })
}
