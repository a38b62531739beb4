//! Reads safetensors: one file, or several, with an index or without. The header is parsed here rather than by the `safetensors`
//! crate because duplicate keys must be found and messages must name the tensor. Which tensors belong together is `layout`'s.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::source::{Cursor, Source, Span};
use super::tensors::{FOR_TENSOR, Raw, Tensors};
use super::{Encoding, Metadata, folder, layout};
use crate::base::error::{Error, bail, err};
use crate::base::{Result, alloc, size};
use crate::tensor::DType;

/// The header length that the format's own implementation allows.
const MAX_HEADER: u64 = 100_000_000;

/// Bytes of memory that a byte of a header may take while it is read.
const HEADER: usize = 8;

/// Whether `bytes` starts like a safetensors file: a plausible header length, then a JSON object.
pub(super) fn recognises(bytes: &[u8]) -> bool {
    match bytes.first_chunk::<8>() {
        Some(len) => {
            let len = u64::from_le_bytes(*len);
            (2..=MAX_HEADER).contains(&len) && bytes.get(8) == Some(&b'{')
        }
        None => false,
    }
}

pub(super) fn open(source: Source, metadata: Metadata) -> Result<Tensors> {
    let raws = tensors(&source, 0).map_err(|e| e.within(source.name()))?;
    assemble(vec![source], raws, metadata)
}

/// Opens the shards that the index at `path` names; they lie in `directory`. If several shards hold a tensor of one name, the index
/// says which one is meant. Tensors that the index does not name are read too, as in transformers.
pub(super) fn open_index(path: &Path, directory: &Path, metadata: Metadata) -> Result<Tensors> {
    let name = path.display();
    let text = std::fs::read(path).map_err(|e| Error::io(format_args!("reading {name}"), e))?;
    let _index = alloc::set_aside(text.len().saturating_mul(HEADER))?;
    let index: Index =
        serde_json::from_slice(&text).map_err(|e| err!(CorruptFile, "{name}: {e}"))?;
    let shards = index.shards();
    if shards.is_empty() {
        bail!(CorruptFile, "{name}: its weight_map is empty");
    }
    for shard in &shards {
        let mut parts = Path::new(shard).components();
        if !matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        ) {
            bail!(
                CorruptFile,
                "{name}: the shard '{shard}' is not a file name in the same directory"
            );
        }
    }
    let paths: Vec<PathBuf> = shards.iter().map(|s| directory.join(s)).collect();
    if let Some(missing) = paths.iter().find(|p| !p.exists()) {
        bail!(
            NotFound,
            "{name} names the shard {}, which is missing",
            missing.display()
        );
    }
    let (sources, raws) = read_shards(&paths)?;
    let raws = index.choose(&shards, raws, &name);
    assemble(sources, raws, metadata)
}

/// Warns of an index beside the single file `file` of a model, unless it says the same.
pub(super) fn warn_of_ignored_index(file: &Path) {
    let name = file.file_name().and_then(|n| n.to_str());
    let Some((name, index_name)) = name.and_then(|n| Some((n, folder::index_beside(n)?))) else {
        return;
    };
    let path = file.with_file_name(&index_name);
    let Ok(text) = std::fs::read(&path) else {
        return;
    };
    let index: Option<Index> = serde_json::from_slice(&text).ok();
    let shards = index.as_ref().map_or(Vec::new(), Index::shards);
    if shards == [name] {
        return;
    }
    let missing = shards
        .iter()
        .filter(|s| !file.with_file_name(s).exists())
        .count();
    tracing::warn!(
        "{} is read; {index_name} beside it is ignored with the {} files that it names, {missing} of them missing",
        file.display(),
        shards.len(),
    );
}

/// Opens the files of one model that has no index.
pub(super) fn open_shards(paths: &[PathBuf], metadata: Metadata) -> Result<Tensors> {
    let (sources, raws) = read_shards(paths)?;
    assemble(sources, raws, metadata)
}

fn read_shards(paths: &[PathBuf]) -> Result<(Vec<Source>, Vec<Raw>)> {
    let mut sources = Vec::with_capacity(paths.len());
    let mut raws = Vec::new();
    for (i, path) in paths.iter().enumerate() {
        let source = Source::open(path)?;
        raws.extend(tensors(&source, i).map_err(|e| e.within(source.name()))?);
        sources.push(source);
    }
    Ok((sources, raws))
}

fn assemble(sources: Vec<Source>, raws: Vec<Raw>, metadata: Metadata) -> Result<Tensors> {
    let _names = alloc::set_aside(raws.len().saturating_mul(FOR_TENSOR))?;
    let layout = layout::group(&sources, &raws, false, metadata.config.as_ref())?;
    let format = match layout.convention {
        None | Some("dat") => "safetensors",
        Some(convention) => convention,
    };
    Tensors::new(format, sources, raws, layout.logical, metadata)
}

