//! Packed weights by the command: beside a conversion, of a model that is there, and what is refused.

use super::*;

#[test]
fn a_model_is_packed_and_used() {
    let scratch = Scratch::new("packed");
    let (out, copy) = (scratch.path("out"), scratch.path("copy"));
    let made = json(&["quantize", MODEL, &out, "--packed"]);
    let file = format!("{out}/packed.nvfp4");
    assert_eq!(made["packed"]["file"], file.as_str());
    assert_eq!(made["packed"]["bytes"], fs::metadata(&file).unwrap().len());
    assert!(made["packed"]["matrices"].as_u64().unwrap() > 10 && made["tensors"].is_u64());
    let intact = json(&["inspect", &out, "--verify"]);
    assert_eq!(intact["verified_packed_bytes"], made["packed"]["bytes"]);
    assert!(text(&["inspect", &out, "--verify"]).contains("intact"));
    let planned = text(&["inspect", &out, "--device", "cpu"]);
    assert!(planned.contains("which processes share"), "{planned}");
    let run = |dir: &str, packed: &str| {
        let prompt = ["run", "--model", dir, "--device", "cpu", "--raw"];
        let limits = ["--prompt", "ab", "--max-tokens", "6", "--temp", "0"];
        text(&[&prompt[..], &limits, &["--packed", packed]].concat())
    };
    let expected = run(&out, "off");
    assert_eq!(run(&out, "required"), expected);
    // Another directory without the file, packed as it is.
    text(&["quantize", MODEL, &copy]);
    let missing = ["inspect", &copy, "--verify"];
    assert!(failure(&missing).contains("no packed weights"));
    let weights = fs::read(format!("{copy}/model.safetensors")).unwrap();
    let packed = json(&["quantize", &copy, &copy, "--packed"]);
    assert_eq!(packed["matrices"], made["packed"]["matrices"]);
    assert_eq!(
        fs::read(format!("{copy}/model.safetensors")).unwrap(),
        weights
    );
    assert_eq!(run(&copy, "required"), expected);
    // A conversion leaves the file of its source behind.
    let again = scratch.path("again");
    text(&["quantize", &copy, &again]);
    assert!(!Path::new(&format!("{again}/packed.nvfp4")).exists());
    let (mut bytes, file) = (fs::read(&file).unwrap(), scratch.path("out/packed.nvfp4"));
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, &bytes).unwrap();
    assert!(failure(&["inspect", &out, "--verify"]).contains("checksum"));
}

#[test]
fn packing_refuses_what_has_no_effect() {
    let scratch = Scratch::new("packed-refusals");
    let dir = scratch.model("model", "config.json", |config| config);
    for option in [&["--recipe", "amax"][..], &["--keep-head"], &["--force"]] {
        let common = ["quantize", &dir, &dir, "--packed"];
        let said = failure(&[&common[..], option].concat());
        let expected = format!("{} has no effect", option[0]);
        assert!(said.contains(&expected), "{said}");
    }
    let dat = scratch.path("m.dat");
    let said = failure(&["quantize", MODEL, &dat, "--packed"]);
    assert!(
        said.contains("--packed is for a directory of safetensors"),
        "{said}"
    );
    assert_eq!(scratch.names(), ["model"]);
}
