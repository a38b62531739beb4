//! Writes a model directory in ModelOpt's NVFP4 layout: one safetensors file, `config.json` with its quantization_config,
//! `hf_quant_config.json`, and the tokenizer's files.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{
    Planned, Progress, Slot, Writer, check_names, check_not_read, companion_files, copy_entry,
    sizes,
};
use crate::base::Result;
use crate::base::directory::NewDirectory;
use crate::base::error::{bail, err};
use crate::base::file::Temporary;
use crate::base::files::{FileContent, GivenFiles, NewContent};
use crate::checkpoint::folder::check_is_model;
use crate::checkpoint::{
    Checkpoint, Encoding, Entry, Metadata, SourceFile, TokenizerSource, safetensors,
};
use crate::format::nvfp4::BLOCK;

/// Name of the file with the weights.
const WEIGHTS: &str = "model.safetensors";

/// Writes a ModelOpt-style directory; see [`Writer`].
pub struct ModelOptWriter {
    progress: Progress,
    directory: NewDirectory,
    files: Vec<(String, Vec<u8>)>,
}

/// A complete model directory that is not in its place yet. Dropped before [`NewModel::commit`], it leaves nothing behind.
pub struct NewModel {
    directory: NewDirectory,
    files: Vec<(String, Temporary)>,
}

impl NewModel {
    /// Its files, for opening the model.
    pub fn contents(&self) -> Result<GivenFiles> {
        let content = |(name, file): &(String, Temporary)| {
            let content: Arc<dyn FileContent> = Arc::new(NewContent::of(file)?);
            Ok((name.clone(), content))
        };
        GivenFiles::new(self.files.iter().map(content).collect::<Result<Vec<_>>>()?)
    }

    /// The files of its weights, as [`SourceFile::all`] describes them once they are in place.
    pub fn weights(&self) -> Result<Vec<SourceFile>> {
        let weights = self.files.iter().filter(|(name, _)| name == WEIGHTS);
        weights
            .map(|(name, file)| Ok(SourceFile::new(name, &file.metadata()?)))
            .collect()
    }

    /// Creates another file of the directory, with `len` bytes of space reserved.
    pub fn file(&self, name: &str, len: u64) -> Result<Temporary> {
        self.directory.file(name, len)
    }

    /// Moves the directory into place, with another file of it that is synced.
    pub fn commit(self, other: Option<Temporary>) -> Result<()> {
        let files = self.files.into_iter().map(|(_, file)| file);
        self.directory
            .commit(other.into_iter().chain(files).collect())
    }
}

/// A tensor of the safetensors file.
struct Item {
    key: String,
    dtype: &'static str,
    width: usize,
    shape: Vec<usize>,
    bytes: u64,
    tensor: usize,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Values,
    Scales,
    Global,
}

impl ModelOptWriter {
    /// Starts a directory at `path`, which must not exist or must be empty. Takes config and tokenizer from `metadata`, that of the source.
    pub fn create(path: &Path, plan: &[Planned], metadata: &Metadata) -> Result<Self> {
        Self::start(path, plan, metadata, NewDirectory::create)
    }

    /// As [`ModelOptWriter::create`], but replaces an existing model directory without folders other than that of its pooling, with everything in it, once the new one is
    /// complete.
    pub fn replace(path: &Path, plan: &[Planned], metadata: &Metadata) -> Result<Self> {
        Self::start(path, plan, metadata, |path| {
            NewDirectory::replace(path, check_is_model)
        })
    }

    fn start(
        path: &Path,
        plan: &[Planned],
        metadata: &Metadata,
        make: impl FnOnce(&Path) -> Result<NewDirectory>,
    ) -> Result<Self> {
        check_names(plan)?;
        if let TokenizerSource::Directory(source) = &metadata.tokenizer {
            check_not_read(path, [source.as_path()])?;
        }
        let items = items(plan)?;
        let (header, slots, len) = layout(plan, &items)?;
        let directory = make(path)?;
        let temporary = directory.file(WEIGHTS, len)?;
        let mut writer = ModelOptWriter {
            progress: Progress::new(temporary, slots),
            directory,
            files: companion_files(metadata)?,
        };
        writer.progress.file.write_at(&header, 0)?;
        writer.describe(plan, metadata)?;
        Ok(writer)
    }

    /// Adds a small file to the directory, instead of the source's file of that name.
    pub fn add_file(&mut self, name: &str, content: Vec<u8>) -> Result<()> {
        if name.is_empty() || name.contains('/') || name == WEIGHTS {
            bail!(InvalidArgument, "'{name}' is not the name of a file to add");
        }
        self.files.retain(|(existing, _)| existing != name);
        self.files.push((name.to_owned(), content));
        Ok(())
    }

