//! Options of a conversion.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::format::nvfp4::{Levels, QuantizeOptions, Recipe};
use crate::ops::Device;

/// Kind of model that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A directory in ModelOpt's layout: safetensors with two-level scales, config and tokenizer.
    ModelOpt,
    /// TorchSharp's `.dat` with single-level scales, and config and tokenizer beside it.
    Dat,
}

/// Format in which a conversion writes the tables: the embedding, the head, and the table of per-layer embeddings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tables {
    /// int8 rows for a table that the source stores in at most 8 bits, if the container supports them; else 16 bits: F16 stays, everything
    /// else becomes bfloat16. NVFP4 stays NVFP4.
    #[default]
    Auto,
    /// bfloat16.
    Bf16,
    /// int8 with one scale per row.
    Int8,
    /// NVFP4, like other weights.
    Nvfp4,
}

/// Options of a conversion.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Kind of model that is written.
    pub container: Container,
    /// How weights are quantized.
    pub quantize: QuantizeOptions,
    /// Format of the embedding, the head and the table of per-layer embeddings. A tied head stays tied: one table is written for both.
    pub tables: Tables,
    /// With [`Tables::Auto`], int8 rows for tables of more than 8 bits too, if the container supports them.
    pub narrow_tables: bool,
    /// Linear weights to write as int8 rows, by the names of their entries.
    pub int8_rows: HashSet<String>,
    /// Entries with one of these in their names keep their encoding, or become bfloat16 if it cannot be written.
    pub keep: Vec<String>,
    /// Keeps the precision of the head, or of the table that it shares with the embedding, whatever `tables` says: quantization harms this
    /// weight most, and it is large.
    pub keep_head: bool,
    /// Replaces a directory that holds a model, as a whole and at once. Otherwise a directory that is not empty is refused. A `.dat` file
    /// is always replaced, by a complete one.
    pub replace: bool,
    /// The CPU that packs the weights of the new directory, whose file of packed weights is then written with it.
    pub packed: Option<Device>,
}

impl ConvertOptions {
    /// Options for `container`, with its levels of scales.
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
            packed: None,
        }
    }

    /// Whether an entry of this name keeps its encoding.
    pub(super) fn keeps(&self, name: &str) -> bool {
        self.keep.iter().any(|part| name.contains(part.as_str()))
    }
}
