//! Choice of training state that a GPU run keeps in host memory.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::error::{Error, Result, err};
use crate::ops::Device;

/// Training state kept in page-locked host memory rather than on the GPU. Nothing by default; every choice gives the same bits. Refused if
/// host and device share their memory: [`Device::check_offload`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Offload {
    /// Moments of matrices. A step copies them to the device and back.
    pub moments: bool,
    /// Inputs of blocks between the forward and the backward pass: the hidden state of each token in each block.
    pub activations: bool,
}

impl Offload {
    /// Refuses a choice that would save nothing on this device.
    pub(super) fn check(self, device: &Device) -> Result<()> {
        match self.moments || self.activations {
            true => device.check_offload(),
            false => Ok(()),
        }
    }
}

impl fmt::Display for Offload {
    /// In the form that [`Offload::from_str`] parses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.moments, self.activations) {
            (false, false) => "none",
            (true, false) => "moments",
            (false, true) => "activations",
            (true, true) => "moments,activations",
        })
    }
}

impl FromStr for Offload {
    type Err = Error;

    /// Parses `none`, `moments`, `activations`, or both with a comma between them.
    fn from_str(text: &str) -> Result<Offload> {
        let mut offload = Offload::default();
        if text == "none" {
            return Ok(offload);
        }
        for name in text.split(',').map(str::trim) {
            match name {
                "moments" => offload.moments = true,
                "activations" => offload.activations = true,
                _ => {
                    return Err(err!(
                        InvalidArgument,
                        "'{name}' is nothing that can be offloaded: none, moments, activations, or both with a comma between them"
                    ));
                }
            }
        }
        Ok(offload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_written() {
        for text in ["none", "moments", "activations", "moments,activations"] {
            assert_eq!(text.parse::<Offload>().unwrap().to_string(), text);
        }
        let error = "weights".parse::<Offload>().unwrap_err().to_string();
        assert!(
            error.contains("'weights'") && error.contains("moments"),
            "{error}"
        );
    }
}
