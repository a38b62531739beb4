//! Steps of a whole model on a GPU: losses of every recipe, trainers that resume, and memory that is offloaded.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use NVFP4::base::memory::{self, Tag};
use NVFP4::cuda::Gpu;
use NVFP4::format::random;
use NVFP4::model::Device;
use NVFP4::model::training::Source;
use NVFP4::train::memory::Estimate;
use NVFP4::train::{
    Clip, Config, HiddenBatch, Lora, MicroBatch, Offload, ProductForm, Recipe, Trainer,
};

use super::{bf16_values, fresh_folder, losses, text};
use crate::common::golden;
use crate::support::gpu;

/// Ten steps, and another trainer that goes on, give the bits of twenty steps. The CPU reads the checkpoint, too.
pub(crate) fn check_resumes(
    cpu: &Device,
    device: &Device,
    source: &Source,
    config: &Config,
    found: &[f64],
) {
    let folder = fresh_folder("training");
    let mut first = Trainer::new(device, source, config).unwrap();
    let mut all = losses(&mut first, 0..10);
    first.save(&folder, &serde_json::Value::Null, 1).unwrap();
    drop(first);
    let (mut second, _) = Trainer::resume(device, source, &folder).unwrap();
    all.extend(losses(&mut second, 10..20));
    assert_eq!(all, found);
    let (mut third, _) = Trainer::resume(cpu, source, &folder).unwrap();
    let (mut again, _) = Trainer::resume(device, source, &folder).unwrap();
    let (tokens, labels) = text(99, 256, source.spec().vocab_size);
    let batch = MicroBatch {
        tokens: &tokens,
        documents: &[256],
        labels: &labels,
        weights: None,
    };
    for delivered in [false, true] {
        let (a, b) = (
            third.evaluate(&[batch], delivered).unwrap(),
            again.evaluate(&[batch], delivered).unwrap(),
        );
        assert!((a / b - 1.0).abs() < 0.01, "{a} and {b}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
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
        check_resumes(&devices[0], &devices[1], &source, &config, &found);
    }
}

/// Adapters, products in four bits and steps towards hidden states on a GPU as on the CPU; activations that are computed again have the same bits.
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

/// Bytes of the device's weights, of the host's weights and of the host's scratch memory.
fn used() -> [u64; 3] {
    [Tag::DeviceWeights, Tag::Weights, Tag::Scratch].map(|tag| memory::usage(tag).current)
}

/// A trainer after ten steps, their losses, and the bytes that it uses.
fn offloading(device: &Device, source: &Source, config: &Config) -> (Trainer, Vec<f64>, [i64; 3]) {
    let before = used();
    let mut trainer = Trainer::new(device, source, config).unwrap();
    let found = losses(&mut trainer, 0..10);
    let after = used();
    let more = std::array::from_fn(|i| after[i] as i64 - before[i] as i64);
    (trainer, found, more)
}

/// Saves a trainer, and demands that the CPU resumes it without offloading.
fn check_resumes_without(trainer: &Trainer, source: &Source) {
    let place = fresh_folder("offload");
    trainer.save(&place, &serde_json::Value::Null, 1).unwrap();
    let cpu = Device::cpu(Some(1)).unwrap();
    let (resumed, _) = Trainer::resume(&cpu, source, &place).unwrap();
    assert_eq!(resumed.config().offload, Offload::default());
    std::fs::remove_dir_all(&place).unwrap();
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
        let words = "shares the host's memory";
        assert!(error.to_string().contains(words), "{error}");
        return;
    }
    let run = |offload| offloading(&device, &source, &settings(offload));
    // The first trainer of a process leaves memory that belongs to the device.
    drop(run(Offload::default()));
    let (kept, wanted, own) = run(Offload::default());
    drop(kept);
    for name in ["moments", "activations", "moments,activations"] {
        let offload: Offload = name.parse().unwrap();
        let (trainer, found, more) = run(offload);
        assert_eq!(found, wanted, "{name}");
        let what = format!("{name}: {own:?} and {more:?}");
        let moments = own[0] - more[0];
        assert_eq!(moments > 0, offload.moments, "{what}");
        assert_eq!(more[1], moments, "{what}");
        // bf16, 256 tokens, a stream before each block.
        let streams = 2 * 256 * source.spec().hidden_size * source.spec().blocks.len();
        let away = match offload.activations {
            true => streams as i64,
            false => 0,
        };
        assert_eq!(more[2] - own[2], away, "{what}");
        if offload == all {
            check_resumes_without(&trainer, &source);
        }
    }
}

/// Times steps of documents of these lengths, and prints them beside the memory that they take.
fn measure_steps(gpu: &Arc<Gpu>, source: &Source, recompute: bool, lengths: &[usize]) {
    let device = Device::Cuda(gpu.clone());
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
    let mut trainer = Trainer::new(&device, source, &config).unwrap();
    gpu.synchronize().unwrap();
    let made = start.elapsed().as_secs_f64();
    let bytes = trainer.parameters().bytes() as f64;
    let parameters = trainer.parameters().layout().parameters();
    println!(
        "made in {made:.1} s; {:.3} bytes a parameter of {parameters}",
        bytes / parameters as f64
    );
    let rows: usize = lengths.iter().sum();
    let time = median_step(gpu, &mut trainer, source, lengths);
    let peak = |tag| memory::usage(tag).peak as f64 / 1e9;
    let estimate = Estimate::new(source, &config, &device, rows);
    println!(
        "{lengths:?} recompute {recompute}: {:.0} ms, {:.0} tokens/s; weights {:.2} GB of {:.2} estimated, scratch {:.2} of {:.2}",
        time * 1e3,
        rows as f64 / time,
        peak(Tag::DeviceWeights),
        estimate.states as f64 / 1e9,
        peak(Tag::DeviceScratch),
        (estimate.gradients + estimate.activations) as f64 / 1e9
    );
}

/// The median time of five steps after a first one, in seconds.
fn median_step(gpu: &Gpu, trainer: &mut Trainer, source: &Source, lengths: &[usize]) -> f64 {
    let rows: usize = lengths.iter().sum();
    let vocabulary = source.spec().vocab_size as u64;
    let tokens: Vec<u32> = (0..rows as u64)
        .map(|i| (random::bits(3, i) % vocabulary) as u32)
        .collect();
    let labels: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    let batch = MicroBatch {
        tokens: &tokens,
        documents: lengths,
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
    times[2]
}

/// Steps of the model in the folder that NVFP4_TRAIN_MODEL names, `--ignored --nocapture`: the modes whose numbers NVFP4_TRAIN_MODES lists,
/// or all of them.
#[test]
#[ignore = "measures"]
fn step_speed() {
    let (Some(gpu), Ok(path)) = (gpu(), std::env::var("NVFP4_TRAIN_MODEL")) else {
        return;
    };
    let source = Source::open(Path::new(&path)).unwrap();
    let modes = [
        (true, vec![4096]),
        (true, vec![2048; 4]),
        (false, vec![2048; 4]),
    ];
    let chosen = std::env::var("NVFP4_TRAIN_MODES").unwrap_or_else(|_| "012".to_owned());
    for (number, (recompute, lengths)) in modes.into_iter().enumerate() {
        if chosen.contains(&number.to_string()) {
            measure_steps(&gpu, &source, recompute, &lengths);
        }
    }
}
