//! Training that learns nothing delivers its initial model: steps at rate 0, over every form of a checkpoint, in every mode.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use NVFP4::base::threads::Pool;
use NVFP4::checkpoint::{Checkpoint, Encoding, ModelOptWriter, Planned, Writer};
use NVFP4::model::convert::{Container, ConvertOptions, Quantized, convert};
use NVFP4::model::open;
use NVFP4::tensor::DType;
use NVFP4::train::Lora;

use super::*;

/// The model at `from` as `options` convert it, at `to`.
pub(super) fn converted(from: &Path, to: &Path, options: &ConvertOptions) {
    let source = open(from).unwrap();
    let pool = Pool::new(2).unwrap();
    convert(&*source, to, options, &pool, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
}

/// The model at `from` at `to`, with every matrix in bfloat16, as most are published.
pub(super) fn dense(from: &Path, to: &Path) {
    let source = open(from).unwrap();
    let plan: Vec<Planned> = source
        .entries()
        .iter()
        .map(|entry| Planned {
            encoding: Encoding::Dense(DType::BF16),
            ..Planned::from(entry)
        })
        .collect();
    let mut writer = Box::new(ModelOptWriter::create(to, &plan, source.metadata()).unwrap());
    for entry in source.entries() {
        writer.begin(&entry.name, 1.0).unwrap();
        let mut values = vec![0.0; entry.rows() * entry.cols()];
        source
            .rows_f32(entry, 0..entry.rows(), &mut values)
            .unwrap();
        // Values that no scale of blocks holds, as those of a model that was never quantized.
        for (i, value) in values.iter_mut().enumerate() {
            *value *= 1.0 + 0.3 * (i as f32 * 0.7).sin();
        }
        writer.values(&values).unwrap();
    }
    writer.finish().unwrap();
}

/// A model that is written without quantized tensors says nothing of quantization, which other readers would refuse.
#[test]
fn dense_models_describe_no_quantization() {
    let folder = Folder::new();
    let (swept, place) = (folder.0.join("swept"), folder.0.join("model"));
    converted(
        &golden("model/qwen3_tied"),
        &swept,
        &sweep(Container::ModelOpt, Tables::Auto),
    );
    let config = |place: &Path| std::fs::read_to_string(place.join("config.json")).unwrap();
    assert!(config(&swept).contains("quantization_config"));
    dense(&swept, &place);
    assert!(!config(&place).contains("quantization_config"));
    assert!(!place.join("hf_quant_config.json").exists());
}

fn sweep(container: Container, tables: Tables) -> ConvertOptions {
    ConvertOptions {
        tables,
        ..ConvertOptions::new(container, NVFP4::format::nvfp4::Recipe::Sweep)
    }
}

/// The files of a directory.
pub(super) fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// The modes of training.
fn modes() -> Vec<(&'static str, Recipe)> {
    let lora = Some(Lora {
        rank: 4,
        alpha: 8.0,
        ..Lora::default()
    });
    let recipe = |last_blocks, lora| Recipe {
        last_blocks,
        lora,
        ..Recipe::default()
    };
    let mut released = recipe(None, None);
    released.release = true;
    released.clip = Clip::Previous(1.0);
    let mut int8 = recipe(None, None);
    int8.weights = WeightForm::Residual(Bits::Eight);
    vec![
        ("all", recipe(None, None)),
        ("all, released", released),
        ("all, residuals of 8 bits", int8),
        ("the last block", recipe(Some(1), None)),
        ("adapters", recipe(None, lora)),
    ]
}

/// A trainer that has taken two steps at a rate of 0.
fn stepped(source: &Source, recipe: Recipe) -> Trainer {
    let mut config = config(recipe, 10);
    config.optimizer.rate = 0.0;
    let mut trainer = Trainer::new(&Device::cpu(Some(2)).unwrap(), source, &config).unwrap();
    let vocabulary = source.spec().vocab_size as u32;
    let mut batch = Documents::new(5, &[24]);
    batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
    let labels = batch.labels.iter_mut();
    labels.for_each(|t| *t %= vocabulary as i32);
    for _ in 0..2 {
        let step = trainer.step(&[batch.batch()]).unwrap();
        assert_eq!((step.changed, step.changed_delivered), (0.0, 0.0));
        assert!(step.gradient_norm > 0.0);
    }
    trainer
}

/// A delivered directory equals that of `nvfp4 quantize` byte for byte: from float32, bfloat16 with fused matrices, GGUF, and its own
/// output with tables of each kind.
#[test]
fn what_learns_nothing_is_what_quantizing_gives() {
    let folder = Folder::new();
    let of_own = |tables, name: &str| {
        let place = folder.0.join(name);
        let from = golden("model/qwen3_tied");
        converted(&from, &place, &sweep(Container::ModelOpt, tables));
        place
    };
    let in_bf16 = |name: &str| {
        let place = folder.0.join(name);
        dense(&golden("model").join(name), &place);
        place
    };
    let sources = [
        in_bf16("qwen3_untied"),
        in_bf16("phi3_partial"),
        golden("model/phi3_partial"),
        golden("model/gemma3_wide"),
        golden("gguf/mistral_window.gguf"),
        golden("gguf/gemma3_wide.gguf"),
        {
            let place = folder.0.join("own-gguf");
            let from = golden("gguf/mistral_window.gguf");
            converted(&from, &place, &sweep(Container::ModelOpt, Tables::Auto));
            place
        },
        of_own(Tables::Bf16, "own-bf16"),
        of_own(Tables::Int8, "own-int8"),
        of_own(Tables::Nvfp4, "own-nvfp4"),
    ];
    for (number, place) in sources.iter().enumerate() {
        let wanted = folder.0.join(format!("wanted-{number}"));
        converted(place, &wanted, &sweep(Container::ModelOpt, Tables::Auto));
        if place
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("own")
        {
            assert!(files(&wanted) == files(place), "{}", place.display());
        }
        let source = Source::open(place).unwrap();
        for (mode, recipe) in modes() {
            let trainer = stepped(&source, recipe);
            let found = folder.0.join(format!("found-{number}-{mode}"));
            trainer
                .export_directory(&source, &found, Tables::Auto, false)
                .unwrap();
            let (found, wanted) = (files(&found), files(&wanted));
            assert!(found.keys().eq(wanted.keys()), "{mode}");
            for (name, bytes) in &wanted {
                assert!(&found[name] == bytes, "{}: {mode}: {name}", place.display());
            }
        }
    }
}

/// Tables have the form that is asked for, and a matrix that is kept high or in float32 is delivered as the source has it.
#[test]
fn what_learns_nothing_has_the_forms_that_are_asked_for() {
    let folder = Folder::new();
    let place = folder.0.join("dense");
    dense(&golden("model/qwen3_untied"), &place);
    let source = Source::open(&place).unwrap();
    for (tables, keep) in [
        (Tables::Int8, ""),
        (Tables::Nvfp4, ""),
        (Tables::Bf16, "down_proj"),
    ] {
        let keep: Vec<String> = [keep]
            .iter()
            .filter(|k| !k.is_empty())
            .map(|k| (*k).to_owned())
            .collect();
        let (wanted, found) = (
            folder.0.join(format!("wanted-{tables:?}")),
            folder.0.join(format!("found-{tables:?}")),
        );
        let options = ConvertOptions {
            keep: keep.clone(),
            ..sweep(Container::ModelOpt, tables)
        };
        converted(&place, &wanted, &options);
        let recipe = Recipe {
            tables,
            keep_high: keep,
            ..Recipe::default()
        };
        let trainer = stepped(&source, recipe);
        trainer
            .export_directory(&source, &found, Tables::Auto, false)
            .unwrap();
        assert!(files(&found) == files(&wanted), "{tables:?}");
    }
    let found = folder.0.join("float32");
    stepped(&source, Recipe::float32())
        .export_directory(&source, &found, Tables::Auto, false)
        .unwrap();
    let found = open(&found).unwrap();
    for entry in source.checkpoint().entries() {
        let own = found.find(&entry.name).unwrap();
        assert_eq!(own.encoding, entry.encoding, "{}", entry.name);
        let values = |checkpoint: &dyn Checkpoint| {
            let mut values = vec![0.0; entry.rows() * entry.cols()];
            checkpoint
                .rows_f32(entry, 0..entry.rows(), &mut values)
                .unwrap();
            values
        };
        assert!(values(&*found) == values(&**source.checkpoint()));
    }
}

/// Everything of an NVFP4 entry: codes, block scales, and the bits of the global scale.
fn parts(checkpoint: &dyn Checkpoint, name: &str) -> (Vec<u8>, Vec<u8>, u32) {
    let entry = checkpoint.find(name).unwrap_or_else(|| panic!("no {name}"));
    assert_eq!(entry.encoding, Encoding::Nvfp4, "{name}");
    let (rows, cols) = (entry.rows(), entry.cols());
    let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / 16]);
    checkpoint
        .rows_nvfp4(entry, 0..rows, &mut codes, &mut scales)
        .unwrap();
    let global = checkpoint.global_scale(entry).unwrap();
    (codes, scales, global.to_bits())
}

