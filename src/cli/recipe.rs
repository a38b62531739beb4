//! The recipes of block scales, as the command line names them.

use NVFP4::format::nvfp4::Recipe;
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
