//! Exports adapters in peft's format.

use std::path::Path;

use serde_json::json;

use super::super::recipe::Recipe;
use super::super::trainer::Trainer;
use crate::base::Result;
use crate::base::directory::NewDirectory;
use crate::base::error::{bail, err};
use crate::model::training::{Layout, MatrixId, Source};

impl Trainer {
    /// Writes the adapters to a directory in peft's format, `adapter_model.safetensors` in float32 and `adapter_config.json`. `base` names
    /// the base model: a directory, or a name of the Hugging Face hub. With `replace`, replaces existing adapters.
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
        // An integer, as in peft's own files, which some readers insist on.
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
}

impl Recipe {
    /// Refuses settings whose result [`Trainer::export_adapter`] could not write.
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

/// Refuses to replace a directory that holds no adapter.
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

/// Names by which peft finds the adapted modules: their last parts if every module with such a name has an adapter, else the full names.
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

/// Encodes a safetensors file of float32 tensors.
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
