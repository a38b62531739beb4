//! What subcommands share about models: a path or hub id to a file, a device by name, loading with a progress bar, and the
//! arguments of sampling.

use std::path::{Path, PathBuf};
use std::time::Duration;

use NVFP4::base::Result;
use NVFP4::base::error::bail;

use super::hub;

/// Where `model` lies: a path that exists, or a model of the hub, fetched if the cache does not hold it.
pub(super) fn resolve(model: &str) -> Result<PathBuf> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(path.to_owned());
    }
    let Some(id) = hub::Id::parse(model) else {
        bail!(
            NotFound,
            "there is no file or directory '{model}', and it is no model of the hub, which would be ORG/NAME"
        );
    };
    match hub::cached(&id) {
        Some(path) => Ok(path),
        None => hub::pull(&id, Duration::from_secs(30)),
    }
}
