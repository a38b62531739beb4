//! Generation settings recommended by a model's maker: stop tokens and sampling. The loader reads them.

use std::path::Path;

use serde_json::{Map, Value};

use super::SamplingOptions;
use super::keys;
use super::spec::Spec;
use crate::base::error::{bail, err};
use crate::base::files::Files;
use crate::base::{Error, Result};
use crate::checkpoint::TokenizerSource;
use crate::text::{TextFiles, turn_ends};

/// The settings read.
pub(crate) struct Generation {
    /// Tokens that end a text, in order.
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) sampling: SamplingOptions,
}

/// Reads the settings from the config, `generation_config.json` or GGUF metadata, the chat template and the tokenizer.
pub(crate) fn read(spec: &Spec, source: &TokenizerSource, text: &TextFiles) -> Result<Generation> {
    let mut stop_tokens = spec.eos.clone();
    let sampling = match (source, source.files()) {
        (_, Some((files, directory))) => {
            let path = directory.join("generation_config.json");
            let file = file(&files, &path)?;
            let named = |e: Error| e.within(path.display());
            stop_tokens.extend(eos(&file).map_err(named)?);
            sampling(&file).map_err(named)?
        }
        (TokenizerSource::Vocabulary(v), _) => {
            stop_tokens.extend(v.ends());
            sampling(&v.sampling).map_err(|e| e.within("general.sampling"))?
        }
        _ => SamplingOptions::default(),
    };
    if let Some(tokenizer) = &text.tokenizer {
        stop_tokens.extend(turn_ends(tokenizer, text.template.as_ref())?);
    }
    stop_tokens.sort_unstable();
    stop_tokens.dedup();
    Ok(Generation {
        stop_tokens,
        sampling,
    })
}

/// The object in a file; empty if the file does not exist.
fn file(files: &Files, path: &Path) -> Result<Map<String, Value>> {
    let Some(bytes) = files.read(path)? else {
        return Ok(Map::new());
    };
    serde_json::from_slice(&bytes).map_err(|e| err!(CorruptFile, "{}: {e}", path.display()))
}

fn eos(file: &Map<String, Value>) -> Result<Vec<u32>> {
    match file.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(value) => keys::token_ids(value)
            .ok_or_else(|| err!(CorruptFile, "'eos_token_id' is {value}; expected token ids")),
    }
}

/// The sampling that transformers' `generate` would do: it draws if `do_sample` is true, else takes the argmax and ignores the other
/// entries. A GGUF file has no `do_sample`; there a temperature implies it.
fn sampling(file: &Map<String, Value>) -> Result<SamplingOptions> {
    let number = |key: &str| match file.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(number) => Ok(Some(number as f32)),
            None => bail!(CorruptFile, "'{key}' is {value}; expected a number"),
        },
    };
    let mut sampling = SamplingOptions::default();
    let draws = match file.get("do_sample") {
        Some(value) => value.as_bool().unwrap_or(false),
        None => file.contains_key("temperature"),
    };
    if draws {
        // The defaults of transformers.
        sampling.temperature = number("temperature")?.unwrap_or(1.0);
        sampling.top_k = number("top_k")?.map_or(50, |k| k.max(0.0) as usize);
        sampling.top_p = number("top_p")?.unwrap_or(1.0);
        sampling.min_p = number("min_p")?.unwrap_or(0.0);
    }
    sampling.repetition_penalty = number("repetition_penalty")?.unwrap_or(1.0);
    sampling
        .check()
        .map_err(|e| err!(CorruptFile, "{}", e.message()))?;
    Ok(sampling)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use serde_json::json;

    fn of(file: Value) -> Result<SamplingOptions> {
        sampling(file.as_object().unwrap())
    }

    #[test]
    fn sampling_is_what_the_maker_asks_for() {
        // Qwen3's.
        let qwen3 =
            of(json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95})).unwrap();
        let expected = SamplingOptions {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            ..SamplingOptions::default()
        };
        assert_eq!(qwen3, expected);
        // SmolLM2 has no such entry, and many files have a temperature without drawing.
        assert_eq!(
            of(json!({"eos_token_id": 2})).unwrap(),
            SamplingOptions::default()
        );
        let greedy =
            of(json!({"do_sample": false, "temperature": 0.6, "repetition_penalty": 1.1})).unwrap();
        assert!(greedy.temperature == 0.0 && greedy.repetition_penalty == 1.1);
        let only = of(json!({"do_sample": true})).unwrap();
        assert!(only.temperature == 1.0 && only.top_k == 50 && only.top_p == 1.0);
        // From GGUF metadata.
        let gguf = of(json!({"temperature": 1.0, "min_p": 0.1, "top_k": 0})).unwrap();
        assert!(gguf.temperature == 1.0 && gguf.min_p == 0.1 && gguf.top_k == 0);
    }

    #[test]
    fn negative_ids_are_no_stop_tokens() {
        let of = |file: Value| eos(file.as_object().unwrap());
        for (ids, want) in [(json!(-1), vec![]), (json!([7, -1, 3]), vec![7, 3])] {
            assert_eq!(of(json!({"eos_token_id": ids})).unwrap(), want);
        }
        for ids in [json!("7"), json!([7, 1.5]), json!([1u64 << 40])] {
            let refused = of(json!({"eos_token_id": ids}));
            expect_kind(refused, ErrorKind::CorruptFile, "'eos_token_id' is");
        }
    }

    #[test]
    fn what_is_no_sampling_is_named() {
        for (file, words) in [
            (
                json!({"do_sample": true, "temperature": "warm"}),
                "'temperature' is \"warm\"",
            ),
            (json!({"do_sample": true, "top_p": 7}), "top_p is 7"),
            (json!({"temperature": -1}), "temperature is -1"),
        ] {
            expect_kind(of(file), ErrorKind::CorruptFile, words);
        }
    }
}
