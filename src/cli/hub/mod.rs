//! Models on the Hugging Face hub: fetching them into the shared cache, and finding them there.
//!
//! `name` parses model names, `settings` reads the environment; `client` makes requests, `failure` decides on retries;
//! `listing` is the list of a repository's files, `select` chooses those of a model; `cache` is the cache on disk, `local`
//! finds complete models in it, `partial` is an incomplete file; `transfer` fetches a file, `meter` shows the progress, and
//! `pull` does all of it in order. `inventory` lists and removes the models in the cache.

mod cache;
mod certificate;
mod client;
mod failure;
mod inventory;
mod listing;
mod local;
mod meter;
mod name;
mod partial;
mod pull;
mod select;
mod settings;
mod transfer;

use std::path::PathBuf;
use std::time::Duration;

use NVFP4::base::Result;

use self::cache::Repository;

pub(super) use self::inventory::{Cached, Model, inventory, remove};
pub(super) use self::name::Name;
pub(super) use self::pull::pull;
pub(super) use self::settings::{cache as cache_folder, endpoint};

/// The default timeout of the hub.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// The model's path in the cache, if it is complete. Makes no request.
pub(super) fn cached(name: &Name) -> Result<Option<PathBuf>> {
    let repository = Repository::new(&settings::cache()?, &name.repo);
    Ok(local::find(&repository, name).map(|pulled| pulled.path))
}
