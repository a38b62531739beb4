//! What training delivers: the model's file.

use std::path::Path;

use serde_json::json;

use super::adapter;
use super::trainer::Trainer;
use crate::base::Result;
use crate::base::directory::NewDirectory;
use crate::base::error::{bail, err};
use crate::checkpoint::{Checkpoint, DatWriter, Encoding, ModelOptWriter, Planned, Writer};
use crate::format::nvfp4::{self, BLOCK, Levels, QuantizeOptions, Recipe, quantize_rows};
use crate::model::convert::text_files;
use crate::model::training::{Layout, MatrixId, Source, VectorId};
use crate::ops::training::optimizer::Matrix;
use crate::tensor::DType;

/// What a model directory holds embeddings, and a head beside them, as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableEncoding {
    /// bfloat16, which holds what is delivered exactly, and which every reader of such directories knows; NVFP4 where a table is frozen in
    /// it.
    #[default]
    Bf16,
    /// NVFP4, as they are trained: a quarter of the bytes.
    Nvfp4,
}

/// A parameter, or some rows of one, in an entry of a file.
enum Content {
    Matrix(MatrixId),
    Vector(VectorId),
}

impl Trainer {
    /// Writes the model to a directory in ModelOpt's layout: matrices as NVFP4 where they are held as such, and else in bfloat16 or
    /// float32; norms and biases in float32. Adapters are merged into their matrices, which are quantized again, as
    /// [`Recipe::weight_scales`] says. An existing model there is replaced if `replace`.
    ///
    /// [`Recipe::weight_scales`]: super::Recipe::weight_scales
    pub fn export_directory(
        &self,
        source: &Source,
        place: &Path,
        tables: TableEncoding,
        replace: bool,
    ) -> Result<()> {
        let layout = source.layout();
        // Global scales of trained matrices are powers of two; others leave values that bfloat16 does not hold.
        let is_frozen = |id: MatrixId| self.parameters().matrices()[id].is_frozen();
        let is_table = |id: MatrixId| id == layout.embedding || id == layout.head;
        let encoding =
            |id: MatrixId| match self.parameters().matrices()[id].forms().weight.is_packed() {
                true if is_table(id) && tables == TableEncoding::Bf16 && !is_frozen(id) => {
                    Encoding::Dense(DType::BF16)
                }
                true => Encoding::Nvfp4,
                false if self.parameters().is_exactly_bf16(id) => Encoding::Dense(DType::BF16),
                false => Encoding::Dense(DType::F32),
            };
        let mut plan = Vec::new();
        for (id, m) in layout.matrices.iter().enumerate() {
            plan.push(Planned {
                name: m.name.clone(),
                shape: vec![m.rows, m.cols],
                encoding: encoding(id),
            });
        }
        for v in &layout.vectors {
            plan.push(Planned {
                name: v.name.clone(),
                shape: vec![v.len],
                encoding: Encoding::Dense(DType::F32),
            });
        }
        let metadata = source.checkpoint().metadata();
        let mut writer = match replace {
            true => ModelOptWriter::replace(place, &plan, metadata)?,
            false => ModelOptWriter::create(place, &plan, metadata)?,
        };
        for (name, content) in text_files(&metadata.tokenizer)? {
            writer.add_file(&name, content)?;
        }
        let mut writer: Box<dyn Writer> = Box::new(writer);
        for id in 0..layout.matrices.len() {
            self.write_matrix(&mut *writer, &layout.matrices[id].name, id, encoding(id))?;
        }
        for id in 0..layout.vectors.len() {
            writer.begin(&layout.vectors[id].name, 1.0)?;
            writer.values(&self.vector(source, id)?)?;
        }
        writer.finish()
    }

    /// Writes the model to a `.dat` file, every tensor in the type that it has in the file that training began with. NVFP4 has no global
    /// scale there, so what is delivered is rounded to codes whose block scales do without.
    pub fn export_dat(&self, source: &Source, place: &Path) -> Result<()> {
        let checkpoint: &dyn Checkpoint = &**source.checkpoint();
        let mut writer: Box<dyn Writer> = Box::new(DatWriter::create_like(place, checkpoint)?);
        for entry in checkpoint.entries() {
            let content = self.content(source, &entry.name)?;
            match content {
                // Not a parameter of training.
                None => writer.copy(checkpoint, entry)?,
                Some(Content::Matrix(id)) if entry.encoding == Encoding::Nvfp4 => {
                    self.write_single_level(&mut *writer, &entry.name, id)?
                }
                Some(Content::Matrix(id)) => {
                    self.write_matrix(&mut *writer, &entry.name, id, entry.encoding)?
                }
                Some(Content::Vector(id)) => {
                    writer.begin(&entry.name, 1.0)?;
                    writer.values(&self.vector(source, id)?)?;
                }
            }
        }
        writer.finish()
    }

