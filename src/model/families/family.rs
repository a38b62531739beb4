//! What a family is.

use serde_json::{Map, Value};

use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

/// Models that share their blocks.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The entry of `architectures` in `config.json`.
    pub class: &'static str,
    /// The value that transformers' config class gives each key that a config leaves out. Token ids are not among them: the tokenizer
    /// and `generation_config.json` name those.
    pub(super) defaults: fn() -> Value,
    /// Keys under other names, the other name first: `attribute_map` of the config class.
    pub(super) renamed: &'static [(&'static str, &'static str)],
    /// Makes a spec of a config.
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

    /// A config under the names that `read` knows, with the defaults of keys that it leaves out. A key that is null is not left out:
    /// a window of null is none, whatever the default.
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
