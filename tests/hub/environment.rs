//! Environment variables take effect: the place of the hub and the cache, the token, proxies, certificates.

use std::fs;

use serde_json::json;

use crate::standin::{Hub, MODEL, failure, path, pulled};

const FILES: &[(&str, &[u8])] = &[
    ("config.json", b"{}"),
    ("tokenizer.json", b"{}"),
    ("model.safetensors", b"weights"),
];

#[test]
fn the_cache_is_where_python_has_it() {
    let hub = Hub::of("where", FILES);
    let home = hub.scratch.path("user");
    let place = |set: &[(&str, &str)]| {
        let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
        command.env_remove("HF_HOME").env("HOME", &home);
        for (name, value) in set {
            command.env(name, value);
        }
        path(&pulled(&mut command))
            .strip_prefix(&hub.scratch.0)
            .unwrap()
            .ancestors()
            .find(|p| p.ends_with("models--org--model"))
            .unwrap()
            .parent()
            .unwrap()
            .display()
            .to_string()
    };
    let at = |name: &str| hub.scratch.path(name).display().to_string();
    assert_eq!(place(&[]), "user/.cache/huggingface/hub");
    assert_eq!(
        place(&[("XDG_CACHE_HOME", &at("xdg"))]),
        "xdg/huggingface/hub"
    );
    assert_eq!(place(&[("HF_HOME", "~/hf")]), "user/hf/hub");
    assert_eq!(place(&[("HF_HOME", "$HOME/hf2/")]), "user/hf2/hub");
    assert_eq!(place(&[("HUGGINGFACE_HUB_CACHE", &at("old"))]), "old");
    let both = [
        ("HF_HUB_CACHE", &*at("new")),
        ("HUGGINGFACE_HUB_CACHE", &*at("old")),
    ];
    assert_eq!(place(&both), "new");
}

#[test]
fn endpoints_as_they_are_written() {
    let hub = Hub::of("endpoints", FILES);
    for endpoint in [
        format!("{}/", hub.at("hub")),
        format!(" {}// ", hub.at("hub")),
    ] {
        pulled(
            hub.nvfp4(&["pull", MODEL, "--json"])
                .env("HF_ENDPOINT", endpoint),
        );
    }
    // Nothing is the hub itself: the proxy, which reaches it no more than we do, is asked for it.
    let mut command = hub.nvfp4(&["pull", "org/other", "--timeout", "5"]);
    let e = failure(
        command
            .env("HF_ENDPOINT", "")
            .env("https_proxy", hub.at("proxy")),
    );
    assert!(e.contains("huggingface.co"), "{e}");
    assert!(
        hub.seen()
            .iter()
            .any(|r| r.server == "proxy" && r.path.contains("huggingface.co:443"))
    );
    let e = failure(
        hub.nvfp4(&["pull", MODEL])
            .env("HF_ENDPOINT", "hub.example"),
    );
    assert!(e.contains("HF_ENDPOINT is 'hub.example'"), "{e}");
}

#[test]
fn tokens_in_files() {
    let config = json!({"private": {MODEL: ["hf_good"]}, "tokens": ["hf_good"]});
    let hub = Hub::with("token-files", FILES, config);
    hub.scratch.write("home/token", b"hf_good\n");
    hub.scratch.write("elsewhere", b"hf_good");
    hub.scratch.write("wrong", b"hf_wrong");
    let fails = |name: &str, value: &str| failure(hub.nvfp4(&["pull", MODEL]).env(name, value));
    let wrong = hub.scratch.path("wrong").display().to_string();
    let e = fails("HF_TOKEN_PATH", &wrong);
    assert!(e.contains(&wrong), "{e}");
    let e = fails("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1");
    assert!(e.contains("no token was found"), "{e}");
    pulled(&mut hub.nvfp4(&["pull", MODEL, "--json"]));
    let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
    pulled(
        command
            .env("HF_HOME", hub.scratch.path("other"))
            .env("HF_TOKEN_PATH", hub.scratch.path("elsewhere")),
    );
    let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
    pulled(
        command
            .env("HF_HOME", hub.scratch.path("third"))
            .env("HUGGING_FACE_HUB_TOKEN", "hf_good"),
    );
}

