//! The recipes of block scales, as the command line names them.

use NVFP4::format::nvfp4::Recipe;
use clap::ValueEnum;

/// A recipe.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum RecipeName {
    /// The largest magnitude of a block becomes 6
    Amax,
    /// The better of 6 and 4 for the largest magnitude
    FourOverSix,
    /// The best of all scales
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
