//! The known families, with the kinds of blocks of each and the uses that are built for them: the table of `docs/models.md`.

use serde_json::json;

use super::families::{self, FAMILIES};
use super::fused;
use super::spec::{BlockSpec, MixerSpec, MlpSpec, Spec};
use super::training;
use crate::base::Result;

/// A family, by its defaults: what models of it consist of, and what refuses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilySupport {
    /// `model_type` in `config.json`; a text model within a larger one may add `_text`.
    pub model_type: &'static str,
    /// The entry of `architectures` in `config.json`.
    pub class: &'static str,
    /// The kinds of its blocks.
    pub blocks: Vec<String>,
    /// Why it does not run on a GPU, if it does not. Every family runs on the CPU.
    pub gpu: Option<String>,
    /// Why it is neither trained nor calibrated, if it is not.
    pub training: Option<String>,
    /// Why it is neither on a GPU, if it is on the CPU alone.
    pub training_on_gpu: Option<String>,
}

/// Numbers that stand for defaults. The experts of Nemotron-H's class are no multiple of the blocks of NVFP4, GLM's class has heads of no size,
/// and Granite's has factors that change nothing.
const NUMBERS: [(&str, usize); 4] = [
    ("head_dim", 128),
    ("logits_scaling", 8),
    ("moe_intermediate_size", 512),
    ("moe_shared_expert_intermediate_size", 512),
];

/// All known families.
pub fn known() -> Result<Vec<FamilySupport>> {
    let of = |family: &families::Family| {
        let mut config = json!({"model_type": family.model_type});
        for (key, number) in NUMBERS {
            config[key] = number.into();
        }
        let spec = families::read(&config)?;
        Ok(FamilySupport {
            model_type: family.model_type,
            class: family.class,
            blocks: kinds(&spec),
            gpu: fused::unsupported(&spec),
            training: training::untrainable(&spec),
            training_on_gpu: training::untrainable_on_gpu(&spec),
        })
    };
    FAMILIES.iter().map(of).collect()
}

