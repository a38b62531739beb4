//! Reads safetensors: one file, or several with or without an index. Parses the header itself rather than with the `safetensors` crate,
//! because duplicate keys must be found and messages must name the tensor. `layout` groups the tensors.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::source::{Cursor, Source, Span};
use super::tensors::{Raw, Tensors};
use super::{Encoding, Metadata, Unreadable, folder, layout, names};
use crate::base::alloc::Budget;
use crate::base::error::{bail, err};
use crate::base::files::Files;
use crate::base::{Result, size};
use crate::tensor::DType;

/// Upper limit of the header length, as in the format's own implementation.
const MAX_HEADER: u64 = 100_000_000;

/// Supported types, as errors list them.
const KNOWN: &str = "F64, F32, F16, BF16, F8_E4M3, I64, I32, I16, I8, U8 and BOOL";

/// Suffixes of scales and codes of a weight, in all conventions.
const SCALES: [&str; 10] = [
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.scale",
    ".absmax",
    ".quant_map",
    ".scale",
];
const CODES: [&str; 5] = [
    ".weight",
    ".weight_packed",
    ".weight.qdata",
    ".qdata",
    "._weight_qdata",
];

/// Whether `bytes` begin like a safetensors file: a plausible header length, then a JSON object.
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
    let found = tensors(&source, 0).map_err(|e| e.within(source.name()))?;
    assemble(vec![source], found, metadata)
}

/// Opens the shards that the index at `path` of `files` names, in its directory. If several shards hold a tensor of the same name, the index
/// decides. Tensors that the index does not name are read too, as in transformers.
pub(super) fn open_index(files: &Files, path: &Path, metadata: Metadata) -> Result<Tensors> {
    let name = path.display();
    let directory = files.directory_of(path);
    let Some(text) = files.read(path)? else {
        bail!(NotFound, "reading {name}: it is missing");
    };
    let _index = Budget::fields(text.len()).set_aside()?;
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
    if let Some(missing) = files.missing(&paths)? {
        bail!(
            NotFound,
            "{name} names the shard {}, which is missing",
            missing.display()
        );
    }
    let (sources, mut found) = read_shards(files, &paths)?;
    index.choose(&shards, &mut found, &name);
    assemble(sources, found, metadata)
}

/// Warns of an index beside a single-file model, unless both agree.
pub(super) fn warn_of_ignored_index(files: &Files, single: &Path) {
    let name = single.file_name().and_then(|n| n.to_str());
    let Some((name, index_name)) = name.and_then(|n| Some((n, folder::index_beside(n)?))) else {
        return;
    };
    let path = single.with_file_name(&index_name);
    let Ok(Some(text)) = files.read(&path) else {
        return;
    };
    let index: Option<Index> = serde_json::from_slice(&text).ok();
    let shards = index.as_ref().map_or(Vec::new(), Index::shards);
    if shards == [name] {
        return;
    }
    let missing = shards
        .iter()
        .filter(|s| !matches!(files.exists(&single.with_file_name(s)), Ok(true)))
        .count();
    tracing::warn!(
        "{} is read; {index_name} beside it is ignored with the {} files that it names, {missing} of them missing",
        single.display(),
        shards.len(),
    );
}

/// Opens the files of a model without an index.
pub(super) fn open_shards(files: &Files, paths: &[PathBuf], metadata: Metadata) -> Result<Tensors> {
    let (sources, found) = read_shards(files, paths)?;
    assemble(sources, found, metadata)
}

/// Tensors of one or more files.
#[derive(Default)]
struct Found {
    raws: Vec<Raw>,
    unreadable: Vec<Aside>,
}

impl Found {
    /// The key of each tensor, and the index of the file that holds it.
    fn places(&self) -> impl Iterator<Item = (&str, usize)> {
        let readable = self.raws.iter().map(|r| (r.key.as_str(), r.span.source));
        readable.chain(
            self.unreadable
                .iter()
                .map(|u| (u.key.as_str(), u.span.source)),
        )
    }
}

/// A tensor that cannot be read.
struct Aside {
    key: String,
    span: Span,
    dtype: String,
    shape: Vec<usize>,
    reason: String,
}

