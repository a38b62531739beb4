//! `nvfp4 quantize --recipe calibrated`.

use super::*;

const PASSAGE: &str = "tests/data/verse-10m/passage.txt";
const FEW: [&str; 4] = ["--calibration-windows", "3", "--calibration-window", "64"];

/// A model in float32 with a tokenizer, which has seen a few words.
fn trained(scratch: &Scratch) -> String {
    let shape = scratch.path("shape");
    std::fs::create_dir(&shape).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        let from = format!("tests/golden/model/qwen3_tied/{file}");
        std::fs::copy(from, format!("{shape}/{file}")).unwrap();
    }
    let out = scratch.path("trained");
    let words = ["train", "--init", &shape, "--data", PASSAGE, "--out", &out];
    let how =
        "--device cpu --steps 20 --batch 4 --window 64 --rate 3e-3 --recipe float32 --save-every 0";
    let how: Vec<&str> = how.split(' ').collect();
    text(&[&words[..], &how].concat());
    format!("{out}/model")
}

/// A file of a text.
fn written(scratch: &Scratch, name: &str, content: &str) -> String {
    let path = scratch.path(name);
    std::fs::write(&path, content).unwrap();
    path
}

fn calibrated(model: &str, to: &str, more: &[&str]) -> Output {
    let args = ["quantize", model, to, "--recipe", "calibrated", "--json"];
    nvfp4(&[&args[..], &FEW, more].concat())
}

fn report(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {said}"))
}

/// Codes by text, in a directory and in a .dat file: the matrices come from the search, and a short text is a warning.
#[test]
fn codes_by_text() {
    let scratch = Scratch::new("calibrated");
    let model = &trained(&scratch);
    let (out, swept) = (scratch.path("out"), scratch.path("swept"));
    let found = report(&calibrated(model, &out, &[]));
    let plain = json(&["quantize", model, &swept, "--tables", "int8"]);
    // Options of the recipe ask for it.
    let asked = scratch.path("asked");
    let args = ["quantize", model, &asked, "--device", "cpu", "--json"];
    let same = report(&nvfp4(&[&args[..], &FEW].concat()));
    assert_eq!(same["calibrated"], found["calibrated"]);
    let matrices = found["calibrated"].as_array().unwrap();
    let errors = |m: &Value| [&m["error"], &m["error_of_sweep"]].map(|e| e.as_f64().unwrap());
    assert!(
        matrices
            .iter()
            .map(errors)
            .all(|[error, of_sweep]| error <= of_sweep)
    );
    assert_eq!(found["quantized"], matrices.len());
    for same in [
        "quantized",
        "kept_nvfp4",
        "embedding",
        "head",
        "bytes_in",
        "bytes_out",
    ] {
        assert_eq!(found[same], plain[same], "{same}");
    }
    assert!(!Path::new(&format!("{out}.calibration")).exists());

    let short = written(&scratch, "short.txt", "Ten tokens, or a few more.");
    let more = ["--force", "--calibration", &short, "--tables", "bf16"];
    let said = calibrated(model, &out, &more);
    let words = String::from_utf8(said.stderr.clone()).unwrap();
    assert!(words.contains("which fill 1 of 3 windows"), "{words}");
    assert_eq!(report(&said)["head"], "BF16");

    std::fs::create_dir(scratch.path("d")).unwrap();
    let dat = scratch.path("d/model.dat");
    let single = report(&calibrated(model, &dat, &[]));
    assert_eq!(single["quantized"], found["quantized"]);
    assert_eq!(single["kept_nvfp4"], 0);
    assert_eq!(json(&["inspect", &dat])["format"], "dat");
}

