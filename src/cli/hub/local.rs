//! Models in the cache, and whether they are complete. Makes no requests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::cache::{self, Repository};
use super::name::Name;
use super::select::{Selection, select, shards};

/// A model that is in the cache.
pub(in crate::cli) struct Pulled {
    /// Its directory, or its file.
    pub(in crate::cli) path: PathBuf,
    pub(in crate::cli) commit: String,
    /// Bytes of its files.
    pub(in crate::cli) bytes: u64,
    /// Bytes that were fetched for it now.
    pub(in crate::cli) fetched: u64,
}

/// The model in the cache, if it is complete.
pub(super) fn find(repository: &Repository, name: &Name) -> Option<Pulled> {
    let commit = repository.commit(name.revision())?;
    let listing = repository.listing(&commit);
    let found;
    let names: BTreeSet<&str> = match &listing {
        Some(listing) => listing.files.keys().map(String::as_str).collect(),
        None => {
            found = names_below(&repository.snapshot(&commit));
            found.iter().map(String::as_str).collect()
        }
    };
    let mut selection = select(&name.repo, &names, name.part.as_deref()).ok()?;
    if let Some(index) = &selection.index {
        let content = std::fs::read(repository.file(&commit, index)?).ok()?;
        selection
            .files
            .extend(shards(&name.repo, index, &content).ok()?);
    }
    if listing.is_none() && may_lack_a_tokenizer(repository, &commit, &selection) {
        return None;
    }
    let mut bytes = 0;
    for file in &selection.files {
        bytes += repository.file(&commit, file)?.metadata().ok()?.len();
    }
    Some(Pulled {
        path: repository.opened(&commit, &selection.opens),
        commit,
        bytes,
        fetched: 0,
    })
}

/// Whether the repository may have a tokenizer that is not in the cache: without a list of its files that is unknown, and a
/// directory of safetensors without a tokenizer is of little use.
fn may_lack_a_tokenizer(repository: &Repository, commit: &str, selection: &Selection) -> bool {
    let is_directory = !selection.files.contains(&selection.opens);
    let tokenizer = match selection.opens.as_str() {
        "" => "tokenizer.json".to_owned(),
        folder => format!("{folder}/tokenizer.json"),
    };
    is_directory
        && repository.file(commit, &tokenizer).is_none()
        && !repository.is_known_to_miss(commit, &tokenizer)
}

/// The paths of all files below `folder`, as a repository would name them.
pub(super) fn names_below(folder: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(inner) = folders.pop() {
        for path in cache::entries(&inner).unwrap_or_default() {
            if path.is_dir() {
                folders.push(path);
            } else if path.is_file()
                && let Some(name) = path.strip_prefix(folder).ok().and_then(Path::to_str)
            {
                names.insert(name.to_owned());
            }
        }
    }
    names
}

/// Describes the part of a model that is in the cache.
pub(super) fn partly(repository: &Repository, name: &Name) -> String {
    let there = repository
        .commit(name.revision())
        .map(|commit| names_below(&repository.snapshot(&commit)))
        .unwrap_or_default();
    match there.is_empty() {
        true => format!("the cache holds no {name}"),
        false => format!(
            "the cache holds {name} in part ({})",
            there.into_iter().collect::<Vec<_>>().join(", ")
        ),
    }
}
