//! Reads GGUF versions 2 and 3, little-endian: `header` parses what precedes the data, `split` joins models of several files, and
//! `translate` converts names and config to Hugging Face terms.

mod family;
mod header;
mod split;
mod translate;
mod types;

use std::collections::HashMap;
use std::path::Path;

use once_cell::sync::OnceCell;

use super::ggml::GgmlType;
use super::source::Source;
use super::tensors::{Function, Mxfp4At, Raw, Stored, Tensors};
use super::{Encoding, Entry, Metadata, TokenizerSource, Unreadable};
use crate::base::Result;
use crate::base::alloc::Budget;
use crate::base::error::{bail, err};
use crate::base::files::Files;
use crate::format::nvfp4;
use crate::tensor::DType;

use header::{Header, MAGIC, read_header};

pub use family::{GgufFamily, GgufForm, GgufKind, GgufMetadata, GgufValueHeads};

pub(super) fn recognises(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Opens a model, in Hugging Face terms if its architecture is one of `families`. If `source` is one of several parts, finds the others
/// at `place`, where it was opened; bytes alone have none.
pub(super) fn open(
    source: Source,
    place: Option<(&Files, &Path)>,
    families: &[GgufFamily],
) -> Result<Tensors> {
    let header = read_header(&source).map_err(|e| e.within(source.name()))?;
    let split = split::Split::read(&header.pairs).map_err(|e| e.within(source.name()))?;
    let (sources, header) = match split {
        None => (vec![source], header),
        Some(split) => split::join(source, header, &split, place)?,
    };
    // The first part has the metadata.
    let name = sources[0].name();
    let Header {
        mut pairs,
        raws,
        unreadable,
    } = header;
    if raws.is_empty() && unreadable.is_empty() {
        bail!(CorruptFile, "{name}: it has 0 tensors");
    }
    let tensors = raws.len() + unreadable.len();
    let _names = Budget::tensors(tensors).set_aside()?;
    let architecture = match pairs.text("general.architecture") {
        Ok(Some(name)) => name.to_owned(),
        Ok(None) => bail!(CorruptFile, "{name}: it has no general.architecture"),
        Err(e) => return Err(e.within(name)),
    };
    let (logical, unreadable, config, embedding) = {
        let metadata = GgufMetadata {
            architecture: &architecture,
            pairs: &pairs,
            raws: &raws,
            unreadable: &unreadable,
            sources: &sources,
        };
        let translation =
            translate::Translation::new(metadata, families).map_err(|e| e.within(name))?;
        let logical = logical(&sources, &raws, &translation)?;
        let unreadable = unreadable.iter().map(|u| {
            Ok(Unreadable {
                name: translation.plain_name(&u.key)?,
                dtype: u.dtype.clone(),
                shape: u.shape.clone(),
                bytes: u.bytes as u64,
                reason: match u.shape.contains(&0) {
                    true => format!("has shape {:?}, which holds no values", u.shape),
                    false => format!("is stored as {}, which is not supported", u.dtype),
                },
            })
        });
        let unreadable = unreadable.collect::<Result<Vec<_>>>();
        let unreadable = unreadable.map_err(|e| e.within(name))?;
        let config = translation.config().map_err(|e| e.within(name))?;
        let embedding = translation.embedding().map_err(|e| e.within(name))?;
        (logical, unreadable, config, embedding)
    };
    let tokenizer = match translate::vocabulary(&mut pairs).map_err(|e| e.within(name))? {
        Some(vocabulary) => TokenizerSource::Vocabulary(vocabulary),
        None => TokenizerSource::None,
    };
    let metadata = Metadata {
        config: Some(config),
        tokenizer,
        embedding,
    };
    Ok(Tensors::new("gguf", sources, raws, logical, metadata)?.beside(unreadable))
}

/// The entries. Global scales of NVFP4 weights are folded into them.
fn logical(
    sources: &[Source],
    raws: &[Raw],
    translation: &translate::Translation<'_>,
) -> Result<Vec<(Entry, Stored)>> {
    let by_key: HashMap<&str, usize> = raws
        .iter()
        .enumerate()
        .map(|(i, r)| (r.key.as_str(), i))
        .collect();
    let file = |i: usize| sources[raws[i].span.source].name();
    let mut global_scale_of = vec![None; raws.len()];
    let mut is_global_scale = vec![false; raws.len()];
    for (i, raw) in raws.iter().enumerate() {
        let Some(base) = raw.key.strip_suffix(".scale") else {
            continue;
        };
        if translation
            .is_named_whole(&raw.key)
            .map_err(|e| e.within(file(i)))?
        {
            continue;
        }
        let weight = by_key
            .get(base)
            .filter(|_| base.ends_with(".weight"))
            .or_else(|| by_key.get(format!("{base}.weight").as_str()));
        match weight {
            Some(&w) if raws[w].encoding == Encoding::Nvfp4 => {
                is_global_scale[i] = true;
                if global_scale_of[w].replace(i).is_some() {
                    bail!(
                        CorruptFile,
                        "{}: '{}' has two scale tensors",
                        file(w),
                        raws[w].key
                    );
                }
            }
            Some(_) => bail!(
                Unsupported,
                "{}: '{}' scales a tensor that is not NVFP4",
                file(i),
                raw.key
            ),
            None => bail!(
                CorruptFile,
                "{}: '{}': there is no '{base}.weight' for it",
                file(i),
                raw.key
            ),
        }
    }
    let mut logical = Vec::with_capacity(raws.len());
    for (i, raw) in raws.iter().enumerate() {
        if is_global_scale[i] || translation.is_in_config(&raw.key) {
            continue;
        }
        let (name, shape, form) = translation.entry(raw).map_err(|e| e.within(file(i)))?;
        let mut bytes = raw.span.len() as u64;
        let (encoding, stored) = match raw.encoding {
            Encoding::Nvfp4 => {
                let why = match form.function {
                    Function::OnePlus => "a norm in NVFP4; norms are stored as dense vectors",
                    Function::NegatedExp => "in NVFP4; expected a dense vector",
                    Function::Values if !form.columns.keeps_blocks(nvfp4::BLOCK) => {
                        "in NVFP4, whose blocks its heads divide; expected another type"
                    }
                    Function::Values => "",
                };
                if !why.is_empty() {
                    bail!(Unsupported, "{}: '{}' is {why}", file(i), raw.key);
                }
                let also = global_scale_of[i];
                let globals = match also {
                    None => vec![1.0],
                    Some(m) => {
                        bytes += raws[m].span.len() as u64;
                        global_scales(sources, &raws[m], raw).map_err(|e| e.within(file(m)))?
                    }
                };
                let stored = Stored::GgufNvfp4 {
                    raw: i,
                    rows: form.rows,
                    columns: form.columns,
                    globals,
                    also,
                };
                (raw.encoding, stored)
            }
            // A stack of experts is NVFP4 without loss.
            Encoding::Ggml(GgmlType::MXFP4) if raw.shape.len() == 3 => {
                let stored = Stored::Mxfp4 {
                    at: Mxfp4At::Blocks { raw: i },
                    globals: OnceCell::new(),
                };
                (Encoding::Mxfp4, stored)
            }
            encoding => (encoding, Stored::Plain { raw: i, form }),
        };
        logical.push((
            Entry {
                shape,
                name,
                encoding,
                bytes,
            },
            stored,
        ));
    }
    Ok(logical)
}

/// Global scales of the NVFP4 tensor `weight`: one, or one per expert for a stack of experts.
fn global_scales(sources: &[Source], raw: &Raw, weight: &Raw) -> Result<Vec<f32>> {
    let experts = match weight.shape[..] {
        [experts, _, _] => experts,
        _ => 1,
    };
    let len = raw.elements();
    if raw.encoding != Encoding::Dense(DType::F32)
        || raw.shape.len() != 1
        || (len != 1 && len != experts)
    {
        bail!(
            Unsupported,
            "'{}' is {} of shape {:?}; '{}' of shape {:?} takes one F32 scale{}",
            raw.key,
            raw.encoding,
            raw.shape,
            weight.key,
            weight.shape,
            match experts {
                1 => String::new(),
                n => format!(", or {n}, one per expert"),
            }
        );
    }
    let mut staging = Vec::new();
    let bytes = sources[raw.span.source].slice(raw.span.range.clone(), &mut staging)?;
    let values: Vec<f32> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    for &value in &values {
        nvfp4::check_global_scale(value)
            .map_err(|e| err!(CorruptFile, "'{}': {}", raw.key, e.message()))?;
    }
    Ok(values)
}