    /// The parameter that an entry of the source is.
    fn content(&self, source: &Source, name: &str) -> Result<Option<Content>> {
        let layout = source.layout();
        if let Some(id) = layout.matrices.iter().position(|m| m.name == name) {
            return Ok(Some(Content::Matrix(id)));
        }
        if let Some(id) = layout.vectors.iter().position(|v| v.name == name) {
            return Ok(Some(Content::Vector(id)));
        }
        if source.is_part_of_a_matrix(name) {
            bail!(
                Unsupported,
                "{name} holds several matrices in one, which is not written back; export to a directory instead"
            );
        }
        Ok(None)
    }

    fn write_matrix(
        &self,
        writer: &mut dyn Writer,
        name: &str,
        id: MatrixId,
        encoding: Encoding,
    ) -> Result<()> {
        let matrices = self.parameters().matrices();
        let matrix: &Matrix = &matrices[id];
        let mut adapted = self.parameters().layout().adapted();
        if let Some((_, adapter)) = adapted.find(|(of, _)| *of == id) {
            let values = adapter::merged(self.device(), matrices, id, adapter)?;
            if encoding != Encoding::Nvfp4 {
                writer.begin(name, 1.0)?;
                return writer.values(&values);
            }
            let (rows, cols) = matrix.shape();
            let options = self.config().recipe.weight_scales.options();
            let quantized = nvfp4::quantize(&values, rows, cols, &options)?;
            writer.begin(name, quantized.global)?;
            return writer.nvfp4(&quantized.codes, &quantized.scales);
        }
        if encoding == Encoding::Nvfp4 {
            let Some((codes, scales)) = matrix.delivered(self.device())? else {
                bail!(
                    Unsupported,
                    "{name} is held in {:?} and cannot be written as NVFP4; export to a directory and convert that",
                    matrix.forms().weight
                );
            };
            writer.begin(name, matrix.global())?;
            return writer.nvfp4(&codes, &scales);
        }
        writer.begin(name, 1.0)?;
        matrix.each_delivered(self.device(), &mut |values| writer.values(values))
    }

    /// Writes a matrix as NVFP4 without a global scale.
    fn write_single_level(&self, writer: &mut dyn Writer, name: &str, id: MatrixId) -> Result<()> {
        let matrices = self.parameters().matrices();
        let cols = matrices[id].shape().1;
        let options = QuantizeOptions {
            levels: Levels::Single,
            recipe: Recipe::Sweep,
            ..QuantizeOptions::default()
        };
        writer.begin(name, 1.0)?;
        let mut first = 0;
        let mut write = |values: &[f32]| {
            let mut codes = vec![0; values.len() / 2];
            let mut scales = vec![0; values.len() / BLOCK];
            quantize_rows(values, cols, first, 1.0, &options, &mut codes, &mut scales)?;
            first += values.len() / cols;
            writer.nvfp4(&codes, &scales)
        };
        let mut adapted = self.parameters().layout().adapted();
        match adapted.find(|(of, _)| *of == id) {
            Some((_, adapter)) => write(&adapter::merged(self.device(), matrices, id, adapter)?),
            None => matrices[id].each_delivered(self.device(), &mut write),
        }
    }

