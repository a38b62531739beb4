//! Windows of a text's tokens, on which models are measured. They do not overlap, and each is read from its beginning.

use std::path::Path;

use NVFP4::base::Result;
use NVFP4::base::error::bail;

/// Checks the options that choose windows.
pub(super) fn check(window: Option<usize>, windows: Option<usize>) -> Result<()> {
    if let Some(window @ 0..2) = window {
        bail!(
            InvalidArgument,
            "--window must be at least 2, got {window}: the first token of a window is not predicted"
        );
    }
    if windows == Some(0) {
        bail!(InvalidArgument, "--windows must be at least 1");
    }
    Ok(())
}

/// Windows of the tokens of the text at `path`, up to `most`. The last one may be shorter.
pub(super) fn of<'a>(
    path: &Path,
    tokens: &'a [u32],
    window: usize,
    most: Option<usize>,
) -> Result<Vec<&'a [u32]>> {
    if tokens.len() < 2 {
        bail!(
            InvalidArgument,
            "{} holds {} tokens; at least 2 are needed",
            path.display(),
            tokens.len()
        );
    }
    // A single token predicts nothing.
    Ok(tokens
        .chunks(window)
        .filter(|w| w.len() > 1)
        .take(most.unwrap_or(usize::MAX))
        .collect())
}
