//! Distillation: losses and gradients against torch's autograd, and the guarantees of a trainer with a teacher.

use std::sync::Arc;

use NVFP4::model::training::{Placement, Teacher};
use NVFP4::ops::training::divergence::Mixture;
use NVFP4::train::{Comparison, Distillation, TeacherPlacement};

use super::*;

fn open(name: &str) -> Source {
    Source::open(&golden("model").join(name)).unwrap()
}

/// Against torch in f64: other shapes than the student's, documents packed, with and without a temperature and labels, and with logits in
/// chunks and at once.
#[test]
fn gradients_of_lessons_are_those_of_autograd() {
    let device = Device::cpu(Some(2)).unwrap();
    for case in ["qwen3_tied", "qwen3_untied"] {
        let source = open(case);
        let file = golden("training").join(format!("{case}_taught.safetensors"));
        let bytes = std::fs::read(file).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let teacher = expected.tensor("teacher").unwrap().data();
        let teacher = std::str::from_utf8(teacher).unwrap();
        let mixture = Mixture {
            temperature: floats(&expected, "temperature")[0],
            label_share: floats(&expected, "share")[0],
        };
        let batch = golden_batch(&device, &source, &expected);
        let tokens = integers(&expected, "tokens").into_iter().map(|t| t as u32);
        let tokens: Vec<u32> = tokens.collect();
        let documents = integers(&expected, "documents").into_iter();
        let documents: Vec<usize> = documents.map(|n| n as usize).collect();
        for (recompute, head_chunk) in [
            (Recompute::Block, 64),
            (Recompute::None, 64),
            (Recompute::Block, 8192),
        ] {
            let options = Options {
                recompute,
                head_chunk,
                ..Options::default()
            };
            let mut store = Dense::new(&device, &source);
            let mut pass = Pass::new(&device, source.spec(), source.layout(), options).unwrap();
            let of_teacher = Arc::new(open(teacher));
            let mut teacher =
                Teacher::new(&device, of_teacher, Placement::Resident, head_chunk).unwrap();
            let same = teacher.batch(&tokens, &documents).unwrap();
            let lesson = teacher.lesson(&same, mixture);
            let totals = pass
                .lesson_gradients(&mut store, &batch, lesson, 0)
                .unwrap();
            let wanted = f64::from(floats(&expected, "loss")[0]);
            assert!(
                (totals.loss / wanted - 1.0).abs() < 1e-5,
                "{case}: a loss of {}, and {wanted} is right",
                totals.loss
            );
            let seen = check_gradients(&store, &expected, case);
            assert!(seen > source.layout().matrices.len(), "{case}: {seen}");
            // A pass without gradients has the same sums.
            let lesson = teacher.lesson(&same, mixture);
            let again = pass.lesson_totals(&mut store, &batch, lesson).unwrap();
            assert_eq!(again, totals);
        }
    }
}

fn taught(recipe: Recipe, steps: u64, distillation: Distillation) -> Config {
    Config {
        distillation: Some(distillation),
        ..config(recipe, steps)
    }
}

/// A trainer of one golden model with another one as its teacher.
fn student(config: &Config, of: &str, teacher: &str, placement: TeacherPlacement) -> Trainer {
    let source = open(of);
    let device = Device::cpu(Some(2)).unwrap();
    let mut trainer = Trainer::new(&device, &source, config).unwrap();
    let teacher = Arc::new(open(teacher));
    trainer
        .set_teacher(&source, teacher, placement, 100)
        .unwrap();
    trainer
}

