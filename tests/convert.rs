//! Conversion of a model on disk to NVFP4 on disk, against quantizing each tensor in memory.

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use NVFP4::base::ErrorKind;
use NVFP4::base::files::Files;
use NVFP4::base::threads::Pool;
use NVFP4::checkpoint::{
    Checkpoint, Encoding, Metadata, ModelOptWriter, Planned, TOKENIZER_FILES, TOOL_TEMPLATE,
    TokenizerSource, Writer,
};
use NVFP4::format::nvfp4::{self, Levels, QuantizeOptions, Recipe};
use NVFP4::format::random;
use NVFP4::format::{e4m3, int8};
use NVFP4::model;
use NVFP4::model::convert::{Container, ConvertOptions, ConvertReport, Tables, convert};
use NVFP4::tensor::DType;
use NVFP4::text::read_files;
use common::expect_kind;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("nvfp4-convert-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const LAYER: &str = "model.layers.0.";

/// A qwen2 model of one layer whose head is tied to an embedding of `vocab` rows.
fn plan(vocab: usize) -> Vec<Planned> {
    let tensor = |name: &str, shape: &[usize], encoding| Planned {
        name: name.to_owned(),
        shape: shape.to_vec(),
        encoding,
    };
    let (bf16, f32) = (Encoding::Dense(DType::BF16), Encoding::Dense(DType::F32));
    let layer = |name: &str, shape: &[usize]| tensor(&format!("{LAYER}{name}"), shape, bf16);
    vec![
        tensor("model.embed_tokens.weight", &[vocab, 32], bf16),
        layer("self_attn.q_proj.weight", &[32, 32]),
        layer("self_attn.k_proj.weight", &[16, 32]),
        layer("self_attn.v_proj.weight", &[16, 32]),
        layer("self_attn.q_proj.bias", &[32]),
        layer("self_attn.k_proj.bias", &[16]),
        layer("self_attn.v_proj.bias", &[16]),
        layer("self_attn.o_proj.weight", &[32, 32]),
        layer("mlp.gate_proj.weight", &[48, 32]),
        layer("mlp.up_proj.weight", &[48, 32]),
        layer("mlp.down_proj.weight", &[32, 48]),
        layer("input_layernorm.weight", &[32]),
        layer("post_attention_layernorm.weight", &[32]),
        tensor("model.norm.weight", &[32], f32),
    ]
}

/// More rows than one region of parts has.
const MANY: usize = 140_000;

/// The config of such a model.
fn config(plan: &[Planned]) -> serde_json::Value {
    serde_json::json!({
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": plan[0].shape[0], "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": true,
    })
}

/// A dense model whose weights differ in size from tensor to tensor; `broken` gets a NaN.
fn write_source(directory: &Path, broken: Option<&str>, plan: &[Planned]) {
    let metadata = Metadata {
        config: Some(config(plan)),
        tokenizer: TokenizerSource::None,
        embedding: Vec::new(),
    };
    let mut writer = Box::new(ModelOptWriter::create(directory, plan, &metadata).unwrap());
    for (t, tensor) in plan.iter().enumerate() {
        let n: usize = tensor.shape.iter().product();
        let mut values: Vec<f32> = (0..n as u64)
            .map(|i| {
                let bits = random::bits(t as u64, i);
                (bits as i64 as f64 / 2f64.powi(63) * f64::from(1 + t as u32)) as f32
            })
            .collect();
        if broken == Some(tensor.name.as_str()) {
            values[n - 5] = f32::NAN;
        }
        writer.begin(&tensor.name, 1.0).unwrap();
        writer.values(&values).unwrap();
    }
    writer.finish().unwrap();
}

fn values(checkpoint: &dyn Checkpoint, name: &str) -> Vec<f32> {
    let entry = checkpoint.find(name).unwrap();
    let mut out = vec![0.0; entry.rows() * entry.cols()];
    checkpoint
        .rows_f32(entry, 0..entry.rows(), &mut out)
        .unwrap();
    out
}

fn run(source: &Path, out: &Path, options: &ConvertOptions) -> NVFP4::base::Result<ConvertReport> {
    let source = model::open(source)?;
    let pool = Pool::new(3)?;
    convert(&*source, out, options, &pool, &mut |_| {
        ControlFlow::Continue(())
    })
}

/// Checks `name` of `out` against `values` quantized in memory with `global`.
fn check(out: &dyn Checkpoint, name: &str, values: &[f32], global: f32, options: &QuantizeOptions) {
    let entry = out
        .find(name)
        .unwrap_or_else(|| panic!("{name} is missing"));
    assert_eq!(entry.encoding, Encoding::Nvfp4, "{name}");
    let (rows, cols) = (entry.rows(), entry.cols());
    let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 16]);
    nvfp4::quantize_rows(values, cols, 0, global, options, &mut codes, &mut scales).unwrap();
    let (mut got_codes, mut got_scales) = (vec![0; codes.len()], vec![0; scales.len()]);
    out.rows_nvfp4(entry, 0..rows, &mut got_codes, &mut got_scales)
        .unwrap();
    assert_eq!(out.global_scale(entry).unwrap(), global, "{name}");
    assert!(codes == got_codes && scales == got_scales, "{name}");
}

