//! Steps towards hidden states, and groups of parameters.

use NVFP4::model::training::HiddenTargets;
use NVFP4::train::{Group, HiddenBatch};

use super::*;

#[test]
fn gradients_of_hidden_states_are_those_of_autograd() {
    let device = Device::cpu(Some(2)).unwrap();
    for case in ["qwen3_tied", "qwen3_untied"] {
        let source = Source::open(&golden("model").join(case)).unwrap();
        let file = golden("training").join(format!("{case}_l1.safetensors"));
        let bytes = std::fs::read(file).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let batch = golden_batch(&device, &source, &expected);
        let targets = floats(&expected, "targets");
        let mut store = Dense::new(&device, &source);
        let options = Options::default();
        let mut pass = Pass::new(&device, source.spec(), source.layout(), options).unwrap();
        let towards = HiddenTargets {
            values: Slice::Host(&targets),
            weight: 1.0 / targets.len() as f32,
        };
        let loss = pass
            .hidden_gradients(&mut store, &batch, towards, 0)
            .unwrap();
        let wanted = f64::from(floats(&expected, "loss")[0]);
        assert!((loss / wanted - 1.0).abs() < 1e-6, "{case}: {loss}");
        let seen = check_gradients(&store, &expected, case);
        assert!(seen >= source.layout().matrices.len(), "{case}: {seen}");
        if !source.spec().tied {
            let head = &store.gradients[source.layout().head];
            assert!(head.iter().all(|g| *g == 0.0), "the head has gradients");
        }
    }
}

/// Steps come nearer to hidden states, in one batch as in two, and leave an untied head alone.
#[test]
fn hidden_states_are_trained_towards() {
    let source = Source::open(&golden("model/qwen3_untied")).unwrap();
    let device = Device::cpu(Some(2)).unwrap();
    let vocabulary = source.spec().vocab_size as u32;
    let hidden = source.spec().hidden_size;
    let mut batch = Documents::new(3, &[12, 20]);
    batch.tokens.iter_mut().for_each(|t| *t %= vocabulary);
    let targets: Vec<f32> = (0..32 * hidden).map(|i| (i as f32).sin()).collect();
    let mut trainers =
        [(); 2].map(|()| Trainer::new(&device, &source, &config(Recipe::float32(), 40)).unwrap());
    let head = source.layout().head;
    let before = weights(&trainers[0])[head].clone();
    let mut losses = Vec::new();
    for _ in 0..40 {
        let all = HiddenBatch {
            tokens: &batch.tokens,
            documents: &[12, 20],
            targets: &targets,
        };
        let parts = [(0..12, [12]), (12..32, [20])];
        let parts = parts.each_ref().map(|(rows, documents)| HiddenBatch {
            tokens: &batch.tokens[rows.clone()],
            documents,
            targets: &targets[rows.start * hidden..rows.end * hidden],
        });
        let once = trainers[0].step_hidden(&[all]).unwrap();
        let twice = trainers[1].step_hidden(&parts).unwrap();
        assert_eq!((once.targets, twice.targets), (32, 32));
        if losses.is_empty() {
            assert!((once.loss / twice.loss - 1.0).abs() < 1e-6);
            assert!((once.gradient_norm / twice.gradient_norm - 1.0).abs() < 1e-5);
        }
        losses.push(once.loss);
    }
    let last = losses[39];
    assert!(last < 0.8 * losses[0], "{} to {last}", losses[0]);
    assert_eq!(weights(&trainers[0])[head], before);
    let wrong = HiddenBatch {
        tokens: &batch.tokens,
        documents: &[12, 20],
        targets: &targets[1..],
    };
    let error = trainers[0].step_hidden(&[wrong]).unwrap_err().to_string();
    assert!(error.contains("there must be"), "{error}");
}

/// The first group that names a parameter sets its rate and its decay.
#[test]
fn groups_have_rates_and_decays_of_their_own() {
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let group = |names: &[&str], rate_factor, decay| Group {
        names: names.iter().map(|n| (*n).to_owned()).collect(),
        rate_factor,
        decay,
    };
    let groups = vec![
        group(&["v_proj"], 0.0, None),
        group(&["embed_tokens"], 1.0, Some(0.0)),
        group(&["self_attn"], 0.5, Some(0.2)),
        group(&["model.norm"], 1.0, Some(0.3)),
    ];
    let plain = Config {
        schedule: Schedule {
            warmup: 0,
            ..Schedule::default()
        },
        ..config(Recipe::float32(), 10)
    };
    let grouped = Config {
        groups,
        ..plain.clone()
    };
    let rate = plain.optimizer.rate;
    let (mut a, mut b) = (trainer(&plain), trainer(&grouped));
    let before = weights(&a);
    let batch = Documents::new(1, &[50]);
    a.step(&[batch.batch()]).unwrap();
    b.step(&[batch.batch()]).unwrap();
    let (a, b) = (weights(&a), weights(&b));
    let layout = source.layout();
    let matrices = layout.matrices.iter().map(|m| (&m.name, 0.1));
    let vectors = layout.vectors.iter().map(|v| (&v.name, 0.0));
    for (i, (name, decay)) in matrices.chain(vectors).enumerate() {
        let (factor, other) = match name.as_str() {
            n if n.contains("v_proj") => (0.0, decay),
            n if n.contains("embed_tokens") => (1.0, 0.0),
            n if n.contains("self_attn") => (0.5, 0.2),
            "model.norm.weight" => (1.0, 0.3),
            _ => (1.0, decay),
        };
        for ((&w, &a), &b) in before[i].iter().zip(&a[i]).zip(&b[i]) {
            let [w, a, b] = [w, a, b].map(f64::from);
            // A step consists of the decay and the move by the gradient, with the rates of the step.
            let moved = a - w * (1.0 - rate * decay);
            let wanted = w * (1.0 - rate * factor * other) + factor * moved;
            assert!((b - wanted).abs() < 1e-6, "{name}: {b}, not {wanted}");
        }
    }
    let refused = |group: Group, last_blocks: Option<usize>| {
        let mut config = Config {
            groups: vec![group],
            ..plain.clone()
        };
        config.recipe.last_blocks = last_blocks;
        let made = Trainer::new(&Device::cpu(Some(1)).unwrap(), &source, &config);
        made.unwrap_err().to_string()
    };
    let error = refused(group(&["embeddings"], 1.0, None), None);
    assert!(
        error.contains("name with \"embeddings\"") && error.contains("model.embed_tokens"),
        "{error}"
    );
    // There is one, which stands still.
    let error = refused(group(&["embed_tokens"], 1.0, None), Some(1));
    assert!(
        error.contains("no parameter that is trained is in the group"),
        "{error}"
    );
    let error = refused(group(&["embed"], -1.0, None), None);
    assert!(error.contains("rate_factor -1"), "{error}");
}
