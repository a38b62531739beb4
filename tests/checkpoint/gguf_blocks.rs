//! GGUF files whose metadata has a number for each block, Nemotron-H's and Gemma 4's: the config that they become, and what is refused.

use super::common::expect_kind;
use super::families::{bytes, float, integer};
use super::files::Gguf;
use NVFP4::base::{ErrorKind, Result};
use NVFP4::checkpoint::{Checkpoint, Encoding};
use NVFP4::model::{self, families, tensors};
use serde_json::{Value, json};

const F32: u32 = 0;
const NVFP4: u32 = 40;
/// IQ2_XXS, which is not read. Of such a tensor the name and the shape are known.
const UNREAD: u32 = 16;

/// A list of 32-bit integers.
fn integers(key: &str, values: &[i32]) -> Vec<u8> {
    let items: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Gguf::array_pair(key, 5, values.len() as u64, &items)
}

fn truths(key: &str, values: &[u8]) -> Vec<u8> {
    Gguf::array_pair(key, 7, values.len() as u64, values)
}

/// A file's metadata and its tensors in F32: names, dimensions innermost first, and values. A tensor without values is not read.
#[derive(Clone)]
struct File {
    architecture: &'static str,
    pairs: Vec<(&'static str, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, Vec<f32>)>,
}

impl File {
    /// Replaces a pair, or leaves it out.
    fn with(mut self, key: &'static str, pair: impl Into<Option<Vec<u8>>>) -> Self {
        self.pairs.retain(|(name, _)| *name != key);
        self.pairs.extend(pair.into().map(|pair| (key, pair)));
        self
    }

    fn integer(self, key: &'static str, value: u32) -> Self {
        let pair = integer(&format!("{}.{key}", self.architecture), value);
        self.with(key, pair)
    }

    fn float(self, key: &'static str, value: f32) -> Self {
        let pair = float(&format!("{}.{key}", self.architecture), value);
        self.with(key, pair)
    }

    fn integers(self, key: &'static str, values: &[i32]) -> Self {
        let pair = integers(&format!("{}.{key}", self.architecture), values);
        self.with(key, pair)
    }

    fn truths(self, key: &'static str, values: &[u8]) -> Self {
        let pair = truths(&format!("{}.{key}", self.architecture), values);
        self.with(key, pair)
    }

    /// Replaces a tensor.
    fn tensor(mut self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        self = self.without_tensor(name);
        let tensor = (name.to_owned(), dims.to_vec(), values.to_vec());
        self.tensors.push(tensor);
        self
    }

    fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|(other, ..)| other != name);
        self
    }

    fn open(&self) -> Result<Box<dyn Checkpoint>> {
        let mut gguf = Gguf::new(self.architecture);
        gguf.pairs.extend(self.pairs.iter().map(|(_, p)| p.clone()));
        let mut data = Vec::new();
        for (name, dims, values) in &self.tensors {
            let kind = if values.is_empty() { UNREAD } else { F32 };
            gguf = gguf.tensor(name, dims, kind, data.len() as u64);
            data.extend(bytes(values));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        model::open_bytes("x.gguf", gguf.with_data(data).build())
    }

    fn config(&self) -> Value {
        self.open().unwrap().metadata().config.clone().unwrap()
    }

    #[track_caller]
    fn refused(&self, kind: ErrorKind, words: &str) {
        expect_kind(self.open().map(drop), kind, words);
    }
}

/// Blocks of Mamba-2, attention, an MLP, and experts.
fn nemotron() -> File {
    let file = File {
        architecture: "nemotron_h_moe",
        pairs: Vec::new(),
        tensors: Vec::new(),
    };
    file.integer("block_count", 4)
        .integer("embedding_length", 64)
        .integer("attention.head_count", 4)
        .integer("attention.key_length", 32)
        .integers("attention.head_count_kv", &[0, 2, 0, 0])
        .integers("feed_forward_length", &[0, 0, 96, 96])
        .integer("ssm.time_step_rank", 4)
        .integer("ssm.inner_size", 64)
        .integer("rope.dimension_count", 16)
        .tensor("token_embd.weight", &[1, 3], &[0.0; 3])
        .tensor("blk.3.ffn_gate_inp.weight", &[1, 2], &[0.0; 2])
}