/// `.dat` files come back byte for byte, and their codes in a directory; so do the codes of compressed-tensors.
#[test]
fn what_learns_nothing_keeps_the_codes_of_other_layouts() {
    let folder = Folder::new();
    let dat = folder.0.join("model.dat");
    converted(
        &golden("model/qwen3_untied"),
        &dat,
        &sweep(Container::Dat, Tables::Auto),
    );
    let own = folder.0.join("own");
    converted(
        &golden("model/qwen3_untied"),
        &own,
        &sweep(Container::ModelOpt, Tables::Auto),
    );
    let compressed = folder.0.join("compressed");
    as_compressed_tensors(&own, &compressed);
    for place in [&dat, &compressed] {
        let source = Source::open(place).unwrap();
        let checkpoint = source.checkpoint().clone();
        assert!(source.is_nvfp4());
        for (mode, recipe) in modes() {
            let trainer = stepped(&source, recipe);
            let found = folder.0.join(format!("{mode} of {}", checkpoint.format()));
            trainer
                .export_directory(&source, &found, Tables::Auto, false)
                .unwrap();
            let found = open(&found).unwrap();
            for entry in checkpoint.entries() {
                if entry.encoding == Encoding::Nvfp4 {
                    let of = |checkpoint: &dyn Checkpoint| parts(checkpoint, &entry.name);
                    assert!(of(&*found) == of(&*checkpoint), "{mode}: {}", entry.name);
                } else {
                    let own = found.find(&entry.name).unwrap();
                    assert_eq!(own.encoding, entry.encoding, "{mode}: {}", entry.name);
                }
            }
            if checkpoint.format() == "dat" {
                let again = folder.0.join("again.dat");
                trainer.export_dat(&source, &again).unwrap();
                assert!(
                    std::fs::read(&again).unwrap() == std::fs::read(&dat).unwrap(),
                    "{mode}"
                );
            }
        }
    }
}