    /// Checks that every planned tensor is complete, and syncs all files.
    pub fn complete(self) -> Result<NewModel> {
        self.progress.check_complete()?;
        let mut files = self
            .files
            .into_iter()
            .map(|(name, content)| {
                let file = self.directory.stage(&name, &content)?;
                Ok((name, file))
            })
            .collect::<Result<Vec<_>>>()?;
        // The weights come last: their presence shows that the rest is complete.
        files.push((WEIGHTS.to_owned(), self.progress.file));
        Ok(NewModel {
            directory: self.directory,
            files,
        })
    }

    /// Adds `hf_quant_config.json`, and `config.json` if the source has one. A model of only dense tensors has no quantization to describe,
    /// and can be loaded by readers that do not know ModelOpt.
    fn describe(&mut self, plan: &[Planned], metadata: &Metadata) -> Result<()> {
        if plan.iter().all(|p| p.encoding.element_bytes().is_some()) {
            if let Some(Value::Object(config)) = &metadata.config {
                let mut config = config.clone();
                config.remove("quantization_config");
                config.remove("quantization");
                self.add_file("config.json", pretty(&Value::Object(config))?)?;
            }
            return Ok(());
        }
        let module = |p: &&Planned| p.name.strip_suffix(".weight").map(str::to_owned);
        let held = |wanted: fn(Encoding) -> bool| {
            let matrices = plan.iter().filter(|p| p.shape.len() >= 2);
            matrices.filter(move |p| wanted(p.encoding))
        };
        // Dense linear layers must be listed, or a reader would look for their scales.
        let mut excluded: Vec<String> = held(|e| e.element_bytes().is_some())
            .filter(|p| p.shape.len() == 2)
            .filter_map(|p| module(&p))
            .collect();
        let has_int8 = held(|e| e == Encoding::Int8).next().is_some();
        let is_tied = !plan.iter().any(|p| p.name == "lm_head.weight");
        if is_tied && !has_int8 {
            excluded.push("lm_head".to_owned());
        }
        let activations = plan.iter().any(|p| p.name.ends_with(".input_scale"));
        let nvfp4 = if activations { "NVFP4" } else { "W4A16_NVFP4" };
        // With two algorithms, layers are listed one by one, as in ModelOpt.
        let algorithm = if has_int8 { "MIXED_PRECISION" } else { nvfp4 };
        let mut layers = Map::new();
        if has_int8 {
            for p in held(|e| e.element_bytes().is_none()) {
                let layer = match p.encoding {
                    Encoding::Int8 => json!({"quant_algo": "W8A16"}),
                    _ => json!({"quant_algo": nvfp4, "group_size": BLOCK}),
                };
                layers.extend(module(&p).map(|module| (module, layer)));
            }
        }
        let producer = json!({"name": "libNVFP4", "version": env!("CARGO_PKG_VERSION")});
        let group = json!({"dynamic": false, "num_bits": 4, "type": "float", "group_size": BLOCK});
        let mut groups = Map::new();
        groups.insert("weights".into(), group.clone());
        if activations {
            groups.insert("input_activations".into(), group);
        }
        groups.insert("targets".into(), json!(["Linear"]));
        let mut quantization = json!({
            "quant_algo": algorithm,
            "kv_cache_quant_algo": null,
            "group_size": BLOCK,
            "exclude_modules": excluded,
        });
        if has_int8 {
            quantization["quantized_layers"] = Value::Object(layers.clone());
        }
        let description = json!({"producer": producer, "quantization": quantization});
        self.add_file("hf_quant_config.json", pretty(&description)?)?;
        if let Some(Value::Object(config)) = &metadata.config {
            let mut config = config.clone();
            let mut quantization = json!({
                "quant_method": "modelopt",
                "quant_algo": algorithm,
                "config_groups": {"group_0": groups},
                "ignore": excluded,
                "producer": producer,
            });
            if has_int8 {
                quantization["quantized_layers"] = Value::Object(layers);
            }
            // MLX's description of other codes.
            config.remove("quantization");
            config.insert("quantization_config".into(), quantization);
            self.add_file("config.json", pretty(&Value::Object(config))?)?;
        }
        Ok(())
    }
}

fn pretty(value: &Value) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|e| err!(Internal, "writing JSON: {e}"))
}