/// Blocks in 8 bits, as many as a budget has room for, and of these the worst; steps of distillation, which are taken back where they bring
/// nothing.
#[test]
fn budgets_and_distillations() {
    let scratch = Scratch::new("budget");
    let model = &trained(&scratch);
    let (out, wide) = (scratch.path("out"), scratch.path("wide"));
    let plain = report(&calibrated(model, &out, &[]));
    let blocks = plain["calibrated"].as_array().unwrap().len() / 7;
    // Room for one block: its int8 rows have a float32 scale each, which small matrices feel.
    let bits = (4.5 + 4.5 / blocks as f64).min(8.0).to_string();
    let found = report(&calibrated(model, &wide, &["--budget", &bits]));
    let chosen = found["wide_blocks"].as_array().unwrap();
    assert_eq!(chosen.len(), 1);
    let listed = json(&["inspect", &wide]);
    for tensor in listed["tensors"].as_array().unwrap() {
        let name = tensor["name"].as_str().unwrap();
        if name.contains("_proj") {
            let is_wide = name.contains(&format!("layers.{}.", chosen[0]));
            let expected = if is_wide { "INT8" } else { "NVFP4" };
            assert_eq!(tensor["encoding"], expected, "{name}");
        }
    }
    let divergence = |place: &str| {
        let words = [
            "perplexity",
            "--model",
            place,
            "--reference",
            model,
            "--text",
            PASSAGE,
        ];
        let found = json(&[&words[..], &["--windows", "4", "--window", "64"]].concat());
        found["reference"]["kl_divergence"].as_f64().unwrap()
    };
    assert!(divergence(&wide) < divergence(&out));

    let before = std::fs::read(format!("{out}/model.safetensors")).unwrap();
    let found = report(&calibrated(model, &out, &["--force", "--distill", "2"]));
    let distilled = &found["distilled"];
    assert_eq!(distilled["steps"], 2);
    let of = |name: &str| distilled[name].as_f64().unwrap();
    assert!(of("divergence_before") > 0.0 && of("divergence") < 2.0 * of("divergence_before"));
    let after = std::fs::read(format!("{out}/model.safetensors")).unwrap();
    assert!(of("divergence") >= of("divergence_before") || after != before);
}

/// Options of other recipes, and destinations that cannot be written, are refused before any work.
#[test]
fn what_makes_no_sense_is_refused() {
    let scratch = Scratch::new("refused");
    let model = &trained(&scratch);
    let (out, dat) = (scratch.path("out"), scratch.path("model.dat"));
    let short = written(&scratch, "short.txt", "Ten tokens, or a few more.");
    let empty = written(&scratch, "empty.txt", "");
    let binary = scratch.path("binary.txt");
    std::fs::write(&binary, [0xff, 0x00, 0xfe]).unwrap();
    for (more, words) in [
        (
            &["--calibration", &short][..],
            "--calibration is for --recipe calibrated",
        ),
        (&["--device", "cpu"], "--device is for --recipe calibrated"),
        (&["--distill", "5"], "--distill is for --recipe calibrated"),
        (&["--budget", "5"], "--budget is for --recipe calibrated"),
    ] {
        let plain = ["quantize", model, &out, "--recipe", "sweep"];
        let said = failure(&[&plain[..], more].concat());
        assert!(said.contains(words), "{said}");
    }
    let full = scratch.path("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(format!("{full}/file"), "").unwrap();
    for (to, more, words) in [
        (&full, &[][..], "is not empty"),
        (&out, &["--calibration-windows", "1"], "there must be two"),
        (
            &out,
            &["--calibration-window", "100000"],
            "the model's context has",
        ),
        (&out, &["--calibration", &empty], "empty.txt"),
        (&out, &["--calibration", &binary], "binary.txt"),
        (&out, &["--calibration", "/nowhere.txt"], "/nowhere.txt"),
        (&out, &["--distill", "0"], "learn nothing"),
        (
            &out,
            &["--distill", "5", "--budget", "5"],
            "excludes a budget",
        ),
        (&out, &["--budget", "4.2"], "it can be 4.5"),
        (&dat, &["--budget", "5"], ".dat holds no int8 rows"),
        (
            &dat,
            &["--distill", "5"],
            "a distillation writes a directory",
        ),
    ] {
        let args = ["quantize", model, to, "--recipe", "calibrated"];
        let said = failure(&[&args[..], more].concat());
        assert!(said.contains(words), "{said}");
    }
    assert!(!Path::new(&out).exists() && !Path::new(&dat).exists());
}
