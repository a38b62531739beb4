//! Weights of tokens in the loss, from rows to steps, and the batches that a step refuses.

use std::hash::Hasher;

use NVFP4::train::MicroBatch;
use twox_hash::XxHash3_64;

use super::*;

/// A conversation with these weights for its two answers.
fn answers(first: &str, second: &str) -> String {
    format!(
        r#"{{"messages": [{{"role": "user", "content": "one"}}, {{"role": "assistant", "content": "two"{first}}}, {{"role": "user", "content": "three"}}, {{"role": "assistant", "content": "four"{second}}}]}}"#
    )
}

#[test]
fn weights_of_messages_reach_the_rows_of_windows() {
    let folder = Folder::new("weights");
    let chatml = ChatTemplate::chatml();
    let text = text(Some(chatml.source()));
    let of = |name: &str, rows: &str| {
        let file = folder.file(name, rows);
        read(&[file], &text, &Options::default()).unwrap()
    };
    let plain = of("plain.jsonl", &answers("", ""));
    let weighted = of("weighted.jsonl", &answers(r#", "weight": 0.25"#, ""));
    assert_eq!(plain.documents()[0].tokens, weighted.documents()[0].tokens);
    assert_eq!(
        plain.documents()[0].learned,
        weighted.documents()[0].learned
    );
    assert!(plain.documents()[0].weights.is_empty());
    // Context without a learned answer has the same tokens.
    let context = of("context.jsonl", &answers(r#", "train": false"#, ""));
    assert_eq!(
        marked(&text, &context.documents()[0]),
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n\
         <|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n"
    );
    let last = of("last.jsonl", &answers("", r#", "weight": 0"#));
    assert_eq!(
        marked(&text, &last.documents()[0]),
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[two<|im_end|>]\n"
    );
    // Packed with rows that have none, on either side.
    for rows in [[&plain, &weighted], [&weighted, &plain]] {
        let mut window = Window::default();
        rows.iter()
            .for_each(|data| window.push(&data.documents()[0]));
        assert_eq!(window.weights.len(), window.labels.len());
        let mut other = Window::default();
        other.push(&rows[1].documents()[0]);
        let mut appended = Window::default();
        appended.push(&rows[0].documents()[0]);
        appended.append(&other);
        assert_eq!(appended, window);
        let mut sums = [0.0, 0.0];
        for (&label, &weight) in window.labels.iter().zip(&window.weights) {
            match label {
                0.. => sums[usize::from(weight == 1.0)] += 1.0,
                _ => assert_eq!(weight, 0.0),
            }
        }
        // One document has a quarter of the weight for the tokens of its first answer.
        let first = sums[0];
        assert!(first > 0.0);
        assert_eq!(window.batch().total_weight(), sums[1] + 0.25 * first);
        assert_eq!(window.targets() as f64, sums[1] + first);
    }
    // All tokens alike, and one of them not.
    let all = Options {
        learn_all: true,
        ..Options::default()
    };
    let error = read(&[folder.path("weighted.jsonl")], &text, &all).unwrap_err();
    assert!(
        error.contains("--train-on-all") && error.contains("message 1 has the weight 0.25"),
        "{error}"
    );
}

fn trainer(source: &Source) -> Trainer {
    let config = Config {
        steps: 4,
        ..Config::default()
    };
    Trainer::new(&Device::cpu(Some(2)).unwrap(), source, &config).unwrap()
}

/// Two documents, and for each row a label.
fn batch() -> (Vec<u32>, [usize; 2], Vec<i32>) {
    let tokens: Vec<u32> = (0..40u32).map(|i| (i * 37 + 11) % 300).collect();
    let labels = (0..40).map(|i| if i % 3 == 0 { -100 } else { (i * 29 + 7) % 300 });
    (tokens, [24, 16], labels.collect())
}

#[test]
fn a_loss_is_the_mean_by_weight() {
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let (tokens, documents, labels) = batch();
    let of = |weights| MicroBatch {
        tokens: &tokens,
        documents: &documents,
        labels: &labels,
        weights,
    };
    let mut one = trainer(&source);
    let only = |from: usize, to: usize| -> Vec<f32> {
        (0..40)
            .map(|i| f32::from(u8::from((from..to).contains(&i))))
            .collect()
    };
    let (first, second) = (only(0, 24), only(24, 40));
    let halves = [&first, &second].map(|w| one.evaluate(&[of(Some(w))], false).unwrap());
    let counts = [16.0, 10.0];
    let mixed: Vec<f32> = first
        .iter()
        .zip(&second)
        .map(|(a, b)| 0.5 * a + 2.0 * b)
        .collect();
    let loss = one.evaluate(&[of(Some(&mixed))], false).unwrap();
    let wanted = (0.5 * counts[0] * halves[0] + 2.0 * counts[1] * halves[1])
        / (0.5 * counts[0] + 2.0 * counts[1]);
    // Sums of f64 in two orders, of weights that are powers of two.
    assert!((loss - wanted).abs() < 1e-9, "{loss} {wanted}");

    // The gradient too: twice the weight is twice the document.
    let twice = [&tokens[..], &tokens[24..]].concat();
    let repeated = MicroBatch {
        tokens: &twice,
        documents: &[24, 16, 16],
        labels: &[&labels[..], &labels[24..]].concat(),
        weights: None,
    };
    let doubled: Vec<f32> = first
        .iter()
        .zip(&second)
        .map(|(a, b)| a + 2.0 * b)
        .collect();
    let (a, b) = (
        trainer(&source).step(&[repeated]).unwrap(),
        trainer(&source).step(&[of(Some(&doubled))]).unwrap(),
    );
    assert!((a.loss - b.loss).abs() < 1e-6, "{a:?} {b:?}");
    assert!(
        (a.gradient_norm / b.gradient_norm - 1.0).abs() < 1e-4,
        "{a:?} {b:?}"
    );
    assert_eq!((a.targets, b.targets), (36, 26));
}

/// Weights of 1 are none, and a label of weight 0 is none, to the bit.
#[test]
fn weights_of_one_and_of_nothing_change_no_bit() {
    let folder = Folder::new("bits");
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let (tokens, documents, labels) = batch();
    let fewer: Vec<i32> = labels
        .iter()
        .enumerate()
        .map(|(i, &l)| if i < 8 { -1 } else { l })
        .collect();
    let ones = vec![1.0; 40];
    let late: Vec<f32> = (0..40).map(|i| if i < 8 { 0.0 } else { 1.0 }).collect();
    for (name, labels, weights, same) in [
        ("ones", &labels, &ones, &labels),
        ("zeros", &labels, &late, &fewer),
    ] {
        let weighted = MicroBatch {
            tokens: &tokens,
            documents: &documents,
            labels,
            weights: Some(weights),
        };
        let plain = MicroBatch {
            labels: same,
            weights: None,
            ..weighted
        };
        let saved = [plain, weighted].map(|batch| {
            let mut trainer = trainer(&source);
            let steps = [0, 1].map(|_| trainer.step(&[batch, batch]).unwrap());
            let place = folder.path(&format!("{name}-{}", batch.weights.is_some()));
            let path = trainer.save(&place, &Value::Null, 1).unwrap();
            let loss = trainer.evaluate(&[batch], true).unwrap();
            (fs::read(path.join("state.bin")).unwrap(), steps, loss)
        });
        assert!(saved[0] == saved[1], "{name}");
    }
}

#[test]
fn batches_that_cannot_be_trained_are_refused() {
    let source = Source::open(&golden("model/qwen3_tied")).unwrap();
    let mut trainer = trainer(&source);
    let (tokens, documents, labels) = batch();
    let of = |weights| MicroBatch {
        tokens: &tokens,
        documents: &documents,
        labels: &labels,
        weights,
    };
    let with =
        |weight: f32| -> Vec<f32> { (0..40).map(|i| if i == 5 { weight } else { 1.0 }).collect() };
    let cases = [
        (
            with(-1.0),
            "weight 5 of a batch is -1; it must be finite and at least 0",
        ),
        (with(f32::NAN), "weight 5 of a batch is NaN"),
        (with(f32::INFINITY), "weight 5 of a batch is inf"),
        (vec![1.0; 39], "40 labels and 39 weights"),
        (vec![0.0; 40], "label that counts"),
    ];
    for (weights, words) in &cases {
        for error in [
            trainer.step(&[of(Some(weights))]).unwrap_err(),
            trainer.evaluate(&[of(Some(weights))], true).unwrap_err(),
        ] {
            assert!(error.to_string().contains(words), "{error}");
        }
    }
    // The model's context has 256 positions.
    let long: Vec<u32> = (0..300).map(|i| i % 7).collect();
    let labels: Vec<i32> = long.iter().map(|&t| t as i32).collect();
    let of = |documents| MicroBatch {
        tokens: &long,
        documents,
        labels: &labels,
        weights: None,
    };
    for error in [
        trainer.step(&[of(&[43, 257])]).unwrap_err(),
        trainer.evaluate(&[of(&[43, 257])], false).unwrap_err(),
        trainer.next_token(&long[..257], true).unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(
            error.contains("has 257 tokens, and the model's context has 256 positions"),
            "{error}"
        );
    }
    trainer.step(&[of(&[44, 256])]).unwrap();
}

/// No window comes twice in a step.
#[test]
fn steps_of_more_windows_than_there_are_are_refused() {
    let folder = Folder::new("epoch");
    let setting = Setting::new(&folder, 3e-3);
    let windows = setting.inputs.windows.len();
    let place = folder.path("run");
    let error = setting.run(&place, 99, false, windows).err().unwrap();
    assert!(
        error.contains(&format!("a step of 2 x {windows} windows"))
            && error.contains(&format!("at most {windows} in a step")),
        "{error}"
    );
    assert!(!place.join("loss.csv").exists());
}

/// Data without weights has the checksum that checkpoints from before there were weights know it by; weights have another.
#[test]
fn checkpoints_know_weights_apart_from_data_without() {
    let folder = Folder::new("known");
    let mut setting = Setting::new(&folder, 3e-3);
    let place = folder.path("run");
    setting.run(&place, 1, false, 1).unwrap();
    let device = Device::cpu(Some(2)).unwrap();
    let checkpoints = place.join(run::CHECKPOINTS);
    let (_, at) = Trainer::resume(&device, &setting.source, &checkpoints).unwrap();
    let mut sum = XxHash3_64::new();
    for window in setting.inputs.windows.all() {
        window
            .documents
            .iter()
            .for_each(|&n| sum.write_u64(n as u64));
        window.tokens.iter().for_each(|&t| sum.write_u32(t));
        window.labels.iter().for_each(|&l| sum.write_i32(l));
    }
    assert_eq!(at["data"]["checksum"], format!("{:016x}", sum.finish()));
    let mut windows = setting.inputs.windows.all().to_vec();
    windows[0].weights = vec![0.5; windows[0].labels.len()];
    setting.inputs.windows = Windows::new(windows).unwrap();
    let error = setting.run(&place, 99, true, 1).err().unwrap();
    assert!(error.contains("their weights are others"), "{error}");
}
