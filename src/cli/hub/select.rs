//! Chooses the files of a repository that make up a model: a pure function of their names, before anything is fetched.

use std::collections::BTreeSet;

use NVFP4::base::Result;
use NVFP4::base::error::{bail, err};
use NVFP4::checkpoint::{
    self, DESCRIPTION_FILES, EMBEDDING_FILES, TOKENIZER_FILES, TOOL_TEMPLATE, Weights,
};

use super::name::is_inside;

/// The files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    /// All of them, by their path in the repository.
    pub(super) files: BTreeSet<String>,
    /// A safetensors index among them, which names further ones.
    pub(super) index: Option<String>,
    /// The path to open: a file, or the folder of these files (empty for the repository's own).
    pub(super) opens: String,
}

/// The most names in a message.
const MOST_NAMES: usize = 12;

/// Chooses among `names`, all the files of `repo`. `part` is a file, a folder, or the name of a quantization.
pub(super) fn select(repo: &str, names: &BTreeSet<&str>, part: Option<&str>) -> Result<Selection> {
    let Some(part) = part else {
        return match in_folder(repo, names, "")? {
            Some(selection) => Ok(selection),
            None => only_folder(repo, names),
        };
    };
    if names.contains(part) {
        return one_file(repo, names, part);
    }
    if names.iter().any(|n| folder_of(n) == part) {
        return in_folder(repo, names, part)?.ok_or_else(|| {
            err!(
                NotFound,
                "the folder {part} of {repo} holds no weights; it holds {}",
                listed(names.iter().copied().filter(|n| folder_of(n) == part))
            )
        });
    }
    quantization(repo, names, part)
}

/// The folder of a path; empty for a file at the top.
pub(super) fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The names of the files in a folder.
pub(super) fn inside<'a>(names: &BTreeSet<&'a str>, folder: &str) -> Vec<&'a str> {
    names
        .iter()
        .filter(|n| folder_of(n) == folder)
        .map(|n| n.rsplit_once('/').map_or(*n, |(_, name)| name))
        .collect()
}

/// The path of a file in a folder.
pub(super) fn joined(folder: &str, name: &str) -> String {
    match folder {
        "" => name.to_owned(),
        _ => format!("{folder}/{name}"),
    }
}

/// A named file, with the other files of its set and those that go with it.
fn one_file(repo: &str, names: &BTreeSet<&str>, file: &str) -> Result<Selection> {
    let folder = folder_of(file);
    let mut files = companions(names, folder);
    files.insert(file.to_owned());
    let parts = checkpoint::gguf_parts(file).unwrap_or_default();
    if let Some(missing) = parts.iter().find(|p| !names.contains(p.as_str())) {
        bail!(
            NotFound,
            "{file} is one of {} parts of a model, and {repo} lacks {missing}",
            parts.len()
        );
    }
    files.extend(parts);
    Ok(Selection {
        files,
        index: None,
        opens: file.to_owned(),
    })
}

/// Files besides weights that are read, or copied when the model is converted.
fn companions(names: &BTreeSet<&str>, folder: &str) -> BTreeSet<String> {
    DESCRIPTION_FILES
        .iter()
        .chain(&TOKENIZER_FILES)
        .chain(&EMBEDDING_FILES)
        .chain([&TOOL_TEMPLATE])
        .map(|name| joined(folder, name))
        .filter(|name| names.contains(name.as_str()))
        .collect()
}

/// The model in a folder; `None` if the folder holds no weights.
fn in_folder(repo: &str, names: &BTreeSet<&str>, folder: &str) -> Result<Option<Selection>> {
    let inside = inside(names, folder);
    let (weights, index) =
        match checkpoint::weights(&inside).map_err(|e| e.within(joined(repo, folder)))? {
            Weights::None => return Ok(None),
            Weights::Index(index) => (vec![index.clone()], Some(joined(folder, &index))),
            Weights::Files(files) => (files, None),
            Weights::Several(sets) => {
                bail!(
                    InvalidArgument,
                    "{} holds {} models: {}; name one as {repo}:{}",
                    joined(repo, folder),
                    sets.len(),
                    listed(sets.iter().map(|s| s[0].as_str())),
                    joined(folder, &sets[0][0])
                );
            }
        };
    let mut files = companions(names, folder);
    let gguf = weights.iter().all(|w| w.ends_with(".gguf"));
    if !gguf && !files.contains(&joined(folder, "config.json")) {
        bail!(
            NotFound,
            "{} holds {} but no config.json, so it is no model; a file of it can be had as {repo}:{}",
            joined(repo, folder),
            listed(weights.iter().map(String::as_str)),
            joined(folder, &weights[0])
        );
    }
    files.extend(weights.iter().map(|w| joined(folder, w)));
    let opens = match gguf {
        true => joined(folder, &weights[0]),
        false => folder.to_owned(),
    };
    Ok(Some(Selection {
        files,
        index,
        opens,
    }))
}

