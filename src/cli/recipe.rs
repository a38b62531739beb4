//! Names of quantization recipes on the command line.

use NVFP4::format::nvfp4::Recipe;
use NVFP4::model::convert::Tables;
use clap::ValueEnum;

/// A recipe.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum RecipeName {
    /// The largest magnitude of a block becomes 6
    Amax,
    /// The largest magnitude of a block becomes 6 or 4, whichever has the smaller squared error
    FourOverSix,
    /// Each block takes the scale with the smallest squared error
    Sweep,
}

impl From<RecipeName> for Recipe {
    fn from(name: RecipeName) -> Self {
        match name {
            RecipeName::Amax => Recipe::Amax,
            RecipeName::FourOverSix => Recipe::FourOverSix,
            RecipeName::Sweep => Recipe::Sweep,
        }
    }
}

/// Encoding of the embedding and the output head.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum TableForm {
    Bf16,
    Int8,
    Nvfp4,
}

impl From<TableForm> for Tables {
    fn from(form: TableForm) -> Tables {
        match form {
            TableForm::Bf16 => Tables::Bf16,
            TableForm::Int8 => Tables::Int8,
            TableForm::Nvfp4 => Tables::Nvfp4,
        }
    }
}
