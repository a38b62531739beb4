//! Groups of layers whose keys and values are alike, so that they share blocks.

use crate::model::spec::{AttentionSpec, Spec};

/// Layers whose keys and values have one shape, and that see equally far back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// Indices of the layers in the model.
    pub layers: Vec<usize>,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Positions that a token sees, its own included; all if `None`.
    pub window: Option<usize>,
}

impl KvGroup {
    /// The groups of a model, in the order of their first layers. The drafter's block counts as a layer after the others. A layer with the keys
    /// and values of another is in none.
    pub(in crate::model) fn of(spec: &Spec) -> Vec<KvGroup> {
        let mut groups: Vec<KvGroup> = Vec::new();
        for (layer, block) in spec.all_blocks().enumerate() {
            let Some(a) = block.attention().filter(|a| a.has_own_keys()) else {
                continue;
            };
            match groups.iter_mut().find(|group| group.is_alike(a)) {
                Some(group) => group.layers.push(layer),
                None => groups.push(KvGroup {
                    layers: vec![layer],
                    kv_heads: a.kv_heads,
                    head_dim: a.head_dim,
                    window: a.window,
                }),
            }
        }
        groups
    }

    fn is_alike(&self, a: &AttentionSpec) -> bool {
        (self.kv_heads, self.head_dim, self.window) == (a.kv_heads, a.head_dim, a.window)
    }
}

/// The place of a layer in the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayerIndex {
    /// Index of the group.
    pub group: usize,
    /// Index of the layer in [`KvGroup::layers`].
    pub index: usize,
}

/// The places of `count` layers; those in no group have no keys and values.
pub(super) fn layer_groups(groups: &[KvGroup], count: usize) -> Vec<Option<KvLayerIndex>> {
    let mut layers = vec![None; count];
    for (group, of) in groups.iter().enumerate() {
        for (index, &layer) in of.layers.iter().enumerate() {
            layers[layer] = Some(KvLayerIndex { group, index });
        }
    }
    layers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;
    use crate::model::spec::MixerSpec;

    #[test]
    fn layers_of_one_shape_and_one_window_form_a_group() {
        let config = r#"{"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
            "vocab_size": 64, "max_position_embeddings": 512, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}"#;
        let mut spec = families::read(&serde_json::from_str(config).unwrap()).unwrap();
        let layers = |spec: &Spec| -> Vec<_> {
            KvGroup::of(spec)
                .into_iter()
                .map(|g| (g.layers, g.window))
                .collect()
        };
        let all = layers(&spec);
        assert_eq!(all, [(vec![0, 2], Some(8)), (vec![1, 3], None)]);
        let MixerSpec::Attention(attention) = &mut spec.blocks[3].mixer else {
            panic!("{spec:?}");
        };
        attention.head_dim = 16;
        let all = layers(&spec);
        assert_eq!(
            all,
            [(vec![0, 2], Some(8)), (vec![1], None), (vec![3], None)]
        );
        let places = layer_groups(&KvGroup::of(&spec), 4);
        let places: Vec<_> = places
            .iter()
            .flatten()
            .map(|p| (p.group, p.index))
            .collect();
        assert_eq!(places, [(0, 0), (1, 0), (0, 1), (2, 0)]);
    }
}
