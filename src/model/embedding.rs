//! How a model embeds texts, by the files of sentence-transformers beside its weights: pooling, normalization, prompts and the longest text.
//! Reads settings; runs nothing.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::keys::Keys;
use crate::base::error::{bail, err};
use crate::base::{Error, Result};
use crate::checkpoint::POOLING_FILE;

/// The rows of a text that make its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The hidden row of the last token.
    Last,
    /// The mean of the hidden rows of all tokens.
    Mean,
    /// The hidden row of the first token.
    Cls,
    /// Every hidden row: an embedding for each token.
    None,
}

/// How a model embeds texts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EmbeddingSettings {
    /// Pooling that the model asks for; `None` if its files name none.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are divided by their length.
    pub normalize: bool,
    /// Whether the mean includes the tokens of a prompt.
    pub include_prompt: bool,
    /// Texts that go before texts of some kind, by its name, in the order of the file.
    pub prompts: Map<String, Value>,
    /// The name of the prompt of texts whose prompt is not given.
    pub default_prompt: Option<String>,
    /// Most tokens of a text, if the model says so; its context is another limit.
    pub max_tokens: Option<usize>,
    /// The reason why the model's own pooling and normalization cannot be done; an error where they are asked for.
    #[serde(serialize_with = "message")]
    pub fault: Option<Error>,
}

fn message<S: Serializer>(
    fault: &Option<Error>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    fault.as_ref().map(Error::to_string).serialize(serializer)
}

impl EmbeddingSettings {
    /// The settings in the [`EMBEDDING_FILES`](crate::checkpoint::EMBEDDING_FILES) of a model with rows of `hidden_size`. A broken or unsupported file is a fault of the settings, because it does not keep the model from generating.
    pub fn read(files: &[(String, Vec<u8>)], hidden_size: usize) -> EmbeddingSettings {
        let mut settings = EmbeddingSettings {
            pooling: None,
            normalize: false,
            include_prompt: true,
            prompts: Map::new(),
            default_prompt: None,
            max_tokens: None,
            fault: None,
        };
        settings.fault = settings.read_all(files, hidden_size).err();
        settings
    }

    fn read_all(&mut self, files: &[(String, Vec<u8>)], hidden_size: usize) -> Result<()> {
        for (name, content) in files {
            let value: Value =
                serde_json::from_slice(content).map_err(|e| err!(CorruptFile, "{name}: {e}"))?;
            let read = match (&**name, &value) {
                ("modules.json", Value::Array(modules)) => self.read_modules(modules),
                ("modules.json", _) => Err(err!(CorruptFile, "it is no list of modules")),
                (_, Value::Object(map)) => match &**name {
                    POOLING_FILE => self.read_pooling(map, hidden_size),
                    "sentence_bert_config.json" => self.read_limits(&Keys(map)),
                    _ => self.read_prompts(&Keys(map)),
                },
                _ => Err(err!(CorruptFile, "it is no JSON object")),
            };
            read.map_err(|e| e.within(name))?;
        }
        Ok(())
    }

    fn read_modules(&mut self, modules: &[Value]) -> Result<()> {
        for module in modules {
            let text = |key: &str| module[key].as_str().unwrap_or_default();
            let name = text("type").rsplit('.').next().unwrap_or_default();
            match (name, text("path")) {
                ("Transformer", _) => {}
                ("Pooling", path) if POOLING_FILE.strip_suffix("/config.json") == Some(path) => {}
                ("Pooling", path) => bail!(
                    Unsupported,
                    "its pooling is in '{path}'; expected {POOLING_FILE}"
                ),
                ("Normalize", _) => self.normalize = true,
                (other, _) => bail!(
                    Unsupported,
                    "the module '{other}' is not supported; known are Transformer, Pooling and Normalize"
                ),
            }
        }
        Ok(())
    }

