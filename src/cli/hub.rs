//! Models on the Hugging Face hub: which files of a repository make a model, and getting them into the hub's own cache.
//! `HF_ENDPOINT`, `HF_HOME` and `HF_TOKEN` are honoured; a download that broke off is resumed.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, Result, env};
use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use indicatif::ProgressBar;

use super::output;

/// A model on the hub: `ORG/NAME`, with `@REVISION` and `:FILE` where given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Id {
    repo: String,
    revision: String,
    file: Option<String>,
}

impl Id {
    /// Reads `ORG/NAME[@REVISION][:FILE]`; `None` if `text` cannot be one.
    pub(super) fn parse(text: &str) -> Option<Id> {
        let (rest, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let (org, name) = repo.split_once('/')?;
        let word = |w: &str| {
            !w.is_empty()
                && !w.starts_with('.')
                && w.chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let plain = |w: &str| !w.is_empty() && is_inside(w);
        (word(org) && word(name) && plain(revision) && file.is_none_or(plain)).then(|| Id {
            repo: repo.to_owned(),
            revision: revision.to_owned(),
            file: file.map(str::to_owned),
        })
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_owned())
    }
}

/// Whether `name` stays inside the directory that it is joined to.
fn is_inside(name: &str) -> bool {
    Path::new(name)
        .components()
        .all(|c| matches!(c, Component::Normal(_)))
}

/// The model's place in the cache, if all of it is there.
pub(super) fn cached(id: &Id) -> Option<PathBuf> {
    let cache = Cache::from_env().repo(id.at(&id.revision));
    complete(&cache, id)
}

fn complete(cache: &CacheRepo, id: &Id) -> Option<PathBuf> {
    if let Some(file) = &id.file {
        return cache.get(file);
    }
    let config = cache.get("config.json")?;
    let whole = match cache.get(INDEX) {
        Some(index) => shards(&index).ok()?.iter().all(|s| cache.get(s).is_some()),
        None => cache.get("model.safetensors").is_some(),
    };
    whole.then(|| config.parent().map(Path::to_owned))?
}

const INDEX: &str = "model.safetensors.index.json";

/// Files that a model may have beside its weights, and that are read here.
const COMPANIONS: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Fetches what is not in the cache yet. Returns the model's directory, or its file if the id names one. The hub must answer
/// within `patience`.
pub(super) fn pull(id: &Id, patience: Duration) -> Result<PathBuf> {
    let token = env::hf_token();
    let mut builder = ApiBuilder::from_env().with_progress(false).with_retries(3);
    if token.is_some() {
        builder = builder.with_token(token);
    }
    let api = builder
        .build()
        .map_err(|e| err!(Io, "preparing to reach the hub: {e}"))?;

    // The client has no timeout of its own; a firewall that swallows packets would keep us for minutes.
    let (send, receive) = mpsc::channel();
    let repo = api.repo(id.at(&id.revision));
    std::thread::spawn(move || send.send(repo.info()));
    let info = match receive.recv_timeout(patience) {
        Ok(info) => info.map_err(|e| failed(id, "asking for the list of files", &e))?,
        Err(_) => bail!(
            Io,
            "{}: the hub did not answer within {} s",
            id.repo,
            patience.as_secs_f32()
        ),
    };
    let names: BTreeSet<String> = info.siblings.into_iter().map(|s| s.rfilename).collect();
    // The commit, not the branch: a push while we download must not mix two versions.
    let fetch = Fetch {
        id,
        repo: api.repo(id.at(&info.sha)),
        cache: Cache::from_env().repo(id.at(&info.sha)),
    };
    let mut directory = None;
    let weights = fetch.weights(&names)?;
    for name in COMPANIONS.into_iter().filter(|n| names.contains(*n)) {
        directory = fetch.file(name)?.parent().map(Path::to_owned);
    }
    let mut last = None;
    for name in &weights {
        last = Some(fetch.file(name)?);
    }
    // The branch points to this commit only now that all of it is here.
    Cache::from_env()
        .repo(id.at(&id.revision))
        .create_ref(&info.sha)
        .map_err(|e| Error::io("noting the revision in the cache", e))?;
    match (&id.file, last, directory) {
        (Some(_), Some(file), _) => Ok(file),
        (None, Some(_), Some(directory)) => Ok(directory),
        _ => bail!(
            NotFound,
            "{} holds no config.json, so it is no model",
            id.repo
        ),
    }
}

struct Fetch<'a> {
    id: &'a Id,
    repo: ApiRepo,
    cache: CacheRepo,
}

