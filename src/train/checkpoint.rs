//! Training checkpoints: the complete state of training in one directory, which appears whole or not at all. `state.bin` holds the arrays
//! of all parameters; `trainer.json` holds their places, the progress of training, the position in the data, and a checksum of all that.

use std::fs;
use std::hash::Hasher;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use twox_hash::XxHash3_64;

use super::offload::Offload;
use super::parameters::Parameters;
use super::trainer::{Config, Progress, Trainer};
use crate::base::directory::{self, NewDirectory};
use crate::base::error::{Error, bail, err};
use crate::base::{Result, file, leftover};
use crate::model::convert::Tables;
use crate::model::training::{Layout, Source};
use crate::ops::Device;
use crate::ops::training::input_moments::InputMoments;
use crate::ops::training::optimizer::StatePart;

/// Version 2: tables are stored as [`Recipe::tables`](super::Recipe::tables) says, and frozen matrices as in the model.
const VERSION: u32 = 2;
/// Version 1: tables were stored like other matrices, and frozen matrices quantized by their largest magnitudes.
const FIRST_VERSION: u32 = 1;
const HEADER: &str = "trainer.json";
const STATE: &str = "state.bin";
/// Prefix of checkpoint names. The step follows, with at least this many digits.
const PREFIX: &str = "step-";
const DIGITS: usize = 8;

/// A parameter of the model in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    name: String,
    shape: Vec<usize>,
    /// Global scale; only for a matrix.
    global: Option<f32>,
    steps: u64,
    /// Whether a step has changed a weight of a matrix. If absent, the matrix counts as changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    moved: Option<bool>,
    /// Checksum of a frozen parameter, which is loaded from the source model and is not in `state.bin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    frozen: Option<u64>,
    /// Names and bytes of its arrays in `state.bin`, in order.
    arrays: Vec<(String, u64)>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: u32,
    family: String,
    config: Config,
    progress: Progress,
    /// Position in the data, in the form of the run that reads it.
    data: Value,
    parameters: Vec<Saved>,
    /// XXH3 of `state.bin`.
    checksum: u64,
}

/// The name of the array of the second moments of a matrix's inputs.
const INPUTS: &str = "input_moments";
/// The names of a vector's arrays.
const VECTOR_PARTS: [&str; 3] = ["values", "first", "second"];

/// Describes all parameters for a checkpoint.
fn describe(parameters: &Parameters) -> Result<Vec<Saved>> {
    let layout = parameters.layout();
    let mut all = Vec::new();
    for (id, m) in layout.matrices.iter().enumerate() {
        let matrix = &parameters.matrices()[id];
        let frozen = parameters.checksum(id)?;
        let part = |part: StatePart| (part.name().to_owned(), matrix.part_bytes(part) as u64);
        all.push(Saved {
            name: m.name.clone(),
            shape: vec![m.rows, m.cols],
            global: Some(matrix.global()),
            steps: matrix.steps(),
            moved: frozen.is_none().then_some(matrix.has_moved()),
            arrays: match frozen {
                Some(_) => {
                    let inputs = parameters.inputs().under(id);
                    let bytes = |of: &InputMoments| (INPUTS.to_owned(), of.state_bytes() as u64);
                    inputs.map(bytes).into_iter().collect()
                }
                None => StatePart::ALL.map(part).to_vec(),
            },
            frozen,
        });
    }
    for (id, v) in layout.vectors.iter().enumerate() {
        let frozen = parameters.vector_checksum(id)?;
        let part = |name: &str| (name.to_owned(), 4 * v.len as u64);
        all.push(Saved {
            name: v.name.clone(),
            shape: vec![v.len],
            global: None,
            steps: parameters.vectors()[id].steps(),
            moved: None,
            arrays: match frozen {
                Some(_) => Vec::new(),
                None => VECTOR_PARTS.map(part).to_vec(),
            },
            frozen,
        });
    }
    Ok(all)
}

/// The name of the checkpoint after `step`.
fn name(step: u64) -> String {
    format!("{PREFIX}{step:0DIGITS$}")
}

/// The step in a checkpoint's name; `None` for a name that no trainer gives.
fn step_of(directory: &str) -> Option<u64> {
    let step = directory.strip_prefix(PREFIX)?.parse().ok()?;
    (name(step) == directory).then_some(step)
}

