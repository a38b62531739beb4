//! Training on a GPU against the CPU: attention, steps of a whole model, and the promise that what resumes goes on to the same bits.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use NVFP4::base::Result;
use NVFP4::base::memory::{self, Tag};
use NVFP4::base::threads::Pool;
use NVFP4::format::adamw::WeightForm;
use NVFP4::format::nvfp4;
use NVFP4::format::residual::Bits;
use NVFP4::model::convert::{Container, ConvertOptions, Tables, convert};
use NVFP4::model::training::Source;
use NVFP4::model::{Device, KvCache, KvType, LoadOptions, Logits, Model, Scratch};
use NVFP4::ops::training::array;
use NVFP4::ops::training::attention::{Documents, PackedAttention, attention, attention_backward};
use NVFP4::ops::training::operand::{
    OperandRounding, ScaleRule, round_columns, round_int8_rows, round_rows,
};
use NVFP4::ops::{Array, Element, Mixed, Slice};
use NVFP4::train::memory::Estimate;
use NVFP4::train::{
    Clip, Config, HiddenBatch, Lora, MicroBatch, Offload, ProductForm, Recipe, Trainer,
};
use half::bf16;

use crate::common::golden;
use crate::support::{gpu, normal};

fn bf16_values(seed: u64, len: usize) -> Vec<f32> {
    normal(seed, len)
        .iter()
        .map(|&v| bf16::from_f32(v).to_f32())
        .collect()
}

fn on<E: Element<Host = f32>>(device: &Device, values: &[f32]) -> Array<E> {
    let mut array = Array::scratch(device, values.len()).unwrap();
    array.all_mut().copy_from(Slice::Host(values)).unwrap();
    array
}

fn read<E: Element<Host = f32>>(array: &Array<E>) -> Vec<f32> {
    let mut values = vec![0.0; array.len()];
    array.all().read(&mut values).unwrap();
    values
}

/// The relative error in the Euclidean norm.
fn error(values: &[f32], exact: &[f32]) -> f64 {
    let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|v| v * v).sum::<f64>();
    let difference = squares(&mut values.iter().zip(exact).map(|(a, b)| f64::from(a - b)));
    (difference / squares(&mut exact.iter().map(|&v| f64::from(v)))).sqrt()
}

struct Attended {
    out: Vec<f32>,
    lse: Vec<f32>,
    dqkv: Vec<f32>,
}

fn attend(device: &Device, options: &PackedAttention, lengths: &[usize], again: bool) -> Attended {
    let rows: usize = lengths.iter().sum();
    let documents = Documents::new(device, lengths).unwrap();
    let qkv: Array<Mixed> = on(device, &bf16_values(1, rows * options.width()));
    let dout: Array<Mixed> = on(device, &bf16_values(2, rows * options.q_width()));
    let mut out: Array<Mixed> = on(device, &vec![9.0; rows * options.q_width()]);
    let mut dqkv: Array<Mixed> = on(device, &vec![9.0; rows * options.width()]);
    let mut lse: Array = on(device, &vec![9.0; rows * options.heads]);
    for _ in 0..if again { 2 } else { 1 } {
        attention(
            device,
            options,
            &documents,
            qkv.all(),
            out.all_mut(),
            lse.all_mut(),
        )
        .unwrap();
        let forward = (qkv.all(), out.all(), lse.all());
        attention_backward(
            device,
            options,
            &documents,
            forward,
            dout.all(),
            dqkv.all_mut(),
        )
        .unwrap();
    }
    let mut sums = read(&lse);
    if !device.is_cuda() {
        // Rows of heads here, heads of rows there.
        let by_row = sums.clone();
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = by_row[i % rows * options.heads + i / rows];
        }
    }
    Attended {
        out: read(&out),
        lse: sums,
        dqkv: read(&dqkv),
    }
}

