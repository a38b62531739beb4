//! Messages of the command, and the hosts that receive its token.

use serde_json::json;

use crate::standin::{Hub, MODEL, failure, pulled};

const FILES: &[(&str, &[u8])] = &[("config.json", b"{}"), ("model.safetensors", b"weights")];

/// A pull with a token that must fail.
fn fails_with(hub: &Hub, name: &str, token: &str) -> String {
    failure(hub.nvfp4(&["pull", name]).env("HF_TOKEN", token))
}

#[test]
fn gated_and_private_models() {
    let hub = Hub::with(
        "gated",
        FILES,
        json!({
            "gated": {MODEL: ["hf_good"]},
            "tokens": ["hf_good", "hf_other"],
        }),
    );
    let place = format!("ask for access at {}/org/model", hub.at("hub"));
    let e = hub.fails(MODEL);
    assert!(
        e.contains("is gated") && e.contains(&place) && e.contains("no token"),
        "{e}"
    );
    let e = fails_with(&hub, MODEL, "hf_other");
    assert!(
        e.contains("is gated")
            && e.contains("ask for it at")
            && e.contains("the token in HF_TOKEN"),
        "{e}"
    );
    let e = fails_with(&hub, MODEL, "hf_wrong");
    assert!(
        e.contains("does not know the token in HF_TOKEN") && !e.contains("hf_wrong"),
        "{e}"
    );
    let e = fails_with(&hub, MODEL, "two words");
    assert!(
        e.contains("the token in HF_TOKEN") && !e.contains("two"),
        "{e}"
    );
    pulled(
        hub.nvfp4(&["pull", MODEL, "--json"])
            .env("HF_TOKEN", "hf_good\n"),
    );
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let hub = Hub::with(
        "token",
        FILES,
        json!({"private": {MODEL: ["hf_good"]}, "tokens": ["hf_good"]}),
    );
    let e = hub.fails(MODEL);
    assert!(
        e.contains("no model org/model") && e.contains("HF_TOKEN"),
        "{e}"
    );
    pulled(
        hub.nvfp4(&["pull", MODEL, "--json"])
            .env("HF_TOKEN", "hf_good"),
    );
    let seen = hub.seen();
    let shown = |server: &str, status: u64| {
        let mut of = seen
            .iter()
            .filter(|r| r.server == server && r.status == status)
            .peekable();
        assert!(of.peek().is_some());
        of.all(|r| r.authorization.as_deref() == Some("Bearer hf_good"))
    };
    assert!(shown("hub", 302) && shown("hub", 307));
    assert!(
        seen.iter()
            .all(|r| r.server != "cdn" || r.authorization.is_none())
    );
}

#[test]
fn what_the_hub_does_not_have() {
    let hub = Hub::with(
        "missing",
        FILES,
        json!({"tokens": ["hf_good"], "renamed": {"old/name": MODEL}}),
    );
    let e = hub.fails("org/other");
    assert!(
        e.contains("no model org/other") && e.contains("no token was found"),
        "{e}"
    );
    let e = fails_with(&hub, "org/other", "hf_good");
    assert!(
        e.contains("no model org/other that the token in HF_TOKEN may see"),
        "{e}"
    );
    let e = hub.fails("org/model@v9");
    assert!(e.contains("org/model has no revision 'v9'"), "{e}");
    let e = hub.fails("org/model:other.gguf");
    assert!(
        e.contains("holds no other.gguf") && e.contains("model.safetensors"),
        "{e}"
    );
    hub.pull("old/name");
    // Numbers in other messages mean nothing.
    hub.faults(
        json!([{"on": "/api/models", "kind": "status", "status": 418, "body": "commit 404a401"}]),
    );
    let e = hub.fails("org/model@v9");
    assert!(
        e.contains("418") && !e.contains("no such") && !e.contains("no model"),
        "{e}"
    );
}

#[test]
fn a_mistyped_path_is_called_one() {
    let hub = Hub::of("mistyped", FILES);
    let run = |model: &str| failure(&mut hub.nvfp4(&["run", "--model", model, "--prompt", "x"]));
    let e = run("models/qwen3");
    assert!(
        e.contains("no model models/qwen3")
            && e.contains("nor is there a file or directory 'models/qwen3'"),
        "{e}"
    );
    hub.forget();
    for path in [
        "./models/qwen3",
        "/models/qwen3",
        "models/qwen3.gguf",
        "models/x/y",
        "qwen3",
        "~/qwen3",
    ] {
        let e = run(path);
        assert!(e.contains(&format!("no file or directory '{path}'")), "{e}");
    }
    assert!(hub.seen().is_empty());
}

#[test]
fn names_that_people_paste() {
    let hub = Hub::of(
        "paste",
        &[("model-Q4_0.gguf", b"GGUF4"), ("model-Q8_0.gguf", b"GGUF8")],
    );
    for (name, file) in [
        ("org/model:Q4_0", "model-Q4_0.gguf"),
        ("org/model:q8_0", "model-Q8_0.gguf"),
        ("hf.co/org/model:Q4_0", "model-Q4_0.gguf"),
        (
            "https://huggingface.co/org/model/blob/main/model-Q8_0.gguf",
            "model-Q8_0.gguf",
        ),
        (
            "https://huggingface.co/org/model/resolve/main/model-Q8_0.gguf?download=true",
            "model-Q8_0.gguf",
        ),
    ] {
        let path = crate::standin::path(&hub.pull(name));
        assert!(path.ends_with(file), "{name}: {}", path.display());
    }
    let e = hub.fails("https://huggingface.co/datasets/org/model");
    assert!(e.contains("is no model of the hub"), "{e}");
    let e = hub.fails("org/model");
    assert!(
        e.contains("model-Q4_0.gguf, model-Q8_0.gguf") && e.contains("org/model:model-Q4_0.gguf"),
        "{e}"
    );
}

#[test]
fn redirects_that_lead_nowhere() {
    let hub = Hub::of("nowhere", FILES);
    for (location, words) in [
        ("file:///etc/passwd", "no address on the web"),
        (
            "/api/models/org/model/revision/main?blobs=true",
            "redirects",
        ),
    ] {
        hub.faults(
            json!([{"on": "/api/models", "kind": "redirect", "location": location, "times": 20}]),
        );
        let e = hub.fails(MODEL);
        assert!(e.contains(words), "{e}");
        hub.no_faults();
    }
}