/// Writes a model in ModelOpt's layout again in that of compressed-tensors.
fn as_compressed_tensors(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = Vec::new();
    for name in file.names() {
        let tensor = file.tensor(name).unwrap();
        let mut data = tensor.data().to_vec();
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let is_code = file.tensor(&format!("{module}.weight_scale_2")).is_ok();
        let name = if let Some(module) = name.strip_suffix(".weight_scale_2") {
            // The inverse.
            let global = f32::from_le_bytes(data[..].try_into().unwrap());
            data = (1.0 / global).to_le_bytes().to_vec();
            format!("{module}.weight_global_scale")
        } else if name.ends_with(".weight") && is_code {
            format!("{module}.weight_packed")
        } else {
            name.to_owned()
        };
        let shape = match name.ends_with("_global_scale") {
            true => vec![1],
            false => tensor.shape().to_vec(),
        };
        tensors.push((name, tensor.dtype(), shape, data));
    }
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap();
        (name.clone(), view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(to.join("model.safetensors"), bytes).unwrap();
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["quantization_config"] = serde_json::json!({
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": true},
        }},
        "ignore": ["lm_head"],
    });
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
}

/// A trained matrix begins with the codes of the source and residuals of zero; one of a dense source with the codes that quantizing gives,
/// and with residuals that bring it nearer to its values.
#[test]
fn weights_begin_where_the_model_is() {
    let device = Device::cpu(Some(2)).unwrap();
    let folder = Folder::new();
    let place = folder.0.join("dense");
    dense(&golden("model/qwen3_untied"), &place);
    let source = Source::open(&place).unwrap();
    let Device::Cpu(host) = &device else {
        unreachable!()
    };
    let options = sweep(Container::ModelOpt, Tables::Auto);
    let quantized = Quantized::new(source.checkpoint().clone(), options.clone(), host.clone());
    let quantized = Source::new(Arc::new(quantized.unwrap())).unwrap();
    let own = folder.0.join("own");
    converted(&place, &own, &options);
    let own = Source::open(&own).unwrap();
    let trainers = [&source, &own]
        .map(|from| Trainer::new(&device, from, &config(Recipe::default(), 10)).unwrap());
    for (id, m) in source.layout().matrices.iter().enumerate() {
        if quantized.encoding(id).unwrap() != Encoding::Nvfp4 {
            continue;
        }
        let (mut codes, mut scales) = (vec![0; m.rows * m.cols / 2], vec![0; m.rows * m.cols / 16]);
        let global = quantized.nvfp4(id, &mut codes, &mut scales).unwrap();
        let mut values = vec![0.0; m.rows * m.cols];
        source.matrix(id, 0..m.rows, &mut values).unwrap();
        let [from_values, from_codes] = trainers.each_ref().map(|trainer| {
            let matrix = &trainer.parameters().matrices()[id];
            assert_eq!(matrix.global(), global);
            let delivered = matrix.delivered(&device).unwrap().unwrap();
            assert!(delivered == (codes.clone(), scales.clone()), "{}", m.name);
            let of = |whole| {
                let mut out = vec![0.0; values.len()];
                matrix
                    .decode(&device, 0..m.rows, whole, SliceMut::Host(&mut out))
                    .unwrap();
                out
            };
            [of(true), of(false)]
        });
        assert!(from_codes[0] == from_codes[1], "{}: a residual", m.name);
        let exact: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
        let [stored, delivered] = from_values
            .each_ref()
            .map(|values| relative_error(&exact, values));
        // Sixteenths of the gaps, and the ends of the grid.
        assert!(
            stored < 0.25 * delivered,
            "{}: {stored} and {delivered}",
            m.name
        );
    }
}