impl Aside {
    fn new(key: String, dtype: String, shape: Vec<usize>, span: &Span) -> Aside {
        let reason = match shape.contains(&0) {
            true => format!("has shape {shape:?}, which holds no values"),
            false => format!("is stored as {dtype}, which is not supported; {KNOWN} are"),
        };
        Aside {
            key,
            span: span.clone(),
            dtype,
            shape,
            reason,
        }
    }

    fn unreadable(self) -> Unreadable {
        Unreadable {
            name: names::logical(&self.key),
            dtype: self.dtype,
            shape: self.shape,
            bytes: self.span.len() as u64,
            reason: self.reason,
        }
    }
}

fn read_shards(files: &Files, paths: &[PathBuf]) -> Result<(Vec<Source>, Found)> {
    let mut sources = Vec::with_capacity(paths.len());
    let mut found = Found::default();
    for (i, path) in paths.iter().enumerate() {
        let source = Source::open(files, path)?;
        let shard = tensors(&source, i).map_err(|e| e.within(source.name()))?;
        found.raws.extend(shard.raws);
        found.unreadable.extend(shard.unreadable);
        sources.push(source);
    }
    Ok((sources, found))
}

/// Takes back words of MLX's codes, which are U32 beside scales and biases, as I32, in which other formats store such words.
fn take_words(found: &mut Found) {
    let keys: HashSet<&str> = found.raws.iter().map(|raw| raw.key.as_str()).collect();
    let is_of_mlx = |aside: &Aside| {
        let module = aside.key.strip_suffix(".weight");
        let has = |module: &str, part: &str| keys.contains(format!("{module}.{part}").as_str());
        aside.dtype == "U32" && module.is_some_and(|m| has(m, "scales") && has(m, "biases"))
    };
    let words: HashSet<String> = (found.unreadable.iter())
        .filter(|aside| is_of_mlx(aside))
        .map(|aside| aside.key.clone())
        .collect();
    for aside in (found.unreadable).extract_if(.., |aside| words.contains(&aside.key)) {
        found.raws.push(Raw {
            key: aside.key,
            type_code: 0,
            encoding: Encoding::Dense(DType::I32),
            shape: aside.shape,
            span: aside.span,
        });
    }
    found
        .raws
        .sort_by_key(|raw| (raw.span.source, raw.span.range.start));
}

/// Sets weights aside whose scales cannot be read, so that every remaining tensor can be read.
fn set_aside_scaled(found: &mut Found) {
    let module = |key: &str, ends: &[&str]| {
        let module = ends.iter().find_map(|end| key.strip_suffix(end));
        module.map(str::to_owned)
    };
    let scales: HashMap<String, (String, String)> = (found.unreadable.iter())
        .filter_map(|aside| {
            let names = (aside.key.clone(), aside.dtype.clone());
            Some((module(&aside.key, &SCALES)?, names))
        })
        .collect();
    if scales.is_empty() {
        return;
    }
    let of = |raw: &Raw| scales.get(&module(&raw.key, &CODES)?);
    for raw in found.raws.extract_if(.., |raw| of(raw).is_some()) {
        let Some((key, dtype)) = of(&raw) else {
            continue;
        };
        let reason = format!("has scales '{key}', which cannot be read: they are {dtype}");
        let stored = raw.encoding.name().to_owned();
        found.unreadable.push(Aside {
            reason,
            ..Aside::new(raw.key, stored, raw.shape, &raw.span)
        });
    }
}

fn assemble(sources: Vec<Source>, mut found: Found, metadata: Metadata) -> Result<Tensors> {
    take_words(&mut found);
    set_aside_scaled(&mut found);
    let Found { raws, unreadable } = found;
    let tensors = raws.len() + unreadable.len();
    let _names = Budget::tensors(tensors).set_aside()?;
    let layout = layout::group(&sources, &raws, false, metadata.config.as_ref())?;
    let format = match layout.convention {
        None | Some("dat") => "safetensors",
        Some(convention) => convention,
    };
    let unreadable = unreadable.into_iter().map(Aside::unreadable).collect();
    Ok(Tensors::new(format, sources, raws, layout.logical, metadata)?.beside(unreadable))
}

