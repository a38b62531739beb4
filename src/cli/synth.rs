//! `nvfp4 synth`: a model of a known shape with seeded random NVFP4 weights, for benchmarks. Its answers mean nothing; its
//! activations stay in a sane range.

use std::path::PathBuf;

use NVFP4::base::Result;
use NVFP4::checkpoint::{Encoding, Metadata, ModelOptWriter, Planned, TokenizerSource, Writer};
use NVFP4::format::nvfp4::BLOCK;
use NVFP4::format::random;
use clap::ValueEnum;
use serde_json::json;

use super::output;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The shape
    #[arg(long, value_enum)]
    arch: Arch,
    /// The directory to write
    #[arg(long)]
    out: PathBuf,
    /// Replace the model in the directory, with all that is in it, when the new one is whole; without it a directory that is not
    /// empty is refused
    #[arg(long)]
    force: bool,
    /// The seed of the weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Arch {
    #[value(name = "tiny")]
    Tiny,
    #[value(name = "qwen3-0.6b")]
    Qwen3_0_6B,
    #[value(name = "qwen3-1.7b")]
    Qwen3_1_7B,
    #[value(name = "qwen3-4b")]
    Qwen3_4B,
    #[value(name = "qwen3-8b")]
    Qwen3_8B,
}

struct Shape {
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    vocabulary: usize,
}

impl Arch {
    fn shape(self) -> Shape {
        let qwen3 = |hidden, layers, heads, intermediate| Shape {
            hidden,
            layers,
            heads,
            kv_heads: 8,
            head_dim: 128,
            intermediate,
            vocabulary: 151_936,
        };
        match self {
            Arch::Tiny => Shape {
                hidden: 64,
                layers: 2,
                heads: 4,
                kv_heads: 2,
                head_dim: 16,
                intermediate: 160,
                vocabulary: 640,
            },
            Arch::Qwen3_0_6B => qwen3(1024, 28, 16, 3072),
            Arch::Qwen3_1_7B => qwen3(2048, 28, 16, 6144),
            Arch::Qwen3_4B => qwen3(2560, 36, 32, 9728),
            Arch::Qwen3_8B => qwen3(4096, 36, 32, 12288),
        }
    }
}

fn plan(s: &Shape) -> Vec<Planned> {
    let mut plan = Vec::new();
    let mut add = |name: String, shape: &[usize], encoding| {
        plan.push(Planned {
            name,
            shape: shape.to_vec(),
            encoding,
        });
    };
    let (q, kv) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
    add(
        "model.embed_tokens.weight".into(),
        &[s.vocabulary, s.hidden],
        Encoding::BF16,
    );
    for layer in 0..s.layers {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}.weight");
        add(name("input_layernorm"), &[s.hidden], Encoding::BF16);
        add(name("self_attn.q_proj"), &[q, s.hidden], Encoding::Nvfp4);
        add(name("self_attn.k_proj"), &[kv, s.hidden], Encoding::Nvfp4);
        add(name("self_attn.v_proj"), &[kv, s.hidden], Encoding::Nvfp4);
        add(name("self_attn.o_proj"), &[s.hidden, q], Encoding::Nvfp4);
        add(name("self_attn.q_norm"), &[s.head_dim], Encoding::BF16);
        add(name("self_attn.k_norm"), &[s.head_dim], Encoding::BF16);
        add(
            name("post_attention_layernorm"),
            &[s.hidden],
            Encoding::BF16,
        );
        add(
            name("mlp.gate_proj"),
            &[s.intermediate, s.hidden],
            Encoding::Nvfp4,
        );
        add(
            name("mlp.up_proj"),
            &[s.intermediate, s.hidden],
            Encoding::Nvfp4,
        );
        add(
            name("mlp.down_proj"),
            &[s.hidden, s.intermediate],
            Encoding::Nvfp4,
        );
    }
    add("model.norm.weight".into(), &[s.hidden], Encoding::BF16);
    add(
        "lm_head.weight".into(),
        &[s.vocabulary, s.hidden],
        Encoding::Nvfp4,
    );
    plan
}