#[test]
fn attention_of_training_gives_what_the_cpu_gives() {
    let Some(gpu) = gpu() else { return };
    let (cpu, gpu) = (Device::cpu(None).unwrap(), Device::Cuda(gpu));
    for dim in [16, 32, 64, 80, 96, 128] {
        for (heads, kv_heads) in [(4, 2), (3, 3), (4, 1)] {
            for (window, score_cap) in [
                (None, None),
                (Some(33), None),
                (Some(1), Some(3.0)),
                (None, Some(3.0)),
            ] {
                for lengths in [&[5, 1, 130, 64, 77][..], &[1], &[200]] {
                    let options = PackedAttention {
                        heads,
                        kv_heads,
                        dim,
                        scale: 0.6 / (dim as f32).sqrt(),
                        window,
                        score_cap,
                    };
                    let exact = attend(&cpu, &options, lengths, false);
                    let found = attend(&gpu, &options, lengths, false);
                    let what = format!("{options:?} {lengths:?}");
                    // bf16 keeps 8 bits: 2^-9 is 2e-3, and probabilities and gradients of scores are rounded too.
                    assert!(
                        error(&found.out, &exact.out) < 4e-3,
                        "{what}: {}",
                        error(&found.out, &exact.out)
                    );
                    assert!(
                        error(&found.lse, &exact.lse) < 1e-5,
                        "{what}: {}",
                        error(&found.lse, &exact.lse)
                    );
                    // A document of one row, or a window of one, has no gradients of queries and keys but rounding.
                    let value = options.kv_heads * dim;
                    let (mut own, mut right) = (Vec::new(), Vec::new());
                    for (a, b) in found
                        .dqkv
                        .chunks(options.width())
                        .zip(exact.dqkv.chunks(options.width()))
                    {
                        own.extend_from_slice(&a[a.len() - value..]);
                        right.extend_from_slice(&b[b.len() - value..]);
                    }
                    assert!(
                        error(&own, &right) < 6e-3,
                        "{what}: values {}",
                        error(&own, &right)
                    );
                    if window != Some(1) && lengths.len() != 1
                        || lengths == [200] && window != Some(1)
                    {
                        assert!(
                            error(&found.dqkv, &exact.dqkv) < 8e-3,
                            "{what}: {}",
                            error(&found.dqkv, &exact.dqkv)
                        );
                    }
                    let again = attend(&gpu, &options, lengths, true);
                    assert!(
                        again.out == found.out && again.dqkv == found.dqkv,
                        "{what}: other bits"
                    );
                }
            }
        }
    }
}

/// Runs of tokens that step by one, of a vocabulary of the given size.
fn text(seed: usize, rows: usize, vocabulary: usize) -> (Vec<u32>, Vec<i32>) {
    let tokens: Vec<u32> = (0..=rows)
        .map(|i| ((seed * 37 + i / 9 * 61 + i) % vocabulary) as u32)
        .collect();
    (
        tokens[..rows].to_vec(),
        tokens[1..].iter().map(|&t| t as i32).collect(),
    )
}

fn losses(trainer: &mut Trainer, steps: std::ops::Range<usize>) -> Vec<f64> {
    let documents = [40, 1, 130, 85];
    let vocabulary = trainer.spec().vocab_size;
    steps
        .map(|step| {
            let (tokens, labels) = text(step, 256, vocabulary);
            let batch = MicroBatch {
                tokens: &tokens,
                documents: &documents,
                labels: &labels,
                weights: None,
            };
            trainer.step(&[batch]).unwrap().loss
        })
        .collect()
}