/// A model that is its own teacher has nothing to learn: the loss is zero, and so is every gradient, at any rate and temperature.
#[test]
fn a_model_learns_nothing_from_itself() {
    for (name, temperature) in [
        ("qwen3_tied", 1.0),
        ("qwen2_untied", 1.7),
        ("gemma3_wide", 0.5),
    ] {
        let mut config = taught(
            Recipe::float32(),
            3,
            Distillation {
                temperature,
                ..Distillation::default()
            },
        );
        config.optimizer.rate = 10.0;
        config.optimizer.decay = 0.0;
        config.head_chunk = 64;
        let mut trainer = student(&config, name, name, TeacherPlacement::Auto);
        let before = weights(&trainer);
        let vocabulary = trainer.spec().vocab_size as u32;
        let mut batch = Documents::new(4, &[40, 9, 31]);
        batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
        let labels = batch.labels.iter_mut();
        labels.for_each(|t| *t %= vocabulary as i32);
        for _ in 0..3 {
            let step = trainer.step(&[batch.batch()]).unwrap();
            assert_eq!(step.outcome, Outcome::Updated);
            assert_eq!((step.loss, step.gradient_norm), (0.0, 0.0), "{name}");
        }
        assert!(before == weights(&trainer), "{name}");
        let same = trainer.compare(&[batch.batch()], true).unwrap();
        let loss = trainer.evaluate(&[batch.batch()], true).unwrap();
        assert_eq!(same.divergence, 0.0, "{name}");
        assert!((same.loss / loss - 1.0).abs() < 1e-6, "{name}");
    }
}

/// Where the teacher's weights are changes no bit: of a teacher in NVFP4 with tables in other types, of one in float32, and of rows that are
/// parts of matrices.
#[test]
fn a_streamed_teacher_is_the_resident_one() {
    let folder = Folder::new();
    let dense = folder.0.join("dense");
    trainer(&config(Recipe::float32(), 1))
        .export_directory(&open("qwen3_tied"), &dense, Tables::Bf16, false)
        .unwrap();
    let dense = dense.to_str().unwrap();
    for (of, teacher) in [
        ("qwen3_tied", "qwen2_untied"),
        ("qwen3_tied", dense),
        ("qwen3_untied", "phi3_partial"),
        ("qwen3_untied", "gemma3_wide"),
    ] {
        let mut found = Vec::new();
        for placement in [TeacherPlacement::Resident, TeacherPlacement::Streamed] {
            let settings = Distillation {
                temperature: 1.5,
                label_share: 0.2,
                ..Distillation::default()
            };
            let config = taught(Recipe::default(), 3, settings);
            let mut trainer = student(&config, of, teacher, placement);
            let at = trainer.teacher().unwrap().placement();
            assert_eq!(
                at == Placement::Resident,
                placement == TeacherPlacement::Resident
            );
            let mut batch = Documents::new(4, &[40, 9, 31]);
            let vocabulary = trainer.spec().vocab_size as u32;
            batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
            let labels = batch.labels.iter_mut();
            labels.for_each(|t| *t %= vocabulary as i32);
            let steps: Vec<_> = (0..3)
                .map(|_| trainer.step(&[batch.batch()]).unwrap())
                .collect();
            assert!(steps[0].loss > 0.1, "{}", steps[0].loss);
            found.push((
                steps,
                trainer.compare(&[batch.batch()], true).unwrap(),
                weights(&trainer),
            ));
        }
        assert!(found[0] == found[1], "{teacher}");
    }
}