/// Layers with a window, with full attention, and one of each that takes the keys and values of those.
fn gemma4() -> File {
    let file = File {
        architecture: "gemma4",
        pairs: Vec::new(),
        tensors: Vec::new(),
    };
    file.integer("block_count", 4)
        .integer("embedding_length", 64)
        .integer("attention.head_count", 4)
        .integers("attention.head_count_kv", &[2, 1, 2, 1])
        .integer("attention.key_length", 32)
        .integer("attention.key_length_swa", 16)
        .integer("attention.sliding_window", 8)
        .truths("attention.sliding_window_pattern", &[1, 0, 1, 0])
        .integer("attention.shared_kv_layers", 2)
        .integers("feed_forward_length", &[48, 48, 96, 96])
        .float("rope.freq_base", 1e6)
        .float("rope.freq_base_swa", 1e4)
        .integer("rope.dimension_count", 32)
        .tensor("token_embd.weight", &[1, 3], &[0.0; 3])
        .tensor("rope_freqs.weight", &[16], &frequencies(&[1.0; 4]))
}

/// Divisors that begin with `first`; pairs with the others do not turn.
fn frequencies(first: &[f32]) -> Vec<f32> {
    let mut all = first.to_vec();
    all.resize(16, 1e30);
    all
}

#[test]
fn blocks_of_nemotron_are_told_by_their_numbers() {
    let c = nemotron().config();
    assert_eq!(c["hybrid_override_pattern"], "M*-E");
    assert_eq!(
        (&c["num_key_value_heads"], &c["intermediate_size"]),
        (&json!(2), &json!(96))
    );
    assert_eq!(
        (&c["mamba_head_dim"], &c["head_dim"]),
        (&json!(16), &json!(32))
    );
    // Attention is without positions, whatever the converter writes.
    assert!(c.get("rope_theta").is_none() && c.get("partial_rotary_factor").is_none());
    // llama.cpp's defaults are not those of transformers.
    let choice = [
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    ];
    assert_eq!(
        choice.map(|key| &c[key]),
        [&json!(false), &json!(1.0), &json!(1), &json!(1)]
    );
    for (key, name) in [
        ("use_bias", "blk.0.ssm_in.bias"),
        ("use_conv_bias", "blk.0.ssm_conv1d.bias"),
        ("mlp_bias", "blk.2.ffn_up.bias"),
        ("attention_bias", "blk.1.attn_q.bias"),
    ] {
        assert_eq!(c[key], false, "{key}");
        assert_eq!(
            nemotron().tensor(name, &[1], &[0.0]).config()[key],
            true,
            "{key}"
        );
    }
    // The numbers of a drafter's block follow those of the others.
    let file = nemotron()
        .integer("block_count", 5)
        .integer("nextn_predict_layers", 1)
        .integers("attention.head_count_kv", &[0, 2, 0, 0, 2])
        .integers("feed_forward_length", &[0, 0, 96, 96, 48])
        .tensor("blk.4.attn_q.weight", &[1, 1], &[0.0]);
    let c = file.config();
    assert_eq!(
        (&c["hybrid_override_pattern"], &c["num_hidden_layers"]),
        (&json!("M*-E"), &json!(4))
    );
    let opened = file.open().unwrap();
    assert!(opened.find("mtp.layers.0.mixer.q_proj.weight").is_some());
}

#[test]
fn vectors_of_mamba_are_stored_as_matrices() {
    let opened = nemotron()
        .tensor("blk.0.ssm_a", &[1, 4], &[-1.0, -2.0, -0.5, -4.0])
        .tensor("blk.0.ssm_d", &[1, 4], &[1.0, 2.0, 3.0, 4.0])
        .tensor("blk.0.ssm_norm.weight", &[2, 2], &[5.0, 6.0, 7.0, 8.0])
        .tensor("blk.0.ssm_conv1d.weight", &[2, 2], &[1.0, 2.0, 3.0, 4.0])
        .tensor("blk.0.ssm_dt.bias", &[4], &[4.0, 3.0, 2.0, 1.0])
        .open()
        .unwrap();
    let logs = [1f32, 2.0, 0.5, 4.0].map(f32::ln);
    for (name, shape, want) in [
        ("A_log", &[4][..], logs),
        ("D", &[4], [1.0, 2.0, 3.0, 4.0]),
        ("norm.weight", &[4], [5.0, 6.0, 7.0, 8.0]),
        ("conv1d.weight", &[2, 1, 2], [1.0, 2.0, 3.0, 4.0]),
        ("dt_bias", &[4], [4.0, 3.0, 2.0, 1.0]),
    ] {
        let entry = opened.find(&format!("model.layers.0.mixer.{name}"));
        let entry = entry.unwrap_or_else(|| panic!("{name}"));
        assert_eq!(entry.shape, shape, "{name}");
        let mut values = [0.0; 4];
        opened
            .rows_f32(entry, 0..entry.rows(), &mut values)
            .unwrap();
        assert_eq!(values, want, "{name}");
    }
}

