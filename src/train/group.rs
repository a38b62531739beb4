//! Parameter groups with their own optimizer settings.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;

/// Parameters with their own optimizer settings, selected by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Group {
    /// Parameters whose names contain one of these.
    pub names: Vec<String>,
    /// Factor of the learning rate.
    pub rate_factor: f64,
    /// Weight decay in place of the optimizer's. Also applies to norms and biases, which have none outside a group.
    pub decay: Option<f64>,
}

impl Default for Group {
    fn default() -> Self {
        Group {
            names: Vec::new(),
            rate_factor: 1.0,
            decay: None,
        }
    }
}

impl Group {
    pub(super) fn check(&self, rate: f64) -> Result<()> {
        let (factor, decay) = (self.rate_factor, self.decay.unwrap_or(0.0));
        let held = factor >= 0.0
            && factor.is_finite()
            && decay >= 0.0
            && rate * factor * decay < 1.0
            && !self.names.is_empty();
        if !held {
            bail!(
                InvalidArgument,
                "a group of parameters {:?} with rate_factor {factor} and decay {decay}; names must be given, the factor at least 0, and the decay \
                 at least 0 and less than 1 / rate",
                self.names
            );
        }
        Ok(())
    }
}