/// Steps move weights that begin on a grid with clipping scales, and the largest weights leave the grid's end as often as they should.
#[test]
fn weights_at_the_end_of_a_grid_go_on() {
    use NVFP4::format::adamw::{
        Block, Coefficients, Field, Forms, Globals, Hyperparameters, KeepScale, Keys, step,
    };
    use NVFP4::format::{e4m3, residual};

    let forms = Forms {
        first: FirstForm::F32,
        second: SecondForm::F32,
        keep_scale: KeepScale::Held,
        ..Forms::default()
    };
    let settings = Hyperparameters {
        rate: 2e-4,
        decay: 0.0,
        ..Hyperparameters::default()
    };
    let (blocks, steps) = (2000, 100);
    let mut mean = 0.0;
    for block in 0..blocks {
        // A code of 6 with the largest residual, and others of 1.
        let (mut codes, mut rest) = ([0x22u8; 8], [0u8; 8]);
        (codes[0], rest[0]) = (0x27, 0x07);
        let mut scale = e4m3::encode(1.0);
        let (mut m, mut v) = ([0u8; 64], [0u8; 64]);
        for number in 1..=steps {
            let mut gradients = [0.0; 16];
            gradients[0] = -1.0;
            step(
                &forms,
                &Coefficients::new(&settings, number, 1.0),
                &Keys::new(7, block, number),
                &Globals {
                    weight: 1.0,
                    first: [1.0; 2],
                    second: [1.0; 2],
                },
                0,
                &gradients,
                Block {
                    codes: Field {
                        codes: &mut codes,
                        scale: Some(&mut scale),
                    },
                    rest: &mut rest,
                    first: Field {
                        codes: &mut m,
                        scale: None,
                    },
                    second: Field {
                        codes: &mut v,
                        scale: None,
                    },
                },
            );
        }
        let value = residual::decode(codes[0] & 15, (rest[0] << 4) as i8 >> 4, Bits::Four);
        mean += f64::from(value * e4m3::decode(scale)) / blocks as f64;
    }
    let wanted = 6.875 + 2e-4 * steps as f64;
    // Steps of the grid are an eighth.
    let deviation = (0.125 * (wanted - 6.875) / blocks as f64).sqrt();
    assert!(
        (mean - wanted).abs() < 6.0 * deviation,
        "{mean}, not {wanted}"
    );
}
