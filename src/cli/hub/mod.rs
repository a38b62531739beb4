//! Models on the Hugging Face hub: getting them into the cache that all programs share, and finding them there.
//!
//! `name` reads what people write, `settings` what the environment says; `client` asks the hub, `failure` says how long to go
//! on trying; `listing` is what a repository holds, `select` which of it makes a model; `cache` is the folder on disk, `local`
//! what of a model is in it, `partial` a file on its way there; `transfer` brings it, by way of `handover` to its digest, `meter`
//! shows that, and `pull` does all of it in order. `inventory` is all that the cache holds, and takes it out again.

mod cache;
mod client;
mod failure;
mod handover;
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

/// How long the hub has to answer where nothing else is asked for.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// The model's place in the cache, if all of it is there. Makes no request.
pub(super) fn cached(name: &Name) -> Result<Option<PathBuf>> {
    let repository = Repository::new(&settings::cache()?, &name.repo);
    Ok(local::find(&repository, name).map(|pulled| pulled.path))
}
