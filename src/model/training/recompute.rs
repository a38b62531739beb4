//! What the backward pass computes again, as data.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::error::{Error, err};
use crate::model::order::{BlockOp, Half};
use crate::model::spec::BlockSpec;

/// What the backward pass computes again, block by block, rather than that the forward pass keeps it for all blocks. The inputs of blocks
/// are always kept. Whatever is chosen gives the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: the fastest, and the most memory.
    None,
    /// All of a block, but for its last product, whose results the backward pass does not take.
    #[default]
    Block,
    /// Some of it.
    #[serde(untagged)]
    Parts(RecomputedParts),
}

/// What of a block is computed again. Sizes are those that keeping it takes, in elements for each token of each block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RecomputedParts {
    /// What the projections of attention and of the MLP take: twice the hidden size, and next to no work.
    pub norms: bool,
    /// The product that makes queries, keys and values: as many elements as it has results.
    pub qkv: bool,
    /// Queries and keys with their norms and positions: as many elements again, and little work.
    pub heads: bool,
    /// Attention: as many elements as queries have, and work that grows with the length of documents.
    pub attention: bool,
    /// The product that leaves attention, and the stream behind it: the hidden size, twice that where the branch is normalized.
    pub output: bool,
    /// The product that makes gate and up: twice the intermediate size, and the most work.
    pub gate_up: bool,
    /// The last product of the MLP, which is only taken again where its results are normalized: the hidden size.
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

    /// Whether the backward pass runs an operation of a block's forward pass again.
    pub(super) fn includes(self, op: BlockOp, block: &BlockSpec) -> bool {
        match op {
            BlockOp::Enter(_) => self.norms,
            BlockOp::Qkv => self.qkv,
            BlockOp::Heads => self.heads,
            BlockOp::Attend => self.attention,
            BlockOp::Project(Half::Attention) | BlockOp::Leave(Half::Attention) => self.output,
            BlockOp::GateUp => self.gate_up,
            // Only a norm takes the output of an MLP again.
            BlockOp::Activate | BlockOp::Project(Half::Mlp) | BlockOp::Experts => {
                self.down && block.norms.post
            }
            // Routes are not kept.
            BlockOp::Route => true,
            BlockOp::Leave(Half::Mlp) => false,
        }
    }
}

impl Recompute {
    /// The switches.
    pub fn parts(self) -> RecomputedParts {
        match self {
            Recompute::None => RecomputedParts::all(false),
            Recompute::Block => RecomputedParts::all(true),
            Recompute::Parts(parts) => parts,
        }
    }
}

impl From<bool> for Recompute {
    /// All of a block, or nothing.
    fn from(block: bool) -> Recompute {
        match block {
            true => Recompute::Block,
            false => Recompute::None,
        }
    }
}

impl fmt::Display for Recompute {
    /// As [`Recompute::from_str`] reads it.
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

    /// `none`, `block`, or names of parts with commas between them: `norms,heads,gate_up`.
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