/// Experts that a GGUF file has as stacks become tensors of their own, quantized each by itself, and the model runs.
#[test]
fn stacks_of_experts_come_apart() {
    let scratch = Scratch::new("experts");
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf/qwen3moe_normalized.gguf");
    let source = model::open(&file).unwrap();
    let out = scratch.0.join("out");
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    let report = run(&file, &out, &options).unwrap();
    // Two blocks of four projections of attention and six experts of three.
    assert_eq!(report.quantized, 2 * (4 + 6 * 3));
    let made = model::open(&out).unwrap();
    for projection in ["gate_proj", "up_proj", "down_proj"] {
        let stack = source
            .find(&format!("model.layers.1.mlp.experts.{projection}.weight"))
            .unwrap();
        let (rows, cols) = (stack.shape[1], stack.shape[2]);
        for expert in 0..6 {
            let name = format!("model.layers.1.mlp.experts.{expert}.{projection}.weight");
            assert_eq!(made.find(&name).unwrap().shape, [rows, cols]);
            let mut want = vec![0f32; rows * cols];
            let of_expert = expert * rows..(expert + 1) * rows;
            source.rows_f32(stack, of_expert, &mut want).unwrap();
            let got = values(&*made, &name);
            let error: f32 = got.iter().zip(&want).map(|(a, b)| (a - b).powi(2)).sum();
            let norm: f32 = want.iter().map(|b| b * b).sum();
            // Quantizing again loses nothing if global scales are equal, and little otherwise.
            assert!(error <= norm * 0.02, "{name}: {error} of {norm}");
        }
    }
    let router = made.find("model.layers.0.mlp.gate.weight").unwrap();
    assert_ne!(router.encoding, Encoding::Nvfp4);
    let model = model::Model::load(
        &out,
        &model::LoadOptions::new(model::Device::cpu(Some(1)).unwrap()),
    )
    .unwrap();
    assert_eq!(model.info().formats["nvfp4"].tensors, report.quantized);
}