    fn read_pooling(&mut self, file: &Map<String, Value>, hidden_size: usize) -> Result<()> {
        const PREFIX: &str = "pooling_mode_";
        let keys = Keys(file);
        for name in ["word_embedding_dimension", "embedding_dimension"] {
            match keys.size(name)? {
                Some(width) if width != hidden_size => bail!(
                    CorruptFile,
                    "'{name}' is {width}, and the hidden rows of the model have {hidden_size} elements"
                ),
                _ => {}
            }
        }
        let mut modes = match keys.get("pooling_mode") {
            Some(Value::Array(_)) => keys.texts("pooling_mode")?.unwrap_or_default(),
            _ => keys.text("pooling_mode")?.into_iter().collect(),
        };
        if modes.is_empty() {
            // Files of earlier versions have a flag for each mode.
            for key in file.keys() {
                if let Some(mode) = key.strip_prefix(PREFIX)
                    && keys.flag(key)? == Some(true)
                {
                    modes.push(mode);
                }
            }
        }
        self.include_prompt = keys.flag("include_prompt")?.unwrap_or(true);
        self.pooling = Some(match modes[..] {
            ["lasttoken"] => Pooling::Last,
            [] | ["mean" | "mean_tokens"] => Pooling::Mean,
            ["cls" | "cls_token"] => Pooling::Cls,
            _ => bail!(
                Unsupported,
                "the pooling '{}' is not supported; known are one of lasttoken, mean and cls",
                modes.join("+")
            ),
        });
        Ok(())
    }

    fn read_limits(&mut self, keys: &Keys<'_>) -> Result<()> {
        self.max_tokens = keys.size("max_seq_length")?;
        if keys.flag("do_lower_case")? == Some(true) {
            bail!(
                Unsupported,
                "'do_lower_case' is true; only texts as they are given are supported"
            );
        }
        Ok(())
    }

    fn read_prompts(&mut self, keys: &Keys<'_>) -> Result<()> {
        if let Some(prompts) = keys.object("prompts")? {
            for name in prompts.0.keys() {
                prompts.text(name)?;
            }
            self.prompts = prompts.0.clone();
        }
        self.default_prompt = keys.text("default_prompt_name")?.map(str::to_owned);
        if let Some(name) = &self.default_prompt {
            self.prompt(name)?;
        }
        Ok(())
    }