fn tensors(source: &Source, number: usize) -> Result<Found> {
    let mut cursor = Cursor::new(source);
    let header_len = cursor.u64("the header length")?;
    if header_len > MAX_HEADER {
        bail!(
            CorruptFile,
            "its header claims {header_len} bytes; at most {MAX_HEADER} are allowed"
        );
    }
    let header = cursor.text(header_len, "the header")?;
    let _header = Budget::fields(header.len()).set_aside()?;
    let header: Map<Item> =
        serde_json::from_str(header).map_err(|e| err!(CorruptFile, "header: {e}"))?;
    let data_start = cursor.position();
    let data_len = cursor.left();
    let mut found = Found {
        raws: Vec::with_capacity(header.0.len()),
        unreadable: Vec::new(),
    };
    let mut spans = Vec::with_capacity(header.0.len());
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
        if start > end || end > data_len {
            bail!(
                CorruptFile,
                "{place}: data_offsets [{start}, {end}] are not within the {data_len} bytes of data"
            );
        }
        let encoding = encoding(&dtype);
        let width = encoding.map(|encoding| encoding.element_bytes().unwrap_or(1));
        let bytes = match width {
            _ if shape.contains(&0) => 0,
            // The type is unknown; the data spans what the file says.
            None => end - start,
            Some(width) => size::product(&place, &shape)
                .and_then(|n| size::product(&place, &[n, width]))
                .map_err(|e| err!(CorruptFile, "{e}"))?,
        };
        if end - start != bytes {
            bail!(
                CorruptFile,
                "{place}: {dtype} of shape {shape:?} takes {bytes} bytes, but data_offsets [{start}, {end}] span {}",
                end - start
            );
        }
        spans.push((start, end, key.clone()));
        let span = Span {
            source: number,
            range: data_start + start..data_start + end,
        };
        match encoding.filter(|_| !shape.contains(&0)) {
            Some(encoding) => found.raws.push(Raw {
                key,
                type_code: 0,
                encoding,
                shape,
                span,
            }),
            None => found.unreadable.push(Aside::new(key, dtype, shape, &span)),
        }
    }
    found.raws.sort_by_key(|r| r.span.range.start);
    // An empty tensor begins where the next one does.
    spans.sort_unstable();
    let mut expected = 0;
    for (start, end, key) in spans {
        if start != expected {
            bail!(
                CorruptFile,
                "'{key}': its data starts at {start}, but the tensor before it ends at {expected}"
            );
        }
        expected = end;
    }
    if expected != data_len {
        bail!(
            CorruptFile,
            "{} bytes follow the last tensor",
            data_len - expected
        );
    }
    Ok(found)
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

/// Names that a warning lists.
const NAMED: usize = 8;

impl Index {
    /// The distinct files that it names, sorted.
    fn shards(&self) -> Vec<&str> {
        let mut shards: Vec<&str> = self.weight_map.0.iter().map(|(_, f)| f.as_str()).collect();
        shards.sort_unstable();
        shards.dedup();
        shards
    }

    /// Drops duplicates among the tensors of `shards`: the index names the shard that counts. A tensor that is missing there is taken from
    /// another shard, with a warning.
    fn choose(&self, shards: &[&str], found: &mut Found, name: &dyn fmt::Display) {
        let named: HashMap<&str, &str> = (self.weight_map.0.iter())
            .map(|(key, file)| (key.as_str(), file.as_str()))
            .collect();
        let is_named = |key: &str, source: usize| named.get(key) == Some(&shards[source]);
        let in_place: HashSet<String> = found
            .places()
            .filter(|&(key, source)| is_named(key, source))
            .map(|(key, _)| key.to_owned())
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
        let is_meant = |key: &str, source: usize| is_named(key, source) || !in_place.contains(key);
        found.raws.retain(|raw| is_meant(&raw.key, raw.span.source));
        found
            .unreadable
            .retain(|aside| is_meant(&aside.key, aside.span.source));
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

/// A JSON object in file order that refuses duplicate keys.
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
