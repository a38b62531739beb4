//! Finds the files of a folder that hold its model's weights, by their names alone: a directory and the listing of a remote repository get
//! the same answer. Lists directories; opens no file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{DESCRIPTION_FILES, POOLING_FILE};
use crate::base::Result;
use crate::base::directory::{entries, names};
use crate::base::error::bail;
use crate::base::files::Files;

/// The weights in a folder, by file names; see [`weights`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// A safetensors index: the files that it names hold the weights.
    Index(String),
    /// All files that hold the weights: a single one, or a complete set in the order of its numbers.
    Files(Vec<String>),
    /// Several models, or several forms of one (the quantizations of a GGUF repository), among which the names do not decide. Each is given
    /// by its files, its index, or the present files of its set; [`weights`] on those names says more.
    Several(Vec<Vec<String>>),
    /// No weights.
    None,
}

/// Finds the weights among `names`, the names of all files in one folder. Names with a `/` are in other folders and are ignored. A missing
/// file of a set, `PREFIX-00001-of-00003.EXTENSION` and so on, is an error that names it.
///
/// The model is the first of the following that is present. transformers has the same order for the names that it knows: a single file
/// comes before an index, because an index beside it is left over from an earlier save.
/// 1. `model.safetensors`
/// 2. `model.safetensors.index.json`
/// 3. a set `model-00001-of-00003.safetensors` without an index
/// 4. a variant, which transformers loads with `variant=`: `model.VARIANT.safetensors`, then
///    `model.safetensors.index.VARIANT.json`, then a set without an index
/// 5. any other `.safetensors` file or set
/// 6. a `.dat` file
/// 7. a `.gguf` file or set
/// 8. `consolidated.safetensors`, or such a set: Mistral's own layout, published beside that of Hugging Face
///
/// Adapters (`adapter_model.safetensors`), vision projectors (`mmproj` in a GGUF file's name) and importance matrices (`imatrix.dat`) are
/// not weights of a model.
pub fn weights(names: &[&str]) -> Result<Weights> {
    let mut found: BTreeMap<(Rank, Unit<'_>), BTreeSet<&str>> = BTreeMap::new();
    for name in names {
        if let Some(place) = classify(name) {
            found.entry(place).or_default().insert(name);
        }
    }
    let best = found.keys().next().map(|(rank, _)| *rank);
    let mut candidates: Vec<(Unit<'_>, BTreeSet<&str>)> = found
        .into_iter()
        .filter(|((rank, _), _)| Some(*rank) == best)
        .map(|((_, unit), files)| (unit, files))
        .collect();
    if best == Some(Rank::Variant) {
        // Files come before indices, and indices before sets.
        let mut seen = BTreeSet::new();
        candidates.retain(|(unit, _)| seen.insert(unit.variant()));
    }
    match &candidates[..] {
        [] => Ok(Weights::None),
        [(Unit::Index(name), _)] => Ok(Weights::Index((*name).to_owned())),
        [(Unit::File(name), _)] => Ok(Weights::Files(vec![(*name).to_owned()])),
        [(Unit::Set(set), files)] => set.whole(files).map(Weights::Files),
        several => {
            let owned = |files: &BTreeSet<&str>| files.iter().map(|f| (*f).to_owned()).collect();
            let mut models: Vec<Vec<String>> = several.iter().map(|(_, f)| owned(f)).collect();
            models.sort();
            Ok(Weights::Several(models))
        }
    }
}

/// The names of all parts of a model of which the GGUF file `name` is one, in order: llama.cpp names them `PREFIX-00001-of-00003.gguf` and
/// so on. `None` for a name of another form.
pub fn gguf_parts(name: &str) -> Option<Vec<String>> {
    let set = numbered(name.strip_suffix(".gguf")?, "gguf")?;
    Some(set.names().collect())
}

/// Names the known substitute for weights in a folder, such as a pickle or an adapter, as the end of a message; empty if there is none.
pub fn instead_of_weights(names: &[&str]) -> String {
    let found = |stems: &[&str], extensions: &[&str]| {
        names.iter().find(|name| match name.rsplit_once('.') {
            Some((stem, extension)) => {
                extensions.contains(&extension) && stems.iter().any(|own| stem.starts_with(own))
            }
            None => false,
        })
    };
    if names.contains(&"adapter_config.json") {
        return "; it is an adapter, for --adapter beside the model that base_model_name_or_path in its adapter_config.json names".to_owned();
    }
    let of_torch = ["pytorch_model", "consolidated", "model"];
    if let Some(name) = found(&of_torch, &["bin", "pt", "pth", "ckpt"]) {
        return format!(
            "; {name} is a pickle of PyTorch, which is a program and is not run: transformers' save_pretrained writes it as safetensors"
        );
    }
    let of_others = [
        "onnx", "h5", "msgpack", "engine", "mlmodel", "task", "litertlm",
    ];
    match found(&[""], &of_others) {
        Some(name) => format!("; {name} is for another program"),
        None => String::new(),
    }
}

/// The name of the index that a model in the file `name` would have; `None` if it would have none.
pub(super) fn index_beside(name: &str) -> Option<String> {
    let stem = name.strip_suffix(".safetensors")?;
    match stem.strip_prefix("model")? {
        "" => Some("model.safetensors.index.json".to_owned()),
        variant => Some(format!(
            "model.safetensors.index.{}.json",
            variant.strip_prefix('.')?
        )),
    }
}

/// The files to open for the model in `directory` of `files`: an index, one file, or a whole set.
pub(super) fn find_in_directory(files: &Files, directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = files.entries(directory)?;
    let shown = files.shown(directory);
    let names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
    let found = match weights(&names).map_err(|e| e.within(&shown))? {
        Weights::Index(index) => vec![index],
        Weights::Files(files) => files,
        Weights::Several(models) => {
            let first: Vec<&str> = models
                .iter()
                .filter_map(|m| m.first())
                .map(String::as_str)
                .collect();
            bail!(
                InvalidArgument,
                "{shown} holds {} models; name the one to open, of {}",
                models.len(),
                first.join(", ")
            )
        }
        Weights::None => bail!(
            NotFound,
            "{shown} holds no model: no .safetensors, .dat or .gguf file with the weights of one{}",
            instead_of_weights(&names)
        ),
    };
    let path_of = |file: &String| {
        let entry = entries.iter().find(|(name, _)| name == file);
        entry.map_or_else(|| directory.join(file), |(_, path)| path.clone())
    };
    Ok(found.iter().map(path_of).collect())
}

/// Fails unless a directory holds only a model, because replacing it must not destroy anything else. A model's directory has weights and
/// their description, and no folders inside but that of its pooling, unlike homes and repositories.
pub(super) fn check_is_model(directory: &Path) -> Result<()> {
    let entries = entries(directory)?;
    let is_foreign =
        |(name, path): &&(String, PathBuf)| path.is_dir() && !is_of_pooling(name, path);
    if let Some((folder, _)) = entries.iter().find(is_foreign) {
        bail!(
            InvalidArgument,
            "{} holds the folder {folder}, so it is not replaced as a model; remove what is not needed, or name another directory",
            directory.display()
        );
    }
    let names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
    let is_described = names
        .iter()
        .any(|n| DESCRIPTION_FILES.contains(n) || n.ends_with(".gguf"));
    // An incomplete set counts as weights too.
    let has_weights = !matches!(weights(&names), Ok(Weights::None));
    let is_model = is_described && has_weights;
    if !is_model && !names.is_empty() {
        bail!(
            InvalidArgument,
            "{} holds no model that could be replaced, but {}; name another directory",
            directory.display(),
            names.join(", ")
        );
    }
    Ok(())
}

/// Whether a folder has the pooling of an embedding model, and nothing else.
fn is_of_pooling(name: &str, folder: &Path) -> bool {
    POOLING_FILE
        .split_once('/')
        .is_some_and(|(own, file)| name == own && names(folder).is_ok_and(|found| found == [file]))
}

/// Role of files in their folder, in order of precedence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Model,
    Index,
    Shards,
    Variant,
    OtherSafetensors,
    Dat,
    Gguf,
    Consolidated,
}

/// Files that are opened together. Among the units of one variant the first wins.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Unit<'a> {
    File(&'a str),
    Index(&'a str),
    Set(Set<'a>),
}

impl<'a> Unit<'a> {
    /// The variant that it holds: `fp16` of `model.fp16.safetensors`.
    fn variant(&self) -> Option<&'a str> {
        match self {
            Unit::File(name) => name.strip_prefix("model.")?.strip_suffix(".safetensors"),
            Unit::Index(name) => name
                .strip_prefix("model.safetensors.index.")?
                .strip_suffix(".json"),
            Unit::Set(set) => set.stem.strip_prefix("model."),
        }
    }
}

/// Set of files `STEM-NUMBER-of-TOTAL.EXTENSION`, numbered from 1 in fixed width.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Set<'a> {
    stem: &'a str,
    extension: &'a str,
    total: usize,
    number_width: usize,
    total_width: usize,
}

impl Set<'_> {
    fn name(&self, number: usize) -> String {
        format!(
            "{}-{number:0number_width$}-of-{:0total_width$}.{}",
            self.stem,
            self.total,
            self.extension,
            number_width = self.number_width,
            total_width = self.total_width,
        )
    }

    fn names(&self) -> impl Iterator<Item = String> {
        (1..=self.total).map(|n| self.name(n))
    }

    /// All its files; fails if one is not in `found`.
    fn whole(&self, found: &BTreeSet<&str>) -> Result<Vec<String>> {
        if let Some(missing) = self.names().find(|n| !found.contains(n.as_str())) {
            bail!(
                NotFound,
                "{missing} is missing: of the {} files of its set {} are there",
                self.total,
                found.len()
            );
        }
        Ok(self.names().collect())
    }
}

