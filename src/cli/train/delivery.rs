//! The results of a run: what it delivers, the destinations, and the checks that they may be written.

use std::path::{Path, PathBuf};

use NVFP4::base::error::{bail, err};
use NVFP4::base::file::Temporary;
use NVFP4::base::{ErrorKind, Result, directory};
use NVFP4::checkpoint::{DESCRIPTION_FILES, TOKENIZER_FILES, TOOL_TEMPLATE};
use NVFP4::model::convert::Tables;
use NVFP4::model::training::Source;
use NVFP4::train::{Recipe, Trainer};

use super::options::Args;

/// Subdirectories of a run's directory for the delivered model and adapters.
pub(super) const MODEL: &str = "model";
pub(super) const ADAPTER: &str = "adapter";

/// The destinations of a completed run's results.
pub(super) struct Delivery {
    /// Destination of the adapters, in peft's format.
    pub(super) adapter: Option<PathBuf>,
    /// Destination of the model, with adapters merged in.
    pub(super) model: Option<PathBuf>,
    /// Whether the model has adapters merged in.
    merges: bool,
}

impl Delivery {
    /// The destinations of a run with this recipe. Fails before training if they could not be written afterwards.
    pub(super) fn new(args: &Args, source: &Source, recipe: &Recipe) -> Result<Delivery> {
        let model = || args.export.clone().unwrap_or_else(|| args.out.join(MODEL));
        let delivery = match recipe.lora {
            None => Delivery {
                adapter: None,
                model: Some(model()),
                merges: false,
            },
            Some(_) => Delivery {
                adapter: match recipe
                    .check_adapter_export(source)
                    .and_then(|()| args.base_name().map(drop))
                {
                    Ok(()) => Some(args.out.join(ADAPTER)),
                    // The merged model can still be delivered.
                    Err(e) if e.kind() == ErrorKind::Unsupported && args.merge => None,
                    Err(e) => return Err(e),
                },
                model: args.merge.then(model),
                merges: args.merge,
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
        if let Some(place) = &delivery.adapter {
            args.check_replaced(place)?;
        }
        Ok(delivery)
    }

    /// The delivered file, if its loss may differ from the last evaluation: it is quantized again, or rounded to one level of scales.
    pub(super) fn rounds_again(&self) -> Option<&Path> {
        let place = self.model.as_deref()?;
        (self.merges || is_dat(place)).then_some(place)
    }

    /// Writes the results.
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
    /// Whether an existing place is replaced: only results that the run itself has written.
    fn replaces(&self, place: &Path) -> bool {
        self.goes_on() && self.export.as_deref() != Some(place) && place.exists()
    }

    /// Fails if the place could not be written at the end of the run.
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
            // A file at this place is replaced.
            return Temporary::create(place, 0)
                .map(drop)
                .map_err(|e| e.within("--export"));
        }
        if self.replaces(place) {
            return self.check_replaced(place);
        }
        if place.exists() && !(place.is_dir() && is_empty(place)?) {
            bail!(
                InvalidArgument,
                "{} exists, and is not replaced; name a new directory for --export",
                place.display()
            );
        }
        match &self.export {
            Some(export) => directory::check_writable(export).map_err(|e| e.within("--export")),
            // It is within OUT, which is checked separately.
            None => Ok(()),
        }
    }

    /// Refuses to replace a directory that contains anything that no run has written.
    fn check_replaced(&self, place: &Path) -> Result<()> {
        if !self.replaces(place) || !place.is_dir() {
            return Ok(());
        }
        let is_own = |name: &String| {
            let name = name.as_str();
            let weights = name.starts_with("model") || name.starts_with("adapter_");
            let is_weights = weights && (name.contains(".safetensors") || name.ends_with(".json"));
            is_weights
                || DESCRIPTION_FILES.contains(&name)
                || TOKENIZER_FILES.contains(&name)
                || TOOL_TEMPLATE.split('/').next() == Some(name)
        };
        match directory::names(place)?
            .into_iter()
            .find(|name| !is_own(name))
        {
            Some(other) => bail!(
                InvalidArgument,
                "{} would be replaced at the end, and holds {other}, which no run has written; move that away",
                place.display()
            ),
            None => Ok(()),
        }
    }

    /// The name of the adapters' base model: its name on the hub, or an absolute path. Must be UTF-8, because it is written to JSON.
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

/// Whether a directory is empty.
fn is_empty(directory: &Path) -> Result<bool> {
    Ok(directory::names(directory)?.is_empty())
}