    /// The text of a prompt. An error that lists the names if there is none of this name.
    pub fn prompt(&self, name: &str) -> Result<&str> {
        if let Some(text) = self.prompts.get(name) {
            return Ok(text.as_str().unwrap_or_default());
        }
        let names: Vec<&str> = self.prompts.keys().map(String::as_str).collect();
        match names.is_empty() {
            true => bail!(
                InvalidArgument,
                "there is no prompt '{name}': the model names none; give the text of a prompt instead"
            ),
            false => bail!(
                InvalidArgument,
                "there is no prompt '{name}'; the model has {}",
                names.join(", ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(files: &[(&str, Value)]) -> EmbeddingSettings {
        let file = |(name, content): &(&str, Value)| (name.to_string(), content.to_string().into());
        let files: Vec<(String, Vec<u8>)> = files.iter().map(file).collect();
        EmbeddingSettings::read(&files, 1024)
    }

    fn modules(names: &[&str]) -> Value {
        let module = |(i, name): (usize, &&str)| {
            let path = match i {
                0 => String::new(),
                _ => format!("{i}_{name}"),
            };
            json!({"idx": i, "name": i.to_string(), "path": path, "type": format!("sentence_transformers.models.{name}")})
        };
        names.iter().enumerate().map(module).collect()
    }

    fn fault(files: &[(&str, Value)], words: &str) {
        let fault = read(files).fault.expect("a fault").to_string();
        assert!(fault.contains(words), "{fault}");
        assert!(!fault.contains('\n'), "{fault}");
    }

    /// The files of Qwen/Qwen3-Embedding-0.6B.
    #[test]
    fn published_files_are_read() {
        let query = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:";
        let found = read(&[
            (
                "modules.json",
                modules(&["Transformer", "Pooling", "Normalize"]),
            ),
            (
                "config_sentence_transformers.json",
                json!({
                    "prompts": {"query": query, "document": ""}, "default_prompt_name": null, "similarity_fn_name": "cosine"
                }),
            ),
            (
                POOLING_FILE,
                json!({
                    "word_embedding_dimension": 1024, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": false,
                    "pooling_mode_max_tokens": false, "pooling_mode_mean_sqrt_len_tokens": false,
                    "pooling_mode_weightedmean_tokens": false, "pooling_mode_lasttoken": true, "include_prompt": true
                }),
            ),
        ]);
        assert_eq!(found.fault, None);
        assert_eq!(
            (found.pooling, found.normalize),
            (Some(Pooling::Last), true)
        );
        assert_eq!(found.prompt("query").unwrap(), query);
        assert_eq!(found.prompt("document").unwrap(), "");
        assert_eq!((found.default_prompt, found.max_tokens), (None, None));
    }

    #[test]
    fn pooling_is_named_in_two_ways() {
        let pooling = |file: Value| read(&[(POOLING_FILE, file)]);
        for (file, want) in [
            (json!({"pooling_mode": "lasttoken"}), Pooling::Last),
            (json!({"pooling_mode": "mean"}), Pooling::Mean),
            (json!({"pooling_mode": "cls"}), Pooling::Cls),
            (json!({"word_embedding_dimension": 1024}), Pooling::Mean),
            (
                json!({"pooling_mode_mean_tokens": false, "pooling_mode_cls_token": true}),
                Pooling::Cls,
            ),
            (json!({"pooling_mode_lasttoken": true}), Pooling::Last),
            (
                json!({"pooling_mode": ["cls"], "embedding_dimension": 1024}),
                Pooling::Cls,
            ),
        ] {
            let found = pooling(file.clone());
            assert_eq!((found.pooling, found.fault), (Some(want), None), "{file}");
            assert!(!found.normalize && found.include_prompt, "{file}");
        }
        assert!(!pooling(json!({"pooling_mode": "mean", "include_prompt": false})).include_prompt);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let pooling = |file: Value| [(POOLING_FILE, file)];
        fault(&pooling(json!({"pooling_mode": "max"})), "'max'");
        let both = json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true});
        fault(&pooling(both), "mean_tokens+cls_token");
        fault(
            &pooling(json!({"pooling_mode": ["mean", "cls"]})),
            "'mean+cls'",
        );
        fault(
            &pooling(json!({"embedding_dimension": 768})),
            "'embedding_dimension' is 768",
        );
        fault(
            &pooling(json!({"word_embedding_dimension": 768})),
            "768, and the hidden rows of the model have 1024",
        );
        let dense = modules(&["Transformer", "Pooling", "Dense", "Normalize"]);
        fault(
            &[("modules.json", dense)],
            "modules.json: the module 'Dense'",
        );
        let elsewhere = json!([{"path": "pool", "type": "sentence_transformers.models.Pooling"}]);
        fault(&[("modules.json", elsewhere)], "in 'pool'");
        fault(&[("modules.json", json!({}))], "no list of modules");
        fault(
            &[("sentence_bert_config.json", json!({"do_lower_case": true}))],
            "do_lower_case",
        );
        let prompts = |file: Value| [("config_sentence_transformers.json", file)];
        fault(&prompts(json!({"prompts": {"query": 1}})), "'query' is 1");
        let absent = json!({"prompts": {"query": "", "document": ""}, "default_prompt_name": "q"});
        fault(
            &prompts(absent),
            "no prompt 'q'; the model has query, document",
        );
        let broken = [("modules.json".to_owned(), b"[".to_vec())];
        let found = EmbeddingSettings::read(&broken, 8);
        assert!(found.fault.is_some_and(|e| e.to_string().contains("EOF")));
        assert_eq!(EmbeddingSettings::read(&[], 8).pooling, None);
    }
}