/// The set to which a file belongs by its name, given without its extension.
fn numbered<'a>(name: &'a str, extension: &'a str) -> Option<Set<'a>> {
    let (rest, total) = name.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    // llama.cpp accepts no other width. safetensors sets mostly have five digits too, but `model-00001-of-000163` exists.
    let widths = if extension == "gguf" { 5..=5 } else { 1..=6 };
    let parse = |text: &str| -> Option<usize> {
        let digits = widths.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().ok())?
    };
    let set = Set {
        stem,
        extension,
        total: parse(total)?,
        number_width: number.len(),
        total_width: total.len(),
    };
    let number = parse(number)?;
    let fixed_width = set.total.to_string().len() <= set.number_width;
    (fixed_width && (1..=set.total).contains(&number)).then_some(set)
}

/// Role of `name` in its folder; `None` if it is not part of the weights.
fn classify(name: &str) -> Option<(Rank, Unit<'_>)> {
    if name.contains('/') {
        return None;
    }
    if let Some(variant) = name.strip_prefix("model.safetensors.index.") {
        return match variant.strip_suffix("json")? {
            "" => Some((Rank::Index, Unit::Index(name))),
            variant => (variant.len() > 1 && variant.ends_with('.'))
                .then_some((Rank::Variant, Unit::Index(name))),
        };
    }
    let (stem, extension) = name.rsplit_once('.')?;
    let (stem, unit) = match (extension, numbered(stem, extension)) {
        ("safetensors" | "gguf", Some(set)) => (set.stem, Unit::Set(set)),
        _ => (stem, Unit::File(name)),
    };
    if is_no_model(stem, extension) {
        return None;
    }
    let rank = match extension {
        "safetensors" => match (stem.split_once('.'), &unit) {
            (None, Unit::File(_)) if stem == "model" => Rank::Model,
            (None, Unit::Set(_)) if stem == "model" => Rank::Shards,
            (None, _) if stem == "consolidated" => Rank::Consolidated,
            (Some(("model", _)), _) => Rank::Variant,
            _ => Rank::OtherSafetensors,
        },
        "dat" => Rank::Dat,
        "gguf" => Rank::Gguf,
        _ => return None,
    };
    Some((rank, unit))
}