    /// Writes the adapters to a directory as peft reads them, `adapter_model.safetensors` in float32 and `adapter_config.json`. `base` is
    /// what the model below them is called: a directory, or a name of the Hugging Face hub. Adapters there are replaced if `replace`.
    pub fn export_adapter(
        &self,
        source: &Source,
        place: &Path,
        base: &str,
        replace: bool,
    ) -> Result<()> {
        let recipe = &self.config().recipe;
        recipe.check_adapter_export(source)?;
        let Some(lora) = &recipe.lora else {
            bail!(Internal, "adapters to write of a recipe without them");
        };
        let layout = self.parameters().layout();
        let mut tensors = Vec::new();
        for (id, adapter) in layout.adapted() {
            let name = layout.matrices[id].name.as_str();
            let (outputs, inputs) = self.parameters().matrices()[id].shape();
            let values =
                |id: MatrixId| self.parameters().matrices()[id].delivered_values(self.device());
            let (a, b) = (values(adapter.a)?, values(adapter.b)?);
            let module = format!("base_model.model.{}", name.trim_end_matches(".weight"));
            let across = |i: usize| b[i % adapter.rank * outputs + i / adapter.rank];
            let b: Vec<f32> = (0..b.len()).map(across).collect();
            tensors.push((format!("{module}.lora_A.weight"), [adapter.rank, inputs], a));
            tensors.push((
                format!("{module}.lora_B.weight"),
                [outputs, adapter.rank],
                b,
            ));
        }
        let new = match replace {
            true => NewDirectory::replace(place, is_adapter)?,
            false => NewDirectory::create(place)?,
        };
        // Whole, as it is in peft's own files, which some readers insist on.
        let alpha = match lora.alpha.fract() == 0.0 {
            true => json!(lora.alpha as u64),
            false => json!(lora.alpha),
        };
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora.rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "target_modules": modules(layout),
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
        });
        let config = serde_json::to_vec_pretty(&config)
            .map_err(|e| err!(Internal, "writing {ADAPTER_CONFIG}: {e}"))?;
        let files = vec![
            new.stage(ADAPTER, &plain_safetensors(&tensors)?)?,
            new.stage(ADAPTER_CONFIG, &config)?,
        ];
        new.commit(files)
    }

    /// A norm or bias as files hold it.
    fn vector(&self, source: &Source, id: VectorId) -> Result<Vec<f32>> {
        let mut values = vec![0.0; source.layout().vectors[id].len];
        self.parameters().vectors()[id].values().read(&mut values)?;
        if source.adds_one(id) {
            values.iter_mut().for_each(|v| *v -= 1.0);
        }
        Ok(values)
    }
}

impl super::Recipe {
    /// Refuses what [`Trainer::export_adapter`] could not write after training by this recipe.
    pub fn check_adapter_export(&self, source: &Source) -> Result<()> {
        if self.lora.is_none() {
            bail!(
                InvalidArgument,
                "all parameters are trained, and there are no adapters to write; export the model"
            );
        }
        let layout = self.layout(source)?;
        let held = layout
            .adapted()
            .find(|(id, _)| source.is_held_with_others(*id));
        if let Some((id, _)) = held {
            bail!(
                Unsupported,
                "{} is a part of a larger matrix of the checkpoint, where peft knows no adapter of its own; export the merged model \
                 (nvfp4 train: --merge)",
                layout.matrices[id].name
            );
        }
        Ok(())
    }
}

const ADAPTER: &str = "adapter_model.safetensors";
const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Refuses a directory that holds no adapter to be replaced.
fn is_adapter(place: &Path) -> Result<()> {
    match place.join(ADAPTER_CONFIG).exists() {
        true => Ok(()),
        false => bail!(
            InvalidArgument,
            "{} holds no adapter, and is not replaced; name another directory",
            place.display()
        ),
    }
}

/// What peft finds the adapted modules by: their last names, where all modules of these names have adapters, else the whole ones.
fn modules(layout: &Layout) -> Vec<String> {
    let module = |id: MatrixId| {
        let name = &layout.matrices[id].name;
        name.trim_end_matches(".weight").to_owned()
    };
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
    let adapted: Vec<String> = layout.adapted().map(|(id, _)| module(id)).collect();
    let mut short: Vec<String> = adapted.iter().map(|name| last(name)).collect();
    short.sort();
    short.dedup();
    let all = layout.blocks.iter().flat_map(|block| block.projections());
    let named = all.filter(|p| short.contains(&last(&module(p.matrix))));
    match named.count() == adapted.len() {
        true => short,
        false => adapted,
    }
}

/// A safetensors file of float32.
fn plain_safetensors(tensors: &[(String, [usize; 2], Vec<f32>)]) -> Result<Vec<u8>> {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    for (name, shape, values) in tensors {
        let end = at + 4 * values.len();
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [at, end]});
        header.insert(name.clone(), entry);
        at = end;
    }
    let mut json =
        serde_json::to_vec(&header).map_err(|e| err!(Internal, "writing {ADAPTER}: {e}"))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    for (_, _, values) in tensors {
        file.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    Ok(file)
}