/// The model in the only folder with one, if the top of the repository has none.
fn only_folder(repo: &str, names: &BTreeSet<&str>) -> Result<Selection> {
    let folders: BTreeSet<&str> = names.iter().map(|n| folder_of(n)).collect();
    let with_weights: Vec<&str> = folders
        .into_iter()
        .filter(|folder| {
            let weights = checkpoint::weights(&inside(names, folder));
            !matches!(weights, Ok(Weights::None))
        })
        .collect();
    match with_weights[..] {
        [] => bail!(
            NotFound,
            "{repo} holds neither safetensors nor GGUF weights; it holds {}{}",
            listed(names.iter().copied()),
            checkpoint::instead_of_weights(&names.iter().copied().collect::<Vec<_>>())
        ),
        [folder] => in_folder(repo, names, folder)?
            .ok_or_else(|| err!(Internal, "{repo}: the folder {folder} lost its weights")),
        _ => bail!(
            InvalidArgument,
            "{repo} holds models in several folders: {}; name one as {repo}:{}",
            listed(with_weights.iter().copied()),
            with_weights[0]
        ),
    }
}

/// The GGUF file whose name has `tag` as a word of its own, in any case: `Q4_0` is in `model-q4_0.gguf`, not in `model-IQ4_0`.
fn quantization(repo: &str, names: &BTreeSet<&str>, tag: &str) -> Result<Selection> {
    let gguf: Vec<&str> = names
        .iter()
        .copied()
        .filter(|n| n.to_ascii_lowercase().ends_with(".gguf"))
        .collect();
    let found: Vec<&str> = gguf
        .iter()
        .copied()
        .filter(|name| has_word(name, tag))
        // The first file represents a model in several files.
        .filter(|name| checkpoint::gguf_parts(name).is_none_or(|parts| parts[0] == *name))
        .collect();
    match found[..] {
        [file] => one_file(repo, names, file),
        [] if gguf.is_empty() => bail!(
            NotFound,
            "{repo} holds no {tag}: neither a file nor a folder, and no GGUF file; it holds {}",
            listed(names.iter().copied())
        ),
        [] => bail!(
            NotFound,
            "{repo} holds no {tag}; its GGUF files are {}",
            listed(gguf.into_iter())
        ),
        _ => bail!(
            InvalidArgument,
            "{} files of {repo} have {tag} in their name: {}; name one as {repo}:{}",
            found.len(),
            listed(found.iter().copied()),
            found[0]
        ),
    }
}

fn has_word(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_ascii_lowercase(), word.to_ascii_lowercase());
    let is_border = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
    name.match_indices(&word).any(|(at, found)| {
        is_border(name[..at].chars().next_back())
            && is_border(name[at + found.len()..].chars().next())
    })
}

/// Names for a message: all of them, or the first ones and how many more.
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    match names.len() {
        0 => "nothing".to_owned(),
        n if n <= MOST_NAMES => names.join(", "),
        n => format!(
            "{} and {} more",
            names[..MOST_NAMES].join(", "),
            n - MOST_NAMES
        ),
    }
}

/// The shards that an index names, by their path in the repository. `index` is its own path.
pub(super) fn shards(repo: &str, index: &str, content: &[u8]) -> Result<BTreeSet<String>> {
    let json: serde_json::Value =
        serde_json::from_slice(content).map_err(|e| err!(CorruptFile, "{repo}: {index}: {e}"))?;
    let Some(map) = json["weight_map"].as_object() else {
        bail!(CorruptFile, "{repo}: {index} has no weight_map");
    };
    map.values()
        .map(|file| match file.as_str() {
            Some(name) if is_inside(name) && !name.contains('/') => {
                Ok(joined(folder_of(index), name))
            }
            _ => Err(err!(
                CorruptFile,
                "{repo}: {index} names a file {file}, which is none beside it"
            )),
        })
        .collect()
}
