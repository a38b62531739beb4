//! What a family is.

use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

/// Models that share their blocks.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The entry of `architectures` in `config.json`.
    pub class: &'static str,
    /// Makes a spec of a config.
    pub(super) read: fn(&Keys<'_>) -> Result<Spec>,
}

impl Family {
    /// The spec of a config of this family.
    pub(super) fn read(&self, keys: &Keys<'_>) -> Result<Spec> {
        let spec = (self.read)(keys)?;
        Ok(Spec {
            family: self.model_type,
            ..spec
        })
    }
}