#[test]
fn weights_are_quantized_and_the_rest_is_kept() {
    let scratch = Scratch::new("kept");
    write_source(&scratch.0.join("in"), None, &plan(MANY));
    let source = model::open(&scratch.0.join("in")).unwrap();
    for (container, out) in [
        (Container::ModelOpt, "out"),
        (Container::Dat, "dat/model.dat"),
    ] {
        for recipe in [Recipe::Amax, Recipe::FourOverSix, Recipe::Sweep] {
            // The directory of the recipe before is replaced.
            let options = ConvertOptions {
                replace: true,
                ..ConvertOptions::new(container, recipe)
            };
            let path = scratch.0.join(out);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let report = run(&scratch.0.join("in"), &path, &options).unwrap();
            assert_eq!(
                (report.tensors, report.quantized, report.kept_nvfp4),
                (14, 7, 0)
            );
            assert_eq!((report.embedding, report.head), ("BF16", "BF16"));
            assert!((0.05..0.15).contains(&report.relative_error), "{report:?}");
            let converted = model::open(&path).unwrap();
            assert_eq!(converted.entries().len(), 14);
            assert!(converted.find("lm_head.weight").is_none());
            let config = converted.metadata().config.as_ref().unwrap();
            assert_eq!(config["tie_word_embeddings"], true);
            assert_eq!(config["model_type"], "qwen2");

            let global = |names: &[&str]| {
                let amax =
                    |n: &&str| nvfp4::amax(&values(&*source, n), 0, Default::default()).unwrap();
                nvfp4::global_scale(
                    names.iter().map(amax).fold(0.0, f32::max),
                    &options.quantize,
                )
            };
            let name = |n: &str| format!("{LAYER}{n}");
            let qkv = ["q", "k", "v"].map(|p| name(&format!("self_attn.{p}_proj.weight")));
            let mlp = ["gate", "up"].map(|p| name(&format!("mlp.{p}_proj.weight")));
            let single = ["self_attn.o_proj.weight", "mlp.down_proj.weight"].map(name);
            let groups = [&qkv[..], &mlp[..], &single[..1], &single[1..]];
            for group in groups {
                let names: Vec<&str> = group.iter().map(String::as_str).collect();
                let global = global(&names);
                for n in names {
                    check(
                        &*converted,
                        n,
                        &values(&*source, n),
                        global,
                        &options.quantize,
                    );
                }
            }
            let embedding = "model.embed_tokens.weight";
            for kept in [
                embedding,
                &name("self_attn.q_proj.bias"),
                "model.norm.weight",
            ] {
                let entry = converted.find(kept).unwrap();
                assert_eq!(
                    entry.encoding,
                    source.find(kept).unwrap().encoding,
                    "{kept}"
                );
                assert_eq!(values(&*converted, kept), values(&*source, kept), "{kept}");
            }
        }
    }
    // NVFP4 weights stay bit for bit, unless the container cannot hold their global scale.
    let again = run(
        &scratch.0.join("out"),
        &scratch.0.join("again"),
        &ConvertOptions::new(Container::ModelOpt, Recipe::Amax),
    )
    .unwrap();
    assert_eq!(
        (again.quantized, again.kept_nvfp4, again.relative_error),
        (0, 7, 0.0)
    );
    let bytes = |d: &str| std::fs::read(scratch.0.join(d).join("model.safetensors")).unwrap();
    assert!(bytes("out") == bytes("again"));
    std::fs::create_dir_all(scratch.0.join("dat2")).unwrap();
    let single = run(
        &scratch.0.join("out"),
        &scratch.0.join("dat2/model.dat"),
        &ConvertOptions::new(Container::Dat, Recipe::Amax),
    )
    .unwrap();
    assert_eq!((single.quantized, single.kept_nvfp4), (7, 0));
}

#[test]
fn a_head_is_kept_where_that_is_asked_for() {
    let scratch = Scratch::new("head");
    let mut plan = plan(40);
    let options = ConvertOptions {
        keep_head: true,
        ..ConvertOptions::new(Container::ModelOpt, Recipe::Amax)
    };
    let (tied, own) = (scratch.0.join("tied"), scratch.0.join("own"));
    let out = scratch.0.join("out");
    write_source(&tied, None, &plan);
    let report = run(&tied, &out, &options).unwrap();
    assert_eq!((report.quantized, report.head), (7, "BF16"));
    let converted = model::open(&out).unwrap();
    assert!(converted.find("lm_head.weight").is_none());
    let config = converted.metadata().config.as_ref().unwrap();
    assert_eq!(config["tie_word_embeddings"], true);

    plan.push(Planned {
        name: "lm_head.weight".to_owned(),
        shape: vec![40, 32],
        encoding: Encoding::Dense(DType::BF16),
    });
    write_source(&own, None, &plan);
    let report = run(&own, &scratch.0.join("out2"), &options).unwrap();
    assert_eq!((report.quantized, report.head), (7, "BF16"));
    let converted = model::open(&scratch.0.join("out2")).unwrap();
    let head = converted.find("lm_head.weight").unwrap();
    assert_eq!(head.encoding, Encoding::Dense(DType::BF16));
}

