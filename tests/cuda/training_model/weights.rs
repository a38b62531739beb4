//! The weights that a GPU trains: models that run them, and exports after steps that change nothing.

use std::ops::ControlFlow;
use std::path::Path;

use NVFP4::base::Result;
use NVFP4::base::memory::{self, Tag};
use NVFP4::base::threads::Pool;
use NVFP4::engine::Served;
use NVFP4::format::adamw::WeightForm;
use NVFP4::format::nvfp4;
use NVFP4::format::residual::Bits;
use NVFP4::model::convert::{Container, ConvertOptions, Tables, convert};
use NVFP4::model::training::Source;
use NVFP4::model::{Device, KvType, LoadOptions, Logits, Scratch};
use NVFP4::session::{GenerateOptions, Piece, Session, SessionOptions};
use NVFP4::train::{Clip, Config, Lora, Recipe, Trainer};

use super::{error, losses, text};
use crate::common::golden;
use crate::support::gpu;

/// The logits of these tokens, and of one more in a step.
fn logits_after(model: &Served, tokens: &[u32]) -> Result<Vec<f32>> {
    let mut cache = model.sequence(64, KvType::F16)?;
    let (mut scratch, mut logits) = (Scratch::new(), Vec::new());
    model.forward(tokens, &mut cache, &mut scratch, Logits::All, &mut logits)?;
    let mut last = Vec::new();
    model.forward(&[7], &mut cache, &mut scratch, Logits::Last, &mut last)?;
    logits.extend(last);
    Ok(logits)
}

/// The model on live weights, through fused kernels, has the bits of the model that an export gives, also after further steps.
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
        let loaded = Served::load(&place, &LoadOptions::new(device.clone())).unwrap();
        let (tokens, _) = text(3, 40, source.spec().vocab_size);
        let logits = |model: &Served| logits_after(model, &tokens).unwrap();
        let (found, expected) = (logits(&model), logits(&loaded));
        // The trainer has an untied embedding in memory of its own, and the loaded model in host memory: the values are equal.
        assert!(found == expected, "{name}: {:e}", error(&found, &expected));
        losses(&mut trainer, 5..6);
        trainer
            .export_directory(&source, &place, Tables::Auto, true)
            .unwrap();
        let loaded = Served::load(&place, &LoadOptions::new(device.clone())).unwrap();
        let (after, expected) = (logits(&model), logits(&loaded));
        assert!(after == expected, "{name}: {:e}", error(&after, &expected));
        assert!(after != found, "{name}");
        std::fs::remove_dir_all(&place).unwrap();
    }
}

/// Sessions on weights that are trained go on after a step as new ones with the same tokens do: what ran ahead, recorded steps and keys of
/// the weights before are not used. Both run their tokens as a prompt, and then the same calls.
#[test]
fn sessions_go_on_with_the_weights_after_a_step() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    for name in ["qwen3_tied", "mistral_window"] {
        let source = Source::open(&golden(name)).unwrap();
        let mut config = Config {
            steps: 20,
            ..Config::default()
        };
        config.optimizer.rate = 2e-3;
        let mut trainer = Trainer::new(&device, &source, &config).unwrap();
        losses(&mut trainer, 0..2);
        let model = trainer.model(&source).unwrap();
        let options = SessionOptions {
            private: true,
            ..SessionOptions::default()
        };
        let session = |tokens: &[u32]| {
            let mut session = Session::new(model.clone(), &options).unwrap();
            session.prefill(tokens).unwrap();
            session
        };
        let generate = GenerateOptions {
            max_tokens: 12,
            ignore_model_stops: true,
            ..GenerateOptions::default()
        };
        let mut go = |_: Piece<'_>| ControlFlow::Continue(());
        let (tokens, _) = text(3, 40, source.spec().vocab_size);
        let mut old = session(&tokens);
        for step in 2..5 {
            // A step has run ahead when the generation ends, and is recorded.
            old.generate(&generate, &mut go).unwrap();
            losses(&mut trainer, step..step + 1);
            let mut new = session(old.tokens());
            let [a, b] = [&mut old, &mut new].map(|s| s.logits().unwrap().to_vec());
            assert!(a == b, "{name}: {:e}", error(&a, &b));
            let [a, b] =
                [&mut old, &mut new].map(|s| s.generate(&generate, &mut go).unwrap().tokens);
            assert_eq!(a, b, "{name}");
        }
        // A thread that generates goes on while steps come.
        std::thread::scope(|scope| {
            let generating = scope.spawn(|| {
                let made = old.generate(&generate, &mut |_| ControlFlow::Continue(()));
                (made.unwrap().tokens.len(), old)
            });
            losses(&mut trainer, 5..10);
            let (made, mut old) = generating.join().unwrap();
            let mut new = session(old.tokens());
            losses(&mut trainer, 10..11);
            let [a, b] = [&mut old, &mut new].map(|s| s.logits().unwrap().to_vec());
            assert!(made == 12 && a == b, "{name}: {:e}", error(&a, &b));
        });
    }
}

/// Trains at a rate of 0 with a recipe, and returns the weights that are exported.
fn trained(device: &Device, source: &Source, recipe: &Recipe, folder: &Path) -> Vec<u8> {
    let mut config = Config {
        recipe: recipe.clone(),
        steps: 10,
        ..Config::default()
    };
    config.optimizer.rate = 0.0;
    let mut trainer = Trainer::new(device, source, &config).unwrap();
    losses(&mut trainer, 0..3);
    let place = folder.join("found");
    trainer
        .export_directory(source, &place, Tables::Auto, true)
        .unwrap();
    std::fs::read(place.join("model.safetensors")).unwrap()
}

/// The weights that quantizing the model's files gives.
fn quantized(source: &Source, recipe: &Recipe, folder: &Path) -> Vec<u8> {
    let place = folder.join("wanted");
    let options = ConvertOptions {
        tables: recipe.tables,
        replace: true,
        ..ConvertOptions::new(Container::ModelOpt, nvfp4::Recipe::Sweep)
    };
    let pool = Pool::new(2).unwrap();
    convert(&**source.checkpoint(), &place, &options, &pool, &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap();
    std::fs::read(place.join("model.safetensors")).unwrap()
}

/// Steps at a rate of 0 deliver what quantizing gives, byte for byte, in every mode.
#[test]
fn a_gpu_that_learns_nothing_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let device = Device::Cuda(gpu);
    let folder = std::env::temp_dir().join(format!("nvfp4-cuda-same-{}", std::process::id()));
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
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let source = Source::open(&goldens.join(name)).unwrap();
        for (number, recipe) in modes.iter().enumerate() {
            let found = trained(&device, &source, recipe, &folder);
            let wanted = quantized(&source, recipe, &folder);
            assert!(found == wanted, "{name}, mode {number}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
