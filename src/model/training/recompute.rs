//! Settings of activation recompute.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::error::{Error, err};
use crate::model::order::{BlockOp, Half};
use crate::model::spec::BlockSpec;

/// The activations that the backward pass recomputes block by block, instead of the forward pass keeping them for all blocks. The inputs of
/// blocks are always kept. All settings give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: the fastest, with the most memory.
    None,
    /// The whole block, except its last GEMM, whose output the backward pass does not need.
    #[default]
    Block,
    /// Some parts.
    #[serde(untagged)]
    Parts(RecomputedParts),
}

/// The recomputed parts of a block. Sizes are the memory saved, in elements for each token of each block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RecomputedParts {
    /// The inputs of the projections of attention and of the MLP: twice the hidden size, and next to no work.
    pub norms: bool,
    /// The GEMM of queries, keys and values, and of gates: the size of its output.
    pub qkv: bool,
    /// Queries and keys after norms and RoPE, or after the convolution of a gated delta net: the same size again, and little work.
    pub heads: bool,
    /// Attention: the size of the queries, twice that with a gate, and work that grows with the length of documents. The gated delta rule:
    /// twice the size of the values, and in f32 one 64th of the state.
    pub attention: bool,
    /// The mixer's output projection, and the residual stream after it: the hidden size, or twice that if the output is normalized.
    pub output: bool,
    /// The GEMM of gate and up: twice the intermediate size, and the most work.
    pub gate_up: bool,
    /// The last GEMM of the MLP, which is only recomputed if its output is normalized: the hidden size.
    pub down: bool,
}

impl RecomputedParts {
    const NAMES: [&str; 7] = [
        "norms",
        "qkv",
        "heads",
        "attention",
        "output",
        "gate_up",
        "down",
    ];

    fn switches(&mut self) -> [&mut bool; 7] {
        [
            &mut self.norms,
            &mut self.qkv,
            &mut self.heads,
            &mut self.attention,
            &mut self.output,
            &mut self.gate_up,
            &mut self.down,
        ]
    }

    fn all(value: bool) -> RecomputedParts {
        let mut parts = RecomputedParts::default();
        parts.switches().into_iter().for_each(|part| *part = value);
        parts
    }

    /// Whether the backward pass recomputes an operation of a block's forward pass.
    pub(super) fn includes(self, op: BlockOp, block: &BlockSpec) -> bool {
        match op {
            BlockOp::Enter(_) => self.norms,
            BlockOp::Qkv | BlockOp::DeltaInputs => self.qkv,
            BlockOp::Heads | BlockOp::Convolve => self.heads,
            BlockOp::Attend | BlockOp::GateHeads | BlockOp::DeltaRule | BlockOp::DeltaNorm => {
                self.attention
            }
            BlockOp::Project(Half::Mixer) | BlockOp::Leave(Half::Mixer) => self.output,
            BlockOp::GateUp => self.gate_up,
            // Only a norm needs the output of an MLP again.
            BlockOp::Activate | BlockOp::Project(Half::Mlp) | BlockOp::Experts => {
                self.down && block.norms.post
            }
            // Routes are not kept.
            BlockOp::Route => true,
            untrained!() | BlockOp::Leave(Half::Mlp) => false,
        }
    }
}

impl Recompute {
    /// The parts that this setting recomputes.
    pub fn parts(self) -> RecomputedParts {
        match self {
            Recompute::None => RecomputedParts::all(false),
            Recompute::Block => RecomputedParts::all(true),
            Recompute::Parts(parts) => parts,
        }
    }
}

impl From<bool> for Recompute {
    /// The whole block, or nothing.
    fn from(block: bool) -> Recompute {
        match block {
            true => Recompute::Block,
            false => Recompute::None,
        }
    }
}

impl fmt::Display for Recompute {
    /// The syntax of [`Recompute::from_str`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = match self {
            Recompute::None => return f.write_str("none"),
            Recompute::Block => return f.write_str("block"),
            Recompute::Parts(parts) => *parts,
        };
        let names = RecomputedParts::NAMES.into_iter().zip(parts.switches());
        let named: Vec<_> = names.filter(|(_, on)| **on).map(|(name, _)| name).collect();
        match named.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&named.join(",")),
        }
    }
}

impl FromStr for Recompute {
    type Err = Error;

    /// `none`, `block`, or comma-separated names of parts: `norms,heads,gate_up`.
    fn from_str(text: &str) -> Result<Recompute, Error> {
        match text {
            "none" => return Ok(Recompute::None),
            "block" => return Ok(Recompute::Block),
            _ => {}
        }
        let mut parts = RecomputedParts::default();
        for name in text.split(',').map(str::trim) {
            let Some(number) = RecomputedParts::NAMES.iter().position(|n| *n == name) else {
                return Err(err!(
                    InvalidArgument,
                    "'{name}' is nothing that can be computed again: none, block, or some of {}",
                    RecomputedParts::NAMES.join(", ")
                ));
            };
            *parts.switches()[number] = true;
        }
        Ok(Recompute::Parts(parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_read_as_they_are_written() {
        let some = RecomputedParts {
            norms: true,
            gate_up: true,
            ..RecomputedParts::default()
        };
        for (recompute, text, json) in [
            (Recompute::None, "none", "\"none\""),
            (Recompute::Block, "block", "\"block\""),
            (
                Recompute::Parts(some),
                "norms,gate_up",
                r#"{"norms":true,"gate_up":true}"#,
            ),
        ] {
            assert_eq!(recompute.to_string(), text);
            assert_eq!(text.parse::<Recompute>().unwrap(), recompute);
            assert_eq!(serde_json::from_str::<Recompute>(json).unwrap(), recompute);
            let again = serde_json::to_string(&recompute).unwrap();
            assert_eq!(
                serde_json::from_str::<Recompute>(&again).unwrap(),
                recompute
            );
        }
        let error = "norms,mlp".parse::<Recompute>().unwrap_err().to_string();
        assert!(
            error.contains("'mlp'") && error.contains("gate_up"),
            "{error}"
        );
        assert!(serde_json::from_str::<Recompute>(r#"{"mlp":true}"#).is_err());
    }
}
