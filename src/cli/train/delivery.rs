//! What a run delivers, where it goes, and what may be there already.

use std::path::{Path, PathBuf};

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, ErrorKind, Result};
use NVFP4::model::convert::Tables;
use NVFP4::model::training::Source;
use NVFP4::train::{Recipe, Trainer};

use super::options::Args;

/// Where the model that a run delivers is, in its directory, and where adapters are.
const MODEL: &str = "model";
const ADAPTER: &str = "adapter";

/// What a run leaves when all steps are taken.
pub(super) struct Delivery {
    /// Where adapters go, as peft reads them.
    pub(super) adapter: Option<PathBuf>,
    /// Where the model goes, with its adapters in it.
    pub(super) model: Option<PathBuf>,
}

impl Delivery {
    /// What a run by this recipe leaves; refuses before training what could not be written after it.
    pub(super) fn new(args: &Args, source: &Source, recipe: &Recipe) -> Result<Delivery> {
        let model = || args.export.clone().unwrap_or_else(|| args.out.join(MODEL));
        let delivery = match recipe.lora {
            None => Delivery {
                adapter: None,
                model: Some(model()),
            },
            Some(_) => Delivery {
                adapter: match recipe
                    .check_adapter_export(source)
                    .and_then(|()| args.base_name().map(drop))
                {
                    Ok(()) => Some(args.out.join(ADAPTER)),
                    // There still is the model to deliver.
                    Err(e) if e.kind() == ErrorKind::Unsupported && args.merge => None,
                    Err(e) => return Err(e),
                },
                model: args.merge.then(model),
            },
        };
        if let Some(place) = &delivery.model {
            if delivery.adapter.as_ref() == Some(place) {
                bail!(
                    InvalidArgument,
                    "--export {} is where adapters go; name another place for the model with them in it",
                    place.display()
                );
            }
            args.check_export(source, place)?;
        }
        Ok(delivery)
    }

    /// Writes it.
    pub(super) fn write(&self, args: &Args, trainer: &Trainer, source: &Source) -> Result<()> {
        if let Some(place) = &self.adapter {
            trainer.export_adapter(source, place, &args.base_name()?, args.replaces(place))?;
        }
        let Some(place) = &self.model else {
            return Ok(());
        };
        if is_dat(place) {
            return trainer.export_dat(source, place);
        }
        trainer.export_directory(source, place, Tables::Auto, args.replaces(place))
    }
}

impl Args {
    /// Whether what is at a place is replaced: only what the run itself has put there.
    fn replaces(&self, place: &Path) -> bool {
        self.resume && self.export.as_deref() != Some(place) && place.exists()
    }

    fn check_export(&self, source: &Source, place: &Path) -> Result<()> {
        if is_dat(place) {
            if source.checkpoint().format() != "dat" {
                bail!(
                    InvalidArgument,
                    "--export to {} takes the layout of the .dat file that training begins with, and this begins with {}; export to a \
                     directory, and convert that by `nvfp4 quantize`",
                    place.display(),
                    source.checkpoint().format()
                );
            }
        } else if place.exists() && !self.replaces(place) && !(place.is_dir() && is_empty(place)?) {
            bail!(
                InvalidArgument,
                "{} exists, and is not replaced; name a new directory for --export",
                place.display()
            );
        }
        Ok(())
    }

    /// What the model that adapters belong to is called: as on the hub, or a path that holds from everywhere.
    /// It is a text of JSON.
    fn base_name(&self) -> Result<String> {
        let name = self.model.clone().unwrap_or_default();
        let name = std::fs::canonicalize(&name).map_or(name, PathBuf::into_os_string);
        name.into_string().map_err(|name| {
            err!(
                InvalidArgument,
                "adapters name their model in JSON, and {} is not UTF-8; give the model another path",
                name.display()
            )
        })
    }
}

fn is_dat(place: &Path) -> bool {
    place.extension().is_some_and(|e| e == "dat")
}

/// Whether nothing is in a directory.
pub(super) fn is_empty(directory: &Path) -> Result<bool> {
    let mut names = std::fs::read_dir(directory)
        .map_err(|e| Error::io(format_args!("listing {}", directory.display()), e))?;
    Ok(names.next().is_none())
}