/// A model whose embedding, and head if it has its own, have this encoding; `tied` is the value in its config.
fn write_tables(directory: &Path, table: Encoding, has_head: bool, tied: bool) {
    let mut plan = plan(40);
    plan[0].encoding = table;
    if has_head {
        plan.push(Planned {
            name: "lm_head.weight".to_owned(),
            ..plan[0].clone()
        });
    }
    let mut config = config(&plan);
    config["tie_word_embeddings"] = tied.into();
    let metadata = Metadata {
        config: Some(config.clone()),
        tokenizer: TokenizerSource::None,
        embedding: Vec::new(),
    };
    let mut writer = Box::new(ModelOptWriter::create(directory, &plan, &metadata).unwrap());
    for tensor in &plan {
        let cols = *tensor.shape.last().unwrap();
        let n: usize = tensor.shape.iter().product();
        let values: Vec<f32> = (0..n as u64)
            .map(|i| random::uniform(n as u64, i) - 0.5)
            .collect();
        writer.begin(&tensor.name, 1.0).unwrap();
        match tensor.encoding {
            Encoding::Nvfp4 => {
                let made = nvfp4::quantize(&values, n / cols, cols, &QuantizeOptions::default());
                let made = made.unwrap();
                writer.nvfp4(&made.codes, &made.scales).unwrap();
            }
            Encoding::Int8 => {
                let (mut codes, mut scales) = (vec![0; n], vec![0.0; n / cols]);
                int8::quantize_rows(&values, cols, 0, &mut codes, &mut scales).unwrap();
                writer.int8(&codes, &scales).unwrap();
            }
            Encoding::Dense(DType::F8E4M3) => {
                let bytes: Vec<u8> = values.iter().map(|&v| e4m3::encode(v)).collect();
                writer.raw(&bytes).unwrap();
            }
            _ => writer.values(&values).unwrap(),
        }
    }
    writer.finish().unwrap();
    if table == Encoding::Dense(DType::F8E4M3) {
        // Float8 of a quantized model has scales.
        config
            .as_object_mut()
            .unwrap()
            .remove("quantization_config");
        std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
    }
}