#[test]
fn proxies() {
    let hub = Hub::with("proxies", FILES, json!({"proxy_auth": "user:pass word"}));
    let proxy = hub.at("proxy").to_owned();
    let with = proxy.replace("http://", "http://user:pass%20word@");
    let used = || {
        hub.seen()
            .iter()
            .filter(|r| r.server == "proxy" && r.status == 200)
            .count()
    };
    let home = |name: &str| hub.scratch.path(name);
    let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
    pulled(command.env("http_proxy", &with).env("HF_HOME", home("a")));
    assert!(used() > 0);
    hub.forget();
    let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
    pulled(command.env("ALL_PROXY", &with).env("HF_HOME", home("b")));
    assert!(used() > 0);
    hub.forget();
    for exception in [
        "*",
        "localhost,127.0.0.1",
        "example.com, 127.0.0.1,.localhost",
    ] {
        let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
        command.env("http_proxy", &with).env("NO_PROXY", exception);
        pulled(command.env("HF_HOME", home(&format!("c{}", exception.len()))));
        assert_eq!(used(), 0, "{exception}");
    }
    // Not for this scheme.
    let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
    pulled(command.env("https_proxy", &with).env("HF_HOME", home("d")));
    assert_eq!(used(), 0);
    let mut command = hub.nvfp4(&["pull", MODEL]);
    let e = failure(command.env("http_proxy", &proxy).env("HF_HOME", home("e")));
    assert!(e.contains("proxy") && e.contains("407"), "{e}");
    let mut command = hub.nvfp4(&["pull", MODEL]);
    let e = failure(
        command
            .env("http_proxy", "gopher://user:secret@x")
            .env("HF_HOME", home("f")),
    );
    assert!(e.contains("http_proxy") && !e.contains("secret"), "{e}");
}

#[test]
fn certificates() {
    let scratch = crate::standin::Scratch::new("certificates");
    for (name, content) in FILES {
        scratch.write(&format!("repo/{name}"), content);
    }
    let tls = scratch.path("tls");
    fs::create_dir_all(&tls).unwrap();
    let config = json!({"repos": {MODEL: {"main": scratch.path("repo")}}, "tls": tls});
    let hub = Hub::start(scratch, &config);
    let e = hub.fails(MODEL);
    assert!(
        e.contains("127.0.0.1") && e.contains("SSL_CERT_FILE"),
        "{e}"
    );
    pulled(
        hub.nvfp4(&["pull", MODEL, "--json"])
            .env("SSL_CERT_FILE", hub.at("ca")),
    );
    // Through a proxy, too.
    let mut command = hub.nvfp4(&["pull", MODEL, "--json"]);
    command
        .env("SSL_CERT_FILE", hub.at("ca"))
        .env("https_proxy", hub.at("proxy"));
    pulled(command.env("HF_HOME", hub.scratch.path("other")));
}

/// A certificate that signed itself, and that the user trusts, is taken as curl takes it, whatever it says of being an authority: for
/// its names and in its time.
#[test]
fn certificates_that_are_trusted_themselves() {
    for form in ["own", "common", "elsewhere", "expired"] {
        let scratch = crate::standin::Scratch::new(&format!("trusted-{form}"));
        for (name, content) in FILES {
            scratch.write(&format!("repo/{name}"), content);
        }
        let tls = scratch.path("tls");
        let config = json!({"repos": {MODEL: {"main": scratch.path("repo")}}, "tls": tls, "certificate": form});
        let hub = Hub::start(scratch, &config);
        let command = || {
            let mut command = hub.nvfp4(&["pull", MODEL, "--json", "--timeout", "20"]);
            let endpoint = hub.at("hub").replace("127.0.0.1", "localhost");
            command.env("HF_ENDPOINT", endpoint);
            command
        };
        let trusting = || {
            let mut trusting = command();
            trusting.env("SSL_CERT_FILE", hub.at("ca"));
            trusting
        };
        let e = failure(&mut command());
        assert!(e.contains("no encrypted connection"), "{form}: {e}");
        // Another server's, which is trusted too, does not stand for this one's.
        fs::write(
            tls.join("both.pem"),
            [
                fs::read(tls.join("ca.pem")).unwrap(),
                fs::read(hub.at("ca")).unwrap(),
            ]
            .concat(),
        )
        .unwrap();
        let e = failure(command().env("SSL_CERT_FILE", tls.join("ca.pem")));
        assert!(e.contains("no encrypted connection"), "{form}: {e}");
        match form {
            "own" | "common" => {
                pulled(&mut trusting());
                let mut command = trusting();
                command.env("SSL_CERT_FILE", tls.join("both.pem"));
                pulled(
                    command
                        .env("https_proxy", hub.at("proxy"))
                        .env("HF_HOME", hub.scratch.path("other")),
                );
            }
            _ => {
                let e = failure(&mut trusting());
                let reason = match form {
                    "expired" => "Expired",
                    _ => "not valid for",
                };
                assert!(e.contains(reason), "{form}: {e}");
            }
        }
    }
}