/// A resumed trainer has the same bits with its own teacher, and is refused without one and with another one.
#[test]
fn lessons_go_on_to_the_same_bits() {
    let settings = Distillation {
        temperature: 2.0,
        label_share: 0.1,
        ..Distillation::default()
    };
    let config = taught(Recipe::default(), 8, settings);
    let batches: Vec<Documents> = (0..8).map(|step| Documents::new(step, &[40, 21])).collect();
    let make = || {
        student(
            &config,
            "qwen3_tied",
            "qwen2_untied",
            TeacherPlacement::Resident,
        )
    };
    let mut whole = make();
    let steps: Vec<_> = batches
        .iter()
        .map(|b| whole.step(&[b.batch()]).unwrap())
        .collect();
    let folder = Folder::new();
    let mut first = make();
    for batch in &batches[..4] {
        first.step(&[batch.batch()]).unwrap();
    }
    first.save(&folder.0, &serde_json::Value::Null, 1).unwrap();
    let (device, source) = (Device::cpu(Some(1)).unwrap(), open("qwen3_tied"));
    let (mut second, _) = Trainer::resume(&device, &source, &folder.0).unwrap();
    let error = second.step(&[batches[4].batch()]).unwrap_err();
    assert!(error.message().contains("no teacher was given"), "{error}");
    let mut give = |name: &str| {
        let teacher = Arc::new(open(name));
        second.set_teacher(&source, teacher, TeacherPlacement::Streamed, 100)
    };
    let error = give("qwen2_massive").unwrap_err();
    assert!(error.message().contains("fingerprint"), "{error}");
    give("qwen2_untied").unwrap();
    for (batch, expected) in batches[4..].iter().zip(&steps[4..]) {
        assert_eq!(second.step(&[batch.batch()]).unwrap(), *expected);
    }
    assert!(weights(&whole) == weights(&second));
}

/// Settings of checkpoints from before there were teachers are read, and written as before.
#[test]
fn settings_without_a_teacher_are_as_they_were() {
    let plain = serde_json::to_value(Config::default()).unwrap();
    assert!(plain.get("distillation").is_none());
    assert_eq!(
        serde_json::from_value::<Config>(plain).unwrap(),
        Config::default()
    );
}

/// Codes in NVFP4 come nearer to the model that they were made from.
#[test]
fn lessons_bring_codes_nearer_to_their_source() {
    let folder = Folder::new();
    let place = folder.0.join("learned");
    // A model that has learned something, with weights that are not NVFP4 codes.
    let mut learned = trainer(&config(Recipe::float32(), 60));
    for step in 0..60 {
        let batch = Documents::new(step, &[64; 4]);
        learned.step(&[batch.batch()]).unwrap();
    }
    learned
        .export_directory(&open("qwen3_tied"), &place, Tables::Bf16, false)
        .unwrap();
    let recipe = Recipe {
        delivered_share: Some(1.0),
        ..Recipe::default()
    };
    let mut config = taught(recipe, 50, Distillation::default());
    config.optimizer.rate = 1e-3;
    config.optimizer.decay = 0.0;
    let place = place.to_str().unwrap();
    let mut trainer = student(&config, place, place, TeacherPlacement::Auto);
    let evaluation = Documents::new(999, &[96; 4]);
    let measure = |trainer: &mut Trainer| -> Comparison {
        trainer.compare(&[evaluation.batch()], true).unwrap()
    };
    let before = measure(&mut trainer);
    for step in 0..50 {
        let batch = Documents::new(100 + step, &[64; 4]);
        trainer.step(&[batch.batch()]).unwrap();
    }
    let after = measure(&mut trainer);
    println!("{before:?} to {after:?}");
    assert!(
        after.divergence < 0.6 * before.divergence,
        "{before:?} to {after:?}"
    );
}