/// Tables by encoding of the source and by option. A tied table stays one.
#[test]
fn tables_are_written_as_is_asked_for() {
    let dense = Encoding::Dense;
    let (bf16, int8, fp4) = (dense(DType::BF16), Encoding::Int8, Encoding::Nvfp4);
    let scratch = Scratch::new("tables");
    let (source, out) = (scratch.0.join("in"), scratch.0.join("out"));
    let dat = scratch.0.join("dat/model.dat");
    for (stored, auto) in [
        (bf16, bf16),
        (dense(DType::F16), dense(DType::F16)),
        (dense(DType::F32), bf16),
        (dense(DType::F8E4M3), int8),
        (int8, int8),
        (fp4, fp4),
    ] {
        for has_head in [false, true] {
            let _ = std::fs::remove_dir_all(&source);
            write_tables(&source, stored, has_head, !has_head);
            let opened = model::open(&source).unwrap();
            for (tables, want) in [
                (Tables::Auto, auto),
                (Tables::Bf16, bf16),
                (Tables::Int8, int8),
                (Tables::Nvfp4, fp4),
            ] {
                let case = format!("{stored}, head: {has_head}, {tables:?}");
                let options = ConvertOptions {
                    tables,
                    replace: true,
                    ..ConvertOptions::new(Container::ModelOpt, Recipe::Amax)
                };
                let report = run(&source, &out, &options).unwrap();
                let made = model::open(&out).unwrap();
                let config = made.metadata().config.as_ref().unwrap();
                assert_eq!(config["tie_word_embeddings"], !has_head, "{case}");
                assert_eq!(made.find("lm_head.weight").is_some(), has_head, "{case}");
                assert_eq!((report.embedding, report.head), (want.name(), want.name()));
                let count = if has_head { 2 } else { 1 };
                assert_eq!(report.int8, if want == int8 { count } else { 0 }, "{case}");
                for name in ["model.embed_tokens.weight", "lm_head.weight"] {
                    let Some(entry) = made.find(name) else {
                        continue;
                    };
                    assert_eq!(entry.encoding, want, "{case}: {name}");
                    check_table(&*opened, &*made, name, &case);
                }
                // The other container has no int8.
                std::fs::create_dir_all(dat.parent().unwrap()).unwrap();
                let options = ConvertOptions {
                    tables,
                    ..ConvertOptions::new(Container::Dat, Recipe::Amax)
                };
                let made = run(&source, &dat, &options);
                if tables == Tables::Int8 {
                    let words = ".dat holds no int8 tables; ask for bf16 or nvfp4";
                    expect_kind(made, ErrorKind::Unsupported, words);
                    continue;
                }
                let want = if want == int8 { bf16 } else { want };
                assert_eq!(made.unwrap().embedding, want.name(), "{case}, dat");
                let _ = std::fs::remove_dir_all(dat.parent().unwrap());
            }
            // The head, or the table that it shares, stays in its precision whatever is asked for.
            let options = ConvertOptions {
                tables: Tables::Nvfp4,
                keep_head: true,
                replace: true,
                ..ConvertOptions::new(Container::ModelOpt, Recipe::Amax)
            };
            let report = run(&source, &out, &options).unwrap();
            let kept = match stored {
                Encoding::Dense(DType::F8E4M3) => bf16,
                same => same,
            };
            assert_eq!(report.head, kept.name(), "{stored}");
            let embedding = if has_head { fp4 } else { kept };
            assert_eq!(report.embedding, embedding.name(), "{stored}");
        }
    }
}

/// Checks the values of a table against those of the source, quantized in memory as it is.
fn check_table(source: &dyn Checkpoint, made: &dyn Checkpoint, name: &str, case: &str) {
    let (want, got) = (values(source, name), values(made, name));
    let (stored, entry) = (source.find(name).unwrap(), made.find(name).unwrap());
    let cols = entry.cols();
    match entry.encoding {
        same if same == stored.encoding => assert_eq!(got, want, "{case}"),
        Encoding::Int8 => {
            let (mut codes, mut scales) = (vec![0; want.len()], vec![0.0; entry.rows()]);
            int8::quantize_rows(&want, cols, 0, &mut codes, &mut scales).unwrap();
            let (mut got_codes, mut got_scales) = (codes.clone(), scales.clone());
            made.rows_int8(entry, 0..entry.rows(), &mut got_codes, &mut got_scales)
                .unwrap();
            assert!(codes == got_codes && scales == got_scales, "{case}");
        }
        Encoding::Nvfp4 => {
            let options = QuantizeOptions::default();
            let amax = nvfp4::amax(&want, 0, Default::default()).unwrap();
            let global = nvfp4::global_scale(amax, &options);
            check(made, name, &want, global, &options);
        }
        _ => {
            let rounded = want.iter().map(|&v| half::bf16::from_f32(v).to_f32());
            assert!(rounded.eq(got.iter().copied()), "{case}");
        }
    }
}

