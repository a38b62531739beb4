//! Models with gated delta nets and gated attention: learning, what is delivered, adapters and calibration.

use std::sync::Arc;

use NVFP4::checkpoint::Encoding;

use super::beginning::dense;
use super::calibrate::calibrated;
use super::*;

/// One model with a matrix for each role of a gated delta net, and one with the rows of each key head together, experts and a head.
const MODELS: [&str; 2] = ["qwen35_tied", "qwen3next_shared"];

fn batch(source: &Source, seed: u64) -> Documents {
    // The longest document has more tokens than there are between two checkpoints of states.
    Documents::within(seed, &[70, 9, 1], source.spec().vocab_size as u32)
}

/// The names, shapes and encodings of a model's tensors, by name.
fn tensors(source: &Source) -> Vec<(String, Vec<usize>, Encoding)> {
    let entries = source.checkpoint().entries().iter();
    let mut tensors: Vec<_> = entries
        .map(|e| (e.name.clone(), e.shape.clone(), e.encoding))
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

fn values(source: &Source, id: MatrixId) -> Vec<f32> {
    let m = &source.layout().matrices[id];
    let mut values = vec![0.0; m.rows * m.cols];
    source.matrix(id, 0..m.rows, &mut values).unwrap();
    values
}

/// Recurrent layers learn in the forms of their files, go on from a checkpoint to the same bits, and are delivered in the tensors that they came in.
#[test]
fn recurrent_layers_learn_and_are_delivered_as_they_came() {
    let device = Device::cpu(Some(2)).unwrap();
    for name in MODELS {
        let source = Source::open(&golden("model").join(name)).unwrap();
        let mut trainer = Trainer::new(&device, &source, &config(Recipe::default(), 24)).unwrap();
        let folder = Folder::new();
        let checkpoint = folder.0.join("checkpoint");
        let mut losses = Vec::new();
        for step in 0..24 {
            if step == 16 {
                let place = serde_json::Value::Null;
                trainer.save(&checkpoint, &place, 1).unwrap();
            }
            let report = trainer.step(&[batch(&source, step % 2).batch()]).unwrap();
            losses.push(report.loss);
        }
        assert!(losses[23] < 0.8 * losses[0], "{name}: {losses:?}");
        let (mut again, _) = Trainer::resume(&device, &source, &checkpoint).unwrap();
        for step in 16..24 {
            let report = again.step(&[batch(&source, step % 2).batch()]).unwrap();
            assert_eq!(report.loss, losses[step as usize], "{name}");
        }
        assert_eq!(weights(&again), weights(&trainer), "{name}");

        let place = folder.0.join("model");
        trainer
            .export_directory(&source, &place, Tables::Auto, false)
            .unwrap();
        let delivered = Source::open(&place).unwrap();
        assert_eq!(delivered.layout(), source.layout());
        // Vectors that have changed are float32.
        for (now, before) in tensors(&delivered).iter().zip(&tensors(&source)) {
            assert_eq!((&now.0, &now.1), (&before.0, &before.1));
            let is_matrix = now.1.len() == 2;
            assert!(
                !is_matrix || now.2 == before.2,
                "{name}: {now:?} of {before:?}"
            );
        }
        for (id, m) in source.layout().matrices.iter().enumerate() {
            let own = trainer.parameters().matrices()[id]
                .delivered_values(&device)
                .unwrap();
            assert!(values(&delivered, id) == own, "{name}: {}", m.name);
            assert!(
                values(&source, id) != own,
                "{name}: {} is as it was",
                m.name
            );
        }
        for (id, v) in source.layout().vectors.iter().enumerate() {
            let [now, before] = [&delivered, &source].map(|s| s.vector(id).unwrap());
            assert!(now != before, "{name}: {} is as it was", v.name);
            let own = trainer.parameters().vectors()[id].values();
            let own = own.host().unwrap().iter().map(|&v| f64::from(v));
            assert!(
                relative_error(&own.collect::<Vec<_>>(), &now) < 1e-6,
                "{}",
                v.name
            );
        }
        Served::load(&place, &LoadOptions::new(device.clone())).unwrap();
    }
}

/// The projections of gated delta nets in bfloat16 are trained so and delivered in int8. Those of their gates are delivered in bfloat16.
#[test]
fn recurrent_projections_are_delivered_in_int8() {
    let device = Device::cpu(Some(2)).unwrap();
    for name in MODELS {
        let folder = Folder::new();
        let [place, out] = ["model", "out"].map(|name| folder.0.join(name));
        dense(&golden("model").join(name), &place);
        let source = Source::open(&place).unwrap();
        let mut trainer = Trainer::new(&device, &source, &config(Recipe::default(), 4)).unwrap();
        for step in 0..4 {
            trainer.step(&[batch(&source, step).batch()]).unwrap();
        }
        trainer
            .export_directory(&source, &out, Tables::Auto, false)
            .unwrap();
        for (tensor, _, encoding) in tensors(&Source::open(&out).unwrap()) {
            let is = |parts: &[&str]| parts.iter().any(|part| tensor.ends_with(part));
            let expected = match () {
                _ if is(&["in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"]) => false,
                _ if is(&[
                    "in_proj_qkv.weight",
                    "in_proj_z.weight",
                    "in_proj_qkvz.weight",
                ]) =>
                {
                    true
                }
                _ => tensor.ends_with("linear_attn.out_proj.weight"),
            };
            assert_eq!(encoding == Encoding::Int8, expected, "{tensor}: {encoding}");
        }
        Served::load(&out, &LoadOptions::new(device.clone())).unwrap();
    }
}

/// Adapters stand beside the matrices of files, by whose names peft knows them, and are merged into them.
#[test]
fn adapters_have_the_names_of_modules() {
    let device = Device::cpu(Some(2)).unwrap();
    let of_models = [&["in_proj_qkv", "in_proj_z"][..], &["in_proj_qkvz"]];
    for (name, inputs) in MODELS.into_iter().zip(of_models) {
        let source = Source::open(&golden("model").join(name)).unwrap();
        let recipe = adapters::recipe(&[inputs, &["out_proj", "q_proj"]].concat());
        let mut trainer = Trainer::new(&device, &source, &config(recipe, 20)).unwrap();
        let losses: Vec<f64> = (0..20)
            .map(|_| trainer.step(&[batch(&source, 1).batch()]).unwrap().loss)
            .collect();
        assert!(losses[19] < 0.9 * losses[0], "{name}: {losses:?}");

        let folder = Folder::new();
        let [adapter, merged] = ["adapter", "merged"].map(|name| folder.0.join(name));
        trainer
            .export_adapter(&source, &adapter, name, false)
            .unwrap();
        let bytes = std::fs::read(adapter.join("adapter_model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let of = |block: usize, module: &str, factor: &str| {
            let name = format!("base_model.model.model.layers.{block}.{module}.{factor}.weight");
            file.tensor(&name).unwrap().shape().to_vec()
        };
        for module in inputs.iter().chain(&["out_proj"]) {
            let module = format!("linear_attn.{module}");
            let stored = format!("model.layers.0.{module}.weight");
            let mut matrices = source.layout().matrices.iter();
            let m = matrices.find(|m| m.name == stored).unwrap();
            assert_eq!(of(0, &module, "lora_A"), [8, m.cols]);
            assert_eq!(of(0, &module, "lora_B"), [m.rows, 8]);
        }
        // Queries and their gates are one module.
        assert_eq!(of(3, "self_attn.q_proj", "lora_B"), [256, 8]);

        trainer
            .export_directory(&source, &merged, Tables::Auto, false)
            .unwrap();
        let merged = Source::open(&merged).unwrap();
        assert_eq!(tensors(&merged), tensors(&source), "{name}");
        let layout = source.layout();
        let inputs = layout.blocks[0].inputs.iter();
        for id in inputs.map(|p| p.matrix) {
            let is_gate = layout.matrices[id].rows <= 8;
            assert_eq!(values(&merged, id) == values(&source, id), is_gate);
        }
    }
}

/// Attention and the MLPs are calibrated; gated delta nets are delivered in int8.
#[test]
fn recurrent_models_are_calibrated() {
    for name in MODELS {
        let folder = Folder::new();
        let [place, out] = ["model", "out"].map(|name| folder.0.join(name));
        dense(&golden("model").join(name), &place);
        let matrices = calibrated(&place, &out, 2);
        let source = Arc::new(Source::open(&place).unwrap());
        let layout = source.layout();
        let all = layout.blocks.iter().flat_map(|block| block.projections());
        let names = all.map(|p| layout.matrices[p.matrix].name.as_str());
        let is_quantized = |n: &&str| !n.contains("linear_attn") && !n.contains("shared_expert");
        let mut expected: Vec<&str> = names.filter(is_quantized).collect();
        let mut found: Vec<&str> = matrices.iter().map(|m| &*m.name).collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        assert!(matrices.iter().all(|m| m.error <= m.error_of_sweep));
        for (tensor, _, encoding) in tensors(&Source::open(&out).unwrap()) {
            let is_recurrent = tensor.contains("in_proj_qkv") || tensor.contains("out_proj");
            assert!(!is_recurrent || encoding == Encoding::Int8, "{tensor}");
        }
    }
}

/// Random weights have the tensors of files, and begin as in transformers.
#[test]
fn recurrent_models_begin_from_random_weights() {
    let device = Device::cpu(Some(2)).unwrap();
    for name in MODELS {
        let source = Source::fresh(&golden("model").join(name), 3).unwrap();
        let vectors = source.layout().vectors.iter().enumerate();
        for (id, v) in vectors.filter(|(_, v)| v.block == Some(0)) {
            let values = source.vector(id).unwrap();
            let is_within =
                |least: f32, most: f32| values.iter().all(|v| (least..=most).contains(v));
            match v.name.rsplit("linear_attn.").next().unwrap() {
                "A_log" => assert!(is_within(0.01f32.ln(), 16f32.ln()), "{values:?}"),
                "conv1d.weight" => assert!(is_within(-0.2, 0.2) && !is_within(0.0, 0.2)),
                _ => assert!(is_within(1.0, 1.0), "{}: {values:?}", v.name),
            }
        }
        let config = config(Recipe::default(), 2);
        let mut trainer = Trainer::new(&device, &source, &config).unwrap();
        trainer.step(&[batch(&source, 1).batch()]).unwrap();
        let folder = Folder::new();
        let place = folder.0.join("model");
        trainer
            .export_directory(&source, &place, Tables::Auto, false)
            .unwrap();
        Served::load(&place, &LoadOptions::new(device.clone())).unwrap();
    }
}

/// Tensors beside the text model, such as those of layers that draft tokens, are delivered as they are.
#[test]
fn tensors_beside_the_text_model_stay() {
    let device = Device::cpu(Some(2)).unwrap();
    let source = Source::open(&golden("model/qwen35_nested")).unwrap();
    let mut trainer = Trainer::new(&device, &source, &config(Recipe::default(), 2)).unwrap();
    trainer.step(&[batch(&source, 1).batch()]).unwrap();
    let folder = Folder::new();
    let place = folder.0.join("model");
    trainer
        .export_directory(&source, &place, Tables::Auto, false)
        .unwrap();
    let delivered = Source::open(&place).unwrap();
    assert_eq!(delivered.layout(), source.layout());
    let mut beside = 0;
    for entry in source.checkpoint().entries() {
        if !source.parameters_of(&entry.name).matrices.is_empty()
            || !source.parameters_of(&entry.name).vectors.is_empty()
        {
            continue;
        }
        let now = delivered.checkpoint().find(&entry.name).unwrap();
        assert_eq!(now, entry);
        let read = |of: &Source| {
            let mut values = vec![0.0; entry.rows() * entry.cols()];
            let rows = 0..entry.rows();
            of.checkpoint().rows_f32(entry, rows, &mut values).unwrap();
            values
        };
        assert_eq!(read(&delivered), read(&source), "{}", entry.name);
        beside += 1;
    }
    assert!(beside > 0);
}