#[test]
fn teachers_that_cannot_teach_are_refused() {
    let source = open("qwen3_tied");
    let device = Device::cpu(Some(1)).unwrap();
    let made = |settings: Option<Distillation>| {
        let config = Config {
            distillation: settings,
            ..config(Recipe::default(), 3)
        };
        Trainer::new(&device, &source, &config)
    };
    let mut trainer = made(Some(Distillation::default())).unwrap();
    let batch = Documents::new(4, &[40]);
    let error = trainer.step(&[batch.batch()]).unwrap_err();
    assert!(error.message().contains("no teacher was given"), "{error}");
    let give = |trainer: &mut Trainer, name: &str| {
        let teacher = Arc::new(open(name));
        let given = trainer.set_teacher(&source, teacher, TeacherPlacement::Auto, 100);
        given.unwrap_err().message().to_owned()
    };
    let error = give(&mut trainer, "qwen3_untied");
    assert!(
        error.contains("predicts 150 tokens and the model 320"),
        "{error}"
    );
    let error = give(&mut made(None).unwrap(), "qwen2_untied");
    assert!(error.contains("no distillation"), "{error}");
    for (temperature, label_share, words) in [
        (0.0, 0.0, "a temperature of 0"),
        (f64::NAN, 0.0, "a temperature of NaN"),
        (1.0, 1.0, "a share of 1 of labels"),
        (1.0, -0.1, "a share of -0.1 of labels"),
    ] {
        let settings = Distillation {
            teacher: None,
            temperature,
            label_share,
        };
        let error = made(Some(settings)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }

    // Two tokens exchanged.
    let folder = Folder::new();
    let copy = folder.0.join("other");
    std::fs::create_dir(&copy).unwrap();
    let from = golden("model/qwen3_tied");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), copy.join(file)).unwrap();
    }
    let tokenizer = std::fs::read_to_string(from.join("tokenizer.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let [(a, first), (b, second)] = ["a", "b"].map(|t| (t, vocabulary[t].clone()));
    vocabulary.insert(a.to_owned(), second);
    vocabulary.insert(b.to_owned(), first);
    std::fs::write(copy.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let mut trainer = made(Some(Distillation::default())).unwrap();
    let error = give(&mut trainer, copy.to_str().unwrap());
    assert!(error.contains("in the teacher's tokenizer"), "{error}");

    // A context that is shorter than the model's.
    std::fs::copy(from.join("tokenizer.json"), copy.join("tokenizer.json")).unwrap();
    let settings = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut settings: serde_json::Value = serde_json::from_str(&settings).unwrap();
    settings["max_position_embeddings"] = 128.into();
    std::fs::write(copy.join("config.json"), settings.to_string()).unwrap();
    let long = Documents::new(4, &[129]);
    let teacher = Arc::new(open(copy.to_str().unwrap()));
    trainer
        .set_teacher(&source, teacher, TeacherPlacement::Auto, 100)
        .unwrap();
    let error = trainer.step(&[long.batch()]).unwrap_err().to_string();
    assert!(error.contains("the teacher's context has 128"), "{error}");
}

/// The loss against a teacher is the mean by the weights of tokens, and a token of weight 0 does not count.
#[test]
fn lessons_count_by_weights() {
    let settings = Distillation {
        temperature: 2.0,
        label_share: 0.25,
        ..Distillation::default()
    };
    let config = taught(Recipe::default(), 3, settings);
    let make = || {
        let placement = TeacherPlacement::Resident;
        student(&config, "qwen3_tied", "qwen2_untied", placement)
    };
    let both = Documents::new(4, &[40, 24]);
    let weighted = |first: f32, second: f32| [vec![first; 40], vec![second; 24]].concat();
    let measured = |weights: &[f32]| {
        let batch = MicroBatch {
            weights: Some(weights),
            ..both.batch()
        };
        let mut trainer = make();
        let compared = trainer.compare(&[batch], true).unwrap();
        let step = trainer.step(&[batch]).unwrap();
        [compared.loss, compared.divergence, step.loss]
    };
    let [first, second] = [weighted(1.0, 0.0), weighted(0.0, 1.0)].map(|w| measured(&w));
    let found = measured(&weighted(0.5, 2.0));
    for ((first, second), found) in first.into_iter().zip(second).zip(found) {
        let wanted = (0.5 * 40.0 * first + 2.0 * 24.0 * second) / (0.5 * 40.0 + 2.0 * 24.0);
        assert!((found / wanted - 1.0).abs() < 1e-5, "{found}, {wanted}");
        assert!((first / second - 1.0).abs() > 1e-3, "{first}, {second}");
    }
    let even = measured(&weighted(1.0, 1.0));
    let plain = make().compare(&[both.batch()], true).unwrap();
    assert_eq!([plain.loss, plain.divergence], even[..2]);
}