/// A file that has a tied head as a tensor of its own, as some exporters write it, gives a model that has it once.
#[test]
fn a_tied_head_is_never_written_twice() {
    let scratch = Scratch::new("twice");
    let (source, out) = (scratch.0.join("in"), scratch.0.join("out"));
    let options = ConvertOptions {
        replace: true,
        ..ConvertOptions::new(Container::ModelOpt, Recipe::Amax)
    };
    for (tied, heads) in [(true, false), (false, true)] {
        let _ = std::fs::remove_dir_all(&source);
        write_tables(&source, Encoding::Dense(DType::BF16), true, tied);
        run(&source, &out, &options).unwrap();
        let made = model::open(&out).unwrap();
        assert_eq!(made.find("lm_head.weight").is_some(), heads);
        let config = made.metadata().config.as_ref().unwrap();
        assert_eq!(config["tie_word_embeddings"], tied);
    }
}

#[test]
fn the_files_of_the_tokenizer_go_along() {
    let scratch = Scratch::new("companions");
    let source = scratch.0.join("in");
    write_source(&source, None, &plan(4000));
    for name in TOKENIZER_FILES {
        let content = match name.ends_with(".json") {
            true => format!(r#"{{"chat_template": "of {name}"}}"#),
            false => format!("of {name}"),
        };
        std::fs::write(source.join(name), content).unwrap();
    }
    // The template in a file of its own comes before the one in the tokenizer's config, and the Jinja file before both.
    std::fs::remove_file(source.join("chat_template.jinja")).unwrap();
    let template = r#"{"chat_template": "of its own file"}"#;
    std::fs::write(source.join("chat_template.json"), template).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/text/tokenizer.json");
    let tokenizer = std::fs::read(tokenizer).unwrap();
    std::fs::write(source.join("tokenizer.json"), tokenizer).unwrap();
    for (container, out) in [
        (Container::ModelOpt, "out"),
        (Container::Dat, "dat/model.dat"),
    ] {
        let path = scratch.0.join(out);
        let directory = match container {
            Container::ModelOpt => path.as_path(),
            Container::Dat => path.parent().unwrap(),
        };
        std::fs::create_dir_all(directory).unwrap();
        let options = ConvertOptions::new(container, Recipe::Amax);
        run(&source, &path, &options).unwrap();
        for name in TOKENIZER_FILES {
            let read = |directory: &Path| std::fs::read_to_string(directory.join(name)).ok();
            assert_eq!(read(directory), read(&source), "{out}: {name}");
        }
        let template = read_files(&Files::Disk, directory)
            .unwrap()
            .template
            .unwrap();
        assert_eq!(template.render(&[], true).unwrap(), "of its own file");
    }
    // Two templates, one of them in a folder, become a list.
    std::fs::create_dir(source.join("additional_chat_templates")).unwrap();
    let tool_use = "{{ tools | length }} tools";
    std::fs::write(source.join(TOOL_TEMPLATE), tool_use).unwrap();
    std::fs::write(source.join("chat_template.jinja"), "no tools").unwrap();
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    let path = scratch.0.join("listed");
    run(&source, &path, &options).unwrap();
    assert!(!path.join("chat_template.jinja").exists());
    let tools = serde_json::json!({"tools": [{}, {}]});
    for directory in [&source, &path] {
        let template = read_files(&Files::Disk, directory)
            .unwrap()
            .template
            .unwrap();
        let tools = tools.as_object().unwrap();
        assert_eq!(template.render_with(&[], true, tools).unwrap(), "2 tools");
        assert_eq!(template.render(&[], true).unwrap(), "no tools");
    }
}

#[test]
fn failures_are_named_and_leave_nothing() {
    let scratch = Scratch::new("failures");
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    let (source, out) = (scratch.0.join("in"), scratch.0.join("out"));
    // A weight that is quantized, a norm and a table that are kept.
    for victim in [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ] {
        let source = scratch.0.join(victim);
        write_source(&source, Some(victim), &plan(40));
        for keep_head in [false, true] {
            let options = ConvertOptions {
                keep_head,
                ..options.clone()
            };
            let e = run(&source, &out, &options).unwrap_err();
            let (kind, words) = match victim.contains("proj") {
                true => (ErrorKind::InvalidArgument, "NaN; NVFP4 holds finite values"),
                false => (ErrorKind::CorruptFile, "NaN; weights must be finite"),
            };
            assert_eq!(e.kind(), kind, "{e}");
            assert!(e.message().contains(victim), "{e}");
            assert!(e.message().contains(words), "{e}");
            assert!(!out.exists());
        }
    }
    write_source(&source, None, &plan(40));

    let mut two = ConvertOptions::new(Container::Dat, Recipe::Amax);
    two.quantize.levels = Levels::Two;
    expect_kind(
        run(&source, &out, &two),
        ErrorKind::InvalidArgument,
        ".dat holds no global scale",
    );
}

/// A conversion refuses the models that loading refuses, with the same message and before it writes anything. Its output loads.
#[test]
fn a_conversion_checks_what_loading_checks() {
    let scratch = Scratch::new("checks");
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    let golden = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/qwen3_tied");
        std::fs::read(path.join(file)).unwrap()
    };
    type Change<'a> = (
        &'a str,
        &'a dyn Fn(&mut Vec<Planned>),
        &'a dyn Fn(&Path),
        &'a str,
    );
    let no_plan = |_: &mut Vec<Planned>| {};
    let no_file = |_: &Path| {};
    let edit = |path: &Path, key: &str, value: serde_json::Value| {
        let path = path.join("config.json");
        let mut config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        std::fs::write(path, config.to_string()).unwrap();
    };
    let changes: &[Change<'_>] = &[
        ("whole", &no_plan, &no_file, ""),
        (
            "norm",
            &|plan| plan.retain(|p| p.name != "model.norm.weight"),
            &no_file,
            "model.norm.weight",
        ),
        (
            "projection",
            &|plan| plan.retain(|p| !p.name.contains("up_proj")),
            &no_file,
            "up_proj.weight",
        ),
        (
            "shape",
            &|plan| plan[7].shape = vec![32, 48],
            &no_file,
            "o_proj.weight has shape [32, 48], expected [32, 32]",
        ),
        (
            "integers",
            &|plan| plan[13].encoding = Encoding::Dense(DType::I8),
            &no_file,
            "model.norm.weight is stored as I8",
        ),
        (
            "layers",
            &no_plan,
            &|path| edit(path, "num_hidden_layers", 2.into()),
            "tensors of this qwen2 model are missing",
        ),
        (
            "architecture",
            &no_plan,
            &|path| edit(path, "model_type", "mamba".into()),
            "unknown architecture 'mamba'",
        ),
        (
            "activation",
            &no_plan,
            &|path| edit(path, "hidden_act", "gelu_new".into()),
            "'gelu_new'",
        ),
        (
            "config",
            &no_plan,
            &|path| std::fs::remove_file(path.join("config.json")).unwrap(),
            "there is no config.json beside the weights",
        ),
        (
            "tokenizer",
            &no_plan,
            &|path| std::fs::write(path.join("tokenizer.json"), "{\"model\": 1}").unwrap(),
            "tokenizer.json",
        ),
        (
            "generation",
            &no_plan,
            &|path| {
                std::fs::write(path.join("tokenizer.json"), golden("tokenizer.json")).unwrap();
                let text = r#"{"eos_token_id": "x"}"#;
                std::fs::write(path.join("generation_config.json"), text).unwrap();
            },
            "eos_token_id",
        ),
    ];
    for (name, plan_change, file_change, words) in changes {
        let (source, out) = (scratch.0.join(name), scratch.0.join(format!("{name}-out")));
        let mut plan = plan(4000);
        plan_change(&mut plan);
        let integers = plan
            .iter()
            .any(|p| p.encoding == Encoding::Dense(DType::I8));
        match integers {
            false => write_source(&source, None, &plan),
            true => write_integers(&source, &plan),
        }
        file_change(&source);
        let load = |path: &Path| {
            let options = model::LoadOptions::new(model::Device::cpu(Some(1)).unwrap());
            NVFP4::engine::Served::load(path, &options).map(|_| ())
        };
        if words.is_empty() {
            load(&source).unwrap();
            run(&source, &out, &options).unwrap();
            load(&out).unwrap();
            continue;
        }
        let (loaded, converted) = (
            load(&source).unwrap_err(),
            run(&source, &out, &options).unwrap_err(),
        );
        assert_eq!(loaded.kind(), converted.kind(), "{loaded}, {converted}");
        assert!(converted.message().contains(words), "{name}: {converted}");
        assert!(
            loaded.message().ends_with(converted.message()),
            "{loaded}, {converted}"
        );
        assert!(!out.exists(), "{name}");
    }
}

