//! How a model is converted.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::format::nvfp4::{Levels, QuantizeOptions, Recipe};

/// Kind of model that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A directory in ModelOpt's layout: safetensors with two-level scales, config and tokenizer.
    ModelOpt,
    /// TorchSharp's `.dat` with single-level scales, and config and tokenizer beside it.
    Dat,
}

/// Format in which a conversion writes the tables: the embedding and the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tables {
    /// int8 rows where the source has the table in at most 8 bits and the container holds them, else 16 bits: F16 as it is, and bfloat16.
    /// NVFP4 stays NVFP4.
    #[default]
    Auto,
    /// bfloat16.
    Bf16,
    /// int8 with a scale a row.
    Int8,
    /// NVFP4, as other weights.
    Nvfp4,
}

/// How to convert.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Kind of model that is written.
    pub container: Container,
    /// How weights are quantized.
    pub quantize: QuantizeOptions,
    /// Format of the embedding and the head. A tied head stays tied: one table is written for both.
    pub tables: Tables,
    /// With [`Tables::Auto`], int8 rows for tables of more than 8 bits too, where the container holds them.
    pub narrow_tables: bool,
    /// Linear weights that become int8 rows, by the names of their entries.
    pub int8_rows: HashSet<String>,
    /// Entries whose names contain one of these stay in the encoding that they have, or become bfloat16 where that cannot be written.
    pub keep: Vec<String>,
    /// Leaves the head, or the table that it shares with the embedding, in the precision that it has, whatever `tables` says: it is the
    /// weight that quantizing harms most, and a large one.
    pub keep_head: bool,
    /// Replaces a directory that holds a model, as a whole and at once. Without it one that is not empty is refused. A `.dat` file
    /// is replaced in any case, by a whole one.
    pub replace: bool,
}

impl ConvertOptions {
    /// Options for `container`, with the levels of scales that it holds.
    pub fn new(container: Container, recipe: Recipe) -> Self {
        ConvertOptions {
            container,
            quantize: QuantizeOptions {
                recipe,
                levels: match container {
                    Container::ModelOpt => Levels::Two,
                    Container::Dat => Levels::Single,
                },
                ..QuantizeOptions::default()
            },
            tables: Tables::Auto,
            narrow_tables: false,
            int8_rows: HashSet::new(),
            keep: Vec::new(),
            keep_head: false,
            replace: false,
        }
    }

    /// Whether an entry of this name stays in the encoding that it has.
    pub(super) fn keeps(&self, name: &str) -> bool {
        self.keep.iter().any(|part| name.contains(part.as_str()))
    }
}