#[test]
fn numbers_of_nemotron_that_make_no_blocks_are_refused() {
    let corrupt = |file: File, words: &str| file.refused(ErrorKind::CorruptFile, words);
    let heads = "attention.head_count_kv";
    corrupt(
        nemotron().integers(heads, &[0, 2, 0]),
        "'nemotron_h_moe.attention.head_count_kv' has 3 elements for 4 layers",
    );
    corrupt(
        nemotron().with("feed_forward_length", None),
        "it has no nemotron_h_moe.feed_forward_length",
    );
    corrupt(
        nemotron().integers(heads, &[0, -1, 0, 0]),
        "'nemotron_h_moe.attention.head_count_kv' is -1 for block 1; expected at least 0",
    );
    corrupt(
        nemotron().integers(heads, &[0, 2, 3, 0]),
        "block 2 has 3 key heads ('nemotron_h_moe.attention.head_count_kv') and an MLP of width 96",
    );
    corrupt(
        nemotron().integer("ssm.inner_size", 66),
        "'nemotron_h_moe.ssm.inner_size' is 66, which 4 heads ('nemotron_h_moe.ssm.time_step_rank') do not divide",
    );
    corrupt(
        nemotron().integer("block_count", 1 << 30),
        "is 1073741824; expected at most 4096",
    );
    let unlike = nemotron().integers("feed_forward_length", &[0, 0, 96, 64]);
    unlike.refused(
        ErrorKind::Unsupported,
        "'nemotron_h_moe.feed_forward_length' is 96 for block 2 and 64 for block 3; blocks of one kind must be alike",
    );
}

#[test]
fn gemma4_files_say_what_its_layers_have() {
    let c = gemma4().config();
    let types = ["sliding_attention", "full_attention"];
    assert_eq!(c["layer_types"], json!([types, types].concat()));
    for (key, want) in [
        ("num_key_value_heads", json!(2)),
        ("num_global_key_value_heads", json!(1)),
        ("head_dim", json!(16)),
        ("global_head_dim", json!(32)),
        ("num_kv_shared_layers", json!(2)),
        ("intermediate_size", json!(48)),
        ("use_double_wide_mlp", json!(true)),
        ("attention_k_eq_v", json!(true)),
        ("hidden_size_per_layer_input", json!(0)),
        ("enable_moe_block", json!(false)),
    ] {
        assert_eq!(c[key], want, "{key}");
    }
    let full = &c["rope_parameters"]["full_attention"];
    assert_eq!(
        (&full["rope_type"], &full["partial_rotary_factor"]),
        (&json!("proportional"), &json!(0.25))
    );
    assert_eq!(c["rope_parameters"]["sliding_attention"]["rope_theta"], 1e4);
    assert!(c.get("rope_theta").is_none());
    // The divisors are in the config alone.
    let opened = gemma4().open().unwrap();
    assert!(opened.find("rope_freqs.weight").is_none());
    // Values of the layer that takes those of another are in published files too.
    for (name, shared) in [
        ("blk.1.attn_v.weight", false),
        ("blk.3.attn_v.weight", true),
    ] {
        let c = gemma4().tensor(name, &[1, 1], &[0.0]).config();
        assert_eq!(c["attention_k_eq_v"], shared, "{name}");
    }
    let plain = gemma4()
        .integers("feed_forward_length", &[48; 4])
        .integer("attention.head_count_kv", 2)
        .config();
    assert_eq!(
        (
            &plain["use_double_wide_mlp"],
            &plain["num_global_key_value_heads"]
        ),
        (&json!(false), &json!(2))
    );
    let cap = |cap| gemma4().float("final_logit_softcapping", cap).config();
    assert_eq!(cap(30.0)["final_logit_softcapping"], 30.0);
    assert!(cap(0.0).get("final_logit_softcapping").is_none());
}

