//! The contents of the cache: lists every repository with its revisions and models, and removes them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, Result};
use NVFP4::checkpoint::{self, Weights};

use super::cache::{Repository, entries};
use super::local::names_below;
use super::name::Name;
use super::partial;
use super::select::{folder_of, inside, joined};
use super::settings;

/// A repository in the cache.
pub(in crate::cli) struct Cached {
    /// `ORG/NAME`.
    pub(in crate::cli) repo: String,
    /// Bytes of complete blobs.
    pub(in crate::cli) bytes: u64,
    /// Bytes on the disk of incomplete blobs.
    pub(in crate::cli) partial_bytes: u64,
    pub(in crate::cli) revisions: Vec<Revision>,
}

/// A commit with files in the cache.
pub(in crate::cli) struct Revision {
    pub(in crate::cli) commit: String,
    /// The branches and tags that point to it.
    pub(in crate::cli) refs: Vec<String>,
    pub(in crate::cli) models: Vec<Model>,
}

/// A model that can be opened.
pub(in crate::cli) struct Model {
    /// Its name for commands: `ORG/NAME[@REVISION][:PART]`.
    pub(in crate::cli) name: String,
    pub(in crate::cli) path: PathBuf,
    /// Bytes of its weights' files.
    pub(in crate::cli) bytes: u64,
}

/// The repositories in the cache, by name. Makes no request.
pub(in crate::cli) fn inventory() -> Result<Vec<Cached>> {
    Repository::all(&settings::cache()?)?
        .into_iter()
        .map(|(repo, repository)| cached(repo, &repository))
        .collect()
}

fn cached(repo: String, repository: &Repository) -> Result<Cached> {
    let (bytes, partial_bytes) = sizes(repository)?;
    let refs = repository.refs()?;
    let mut revisions: Vec<Revision> = repository
        .commits()?
        .into_iter()
        .map(|commit| Revision {
            refs: refs
                .iter()
                .filter(|(_, c)| *c == commit)
                .map(|(name, _)| name.clone())
                .collect(),
            commit,
            models: Vec::new(),
        })
        .collect();
    // Commits that branches point to come first.
    revisions.sort_by_key(|r| r.refs.is_empty());
    for revision in &mut revisions {
        let base = match revision
            .refs
            .iter()
            .find(|r| *r == "main")
            .or(revision.refs.first())
        {
            Some(name) if name == "main" => repo.clone(),
            Some(name) => format!("{repo}@{name}"),
            None => format!("{repo}@{}", revision.commit),
        };
        revision.models = models(&base, &repository.snapshot(&revision.commit));
    }
    Ok(Cached {
        repo,
        bytes,
        partial_bytes,
        revisions,
    })
}

/// Bytes of complete blobs, and of incomplete ones.
fn sizes(repository: &Repository) -> Result<(u64, u64)> {
    let (mut whole, mut partial) = (0, 0);
    for path in entries(&repository.path().join("blobs"))? {
        // Python keeps some blobs elsewhere, with links to them.
        let Ok(there) = fs::metadata(&path) else {
            continue;
        };
        match is_partial(&path) {
            // Parts that are missing take no space.
            true => partial += there.blocks() * 512,
            false => whole += there.len(),
        }
    }
    Ok((whole, partial))
}

/// Whether a file among the blobs is an incomplete one, ours or Python's.
fn is_partial(path: &Path) -> bool {
    path.extension()
        .is_some_and(|e| e == partial::EXTENSION || e == "incomplete")
}

/// The models in a snapshot, in all its folders.
fn models(base: &str, snapshot: &Path) -> Vec<Model> {
    let names = names_below(snapshot);
    let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let folders: BTreeSet<&str> = names.iter().map(|n| folder_of(n)).collect();
    let mut models = Vec::new();
    for folder in folders {
        let sets = match checkpoint::weights(&inside(&names, folder)) {
            Ok(Weights::Index(index)) => vec![vec![index]],
            Ok(Weights::Files(files)) => vec![files],
            Ok(Weights::Several(sets)) => sets,
            Ok(Weights::None) | Err(_) => continue,
        };
        let several = sets.len() > 1;
        for files in sets {
            let is_file = several || files[0].ends_with(".gguf");
            let part = match is_file {
                true => joined(folder, &files[0]),
                false => folder.to_owned(),
            };
            // The only model of a repository needs no part in its name.
            let name = match several || !folder.is_empty() {
                true => format!("{base}:{part}"),
                false => base.to_owned(),
            };
            let size = |file: &String| {
                let path = snapshot.join(joined(folder, file));
                fs::metadata(path).map_or(0, |m| m.len())
            };
            let path = match part.as_str() {
                "" => snapshot.to_owned(),
                part => snapshot.join(part),
            };
            models.push(Model {
                name,
                path,
                bytes: files.iter().map(size).sum(),
            });
        }
    }
    models
}

/// Removes a repository, a revision or a part of one from the cache, with the blobs that nothing else there needs. Returns
/// the number of bytes freed.
pub(in crate::cli) fn remove(name: &Name) -> Result<u64> {
    let repository = Repository::new(&settings::cache()?, &name.repo);
    if repository.is_locked()? {
        bail!(Busy, "{} is being fetched by another program", name.repo);
    }
    let before = on_disk(&repository)?;
    if name.is_whole() {
        if !repository.path().is_dir() {
            bail!(NotFound, "the cache holds no {name}");
        }
        repository.remove()?;
        return Ok(before);
    }
    let missing = || err!(NotFound, "the cache holds no {name}");
    let commit = repository.commit(name.revision()).ok_or_else(missing)?;
    let snapshot = repository.snapshot(&commit);
    match &name.part {
        None if snapshot.is_dir() => repository.remove_commit(&commit)?,
        None => return Err(missing()),
        Some(part) => {
            let place = snapshot.join(part);
            let parts = checkpoint::gguf_parts(part).unwrap_or_else(|| vec![part.clone()]);
            if place.is_dir() {
                fs::remove_dir_all(&place).map_err(|e| failed(&place, e))?;
            } else if place.is_symlink() || place.is_file() {
                for part in parts {
                    let place = snapshot.join(part);
                    match fs::remove_file(&place) {
                        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                            return Err(failed(&place, e));
                        }
                        _ => {}
                    }
                }
            } else {
                let there: Vec<String> = names_below(&snapshot).into_iter().collect();
                bail!(
                    NotFound,
                    "the cache holds no {name}; of that revision it holds {}",
                    there.join(", ")
                );
            }
        }
    }
    if repository.commits()?.is_empty() {
        repository.remove()?;
        return Ok(before);
    }
    repository.remove_unused()?;
    Ok(before - on_disk(&repository)?)
}

fn on_disk(repository: &Repository) -> Result<u64> {
    sizes(repository).map(|(whole, partial)| whole + partial)
}

fn failed(path: &Path, error: std::io::Error) -> Error {
    Error::io(format_args!("removing {}", path.display()), error)
}
