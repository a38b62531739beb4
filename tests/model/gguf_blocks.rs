//! GGUF files of models whose blocks differ, Nemotron-H and Gemma 4: the same model as the golden, loaded and quantized, and files whose
//! sizes do not agree.

use super::*;

const CASES: [&str; 4] = [
    "nemotronh_dense",
    "nemotronh_experts",
    "gemma4_experts",
    "gemma4_perlayer",
];

#[test]
fn the_model_is_that_of_the_golden() {
    for case in CASES {
        let (stored, mut made) = (load(case).spec().clone(), load_gguf(case).spec().clone());
        if case.starts_with("nemotron") {
            // The converter writes the same limit for all models without positions.
            assert_eq!(made.max_positions, 1 << 20);
            made.max_positions = stored.max_positions;
        }
        assert_eq!(made, stored, "{case}");
    }
}

/// The largest difference between the logits of two models at any of some positions.
fn farthest(a: &Served, b: &Served) -> f32 {
    let tokens = some_tokens(a, 40);
    let [a, b] = [a, b].map(|model| run(model, &tokens, Logits::All));
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(&b);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The bar for logits: none for the same values, and that of all models where files have `-e^A` for A.
fn bar(case: &str) -> f32 {
    match case.starts_with("nemotron") {
        true => TOLERANCE,
        false => 0.0,
    }
}

#[test]
fn equal_values_give_equal_logits() {
    for case in CASES {
        let dense = dense_copy(case);
        let dense = Served::load(&dense.0, &options()).unwrap();
        let apart = farthest(&load_gguf(case), &dense);
        assert!(apart <= bar(case), "{case}: {apart}");
    }
}

/// Converts `source` to NVFP4 and loads the result. Also the numbers of matrices that were quantized, and that were NVFP4 already.
fn quantized(source: &Path, case: &str) -> (Arc<Served>, (usize, usize)) {
    let out = Copy::of(case, "converted");
    let mut options = ConvertOptions::new(Container::ModelOpt, Recipe::default());
    options.replace = true;
    let go = &mut |_: ConvertProgress<'_>| ControlFlow::Continue(());
    let source = model::open(source).unwrap();
    let pool = Pool::new(2).unwrap();
    let report = convert(&*source, &out.0, &options, &pool, go).unwrap();
    let model = Served::load(&out.0, &common::options()).unwrap();
    (model, (report.quantized, report.kept_nvfp4))
}

/// A file becomes the same NVFP4 model as its golden does, whose NVFP4 matrices are dense where the file's are.
#[test]
fn files_are_quantized_as_their_goldens_are() {
    let counts = [(2, 11), (40, 0), (74, 0), (36, 0)];
    for (case, counts) in CASES.into_iter().zip(counts) {
        let (of_file, of_its_matrices) = quantized(&gguf(case), case);
        assert_eq!(of_its_matrices, counts, "{case}");
        let (of_golden, _) = match counts.1 {
            0 => quantized(&dense_copy(case).0, case),
            _ => quantized(&golden(case), case),
        };
        let apart = farthest(&of_file, &of_golden);
        assert!(apart <= bar(case), "{case}: {apart}");
    }
}

/// Loads a file whose number of `key`, or number `at` in its list of 32-bit integers, is `value`.
fn changed(case: &str, key: &str, at: usize, value: u32) -> Result<Arc<Served>> {
    let mut bytes = fs::read(gguf(case)).unwrap();
    let place = bytes
        .windows(key.len())
        .position(|part| part == key.as_bytes())
        .unwrap();
    // The type of a value; for a list, the type of its elements and their number too.
    let value_at = place + key.len() + 4;
    let is_list = bytes[value_at - 4] == 9;
    let first = if is_list { value_at + 12 } else { value_at };
    let number = &mut bytes[first + 4 * at..][..4];
    assert_ne!(number, value.to_le_bytes());
    number.copy_from_slice(&value.to_le_bytes());
    let path = std::env::temp_dir().join(format!("nvfp4-{}-{case}-{at}.gguf", std::process::id()));
    fs::write(&path, bytes).unwrap();
    let loaded = Served::load(&path, &options());
    fs::remove_file(&path).unwrap();
    loaded
}

#[test]
fn sizes_that_do_not_agree_with_tensors_are_refused() {
    for (case, key, at, value, words) in [
        // An MLP that the file says is Mamba-2.
        (
            "nemotronh_dense",
            "nemotron_h.feed_forward_length",
            1,
            0,
            "model.layers.1.mixer.in_proj.weight",
        ),
        (
            "nemotronh_dense",
            "nemotron_h.ssm.group_count",
            0,
            4,
            "model.layers.0.mixer.in_proj.weight has shape [324, 64], expected [388, 64]",
        ),
        (
            "nemotronh_experts",
            "nemotron_h_moe.expert_shared_feed_forward_length",
            0,
            32,
            "model.layers.1.mixer.shared_experts.up_proj.weight has shape [64, 48], expected [32, 48]",
        ),
        (
            "gemma4_perlayer",
            "gemma4.attention.key_length_swa",
            0,
            32,
            "model.layers.0.self_attn.q_proj.weight",
        ),
        (
            "gemma4_perlayer",
            "gemma4.embedding_length_per_layer_input",
            0,
            16,
            "model.embed_tokens_per_layer.weight",
        ),
        (
            "gemma4_experts",
            "gemma4.expert_feed_forward_length",
            0,
            16,
            "model.layers.0.experts.gate_up_proj has shape [6, 64, 48], expected [6, 32, 48]",
        ),
    ] {
        match changed(case, key, at, value) {
            Ok(_) => panic!("{case} with {key} {value} was loaded"),
            Err(e) => {
                assert!(e.message().contains(words), "{case}, {key}: {e}");
                assert!(!e.message().contains('\n'), "{case}, {key}: {e}");
            }
        }
    }
}