fn items(plan: &[Planned]) -> Result<Vec<Item>> {
    let mut items = Vec::with_capacity(plan.len() * 3);
    for (tensor, planned) in plan.iter().enumerate() {
        let (bytes, scale_bytes) = sizes(planned)?;
        let name = &planned.name;
        if let (Some(dtype), Some(width)) = (
            safetensors::dtype(planned.encoding),
            planned.encoding.element_bytes(),
        ) {
            items.push(Item {
                key: name.clone(),
                dtype,
                width,
                shape: planned.shape.clone(),
                bytes,
                tensor,
                role: Role::Values,
            });
            continue;
        }
        let Some(module) = name.strip_suffix(".weight") else {
            bail!(
                InvalidArgument,
                "'{name}': the ModelOpt layout holds {} tensors whose names end in .weight",
                planned.encoding
            );
        };
        let with_last = |divisor: usize| {
            let mut shape = planned.shape.clone();
            if let Some(dim) = shape.last_mut() {
                *dim /= divisor;
            }
            shape
        };
        let mut item = |key, dtype, width, shape, bytes, role| {
            items.push(Item {
                key,
                dtype,
                width,
                shape,
                bytes,
                tensor,
                role,
            });
        };
        let scales = format!("{module}.weight_scale");
        if planned.encoding == Encoding::Int8 {
            let rows = planned.shape[..planned.shape.len() - 1].to_vec();
            let shape = planned.shape.clone();
            item(name.clone(), "I8", 1, shape, bytes, Role::Values);
            item(scales, "F32", 4, rows, scale_bytes, Role::Scales);
            continue;
        }
        item(name.clone(), "U8", 1, with_last(2), bytes, Role::Values);
        item(
            scales,
            "F8_E4M3",
            1,
            with_last(BLOCK),
            scale_bytes,
            Role::Scales,
        );
        item(
            format!("{module}.weight_scale_2"),
            "F32",
            4,
            Vec::new(),
            4,
            Role::Global,
        );
    }
    Ok(items)
}

/// The header, the places, and the length of the file. Wide elements come first, so that every tensor is aligned to its element, on which
/// torch relies; within a width, values come before their scales. A file that is read and written again keeps its order.
fn layout(plan: &[Planned], items: &[Item]) -> Result<(Vec<u8>, Vec<Slot>, u64)> {
    let mut order: Vec<&Item> = items.iter().collect();
    order.sort_by_key(|i| (std::cmp::Reverse(i.width), i.role));
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut ends = Vec::with_capacity(order.len());
    let mut position = 0u64;
    for item in &order {
        let end = position
            .checked_add(item.bytes)
            .ok_or_else(|| err!(InvalidArgument, "the plan takes more than 2^64 bytes"))?;
        let description = json!({
            "dtype": item.dtype,
            "shape": item.shape,
            "data_offsets": [position, end],
        });
        if entries.insert(item.key.clone(), description).is_some() {
            bail!(InvalidArgument, "the plan names '{}' twice", item.key);
        }
        ends.push(end);
        position = end;
    }
    let mut json = serde_json::to_vec(&Value::Object(entries))
        .map_err(|e| err!(Internal, "writing the header: {e}"))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    let data = header.len() as u64;
    let mut slots: Vec<Slot> = plan.iter().map(Slot::new).collect();
    for (item, end) in order.iter().zip(ends) {
        let at = data + end - item.bytes;
        let slot = &mut slots[item.tensor];
        match item.role {
            Role::Values => (slot.at, slot.bytes) = (at, item.bytes),
            Role::Scales => (slot.scales_at, slot.scale_bytes) = (at, item.bytes),
            Role::Global => slot.global_at = Some(at),
        }
    }
    Ok((header, slots, data + position))
}

impl Writer for ModelOptWriter {
    fn begin(&mut self, name: &str, global: f32) -> Result<()> {
        self.progress.begin(name, global)
    }

    fn values(&mut self, values: &[f32]) -> Result<()> {
        self.progress.values(values)
    }

    fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.progress.raw(bytes)
    }

    fn nvfp4(&mut self, codes: &[u8], scales: &[u8]) -> Result<()> {
        self.progress.nvfp4(codes, scales)
    }

    fn int8(&mut self, codes: &[u8], scales: &[f32]) -> Result<()> {
        self.progress.int8(codes, scales)
    }

    fn copy(&mut self, source: &dyn Checkpoint, entry: &Entry) -> Result<()> {
        let planned = self.progress.next_encoding(&entry.name)?;
        copy_entry(self, planned, source, entry)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.complete()?.commit(None)
    }
}