#[test]
fn a_gpu_trains_as_the_cpu_does() {
    let Some(gpu) = gpu() else { return };
    let source = Source::open(&golden("qwen3_tied")).unwrap();
    for recipe in [
        Recipe::float32(),
        Recipe::default(),
        Recipe {
            release: true,
            clip: Clip::Previous(1.0),
            ..Recipe::default()
        },
    ] {
        let mut config = Config {
            recipe,
            steps: 20,
            ..Config::default()
        };
        config.optimizer.rate = 2e-3;
        let devices = [Device::cpu(None).unwrap(), Device::Cuda(gpu.clone())];
        let [cpu, found] = devices.each_ref().map(|device| {
            let mut trainer = Trainer::new(device, &source, &config).unwrap();
            losses(&mut trainer, 0..20)
        });
        for (step, (a, b)) in cpu.iter().zip(&found).enumerate() {
            assert!(
                (a / b - 1.0).abs() < 0.02,
                "{:?}: step {step}: {a} and {b}",
                config.recipe
            );
        }
        assert!(found[19] < found[0] - 0.3, "{found:?}");

        // Ten steps, and another trainer that goes on: the same bits, also of a checkpoint that the CPU reads.
        let device = &devices[1];
        let folder =
            std::env::temp_dir().join(format!("nvfp4-cuda-training-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let mut first = Trainer::new(device, &source, &config).unwrap();
        let mut all = losses(&mut first, 0..10);
        first.save(&folder, &serde_json::Value::Null, 1).unwrap();
        drop(first);
        let (mut second, _) = Trainer::resume(device, &source, &folder).unwrap();
        all.extend(losses(&mut second, 10..20));
        assert_eq!(all, found);
        let (mut third, _) = Trainer::resume(&devices[0], &source, &folder).unwrap();
        let (tokens, labels) = text(99, 256, source.spec().vocab_size);
        let batch = MicroBatch {
            tokens: &tokens,
            documents: &[256],
            labels: &labels,
            weights: None,
        };
        let (mut again, _) = Trainer::resume(device, &source, &folder).unwrap();
        for delivered in [false, true] {
            let (a, b) = (
                third.evaluate(&[batch], delivered).unwrap(),
                again.evaluate(&[batch], delivered).unwrap(),
            );
            assert!((a / b - 1.0).abs() < 0.01, "{a} and {b}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// Operands in NVFP4 have the bits of the CPU, and columns go where they should.
#[test]
fn operands_of_training_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let devices = [Device::cpu(Some(2)).unwrap(), Device::Cuda(gpu)];
    let (rows, width) = (37, 1040);
    let mut values = bf16_values(5, rows * width);
    values[..16].fill(0.0);
    // Eighths, whose sums f32 holds in any order.
    let eighths: Vec<f32> = values.iter().map(|v| (v * 8.0).round() / 8.0).collect();
    for rounding in [
        OperandRounding::Nearest(ScaleRule::Amax),
        OperandRounding::Nearest(ScaleRule::FourOverSix),
        OperandRounding::Stochastic(0x1234_5678_9abc_def0),
    ] {
        let [a, b] = devices.each_ref().map(|device| {
            let x: Array<Mixed> = on(device, &values);
            let mut y: Array<Mixed> = on(device, &values);
            round_rows(device, x.all(), width, rounding, y.all_mut()).unwrap();
            let x: Array<Mixed> = on(device, &eighths);
            let mut z: Array<Mixed> = on(device, &vec![9.0; 48 * width]);
            round_columns(device, x.all(), width, Some(rounding), z.all_mut()).unwrap();
            (read(&y), read(&z))
        });
        assert!(a == b, "{rounding:?}");
    }
    let [a, b] = devices.each_ref().map(|device| {
        let mut x: Array<Mixed> = on(device, &values);
        round_int8_rows(device, x.all_mut(), width).unwrap();
        let rounded = read(&x).into_iter().map(|v| bf16::from_f32(v).to_f32());
        rounded.collect::<Vec<_>>()
    });
    assert!(a == b && a != values, "int8 rows");
    let [a, b] = devices.each_ref().map(|device| {
        let mut all: Array<Mixed> = on(device, &values);
        let mut part: Array<Mixed> = on(device, &vec![9.0; rows * 48]);
        array::copy_columns(device, all.all(), width, 512, part.all_mut()).unwrap();
        let copied = read(&part);
        array::add_columns(device, all.all_mut(), width, 16, part.all()).unwrap();
        let sums = read(&all).into_iter().map(|v| bf16::from_f32(v).to_f32());
        (copied, sums.collect::<Vec<_>>())
    });
    assert!(a == b);
}

/// Adapters, products in four bits and steps towards hidden states on a GPU as on the CPU; what is computed again has the same bits.
#[test]
fn a_gpu_trains_in_every_mode() {
    let Some(gpu) = gpu() else { return };
    let devices = [Device::cpu(Some(2)).unwrap(), Device::Cuda(gpu)];
    let source = Source::open(&golden("qwen3_tied")).unwrap();
    let adapters = Recipe {
        lora: Some(Lora {
            rank: 4,
            ..Lora::default()
        }),
        ..Recipe::default()
    };
    let four = Recipe {
        activations: ProductForm::Nvfp4,
        gradients: ProductForm::Nvfp4,
        ..Recipe::default()
    };
    for (name, recipe) in [("adapters", adapters), ("four bits", four)] {
        let run = |device: &Device, recompute: &str| {
            let mut config = Config {
                recipe: recipe.clone(),
                recompute: recompute.parse().unwrap(),
                steps: 20,
                ..Config::default()
            };
            config.optimizer.rate = 2e-3;
            let mut trainer = Trainer::new(device, &source, &config).unwrap();
            losses(&mut trainer, 0..10)
        };
        let (exact, found) = (run(&devices[0], "block"), run(&devices[1], "block"));
        for (a, b) in exact.iter().zip(&found) {
            assert!(
                (a / b - 1.0).abs() < 0.02,
                "{name}: {exact:?} and {found:?}"
            );
        }
        for recompute in ["none", "norms,heads,gate_up", "qkv,attention,output,down"] {
            assert_eq!(run(&devices[1], recompute), found, "{name}: {recompute}");
        }
    }
    let (tokens, _) = text(1, 64, source.spec().vocab_size);
    let targets = bf16_values(8, 64 * source.spec().hidden_size);
    let [a, b] = devices.each_ref().map(|device| {
        let mut trainer = Trainer::new(device, &source, &Config::default()).unwrap();
        let batch = HiddenBatch {
            tokens: &tokens,
            documents: &[64],
            targets: &targets,
        };
        let mut steps = (0..5).map(|_| trainer.step_hidden(&[batch]).unwrap().loss);
        let first = steps.next().unwrap();
        (first, steps.last().unwrap())
    });
    assert!((a.0 / b.0 - 1.0).abs() < 0.01, "{a:?} and {b:?}");
    assert!(b.1 < b.0, "{b:?}");
}

/// Moments and inputs of blocks in the host's memory: the same bits, less memory of the device, and a checkpoint that goes on where nothing
/// can be offloaded.
#[test]
fn what_is_offloaded_gives_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    let source = Source::open(&golden("qwen3_tied")).unwrap();
    let settings = |offload| Config {
        offload,
        steps: 20,
        ..Config::default()
    };
    let all = Offload {
        moments: true,
        activations: true,
    };
    if device.check_offload().is_err() {
        let error = Trainer::new(&device, &source, &settings(all)).unwrap_err();
        assert!(
            error.to_string().contains("shares the host's memory"),
            "{error}"
        );
        return;
    }
    let used =
        || [Tag::DeviceWeights, Tag::Weights, Tag::Scratch].map(|tag| memory::usage(tag).current);
    let run = |offload| {
        let before = used();
        let mut trainer = Trainer::new(&device, &source, &settings(offload)).unwrap();
        let found = losses(&mut trainer, 0..10);
        let after = used();
        let more: [i64; 3] = std::array::from_fn(|i| after[i] as i64 - before[i] as i64);
        (trainer, found, more)
    };
    // The first trainer of a process leaves memory that belongs to the device.
    drop(run(Offload::default()));
    let (kept, wanted, own) = run(Offload::default());
    drop(kept);
    for offload in ["moments", "activations", "moments,activations"] {
        let (trainer, found, more) = run(offload.parse().unwrap());
        assert_eq!(found, wanted, "{offload}");
        let moments = own[0] - more[0];
        let offloads: Offload = offload.parse().unwrap();
        assert_eq!(
            moments > 0,
            offloads.moments,
            "{offload}: {own:?} and {more:?}"
        );
        assert_eq!(more[1], moments, "{offload}: {own:?} and {more:?}");
        // bf16, 256 tokens, a stream before each block.
        let streams = 2 * 256 * source.spec().hidden_size * source.spec().blocks.len();
        let away = if offloads.activations {
            streams as i64
        } else {
            0
        };
        assert_eq!(more[2] - own[2], away, "{offload}: {own:?} and {more:?}");
        if offload == "moments,activations" {
            let place =
                std::env::temp_dir().join(format!("nvfp4-cuda-offload-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&place);
            trainer.save(&place, &serde_json::Value::Null, 1).unwrap();
            let (resumed, _) =
                Trainer::resume(&Device::cpu(Some(1)).unwrap(), &source, &place).unwrap();
            assert_eq!(resumed.config().offload, Offload::default());
            std::fs::remove_dir_all(&place).unwrap();
        }
    }
}

/// The model on live weights, through fused kernels, has the bits of the one that is exported and loaded.
#[test]
fn a_gpu_runs_the_weights_that_it_trains() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    let high = Recipe {
        keep_high: vec!["mlp".to_owned()],
        ..Recipe::default()
    };
    for (name, recipe) in [
        ("qwen3_tied", Recipe::default()),
        ("mistral_window", high),
        ("qwen3_yarn", Recipe::float32()),
    ] {
        let source = Source::open(&golden(name)).unwrap();
        let mut config = Config {
            recipe,
            steps: 20,
            ..Config::default()
        };
        config.optimizer.rate = 2e-3;
        let mut trainer = Trainer::new(&device, &source, &config).unwrap();
        losses(&mut trainer, 0..5);
        let before = memory::usage(Tag::DeviceWeights).current;
        let model = trainer.model(&source).unwrap();
        let more = memory::usage(Tag::DeviceWeights).current - before;
        let matrices: usize = trainer
            .parameters()
            .matrices()
            .iter()
            .map(|m| m.bytes())
            .sum();
        assert!(
            more < matrices as u64 / 8,
            "{name}: {more} bytes more than {matrices}"
        );
        let place = std::env::temp_dir().join(format!("nvfp4-cuda-live-{}", std::process::id()));
        trainer
            .export_directory(&source, &place, Tables::Auto, true)
            .unwrap();
        let loaded = Model::load(&place, &LoadOptions::new(device.clone())).unwrap();
        let (tokens, _) = text(3, 40, source.spec().vocab_size);
        let logits = |model: &Model| {
            let mut cache = KvCache::new(&device, model.spec(), 64, KvType::F16)?;
            let (mut scratch, mut logits) = (Scratch::new(), Vec::new());
            model.forward(&tokens, &mut cache, &mut scratch, Logits::All, &mut logits)?;
            let mut last = Vec::new();
            model.forward(&[7], &mut cache, &mut scratch, Logits::Last, &mut last)?;
            logits.extend(last);
            Ok(logits)
        };
        let found: Result<Vec<f32>> = logits(&model);
        let (found, expected) = (found.unwrap(), logits(&loaded).unwrap());
        // An untied embedding is looked up in its own memory, and from a file in host memory: the same values.
        assert!(found == expected, "{name}: {:e}", error(&found, &expected));
        losses(&mut trainer, 5..6);
        assert!(logits(&model).is_err());
        let next = trainer.model(&source).unwrap();
        assert!(logits(&next).unwrap() != found);
        std::fs::remove_dir_all(&place).unwrap();
    }
}

/// TFLOP/s of attention, with the operations of what is not masked: `--ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn attention_of_training_speed() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    let options = PackedAttention {
        heads: 32,
        kv_heads: 8,
        dim: 128,
        scale: 0.088,
        window: None,
        score_cap: None,
    };
    let lengths = [2048; 4];
    let rows = 8192;
    let documents = Documents::new(&device, &lengths).unwrap();
    let qkv: Array<Mixed> = on(&device, &bf16_values(1, rows * options.width()));
    let dout: Array<Mixed> = on(&device, &bf16_values(2, rows * options.q_width()));
    let mut out: Array<Mixed> = on(&device, &vec![0.0; rows * options.q_width()]);
    let mut dqkv: Array<Mixed> = on(&device, &vec![0.0; rows * options.width()]);
    let mut lse: Array = on(&device, &vec![0.0; rows * options.heads]);
    let operations = 4.0 * (rows * 1024 * options.heads * options.dim) as f64;
    for (name, backward, factor) in [("forward", false, 1.0), ("backward", true, 2.5)] {
        let mut times: Vec<f64> = (0..20)
            .map(|_| {
                gpu.synchronize().unwrap();
                let start = Instant::now();
                if backward {
                    let forward = (qkv.all(), out.all(), lse.all());
                    attention_backward(
                        &device,
                        &options,
                        &documents,
                        forward,
                        dout.all(),
                        dqkv.all_mut(),
                    )
                    .unwrap();
                } else {
                    attention(
                        &device,
                        &options,
                        &documents,
                        qkv.all(),
                        out.all_mut(),
                        lse.all_mut(),
                    )
                    .unwrap();
                }
                gpu.synchronize().unwrap();
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: {:.3} ms, {:.0} TFLOP/s",
            times[10] * 1e3,
            factor * operations / times[10] / 1e12
        );
    }
}

/// Steps of the model in the folder that NVFP4_TRAIN_MODEL names, `--ignored --nocapture`: the modes whose numbers NVFP4_TRAIN_MODES lists,
/// or all of them.
#[test]
#[ignore = "measures"]
fn step_speed() {
    let (Some(gpu), Ok(path)) = (gpu(), std::env::var("NVFP4_TRAIN_MODEL")) else {
        return;
    };
    let device = Device::Cuda(gpu.clone());
    let source = Source::open(path.as_ref()).unwrap();
    let modes = [
        (true, vec![4096]),
        (true, vec![2048; 4]),
        (false, vec![2048; 4]),
    ];
    let chosen = std::env::var("NVFP4_TRAIN_MODES").unwrap_or_else(|_| "012".to_owned());
    for (number, (recompute, lengths)) in modes.into_iter().enumerate() {
        if !chosen.contains(&number.to_string()) {
            continue;
        }
        memory::reset_peak();
        let config = Config {
            recipe: Recipe {
                release: true,
                clip: Clip::Previous(1.0),
                ..Recipe::default()
            },
            recompute: recompute.into(),
            ..Config::default()
        };
        let start = Instant::now();
        let mut trainer = Trainer::new(&device, &source, &config).unwrap();
        gpu.synchronize().unwrap();
        let made = start.elapsed().as_secs_f64();
        let bytes = trainer.parameters().bytes() as f64;
        println!(
            "made in {made:.1} s; {:.3} bytes a parameter of {}",
            bytes / trainer.parameters().layout().parameters() as f64,
            trainer.parameters().layout().parameters()
        );
        let rows: usize = lengths.iter().sum();
        let vocabulary = source.spec().vocab_size as u64;
        let tokens: Vec<u32> = (0..rows as u64)
            .map(|i| (NVFP4::format::random::bits(3, i) % vocabulary) as u32)
            .collect();
        let labels: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let batch = MicroBatch {
            tokens: &tokens,
            documents: &lengths,
            labels: &labels,
            weights: None,
        };
        let mut times: Vec<f64> = (0..6)
            .map(|_| {
                let start = Instant::now();
                let step = trainer.step(&[batch]).unwrap();
                gpu.synchronize().unwrap();
                println!(
                    "loss {:.4} norm {:.3} changed {:.4} {:.4}",
                    step.loss, step.gradient_norm, step.changed, step.changed_delivered
                );
                start.elapsed().as_secs_f64()
            })
            .skip(1)
            .collect();
        times.sort_by(f64::total_cmp);
        let peak = |tag| memory::usage(tag).peak as f64 / 1e9;
        let estimate = Estimate::new(&source, &config, &device, rows);
        println!(
            "{lengths:?} recompute {recompute}: {:.0} ms, {:.0} tokens/s; weights {:.2} GB of {:.2} estimated, scratch {:.2} of {:.2}",
            times[2] * 1e3,
            rows as f64 / times[2],
            peak(Tag::DeviceWeights),
            estimate.states as f64 / 1e9,
            peak(Tag::DeviceScratch),
            (estimate.gradients + estimate.activations) as f64 / 1e9
        );
    }
}

/// Steps at a rate of 0 deliver what quantizing gives, byte for byte, in every mode.
#[test]
fn a_gpu_that_learns_nothing_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    let folder = std::env::temp_dir().join(format!("nvfp4-cuda-same-{}", std::process::id()));
    let pool = Pool::new(2).unwrap();
    let lora = Some(Lora {
        rank: 4,
        ..Lora::default()
    });
    let modes = [
        Recipe::default(),
        Recipe {
            weights: WeightForm::Residual(Bits::Eight),
            ..Recipe::default()
        },
        Recipe {
            release: true,
            clip: Clip::Never,
            tables: Tables::Int8,
            ..Recipe::default()
        },
        Recipe {
            last_blocks: Some(1),
            ..Recipe::default()
        },
        Recipe {
            lora,
            ..Recipe::default()
        },
    ];
    for name in ["model/qwen3_untied", "gguf/mistral_window.gguf"] {
        let place = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden")
            .join(name);
        let source = Source::open(&place).unwrap();
        for (number, recipe) in modes.iter().enumerate() {
            let mut config = Config {
                recipe: recipe.clone(),
                steps: 10,
                ..Config::default()
            };
            config.optimizer.rate = 0.0;
            let mut trainer = Trainer::new(&device, &source, &config).unwrap();
            losses(&mut trainer, 0..3);
            let [found, wanted] = ["found", "wanted"].map(|kind| folder.join(kind));
            trainer
                .export_directory(&source, &found, Tables::Auto, true)
                .unwrap();
            let options = ConvertOptions {
                tables: recipe.tables,
                replace: true,
                ..ConvertOptions::new(Container::ModelOpt, nvfp4::Recipe::Sweep)
            };
            convert(
                &**source.checkpoint(),
                &wanted,
                &options,
                &pool,
                &mut |_| ControlFlow::Continue(()),
            )
            .unwrap();
            let [found, wanted] = [found, wanted]
                .map(|place| std::fs::read(place.join("model.safetensors")).unwrap());
            assert!(found == wanted, "{name}, mode {number}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