fn config(s: &Shape) -> serde_json::Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.intermediate,
        "vocab_size": s.vocabulary,
        "hidden_act": "silu",
        "attention_bias": false,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": null,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
    })
}

/// Root mean square of the 16 e2m1 values, each as likely as another.
const CODE_RMS: f32 = 2.926;

/// The standard deviation of the weights: Qwen's initializer_range.
const WEIGHT_RMS: f32 = 0.02;

/// Bytes made and written at a time: whole blocks' worth of codes and their scales.
const CHUNK: usize = 1 << 20;

fn fill(seed: u64, first: u64, out: &mut [u8]) {
    for (i, chunk) in out.chunks_mut(8).enumerate() {
        let bits = random::bits(seed, first + i as u64).to_le_bytes();
        chunk.copy_from_slice(&bits[..chunk.len()]);
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    let shape = args.arch.shape();
    let plan = plan(&shape);
    let metadata = Metadata {
        config: Some(config(&shape)),
        tokenizer: TokenizerSource::None,
    };
    let values = |p: &Planned| p.shape.iter().product::<usize>();
    let bytes = |p: &Planned| match p.encoding {
        Encoding::Nvfp4 => values(p) / 2 + values(p) / BLOCK,
        _ => values(p) * 2,
    } as u64;
    let total: u64 = plan.iter().map(bytes).sum();
    let bar = output::byte_bar("writing", total);
    let start = match args.force {
        true => ModelOptWriter::replace,
        false => ModelOptWriter::create,
    };
    let mut writer = Box::new(start(&args.out, &plan, &metadata)?);
    let mut codes = vec![0; CHUNK];
    let mut scales = vec![0; CHUNK * 2 / BLOCK];
    for (t, tensor) in plan.iter().enumerate() {
        let seed = random::bits(args.seed, t as u64);
        if tensor.encoding == Encoding::Nvfp4 {
            writer.begin(&tensor.name, WEIGHT_RMS / CODE_RMS)?;
            let all = values(tensor) / 2;
            for start in (0..all).step_by(CHUNK) {
                let n = CHUNK.min(all - start);
                fill(seed, (start / 8) as u64, &mut codes[..n]);
                let scales = &mut scales[..n * 2 / BLOCK];
                fill(!seed, (start / 64) as u64, scales);
                // Eight neighbouring scales from 0.75 to 1.375.
                scales.iter_mut().for_each(|s| *s = 0x34 + (*s & 7));
                writer.nvfp4(&codes[..n], scales)?;
                bar.inc((n + scales.len()) as u64);
            }
            continue;
        }
        writer.begin(&tensor.name, 1.0)?;
        if tensor.shape.len() == 1 {
            writer.values(&vec![1.0; values(tensor)])?;
            bar.inc(bytes(tensor));
            continue;
        }
        let all = values(tensor) * 2;
        for start in (0..all).step_by(CHUNK) {
            let n = CHUNK.min(all - start);
            fill(seed, (start / 8) as u64, &mut codes[..n]);
            // bf16 of either sign from 2^-7 to 2^-5: the sign, the lowest exponent bit and the mantissa are random.
            for high in codes[1..n].iter_mut().step_by(2) {
                *high = (*high & 0x80) | 0x3c;
            }
            writer.raw(&codes[..n])?;
            bar.inc(n as u64);
        }
    }
    writer.finish()?;
    bar.finish_and_clear();
    let parameters: usize = plan.iter().map(values).sum();
    if args.json {
        return output::json(&json!({"path": args.out, "bytes": total, "parameters": parameters}));
    }
    output::line(format_args!(
        "{}: {:.3} billion parameters, {}",
        args.out.display(),
        parameters as f64 / 1e9,
        output::size(total)
    ))
}
