//! The description of a model family: its names, defaults and reader. One constant per family, listed in `FAMILIES`.

use serde_json::{Map, Value};

use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

/// A family of models with the same kinds of blocks.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The entry of `architectures` in `config.json`.
    pub class: &'static str,
    /// The default that transformers' config class gives each missing key. Token ids are not included: the tokenizer and
    /// `generation_config.json` name them.
    pub(super) defaults: fn() -> Value,
    /// Keys with other names, the other name first: `attribute_map` of the config class.
    pub(super) renamed: &'static [(&'static str, &'static str)],
    /// Reads a spec from a config.
    pub(super) read: fn(&Keys<'_>) -> Result<Spec>,
}

impl Family {
    /// The spec of a config of this family.
    pub(super) fn read(&self, keys: &Keys<'_>) -> Result<Spec> {
        let complete = self.complete(keys);
        let spec = (self.read)(&Keys(&complete))?;
        Ok(Spec {
            family: self.model_type,
            ..spec
        })
    }

    /// A config with the names that `read` knows, and defaults for missing keys. A null key is not missing: a null window means none,
    /// whatever the default.
    pub(super) fn complete(&self, keys: &Keys<'_>) -> Map<String, Value> {
        let mut all = keys.0.clone();
        for (other, name) in self.renamed {
            if let Some(value) = all.remove(*other) {
                all.entry(*name).or_insert(value);
            }
        }
        if let Value::Object(defaults) = (self.defaults)() {
            for (key, value) in defaults {
                all.entry(key).or_insert(value);
            }
        }
        all
    }
}