/// Whether a file with a model's extension holds something else that is published beside models.
fn is_no_model(stem: &str, extension: &str) -> bool {
    let lower = stem.to_ascii_lowercase();
    let imatrix = lower.starts_with("imatrix") || lower.ends_with("imatrix");
    match extension {
        "safetensors" => stem == "adapter_model" || stem.starts_with("adapter_model."),
        "gguf" => imatrix || lower.contains("mmproj"),
        _ => imatrix,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    /// The weights found in a folder with the names in `lines`, separated by spaces.
    fn found(lines: &str) -> Weights {
        let names: Vec<&str> = lines.split_whitespace().collect();
        weights(&names).unwrap_or_else(|e| panic!("{lines}: {e}"))
    }

    fn index(name: &str) -> Weights {
        Weights::Index(name.to_owned())
    }

    fn owned(names: &str) -> Vec<String> {
        names.split_whitespace().map(str::to_owned).collect()
    }

    fn files(names: &str) -> Weights {
        Weights::Files(owned(names))
    }

    const BESIDE: &str = ".gitattributes LICENSE README.md config.json generation_config.json merges.txt tokenizer.json tokenizer_config.json vocab.json";

    /// Qwen/Qwen3-0.6B and Qwen/Qwen3-4B.
    #[test]
    fn one_file_and_an_index() {
        let one = format!("{BESIDE} model.safetensors");
        assert_eq!(found(&one), files("model.safetensors"));
        let shards = "model-00001-of-00003.safetensors model-00002-of-00003.safetensors model-00003-of-00003.safetensors";
        let sharded = format!("{BESIDE} {shards} model.safetensors.index.json");
        assert_eq!(found(&sharded), index("model.safetensors.index.json"));
        assert_eq!(found(BESIDE), Weights::None);
        assert_eq!(found(""), Weights::None);
        assert_eq!(
            found("pytorch_model.bin onnx/model.safetensors"),
            Weights::None
        );
    }

    /// A model saved in one file over an earlier save in shards, as transformers reads it.
    #[test]
    fn one_file_comes_before_an_index() {
        let shards = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors";
        let index = "model.safetensors.index.json";
        for left in [
            index.to_owned(),
            format!("{index} {shards}"),
            shards.to_owned(),
        ] {
            assert_eq!(
                found(&format!("{BESIDE} {left} model.safetensors")),
                files("model.safetensors"),
                "{left}"
            );
        }
        for (file, index) in [
            ("model.safetensors", Some("model.safetensors.index.json")),
            (
                "model.fp16.safetensors",
                Some("model.safetensors.index.fp16.json"),
            ),
            ("consolidated.safetensors", None),
            ("models.safetensors", None),
            ("model.gguf", None),
        ] {
            assert_eq!(index_beside(file).as_deref(), index, "{file}");
        }
    }

    #[test]
    fn a_set_without_an_index() {
        let two = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors";
        assert_eq!(found(&format!("{BESIDE} {two}")), files(two));
        assert_eq!(
            found("model-00001-of-00001.safetensors"),
            files("model-00001-of-00001.safetensors")
        );
        // In any order of listing.
        let turned = "b-2-of-2.safetensors b-1-of-2.safetensors";
        assert_eq!(
            found(turned),
            files("b-1-of-2.safetensors b-2-of-2.safetensors")
        );
        // deepseek-ai/DeepSeek-V3 writes the number and the total in different widths.
        let names: Vec<String> = (1..=163)
            .map(|n| format!("model-{n:05}-of-000163.safetensors"))
            .collect();
        assert_eq!(found(&names.join(" ")), Weights::Files(names));

        let gone = |names: &str| {
            let names: Vec<&str> = names.split_whitespace().collect();
            let error = weights(&names).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound);
            error.message().to_owned()
        };
        assert_eq!(
            gone("model-00001-of-00003.safetensors model-00003-of-00003.safetensors"),
            "model-00002-of-00003.safetensors is missing: of the 3 files of its set 2 are there"
        );
        let last = gone("a-00001-of-00002.gguf");
        assert!(
            last.starts_with("a-00002-of-00002.gguf is missing"),
            "{last}"
        );
        // Numbers that no set has are part of the name.
        for odd in [
            "a-3-of-2.gguf",
            "a-0-of-2.safetensors",
            "a-1-of-12.safetensors",
            "a-1-of-0000001.safetensors",
            "a--of-.safetensors",
            "a-+1-of-00002.gguf",
        ] {
            assert_eq!(found(odd), files(odd), "{odd}");
        }
        let two_sets = "m-1-of-2.safetensors m-2-of-2.safetensors m-1-of-3.safetensors";
        let Weights::Several(models) = found(two_sets) else {
            panic!("{:?}", found(two_sets));
        };
        assert_eq!(
            models,
            [
                owned("m-1-of-2.safetensors m-2-of-2.safetensors"),
                owned("m-1-of-3.safetensors")
            ]
        );
    }

    /// mistralai/Mistral-7B-Instruct-v0.3, and mistralai/Mistral-Large-Instruct-2411 in fewer files.
    #[test]
    fn mistral_publishes_two_layouts() {
        let shards = "model-00001-of-00003.safetensors model-00002-of-00003.safetensors model-00003-of-00003.safetensors";
        let both =
            format!("{BESIDE} consolidated.safetensors params.json tokenizer.model.v3 {shards}");
        assert_eq!(found(&both), files(shards));
        assert_eq!(
            found(&format!("{both} model.safetensors.index.json")),
            index("model.safetensors.index.json")
        );
        assert_eq!(
            found("consolidated.safetensors params.json tekken.json"),
            files("consolidated.safetensors")
        );
        let own = "consolidated-00001-of-00002.safetensors consolidated-00002-of-00002.safetensors";
        let alone = format!("{own} consolidated.safetensors.index.json params.json");
        assert_eq!(found(&alone), files(own));
        assert_eq!(found(&format!("{alone} other.gguf")), files("other.gguf"));
        assert_eq!(
            found(&format!("{alone} model.safetensors")),
            files("model.safetensors")
        );
    }

    /// TheBloke/Mistral-7B-Instruct-v0.2-GGUF.
    #[test]
    fn every_quantization_is_a_candidate() {
        let kinds = "Q2_K Q3_K_L Q3_K_M Q3_K_S Q4_0 Q4_K_M Q4_K_S Q5_0 Q5_K_M Q5_K_S Q6_K Q8_0";
        let names: Vec<String> = kinds
            .split(' ')
            .map(|k| format!("mistral-7b-instruct-v0.2.{k}.gguf"))
            .collect();
        let listing = format!("README.md config.json {}", names.join(" "));
        let Weights::Several(models) = found(&listing) else {
            panic!("{:?}", found(&listing));
        };
        assert_eq!(models.len(), 12);
        assert_eq!(models.concat(), names);
        assert_eq!(found("a.Q8_0.gguf a.gguf.part"), files("a.Q8_0.gguf"));
    }

    /// lmstudio-community/Qwen3-235B-A22B-GGUF with fewer parts. Qwen and unsloth have a folder for each quantization.
    #[test]
    fn a_split_quantization_is_one_candidate() {
        let split =
            "Qwen3-235B-A22B-Q8_0-00001-of-00002.gguf Qwen3-235B-A22B-Q8_0-00002-of-00002.gguf";
        assert_eq!(found(split), files(split));
        let other =
            "Qwen3-235B-A22B-Q2_K-00001-of-00003.gguf Qwen3-235B-A22B-Q2_K-00003-of-00003.gguf";
        let single = "Qwen3-235B-A22B-UD-IQ1_S.gguf";
        let mixed = format!(
            "README.md {split} {single} {other} Q4_0/Qwen3-235B-A22B-Q4_0-00001-of-00003.gguf"
        );
        let want = vec![owned(other), owned(split), owned(single)];
        assert_eq!(found(&mixed), Weights::Several(want));
        // Each candidate alone gives its own result.
        expect_kind(
            weights(&other.split(' ').collect::<Vec<_>>()),
            ErrorKind::NotFound,
            "00002-of-00003.gguf is missing",
        );
        assert_eq!(found(single), files(single));
    }

    /// Projectors and importance matrices as unsloth, bartowski, ggml-org and mradermacher name them.
    #[test]
    fn what_is_beside_gguf_models_is_none() {
        for beside in [
            "mmproj-F16.gguf mmproj-BF16.gguf mmproj-F32.gguf",
            "Qwen2.5-VL-7B-Instruct-mmproj-f16.gguf",
            "mmproj-model-f16-00001-of-00002.gguf",
            "imatrix_unsloth.dat",
            "imatrix_unsloth.gguf",
            "imatrix.dat",
            "Qwen_Qwen3-0.6B-imatrix.gguf",
        ] {
            assert_eq!(found(beside), Weights::None, "{beside}");
            let model = "gemma-3-4b-it-Q4_K_M.gguf";
            assert_eq!(
                found(&format!("{beside} {model}")),
                files(model),
                "{beside}"
            );
        }
    }

    /// The two text encoders of stabilityai/stable-diffusion-3-medium-diffusers, and subsets of their files.
    #[test]
    fn variants_come_after_the_plain_files() {
        assert_eq!(
            found("model.fp16.safetensors model.safetensors"),
            files("model.safetensors")
        );
        let plain = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors";
        let half = "model.fp16-00001-of-00002.safetensors model.fp16-00002-of-00002.safetensors";
        let (index_of_half, index_of_plain) = (
            "model.safetensors.index.fp16.json",
            "model.safetensors.index.json",
        );
        let all = [plain, half, index_of_half, index_of_plain].join(" ");
        assert_eq!(found(&all), index(index_of_plain));
        assert_eq!(found(&[plain, half, index_of_half].join(" ")), files(plain));
        assert_eq!(
            found(&[half, index_of_half].join(" ")),
            index(index_of_half)
        );
        assert_eq!(found(half), files(half));
        // Within a variant the order is that of plain files; two variants are two models.
        let single = "model.fp16.safetensors";
        assert_eq!(
            found(&[half, index_of_half, single].join(" ")),
            files(single)
        );
        assert_eq!(
            found(&[half, index_of_half, "model.bf16.safetensors"].join(" ")),
            Weights::Several(vec![owned("model.bf16.safetensors"), owned(index_of_half)])
        );
        assert_eq!(
            found("model.fp16.safetensors other.safetensors"),
            files("model.fp16.safetensors")
        );
        let two = "model.bf16.safetensors model.fp16.safetensors";
        assert_eq!(
            found(two),
            Weights::Several(two.split(' ').map(owned).collect())
        );
        for odd in [
            "model.safetensors.index.json.bak",
            "model.safetensors.index..json",
            "model.safetensors.index.xjson",
        ] {
            assert_eq!(found(odd), Weights::None, "{odd}");
        }
    }

    #[test]
    fn adapters_are_no_models() {
        let adapter = "README.md adapter_config.json adapter_model.safetensors tokenizer.json";
        assert_eq!(found(adapter), Weights::None);
        assert_eq!(
            found(&format!("{adapter} merged.safetensors")),
            files("merged.safetensors")
        );
    }

    #[test]
    fn safetensors_come_before_dat_and_dat_before_gguf() {
        assert_eq!(found("a.gguf b.dat c.safetensors"), files("c.safetensors"));
        assert_eq!(
            found("a.gguf b.dat consolidated.safetensors"),
            files("b.dat")
        );
        let Weights::Several(models) = found("b.dat a.dat") else {
            panic!("two models are one");
        };
        assert_eq!(models, [["a.dat"], ["b.dat"]]);
    }

    #[test]
    fn parts_of_a_gguf_by_the_name_of_one() {
        let parts = gguf_parts("Q8_0/m-of-x-00002-of-00003.gguf").unwrap();
        assert_eq!(
            parts,
            owned(
                "Q8_0/m-of-x-00001-of-00003.gguf Q8_0/m-of-x-00002-of-00003.gguf Q8_0/m-of-x-00003-of-00003.gguf"
            )
        );
        assert_eq!(gguf_parts("m-00001-of-00001.gguf").unwrap().len(), 1);
        for name in [
            "m.gguf",
            "m-1-of-3.gguf",
            "m-00004-of-00003.gguf",
            "m-00000-of-00003.gguf",
            "m-00001-of-00003.safetensors",
            "m-00001-of-000003.gguf",
            "",
        ] {
            assert_eq!(gguf_parts(name), None, "{name}");
        }
    }
}