/// The number of parameters of the model in a file, by its metadata.
fn parameters(file: &File) -> usize {
    let spec = families::read(&file.config()).unwrap();
    let stored = tensors::stored(&spec).into_iter();
    stored
        .map(|(_, shape, _)| shape.iter().product::<usize>())
        .sum()
}

/// Sizes as the metadata of published files has them, and the parameters that their makers or transformers count.
#[test]
fn published_files_have_the_parameters_of_their_models() {
    let kinds = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME";
    let each = |letter: char, value: i32| -> Vec<i32> {
        let letters = kinds.chars();
        letters
            .map(|l| if l == letter { value } else { 0 })
            .collect()
    };
    let mut nemotron = nemotron()
        .without_tensor("blk.3.ffn_gate_inp.weight")
        .integer("block_count", 52)
        .integer("context_length", 1 << 20)
        .integer("embedding_length", 2688)
        .integer("attention.head_count", 32)
        .integer("attention.key_length", 128)
        .float("attention.layer_norm_rms_epsilon", 1e-5)
        .integers("attention.head_count_kv", &each('*', 2))
        .integers("feed_forward_length", &each('E', 1856))
        .integer("ssm.conv_kernel", 4)
        .integer("ssm.state_size", 128)
        .integer("ssm.group_count", 8)
        .integer("ssm.time_step_rank", 64)
        .integer("ssm.inner_size", 4096)
        .integer("expert_count", 128)
        .integer("expert_used_count", 6)
        .integer("expert_feed_forward_length", 1856)
        .integer("expert_shared_feed_forward_length", 3712)
        .integer("expert_shared_count", 1)
        .float("expert_weights_scale", 2.5)
        .tensor("token_embd.weight", &[2688, 131_072], &[])
        .tensor("output.weight", &[2688, 131_072], &[])
        .tensor("blk.0.ssm_conv1d.bias", &[6144], &[]);
    for (block, _) in kinds.match_indices('E') {
        nemotron = nemotron.tensor(
            &format!("blk.{block}.ffn_gate_inp.weight"),
            &[2688, 128],
            &[],
        );
    }
    assert_eq!(parameters(&nemotron), 31_577_940_288);

    let windowed: Vec<u8> = (1..=30).map(|n| u8::from(n % 6 != 0)).collect();
    let kv_heads: Vec<i32> = windowed
        .iter()
        .map(|&w| if w == 1 { 8 } else { 2 })
        .collect();
    let divisors: Vec<f32> = (0..256).map(|i| if i < 64 { 1.0 } else { 1e30 }).collect();
    let gemma = gemma4()
        .integer("block_count", 30)
        .integer("context_length", 1 << 18)
        .integer("embedding_length", 2816)
        .integer("attention.head_count", 16)
        .integers("attention.head_count_kv", &kv_heads)
        .integer("attention.key_length", 512)
        .integer("attention.key_length_swa", 256)
        .float("attention.layer_norm_rms_epsilon", 1e-6)
        .integer("attention.sliding_window", 1024)
        .truths("attention.sliding_window_pattern", &windowed)
        .integer("attention.shared_kv_layers", 0)
        .integer("feed_forward_length", 2112)
        .integer("rope.dimension_count", 512)
        .integer("expert_count", 128)
        .integer("expert_used_count", 8)
        .integer("expert_feed_forward_length", 704)
        .float("final_logit_softcapping", 30.0)
        .tensor("token_embd.weight", &[2816, 262_144], &[])
        .tensor("rope_freqs.weight", &[256], &divisors);
    assert_eq!(parameters(&gemma), 25_233_141_790);
}

