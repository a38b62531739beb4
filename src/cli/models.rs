//! `nvfp4 models`: lists the models in the cache, and which of them this machine can run.

use std::collections::BTreeSet;

use NVFP4::base::Result;
use NVFP4::cuda;
use NVFP4::model::open;
use NVFP4::model::placement::{self, DeviceRoom};
use NVFP4::ops::DeviceKind;
use serde::Serialize;
use serde_json::{Value, json};

use super::{hub, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

/// Information about a model file that does not require loading it.
#[derive(Serialize)]
struct Described {
    name: String,
    path: String,
    bytes: u64,
    #[serde(flatten)]
    content: Content,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content {
    Runs {
        format: &'static str,
        encodings: BTreeSet<&'static str>,
        /// Bytes of the weights in memory and of a conversation of common length.
        needs_bytes: u64,
        /// Bytes beside these that are mapped from a file of packed weights, which processes share.
        mapped_bytes: u64,
        fits: Vec<Fits>,
    },
    Fails {
        error: String,
    },
}

#[derive(Serialize)]
struct Fits {
    device: String,
    fits: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let devices = placement::rooms(&cuda::report());
    let cached = hub::inventory()?;
    if args.json {
        let all: Vec<Value> = cached
            .iter()
            .map(|repository| {
                let revisions: Vec<Value> = repository
                    .revisions
                    .iter()
                    .map(|r| {
                        let models: Vec<Described> =
                            r.models.iter().map(|m| describe(m, &devices)).collect();
                        json!({"commit": r.commit, "refs": r.refs, "models": models})
                    })
                    .collect();
                json!({
                    "model": repository.repo,
                    "bytes": repository.bytes,
                    "partial_bytes": repository.partial_bytes,
                    "revisions": revisions,
                })
            })
            .collect();
        return output::json(&all);
    }
    let mut rows = vec![["MODEL", "DISK", "FORMAT", "MEMORY", "RUNS ON"].map(str::to_owned)];
    cached.iter().for_each(|r| rows.extend(table(r, &devices)));
    if rows.len() == 1 {
        return output::line("no models yet: nvfp4 pull ORG/NAME fetches one");
    }
    let width = |column: usize| {
        rows.iter()
            .map(|r| r[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: [usize; 5] = std::array::from_fn(width);
    for [model, disk, format, memory, devices] in &rows {
        let row = format!(
            "{model:0$}  {disk:>1$}  {format:2$}  {memory:>3$}  {devices}",
            widths[0], widths[1], widths[2], widths[3]
        );
        output::line(row.trim_end())?;
    }
    let bytes = cached.iter().map(|r| r.bytes + r.partial_bytes).sum();
    output::line(format_args!(
        "{} in {}",
        output::size(bytes),
        hub::cache_folder()?.display()
    ))
}

/// Table rows of a repository: its models, and incomplete downloads.
fn table(repository: &hub::Cached, devices: &[DeviceRoom]) -> Vec<[String; 5]> {
    let mut rows = Vec::new();
    for model in repository.revisions.iter().flat_map(|r| &r.models) {
        let described = describe(model, devices);
        let size = output::size(described.bytes);
        rows.push(match described.content {
            Content::Runs {
                format,
                encodings,
                needs_bytes,
                mapped_bytes,
                fits,
            } => {
                let encodings: Vec<&str> = encodings.into_iter().collect();
                let fits: Vec<String> = fits
                    .into_iter()
                    .filter(|f| f.fits)
                    .map(|f| f.device)
                    .collect();
                let fits = match fits.is_empty() {
                    true => "nothing here: too large".to_owned(),
                    false => fits.join(", "),
                };
                let format = format!("{format}, {}", encodings.join(" "));
                let memory = match mapped_bytes {
                    0 => output::size(needs_bytes),
                    _ => format!(
                        "{} + {} shared",
                        output::size(needs_bytes),
                        output::size(mapped_bytes)
                    ),
                };
                [described.name, size, format, memory, fits]
            }
            Content::Fails { error } => [described.name, size, String::new(), String::new(), error],
        });
    }
    if repository.partial_bytes > 0 || rows.is_empty() {
        let come = output::size(repository.bytes + repository.partial_bytes);
        let part = "not whole: nvfp4 pull goes on with it".to_owned();
        rows.push([
            repository.repo.clone(),
            come,
            String::new(),
            String::new(),
            part,
        ]);
    }
    rows
}

fn describe(model: &hub::Model, devices: &[DeviceRoom]) -> Described {
    Described {
        name: model.name.clone(),
        path: model.path.display().to_string(),
        bytes: model.bytes,
        content: content(model, devices).unwrap_or_else(|e| Content::Fails {
            error: e.message().to_owned(),
        }),
    }
}

fn content(model: &hub::Model, devices: &[DeviceRoom]) -> Result<Content> {
    let checkpoint = open(&model.path)?;
    let needs_on = |kind| placement::needs_of(&*checkpoint, kind, false);
    let needs = needs_on(DeviceKind::Cpu)?;
    Ok(Content::Runs {
        format: checkpoint.format(),
        // Norms are small and mostly of another type, so only matrices determine the model's type.
        encodings: checkpoint
            .entries()
            .iter()
            .filter(|e| e.shape.len() > 1)
            .map(|e| e.encoding.name())
            .collect(),
        needs_bytes: needs.own,
        mapped_bytes: needs.mapped,
        fits: devices
            .iter()
            .map(|d| {
                Ok(Fits {
                    device: d.device(),
                    fits: d.fits(needs_on(d.kind())?.total()),
                })
            })
            .collect::<Result<_>>()?,
    })
}