impl Fetch<'_> {
    /// The names of the weights files, in a repository that holds `names`.
    fn weights(&self, names: &BTreeSet<String>) -> Result<Vec<String>> {
        let repo = &self.id.repo;
        if let Some(file) = &self.id.file {
            if !names.contains(file) {
                bail!(
                    NotFound,
                    "{repo} holds no {file}; it holds {}",
                    list(names, "")
                );
            }
            return Ok(vec![file.clone()]);
        }
        if names.contains(INDEX) {
            let index = self.file(INDEX)?;
            let shards = shards(&index)?;
            if let Some(missing) = shards.iter().find(|s| !names.contains(*s)) {
                bail!(
                    NotFound,
                    "{INDEX} of {repo} names {missing}, which the repository does not hold"
                );
            }
            return Ok(shards.into_iter().collect());
        }
        if names.contains("model.safetensors") {
            return Ok(vec!["model.safetensors".to_owned()]);
        }
        let gguf = list(names, ".gguf");
        if gguf.is_empty() {
            bail!(
                NotFound,
                "{repo} holds neither safetensors nor GGUF weights; it holds {}",
                list(names, "")
            );
        }
        bail!(
            InvalidArgument,
            "{repo} holds GGUF files; name one as {repo}:FILE, of {gguf}"
        )
    }

    /// The path of `name` in the cache, downloaded if it is not there.
    fn file(&self, name: &str) -> Result<PathBuf> {
        if !is_inside(name) {
            bail!(
                CorruptFile,
                "{}: the hub names a file '{name}'",
                self.id.repo
            );
        }
        if let Some(path) = self.cache.get(name) {
            return Ok(path);
        }
        let mut size = 0;
        let bar = Bar {
            bar: output::byte_bar(name, 0),
            size: &mut size,
        };
        let path = self
            .repo
            .download_with_progress(name, bar)
            .map_err(|e| failed(self.id, &format!("fetching {name}"), &e))?;
        let length = std::fs::metadata(&path)
            .map_err(|e| Error::io(format_args!("reading {}", path.display()), e))?
            .len();
        if length != size as u64 {
            // What is in the cache counts as whole from now on, so it must go.
            if let Ok(blob) = path.canonicalize() {
                let _ = std::fs::remove_file(blob);
            }
            let _ = std::fs::remove_file(&path);
            bail!(
                Io,
                "{name} of {}: {length} of {size} bytes came; try again",
                self.id.repo
            );
        }
        Ok(path)
    }
}

fn list(names: &BTreeSet<String>, ending: &str) -> String {
    let names: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|n| n.ends_with(ending))
        .collect();
    names.join(", ")
}

/// The files that a safetensors index names.
fn shards(index: &Path) -> Result<BTreeSet<String>> {
    let text = std::fs::read(index)
        .map_err(|e| Error::io(format_args!("reading {}", index.display()), e))?;
    let index: serde_json::Value =
        serde_json::from_slice(&text).map_err(|e| err!(CorruptFile, "{}: {e}", index.display()))?;
    let Some(map) = index["weight_map"].as_object() else {
        bail!(CorruptFile, "{INDEX} has no weight_map");
    };
    map.values()
        .map(|file| match file.as_str() {
            Some(name) if is_inside(name) => Ok(name.to_owned()),
            _ => Err(err!(CorruptFile, "{INDEX} names a file {file}")),
        })
        .collect()
}

fn failed(id: &Id, action: &str, error: &ApiError) -> Error {
    let text = error.to_string();
    let repo = &id.repo;
    if text.contains("404") {
        err!(
            NotFound,
            "{repo} ({}): {action}: the hub has no such model, file or revision",
            id.revision
        )
    } else if text.contains("401") || text.contains("403") {
        err!(
            Io,
            "{repo}: {action}: the hub refuses; the model may need a token (HF_TOKEN) or may not exist"
        )
    } else {
        err!(Io, "{repo}: {action}: {text}")
    }
}

/// Shows a download, and keeps the size that the hub announced.
struct Bar<'a> {
    bar: ProgressBar,
    size: &'a mut usize,
}

impl Progress for Bar<'_> {
    fn init(&mut self, size: usize, _name: &str) {
        *self.size = size;
        self.bar.set_length(size as u64);
        self.bar.set_position(0);
    }

    fn update(&mut self, size: usize) {
        self.bar.inc(size as u64);
    }

    fn finish(&mut self) {
        self.bar.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids() {
        let id = Id::parse("Qwen/Qwen3-0.6B").unwrap();
        assert_eq!(
            (id.repo.as_str(), id.revision.as_str(), id.file),
            ("Qwen/Qwen3-0.6B", "main", None)
        );
        let id = Id::parse("a/b@v1:c/d.gguf").unwrap();
        assert_eq!(
            (id.repo.as_str(), id.revision.as_str(), id.file.as_deref()),
            ("a/b", "v1", Some("c/d.gguf"))
        );
        for bad in [
            "",
            "a",
            "/a/b",
            "a/b/c",
            "./a",
            "../a",
            "a/",
            "a/..",
            "a/b:../c",
            "a/b:/etc/x",
            "a b/c",
            "a/b@../x",
            "a/b:",
        ] {
            assert_eq!(Id::parse(bad), None, "{bad}");
        }
    }
}