/// The checkpoints in a directory, by rising step.
pub fn list(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let mut found: Vec<_> = directory::names(directory)?
        .into_iter()
        .filter_map(|name| Some((step_of(&name)?, directory.join(name))))
        .filter(|(_, place)| place.join(HEADER).exists())
        .collect();
    found.sort();
    Ok(found)
}

/// The number of steps before the checkpoint in `place`.
pub fn steps(place: &Path) -> Result<u64> {
    let header = read_header(place).map_err(|e| e.within(place.display()))?;
    Ok(header.progress.steps)
}

/// Removes a checkpoint's own files, and its directory if nothing else is in it.
fn remove(place: &Path) -> Result<()> {
    // Without the first file it is no checkpoint any more, even if the process ends here.
    for file in [HEADER, STATE] {
        let file = place.join(file);
        match fs::remove_file(&file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io(format_args!("removing {}", file.display()), e));
            }
            _ => {}
        }
    }
    match fs::remove_dir(place) {
        Err(e) if e.kind() != io::ErrorKind::DirectoryNotEmpty => {
            Err(Error::io(format_args!("removing {}", place.display()), e))
        }
        _ => Ok(()),
    }
}

/// Removes leftovers of a killed process from the checkpoints in `directory`: temporary names, and a half-removed checkpoint. Everything
/// else stays.
pub(super) fn sweep(directory: &Path) -> Result<()> {
    if !directory.exists() {
        return Ok(());
    }
    for (name, place) in directory::entries(directory)? {
        let temporary = leftover::abandoned(&name);
        if temporary.is_some_and(|of| [HEADER, STATE].contains(&of)) && place.is_file() {
            let removing = |e| Error::io(format_args!("removing {}", place.display()), e);
            fs::remove_file(&place).map_err(removing)?;
        }
        let half_made = temporary.and_then(step_of).is_some();
        let half_removed = step_of(&name).is_some() && !place.join(HEADER).exists();
        if place.is_dir() && (half_made || half_removed && place.join(STATE).exists()) {
            remove(&place)?;
        }
    }
    Ok(())
}

impl Trainer {
    /// Writes a checkpoint into `directory`, named by the last step, and removes all but the last `keep`, at least 1. [`Trainer::resume`]
    /// returns `data`. A failed write leaves nothing, and the earlier checkpoints stay.
    pub fn save(&self, directory: &Path, data: &Value, keep: usize) -> Result<PathBuf> {
        self.save_beside(directory, data, keep, None)
    }

    /// [`Trainer::save`] that also keeps the checkpoint of the step `spared`, however old it is.
    pub(super) fn save_beside(
        &self,
        directory: &Path,
        data: &Value,
        keep: usize,
        spared: Option<u64>,
    ) -> Result<PathBuf> {
        let place = directory.join(name(self.progress().steps));
        let saved = describe(self.parameters())?;
        let size = saved
            .iter()
            .flat_map(|s| &s.arrays)
            .map(|(_, bytes)| bytes)
            .sum();
        let matrices = self.parameters().matrices().len();
        let new = NewDirectory::replace(&place, is_checkpoint)?;
        let state = new.file(STATE, size)?;
        let (mut at, mut sum) = (0, XxHash3_64::new());
        let mut write = |bytes: &[u8]| -> Result<()> {
            sum.write(bytes);
            state.write_at(bytes, at)?;
            at += bytes.len() as u64;
            Ok(())
        };
        for (id, matrix) in self.parameters().matrices().iter().enumerate() {
            if matrix.is_frozen() {
                if let Some(inputs) = self.parameters().inputs().under(id) {
                    write(&inputs.read_state()?)?;
                }
                continue;
            }
            for part in StatePart::ALL {
                write(&matrix.read_part(self.device(), part)?)?;
            }
        }
        for (vector, saved) in self.parameters().vectors().iter().zip(&saved[matrices..]) {
            if saved.frozen.is_none() {
                let state = vector.read_state()?;
                state.iter().try_for_each(|bytes| write(bytes))?;
            }
        }
        state.sync()?;
        let header = Header {
            version: VERSION,
            family: self.spec().family.to_owned(),
            config: self.config().clone(),
            progress: *self.progress(),
            data: data.clone(),
            parameters: saved,
            checksum: sum.finish(),
        };
        let json = serde_json::to_vec_pretty(&header)
            .map_err(|e| err!(Internal, "writing {HEADER}: {e}"))?;
        let header = new.stage(HEADER, &json)?;
        new.commit(vec![state, header])?;
        let all = list(directory)?;
        for (step, old) in &all[..all.len().saturating_sub(keep.max(1))] {
            if spared != Some(*step) {
                remove(old)?;
            }
        }
        Ok(place)
    }