/// A model with some integer tensors, all 0.
fn write_integers(directory: &Path, plan: &[Planned]) {
    let metadata = Metadata {
        config: Some(config(plan)),
        tokenizer: TokenizerSource::None,
        embedding: Vec::new(),
    };
    let mut writer = Box::new(ModelOptWriter::create(directory, plan, &metadata).unwrap());
    for tensor in plan {
        let n: usize = tensor.shape.iter().product();
        writer.begin(&tensor.name, 1.0).unwrap();
        match tensor.encoding {
            Encoding::Dense(DType::I8) => writer.raw(&vec![0; n]).unwrap(),
            _ => writer.values(&vec![0.0; n]).unwrap(),
        }
    }
    writer.finish().unwrap();
}

/// Tensors that the model does not use are kept as they are where NVFP4 cannot hold them.
#[test]
fn what_the_model_does_not_use_stops_nothing() {
    let scratch = Scratch::new("unused");
    let (source, out) = (scratch.0.join("in"), scratch.0.join("out"));
    let mut plan = plan(40);
    let extra = |name: &str, shape: &[usize]| Planned {
        name: name.to_owned(),
        shape: shape.to_vec(),
        encoding: Encoding::Dense(DType::BF16),
    };
    plan.push(extra("mtp.layers.0.mlp.up_proj.weight", &[8, 24]));
    plan.push(extra("mtp.layers.0.mlp.down_proj.weight", &[8, 32]));
    plan.push(extra("mtp.norm.weight", &[24]));
    write_source(&source, Some("mtp.norm.weight"), &plan);
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    run(&source, &out, &options).unwrap();
    let (source, made) = (model::open(&source).unwrap(), model::open(&out).unwrap());
    let odd = "mtp.layers.0.mlp.up_proj.weight";
    assert_eq!(
        made.find(odd).unwrap().encoding,
        Encoding::Dense(DType::BF16)
    );
    assert_eq!(values(&*made, odd), values(&*source, odd));
}