/// Down projections in NVFP4 have the product of their global scales and the experts' factors in one tensor.
#[test]
fn factors_of_experts_scale_weights_in_nvfp4_too() {
    let mut gguf = Gguf::new("gemma4");
    gguf.pairs
        .extend(gemma4().pairs.into_iter().map(|(_, pair)| pair));
    // Two experts of one row: four scales of 1, and codes of 1.
    let block = [&[0x38; 4][..], &[0x22; 32]].concat();
    let mut data = vec![0; 64];
    data[..64].copy_from_slice(&bytes(&frequencies(&[1.0; 16])));
    for _ in 0..4 {
        data.extend(&block);
    }
    data.resize(data.len().next_multiple_of(32), 0);
    let scales = data.len() as u64;
    data.extend(bytes(&[0.5, 0.25]));
    data.resize(data.len().next_multiple_of(32), 0);
    let others = data.len() as u64;
    data.extend(bytes(&[8.0, 4.0]));
    let opened = gguf
        .tensor("rope_freqs.weight", &[16], F32, 0)
        .tensor("blk.0.ffn_down_exps.weight", &[64, 2, 2], NVFP4, 64)
        .tensor("blk.0.ffn_down_exps.scale", &[2], F32, scales)
        .tensor("blk.0.ffn_gate_inp.scale", &[2], F32, others)
        .with_data(data)
        .build();
    let opened = model::open_bytes("x.gguf", opened).unwrap();
    let stack = opened.find("model.layers.0.experts.down_proj.weight");
    let stack = stack.unwrap();
    assert_eq!(stack.encoding, Encoding::Nvfp4);
    assert_eq!(opened.global_scales(stack).unwrap(), [1.0]);
    for (name, want) in [("per_expert_scale", [0.5, 0.25]), ("scale", [8.0, 4.0])] {
        let entry = opened.find(&format!("model.layers.0.router.{name}"));
        let mut values = [0.0; 2];
        opened.rows_f32(entry.unwrap(), 0..1, &mut values).unwrap();
        assert_eq!(values, want, "{name}");
    }
}

#[test]
fn numbers_of_gemma4_that_make_no_model_are_refused() {
    let corrupt = |file: File, words: &str| file.refused(ErrorKind::CorruptFile, words);
    let unsupported = |file: File, words: &str| file.refused(ErrorKind::Unsupported, words);
    let (pattern, freqs) = ("attention.sliding_window_pattern", "rope_freqs.weight");
    corrupt(
        gemma4().truths(pattern, &[1, 1, 0]),
        "'gemma4.attention.sliding_window_pattern' has 3 elements for 4 layers",
    );
    corrupt(
        gemma4().integer(pattern, 6),
        "'gemma4.attention.sliding_window_pattern' is no list; expected a truth value for each block",
    );
    corrupt(
        gemma4().integer("attention.sliding_window", 0),
        "'gemma4.attention.sliding_window' is 0 or missing, but layers have a window",
    );
    corrupt(
        gemma4().integers("feed_forward_length", &[48, 48, 72, 72]),
        "'gemma4.feed_forward_length' is 72 for block 2; expected 48, as before it, or twice as much",
    );
    unsupported(
        gemma4().integers("attention.head_count_kv", &[2, 1, 4, 1]),
        "'gemma4.attention.head_count_kv' is 2 for block 0 and 4 for block 2; blocks of one kind must be alike",
    );
    corrupt(
        gemma4().with("attention.key_length_swa", None),
        "it has no gemma4.attention.key_length_swa",
    );
    corrupt(
        gemma4().with("rope.freq_base_swa", None),
        "it has no gemma4.rope.freq_base_swa",
    );
    corrupt(
        gemma4().integer("rope.dimension_count", 8),
        "'gemma4.rope.dimension_count' is 8; expected 32",
    );
    corrupt(
        gemma4().without_tensor(freqs),
        "it has no rope_freqs.weight",
    );
    corrupt(
        gemma4().tensor(freqs, &[8], &[1.0; 8]),
        "'rope_freqs.weight' has 8 elements; expected 16, half the width of a head ('gemma4.attention.key_length')",
    );
    unsupported(
        gemma4().tensor(freqs, &[16], &frequencies(&[1.0, 2.5])),
        "'rope_freqs.weight' has 2.5 after 1 ones; expected at least 1e20",
    );
    let scaled = gemma4().float("rope.scaling.factor", 8.0);
    unsupported(
        scaled,
        "it has rope scaling, {\"rope_type\":\"linear\",\"factor\":8.0}; Gemma 4 is known only without",
    );
    let one_of_two = gemma4().with("attention.shared_kv_layers", None).tensor(
        "blk.3.attn_v.weight",
        &[1, 1],
        &[0.0],
    );
    corrupt(
        one_of_two.integers("feed_forward_length", &[48; 4]),
        "'blk.3.attn_v.weight': there is none for block 1, which has full attention too",
    );
}