    /// Resumes from the last checkpoint in `directory`, or from `directory` itself if it is a checkpoint. Returns the trainer and the
    /// position in the data. `source` is the model that training began with. The result has the same bits as training without a stop.
    pub fn resume(device: &Device, source: &Source, directory: &Path) -> Result<(Trainer, Value)> {
        Self::resume_as(device, source, directory, &|saved| Ok(saved.clone()))
    }

    /// [`Trainer::resume`] with other settings: `settings` maps those of the checkpoint. They must store parameters as the checkpoint does.
    pub fn resume_as(
        device: &Device,
        source: &Source,
        directory: &Path,
        settings: &dyn Fn(&Config) -> Result<Config>,
    ) -> Result<(Trainer, Value)> {
        let place = match directory.join(HEADER).exists() {
            true => directory.to_owned(),
            false => match list(directory)?.pop() {
                Some((_, last)) => last,
                None => bail!(
                    NotFound,
                    "there is no checkpoint in {}",
                    directory.display()
                ),
            },
        };
        let header = read_header(&place).map_err(|e| e.within(place.display()))?;
        let config = settings(&header.config)?;
        Self::read(device, source, &place, header, config).map_err(|e| e.within(place.display()))
    }

    fn read(
        device: &Device,
        source: &Source,
        place: &Path,
        header: Header,
        mut config: Config,
    ) -> Result<(Trainer, Value)> {
        check_model(&header, source, &header.config.recipe.layout(source)?)?;
        if device.check_offload().is_err() {
            config.offload = Offload::default();
        }
        let mut trainer = Trainer::empty(device, source, &config)?;
        for (id, saved) in header.parameters.iter().enumerate() {
            if let (Some(_), [(name, _)]) = (saved.frozen, &saved.arrays[..])
                && name == INPUTS
                && let Some(matrix) = trainer.parameters().matrices().get(id)
            {
                let cols = matrix.shape().1;
                trainer
                    .parameters_mut()
                    .inputs_mut()
                    .at(device, (id, cols))?;
            }
        }
        let expected = describe(trainer.parameters())?;
        for (saved, expected) in header.parameters.iter().zip(&expected) {
            if let (Some(then), Some(now)) = (saved.frozen, expected.frozen)
                && then != now
            {
                bail!(
                    InvalidArgument,
                    "{} of the model is not the one that stood still while the checkpoint was trained; resume with the model that training began with",
                    saved.name
                );
            }
            if saved.arrays != expected.arrays {
                bail!(
                    CorruptFile,
                    "{} is stored as {:?}, and its recipe stores {:?}",
                    saved.name,
                    saved.arrays,
                    expected.arrays
                );
            }
        }
        let path = place.join(STATE);
        let opening = |e| Error::io(format_args!("reading {}", path.display()), e);
        let mut file = file::open(&path).map_err(opening)?;
        let size: u64 = expected
            .iter()
            .flat_map(|s| &s.arrays)
            .map(|(_, bytes)| bytes)
            .sum();
        let found = file.metadata().map_err(opening)?.len();
        if found != size {
            bail!(
                CorruptFile,
                "{STATE} has {found} bytes, and {size} are right"
            );
        }
        let mut sum = XxHash3_64::new();
        let mut read = |bytes: usize| -> Result<Vec<u8>> {
            let mut bytes = vec![0; bytes];
            file.read_exact(&mut bytes).map_err(opening)?;
            sum.write(&bytes);
            Ok(bytes)
        };
        let count = trainer.parameters().matrices().len();
        let (matrices, vectors) = header.parameters.split_at(count);
        for (id, saved) in matrices.iter().enumerate() {
            let parameters = trainer.parameters_mut();
            if parameters.matrices()[id].is_frozen() {
                if let Some(inputs) = parameters.inputs_mut().under_mut(id) {
                    inputs.write_state(&read(inputs.state_bytes())?)?;
                }
                continue;
            }
            let matrix = &mut parameters.matrices_mut()[id];
            let codes = read(matrix.part_bytes(StatePart::Codes))?;
            let scales = read(matrix.part_bytes(StatePart::Scales))?;
            matrix.write_weights(device, &codes, &scales)?;
            for part in &StatePart::ALL[2..] {
                let bytes = read(matrix.part_bytes(*part))?;
                matrix.write_part(*part, &bytes)?;
            }
            matrix.restore(saved.global.unwrap_or(1.0), saved.steps)?;
            matrix.restore_moved(saved.moved.unwrap_or(saved.steps > 0));
        }
        for (vector, saved) in trainer
            .parameters_mut()
            .vectors_mut()
            .iter_mut()
            .zip(vectors)
        {
            if saved.frozen.is_some() {
                continue;
            }
            let len = 4 * vector.values().len();
            let (values, first, second) = (read(len)?, read(len)?, read(len)?);
            vector.write_state([&values, &first, &second], saved.steps)?;
        }
        if sum.finish() != header.checksum {
            bail!(
                CorruptFile,
                "{STATE} is damaged: its checksum is not the one in {HEADER}; use an earlier checkpoint"
            );
        }
        *trainer.progress_mut() = header.progress;
        Ok((trainer, header.data))
    }
}