#[test]
fn progress_reaches_the_end_and_may_stop() {
    let scratch = Scratch::new("progress");
    let (source, out) = (scratch.0.join("in"), scratch.0.join("out"));
    write_source(&source, None, &plan(MANY));
    let source = model::open(&source).unwrap();
    let pool = Pool::new(2).unwrap();
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    let mut calls = 0;
    let e = convert(&*source, &out, &options, &pool, &mut |p| {
        calls += 1;
        assert!(p.done <= p.total);
        if calls == 9 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })
    .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Cancelled);
    assert!(!out.exists());
    let mut last = (0, 0);
    convert(&*source, &out, &options, &pool, &mut |p| {
        assert!(p.done >= last.0);
        last = (p.done, p.total);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(last.0, last.1);
}

/// The flags of a text model within another disagree in published files; its table stays one.
#[test]
fn a_table_that_a_text_model_within_another_shares_stays_one() {
    let scratch = Scratch::new("within");
    let out = scratch.0.join("out");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/mistral3_nested");
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    let report = run(&golden, &out, &options).unwrap();
    assert_eq!((report.embedding, report.head), ("BF16", "BF16"));
    let made = model::open(&out).unwrap();
    assert!(made.find("lm_head.weight").is_none());
    let device = model::Device::cpu(Some(1)).unwrap();
    let written = model::Model::load(&out, &model::LoadOptions::new(device)).unwrap();
    assert!(written.info().tied);
    assert_eq!(written.info().formats["nvfp4"].tensors, 14);
}