fn tensors(source: &Source, number: usize) -> Result<Vec<Raw>> {
    let mut cursor = Cursor::new(source);
    let header_len = cursor.u64("the header length")?;
    if header_len > MAX_HEADER {
        bail!(
            CorruptFile,
            "its header claims {header_len} bytes; at most {MAX_HEADER} are allowed"
        );
    }
    let header = cursor.text(header_len, "the header")?;
    let _header = alloc::set_aside(header.len().saturating_mul(HEADER))?;
    let header: Map<Item> =
        serde_json::from_str(header).map_err(|e| err!(CorruptFile, "header: {e}"))?;
    let data_start = cursor.position();
    let data_len = cursor.left();
    let mut raws = Vec::with_capacity(header.0.len());
    for (key, item) in header.0 {
        if key == "__metadata__" {
            continue;
        }
        let place = format!("'{key}'");
        let Item::Tensor {
            dtype,
            shape,
            data_offsets: [start, end],
        } = item
        else {
            bail!(
                CorruptFile,
                "{place}: it takes dtype, shape and data_offsets"
            );
        };
        let Some(encoding) = encoding(&dtype) else {
            bail!(
                Unsupported,
                "{place}: dtype '{dtype}' is not supported; F64, F32, F16, BF16, F8_E4M3, I64, I32, I16, I8, U8 and BOOL are"
            );
        };
        if shape.contains(&0) {
            bail!(CorruptFile, "{place}: a dimension of {shape:?} is 0");
        }
        let width = encoding.element_bytes().unwrap_or(1);
        let bytes = size::product(&place, &shape)
            .and_then(|n| size::product(&place, &[n, width]))
            .map_err(|e| err!(CorruptFile, "{e}"))?;
        if start > end || end > data_len {
            bail!(
                CorruptFile,
                "{place}: data_offsets [{start}, {end}] are not within the {data_len} bytes of data"
            );
        }
        if end - start != bytes {
            bail!(
                CorruptFile,
                "{place}: {dtype} of shape {shape:?} takes {bytes} bytes, but data_offsets [{start}, {end}] span {}",
                end - start
            );
        }
        raws.push(Raw {
            key,
            type_code: 0,
            encoding,
            shape,
            span: Span {
                source: number,
                range: data_start + start..data_start + end,
            },
        });
    }
    raws.sort_by_key(|r| r.span.range.start);
    let mut expected = data_start;
    for raw in &raws {
        if raw.span.range.start != expected {
            bail!(
                CorruptFile,
                "'{}': its data starts at {}, but the tensor before it ends at {}",
                raw.key,
                raw.span.range.start - data_start,
                expected - data_start
            );
        }
        expected = raw.span.range.end;
    }
    if expected != data_start + data_len {
        bail!(
            CorruptFile,
            "{} bytes follow the last tensor",
            data_start + data_len - expected
        );
    }
    Ok(raws)
}

fn encoding(name: &str) -> Option<Encoding> {
    DType::ALL
        .iter()
        .map(|&dtype| Encoding::Dense(dtype))
        .find(|&encoding| dtype(encoding) == Some(name))
}

/// The name of a dense encoding in a header.
pub(super) fn dtype(encoding: Encoding) -> Option<&'static str> {
    encoding.element_bytes().map(|_| encoding.name())
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: Map<String>,
}

/// Names that a warning spells out.
const NAMED: usize = 8;

impl Index {
    /// The files that it names, each once, sorted.
    fn shards(&self) -> Vec<&str> {
        let mut shards: Vec<&str> = self.weight_map.0.iter().map(|(_, f)| f.as_str()).collect();
        shards.sort_unstable();
        shards.dedup();
        shards
    }

    /// Drops duplicates among the tensors `raws` of `shards`: the index says which shard holds the tensor that is meant. A tensor
    /// that is missing there is taken from another shard, with a warning.
    fn choose(&self, shards: &[&str], raws: Vec<Raw>, name: &dyn fmt::Display) -> Vec<Raw> {
        let named: HashMap<&str, &str> = (self.weight_map.0.iter())
            .map(|(key, file)| (key.as_str(), file.as_str()))
            .collect();
        let is_named = |raw: &Raw| named.get(raw.key.as_str()) == Some(&shards[raw.span.source]);
        let in_place: HashSet<String> = (raws.iter())
            .filter(|raw| is_named(raw))
            .map(|raw| raw.key.clone())
            .collect();
        let misplaced: Vec<&str> = (self.weight_map.0.iter())
            .map(|(key, _)| key.as_str())
            .filter(|key| !in_place.contains(*key))
            .collect();
        if !misplaced.is_empty() {
            let shown = &misplaced[..misplaced.len().min(NAMED)];
            tracing::warn!(
                "{name}: {} tensors are not in the shard it names for them: {}{}",
                misplaced.len(),
                shown.join(", "),
                if shown.len() < misplaced.len() {
                    ", ..."
                } else {
                    ""
                }
            );
        }
        raws.into_iter()
            .filter(|raw| is_named(raw) || !in_place.contains(&raw.key))
            .collect()
    }
}

/// A value of the header: a tensor, or the free-form `__metadata__`.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Item {
    Tensor {
        dtype: String,
        shape: Vec<usize>,
        data_offsets: [usize; 2],
    },
    Other(serde::de::IgnoredAny),
}

/// A JSON object in file order that refuses a key standing twice.
struct Map<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Map<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct InOrder<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for InOrder<T> {
            type Value = Map<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Map<T>, A::Error> {
                let mut items = Vec::new();
                let mut seen = HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format_args!(
                            "the key '{key}' stands twice"
                        )));
                    }
                    items.push((key, map.next_value()?));
                }
                Ok(Map(items))
            }
        }
        deserializer.deserialize_map(InOrder(std::marker::PhantomData))
    }
}