/// Refuses to replace a directory that is not a checkpoint.
fn is_checkpoint(place: &Path) -> Result<()> {
    match place.join(HEADER).exists() {
        true => Ok(()),
        false => bail!(
            InvalidArgument,
            "{} is not a checkpoint of training, and is not replaced; name another directory",
            place.display()
        ),
    }
}

fn read_header(place: &Path) -> Result<Header> {
    let path = place.join(HEADER);
    let text =
        file::read(&path).map_err(|e| Error::io(format_args!("reading {}", path.display()), e))?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|e| err!(CorruptFile, "{HEADER}: {e}"))?;
    match value["version"].as_u64() {
        Some(version) if version == u64::from(VERSION) || version == u64::from(FIRST_VERSION) => {}
        version => bail!(
            Unsupported,
            "a checkpoint of version {version:?}; this library reads versions {FIRST_VERSION} and {VERSION}"
        ),
    }
    let mut header: Header =
        serde_json::from_value(value).map_err(|e| err!(CorruptFile, "{HEADER}: {e}"))?;
    if header.version == FIRST_VERSION {
        if let Some(frozen) = header
            .parameters
            .iter()
            .find(|saved| saved.frozen.is_some())
        {
            bail!(
                Unsupported,
                "a checkpoint of version {FIRST_VERSION} beside {}, which stood still: that version quantized what stands still, and this \
                 one holds it as the model does; begin the run anew",
                frozen.name
            );
        }
        header.config.recipe.tables = Tables::Nvfp4;
    }
    Ok(header)
}

/// Refuses a model other than the checkpoint's, and names the differences.
fn check_model(header: &Header, source: &Source, layout: &Layout) -> Result<()> {
    let matrices = layout
        .matrices
        .iter()
        .map(|m| (&m.name, vec![m.rows, m.cols]));
    let own: Vec<_> = matrices
        .chain(layout.vectors.iter().map(|v| (&v.name, vec![v.len])))
        .collect();
    let in_checkpoint = |name: &str| header.parameters.iter().any(|saved| saved.name == name);
    let missing = own.iter().filter(|(name, _)| !in_checkpoint(name));
    let mut differing: Vec<_> = missing
        .map(|(name, _)| format!("{name} is not in the checkpoint"))
        .collect();
    for saved in &header.parameters {
        match own.iter().find(|(name, _)| **name == saved.name) {
            None => differing.push(format!("{} is not in the model", saved.name)),
            Some((_, shape)) if *shape != saved.shape => {
                differing.push(format!(
                    "{} is {:?} and in the model {shape:?}",
                    saved.name, saved.shape
                ));
            }
            Some(_) => {}
        }
    }
    if !differing.is_empty() || header.family != source.spec().family {
        let more = differing.len().saturating_sub(8);
        let shown = differing[..differing.len() - more].join("; ");
        bail!(
            InvalidArgument,
            "the checkpoint is of another model ({}, and this is {}): {shown}{}",
            header.family,
            source.spec().family,
            if more > 0 {
                format!("; and {more} more")
            } else {
                String::new()
            }
        );
    }
    Ok(())
}