/// The kinds of blocks of a model, in the order of their first blocks.
fn kinds(spec: &Spec) -> Vec<String> {
    let mixer = |block: &BlockSpec| match &block.mixer {
        MixerSpec::GatedDelta(_) => Some("gated delta net"),
        MixerSpec::Attention(attention) => match (attention.gated, attention.window) {
            _ if attention.sinks && attention.window.is_some() => {
                Some("attention with sinks and a window")
            }
            _ if attention.sinks => Some("attention with sinks"),
            (true, _) => Some("gated attention"),
            (false, Some(_)) => Some("attention with a window"),
            (false, None) => Some("attention"),
        },
        MixerSpec::Mamba2(_) => Some("Mamba-2"),
        MixerSpec::None => None,
    };
    let mlp = |block: &BlockSpec| match &block.mlp {
        MlpSpec::Dense(_) => Some("MLP"),
        MlpSpec::Experts(experts) => match experts.shared {
            Some(_) => Some("experts and a shared one"),
            None => Some("experts"),
        },
        MlpSpec::DenseAndExperts(..) => Some("MLP and experts"),
        MlpSpec::None => None,
    };
    let own = |block: &BlockSpec| block.per_layer.map(|_| "per-layer embedding");
    let mut kinds = Vec::new();
    for block in &spec.blocks {
        let halves = mixer(block).into_iter().chain(mlp(block)).chain(own(block));
        let halves: Vec<_> = halves.collect();
        let kind = halves.join(", ");
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{Activation, DenseMlpSpec, KeyValues, NormPlacement, QkNorm};

    /// The lines of the table in `docs/models.md`.
    fn table() -> String {
        let mut lines = vec![
            "| `model_type` | class | blocks | CPU | GPU | trained, calibrated |".to_owned(),
            "|---|---|---|---|---|---|".to_owned(),
        ];
        lines.extend(known().unwrap().iter().map(|family| {
            let FamilySupport {
                model_type,
                class,
                blocks,
                gpu,
                training,
                training_on_gpu,
            } = family;
            let blocks = blocks.join("; ");
            let training = match (training, training_on_gpu) {
                (Some(_), _) => "no",
                (None, Some(_)) => "CPU",
                (None, None) => "yes",
            };
            let gpu = if gpu.is_none() { "yes" } else { "no" };
            format!("| `{model_type}` | `{class}` | {blocks} | yes | {gpu} | {training} |")
        }));
        lines.join("\n")
    }

    #[test]
    fn the_page_of_models_has_every_family() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/models.md");
        let page = std::fs::read_to_string(path).unwrap();
        let table = table();
        assert!(
            page.contains(&table),
            "docs/models.md lacks this table:\n{table}"
        );
    }

    #[test]
    fn the_page_of_models_has_every_architecture_of_gguf() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/models.md");
        let page = std::fs::read_to_string(path).unwrap();
        let names = families::gguf().iter().map(|family| family.architecture);
        let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
        let list = format!("Architectures of GGUF: {}.", names.join(", "));
        assert!(page.contains(&list), "docs/models.md lacks this: {list}");
    }

    #[test]
    fn what_is_not_trained_is_named() {
        let known = known().unwrap();
        let of = |name: &str| known.iter().find(|f| f.model_type == name).unwrap();
        assert_eq!(of("qwen3").training_on_gpu, None);
        assert_eq!(of("qwen3_next").training, None);
        let refusal = of("nemotron_h").training.as_ref().unwrap();
        assert!(refusal.contains("block 0 is Mamba-2"), "{refusal}");
        let refusal = of("qwen3_next").training_on_gpu.as_ref().unwrap();
        assert!(
            refusal.contains("block 0 is a gated delta net"),
            "{refusal}"
        );
        for (family, words) in [
            ("nemotron_h", "block 0 is Mamba-2"),
            ("gpt_oss", "block 0 has attention with sinks"),
            ("gemma4", "block 0 has attention with a norm of values"),
        ] {
            let refusal = of(family).training.as_ref().unwrap();
            assert!(refusal.contains(words), "{refusal}");
        }
    }

    #[test]
    fn every_family_runs_on_a_gpu() {
        for family in known().unwrap() {
            assert_eq!(family.gpu, None, "{}", family.model_type);
        }
    }

    #[test]
    fn what_does_not_run_on_a_gpu_is_named() {
        let read = |family: &str| families::read(&json!({"model_type": family})).unwrap();
        let mlp = |spec: &mut Spec, change: fn(&mut DenseMlpSpec)| match &mut spec.blocks[1].mlp {
            MlpSpec::Dense(mlp) => change(mlp),
            other => panic!("{other:?}"),
        };
        let mut bare = read("qwen3");
        bare.blocks[1].norms.pre = false;
        let mut ungated = read("qwen3");
        mlp(&mut ungated, |mlp| mlp.gated = false);
        let mut squared = read("qwen3");
        mlp(&mut squared, |mlp| mlp.activation = Activation::ReluSquared);
        let gemma4 = |change: fn(&mut BlockSpec)| {
            let mut spec = read("gemma4");
            change(&mut spec.blocks[1]);
            spec.family = "qwen3";
            spec
        };
        let own = gemma4(|block| block.norms.post = false);
        let mut beside = gemma4(|block| block.norms.pre = false);
        let mixture = read("qwen3_moe").blocks[1].mlp.clone();
        if let (MlpSpec::Dense(mlp), MlpSpec::Experts(experts)) = (&beside.blocks[1].mlp, mixture) {
            beside.blocks[1].mlp = MlpSpec::DenseAndExperts(*mlp, experts);
        }
        let scaled = gemma4(|block| (block.norms.post, block.per_layer) = (false, None));
        let gated = gemma4(|block| {
            let own = block.per_layer.as_mut().unwrap();
            own.activation = Activation::ReluSquared;
        });
        let mut shared = read("qwen3");
        if let MixerSpec::Attention(attention) = &mut shared.blocks[1].mixer {
            attention.qk_norm = QkNorm::Projections;
            attention.key_values = KeyValues::KeysAsValues;
        }
        for (spec, what) in [
            (
                bare,
                "no norms before attention and MLP, and none after them",
            ),
            (beside, "experts, and no norm before them"),
            (
                shared,
                "a norm over all heads of queries, and no projections of keys and of values",
            ),
            (
                ungated,
                "an MLP without a gate whose activation is no squared ReLU",
            ),
            (squared, "a squared ReLU of a gate"),
            (
                own,
                "an input of its own, and no norms after attention and MLP",
            ),
            (
                scaled,
                "a factor of its residual stream, and no norms after attention and MLP",
            ),
            (
                gated,
                "an input of its own whose gate is neither SiLU nor GELU",
            ),
        ] {
            let expected = format!("block 1 of this qwen3 model has {what}");
            assert_eq!(fused::unsupported(&spec), Some(expected));
        }
        let mut drafts = read("qwen3_5");
        assert_eq!(fused::unsupported(&drafts), None);
        drafts.drafter.as_mut().unwrap().block.norms = NormPlacement {
            pre: false,
            post: true,
        };
        let expected =
            "the drafter's block of this qwen3_5 model has no norms before attention and MLP";
        assert_eq!(fused::unsupported(&drafts).unwrap(), expected);
    }
}
