//! Converts a model on disk to NVFP4 on disk, one tensor at a time: quantizes linear weights, writes tables in the requested format, and
//! keeps the encoding of the rest. Peak memory is a few megabytes for any model. Knows no file format and runs nothing.

mod options;
mod plan;
mod quantized;
mod rows;

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::path::Path;

use serde::Serialize;
use serde_json::json;

use self::plan::{Action, PlannedTensor, plan};
use self::rows::{PART, PARTS, RowConverter};
use super::load::rows_nvfp4;
use super::tensors::{EMBEDDINGS, HEAD};
use super::{PackReport, check_loadable, pack_new, text};
use crate::base::error::{bail, err};
use crate::base::file::folder_of;
use crate::base::threads::Pool;
use crate::base::{Result, call, memory};
use crate::checkpoint::{
    Checkpoint, DatWriter, Encoding, ModelOptWriter, PACKED_FILE, Planned, TokenizerSource, Writer,
    check_not_read, missing_companions, write_companions,
};
use crate::format::nvfp4::{BLOCK, Levels};
use crate::ops::Device;
use crate::text::Tokenizer;

pub use options::{Container, ConvertOptions, Tables};
pub use quantized::Quantized;

/// Progress of a conversion.
#[derive(Clone, Copy, Debug)]
pub struct ConvertProgress<'a> {
    /// The current tensor; [`PACKED_FILE`] while that file is written.
    pub tensor: &'a str,
    /// Source bytes processed. Packing adds the bytes of the tensors that were written.
    pub done: u64,
    /// Total.
    pub total: u64,
}

/// Result of a conversion.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ConvertReport {
    /// Tensors written.
    pub tensors: usize,
    /// Tensors that this conversion quantized to NVFP4.
    pub quantized: usize,
    /// Tensors that were NVFP4 already, or MXFP4, which became NVFP4 without loss.
    pub kept_nvfp4: usize,
    /// Tensors written as int8 rows.
    pub int8: usize,
    /// Encoding of the written embedding; empty if there is none.
    pub embedding: &'static str,
    /// Encoding of the written head; the embedding's if they share a table.
    pub head: &'static str,
    /// Bytes of tensors read.
    pub bytes_in: u64,
    /// Bytes of tensors written.
    pub bytes_out: u64,
    /// Root mean square of the error over that of the weights that this conversion quantized to NVFP4.
    pub relative_error: f64,
    /// The file of packed weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packed: Option<PackReport>,
}

/// Converts `source` to `destination`: a directory, or a `.dat` file for [`Container::Dat`]. Norms and biases stay dense, and tables are
/// written as [`ConvertOptions::tables`] says. `progress` may stop the conversion, which leaves nothing behind. Except for the check of
/// values, a source that loading would refuse is refused before anything is written.
pub fn convert(
    source: &dyn Checkpoint,
    destination: &Path,
    options: &ConvertOptions,
    pool: &Pool,
    progress: &mut dyn FnMut(ConvertProgress<'_>) -> ControlFlow<()>,
) -> Result<ConvertReport> {
    let used = check_loadable(source)?;
    let steps = checked_plan(source, options, &used)?;
    if let [first, more @ ..] = source.unreadable() {
        tracing::warn!(
            "{} tensors are left out, as they cannot be read: {first}{}",
            more.len() + 1,
            if more.is_empty() { "" } else { ", ..." }
        );
    }
    let (metadata, files) = (source.metadata(), text_files(&source.metadata().tokenizer)?);
    let mut output = begin(source, destination, options, &steps, &files)?;
    let writer = output.writer();
    let bytes_out = steps.iter().map(PlannedTensor::bytes_out).sum();
    let to_read: u64 = steps.iter().map(PlannedTensor::bytes).sum();
    let mut work = Work {
        rows: RowConverter {
            source,
            pool,
            options: &options.quantize,
        },
        largest: HashMap::new(),
        done: 0,
        total: match options.packed {
            Some(_) => to_read + bytes_out,
            None => to_read,
        },
        progress,
    };
    let encoding_of = |names: &[&str]| {
        let found = |name: &&str| steps.iter().find(|s| s.name == *name);
        names
            .iter()
            .find_map(found)
            .map_or("", |s| s.encoding.name())
    };
    let mut report = ConvertReport {
        tensors: steps.len(),
        embedding: encoding_of(&EMBEDDINGS),
        head: encoding_of(&[&[HEAD], &EMBEDDINGS[..]].concat()),
        bytes_in: source.entries().iter().map(|e| e.bytes).sum(),
        bytes_out,
        ..ConvertReport::default()
    };
    let (mut squares, mut errors) = (0.0, 0.0);
    for step in &steps {
        work.tell(&step.name)?;
        report.int8 += usize::from(step.encoding == Encoding::Int8);
        match step.action {
            Action::Copy => {
                if !matches!(step.encoding, Encoding::Nvfp4 | Encoding::Int8)
                    && used.contains(&step.entry.name)
                {
                    work.rows
                        .check_finite(step)
                        .map_err(|e| e.within(&step.entry.name))?;
                }
                writer
                    .copy(source, &step.entry)
                    .map_err(|e| e.within(&step.entry.name))?;
                work.done += step.entry.bytes;
                report.kept_nvfp4 += usize::from(step.encoding == Encoding::Nvfp4);
            }
            Action::CopyRows => {
                copy_rows(source, step, writer).map_err(|e| e.within(&step.name))?;
                work.done += step.bytes();
                report.kept_nvfp4 += 1;
            }
            Action::Quantize => {
                let sums = work
                    .quantize(step, &steps, writer)
                    .map_err(|e| e.within(&step.name))?;
                squares += sums.0;
                errors += sums.1;
                report.quantized += 1;
            }
            Action::Int8 => work
                .int8(step, writer)
                .map_err(|e| e.within(&step.entry.name))?,
        }
    }
    if let Some(last) = steps.last() {
        work.tell(&last.name)?;
    }
    if squares > 0.0 {
        report.relative_error = (errors / squares).sqrt();
    }
    if options.container == Container::Dat {
        write_companions(folder_of(destination), metadata, &files)?;
    }
    report.packed = work.finish(output, destination, options.packed.as_ref())?;
    Ok(report)
}

/// Fails if [`convert`] would fail before it reads weights, or if the destination lacks room. Writes nothing.
pub fn check_destination(
    source: &dyn Checkpoint,
    destination: &Path,
    options: &ConvertOptions,
) -> Result<()> {
    let steps = checked_plan(source, options, &check_loadable(source)?)?;
    let files = text_files(&source.metadata().tokenizer)?;
    begin(source, destination, options, &steps, &files).map(|_| ())
}

fn checked_plan(
    source: &dyn Checkpoint,
    options: &ConvertOptions,
    used: &HashSet<String>,
) -> Result<Vec<PlannedTensor>> {
    options.quantize.check()?;
    if options.container == Container::Dat && options.quantize.levels == Levels::Two {
        bail!(
            InvalidArgument,
            ".dat holds no global scale; quantize with a single-level scale"
        );
    }
    if options.container == Container::Dat && options.packed.is_some() {
        bail!(
            InvalidArgument,
            "packed weights are written into a directory, not beside a .dat file"
        );
    }
    plan(source, options, used)
}

/// The writer of a conversion.
enum Output {
    Directory(Box<ModelOptWriter>),
    Dat(Box<DatWriter>),
}

impl Output {
    fn writer(&mut self) -> &mut dyn Writer {
        match self {
            Output::Directory(writer) => &mut **writer,
            Output::Dat(writer) => &mut **writer,
        }
    }
}

/// A writer for these steps and the tokenizer's files. Leaves nothing behind if it is dropped unfinished.
fn begin(
    source: &dyn Checkpoint,
    destination: &Path,
    options: &ConvertOptions,
    steps: &[PlannedTensor],
    files: &[(String, Vec<u8>)],
) -> Result<Output> {
    let planned: Vec<Planned> = steps.iter().map(Planned::from).collect();
    let metadata = source.metadata();
    Ok(match options.container {
        Container::ModelOpt => {
            check_not_read(destination, source.files())?;
            let start = match options.replace {
                true => ModelOptWriter::replace,
                false => ModelOptWriter::create,
            };
            let mut writer = start(destination, &planned, metadata)?;
            for (name, content) in files {
                writer.add_file(name, content.clone())?;
            }
            Output::Directory(Box::new(writer))
        }
        Container::Dat => {
            missing_companions(folder_of(destination), metadata, files)?;
            Output::Dat(Box::new(DatWriter::create(destination, &planned)?))
        }
    })
}

/// Copies some rows of an entry that reads as NVFP4.
fn copy_rows(source: &dyn Checkpoint, step: &PlannedTensor, writer: &mut dyn Writer) -> Result<()> {
    let (entry, height) = (&step.entry, step.height());
    let globals = source.global_scales(entry)?;
    writer.begin(
        &step.name,
        globals[step.rows.first() / (entry.rows() / globals.len())],
    )?;
    let mut codes = memory::zeros(height * entry.cols() / 2)?;
    let mut scales = memory::zeros(height * entry.cols() / BLOCK)?;
    let rows = &step.rows;
    rows_nvfp4(source, entry, rows, 0..height, &mut codes, &mut scales)?;
    writer.nvfp4(&codes, &scales)
}

/// The state that the steps of a conversion share.
struct Work<'a> {
    rows: RowConverter<'a>,
    /// The largest magnitude of each tensor examined so far, by name.
    largest: HashMap<String, f32>,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(ConvertProgress<'_>) -> ControlFlow<()>,
}

impl Work<'_> {
    fn tell(&mut self, tensor: &str) -> Result<()> {
        let at = ConvertProgress {
            tensor,
            done: self.done,
            total: self.total,
        };
        call::check().map_err(|e| e.within(format_args!("the conversion at '{tensor}'")))?;
        match (self.progress)(at) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => bail!(Cancelled, "the conversion was stopped at '{tensor}'"),
        }
    }

    /// Completes the model, packs its weights if `device` is given, and moves it into place.
    fn finish(
        &mut self,
        output: Output,
        destination: &Path,
        device: Option<&Device>,
    ) -> Result<Option<PackReport>> {
        let new = match output {
            Output::Directory(writer) => writer.complete()?,
            Output::Dat(writer) => return writer.finish().map(|()| None),
        };
        let Some(device) = device else {
            return new.commit(None).map(|()| None);
        };
        let (before, share) = (self.done, self.total - self.done);
        let (file, report) = pack_new(&new, destination, device, &mut |done, total| {
            let part = u128::from(share) * u128::from(done) / u128::from(total.max(1));
            self.done = before + part as u64;
            self.tell(PACKED_FILE)
        })?;
        new.commit(Some(file))?;
        Ok(Some(report))
    }

    /// Writes `step` quantized. Returns the sum of squares of the weights and of their errors.
    fn quantize(
        &mut self,
        step: &PlannedTensor,
        steps: &[PlannedTensor],
        writer: &mut dyn Writer,
    ) -> Result<(f64, f64)> {
        let global = self.rows.global(step, steps, &mut self.largest)?;
        writer.begin(&step.name, global)?;
        let (rows, cols) = (step.height(), step.entry.cols());
        let per_part = (PART / cols).max(1);
        let per_region = per_part * PARTS;
        let before = self.done;
        let (mut squares, mut errors) = (0.0, 0.0);
        for first in (0..rows).step_by(per_region) {
            let region = first..rows.min(first + per_region);
            let mut codes = memory::zeros(region.len() * cols / 2)?;
            let mut scales = memory::zeros(region.len() * cols / BLOCK)?;
            let sums = self.rows.region(
                step,
                region.clone(),
                per_part,
                global,
                &mut codes,
                &mut scales,
            )?;
            squares += sums.0;
            errors += sums.1;
            writer.nvfp4(&codes, &scales)?;
            let done = region.end as u128;
            self.done = before + (step.bytes() as u128 * done / rows as u128) as u64;
            self.tell(&step.name)?;
        }
        Ok((squares, errors))
    }

    /// Writes `step` as int8 rows.
    fn int8(&mut self, step: &PlannedTensor, writer: &mut dyn Writer) -> Result<()> {
        writer.begin(&step.name, 1.0)?;
        let (rows, cols) = (step.height(), step.entry.cols());
        let per_part = (PART / cols).max(1);
        let before = self.done;
        for first in (0..rows).step_by(per_part * PARTS) {
            let region = first..rows.min(first + per_part * PARTS);
            let mut codes = memory::zeros(region.len() * cols)?;
            let mut scales = memory::zeros(region.len())?;
            let part = region.clone();
            self.rows
                .int8(step, part, per_part, &mut codes, &mut scales)?;
            writer.int8(&codes, &scales)?;
            let done = region.end as u128;
            self.done = before + (step.bytes() as u128 * done / rows as u128) as u64;
            self.tell(&step.name)?;
        }
        Ok(())
    }
}

/// Tokenizer, template and sampling files for a directory, by name, of a source that contains them. Empty for other sources, whose own
/// files are copied.
pub fn text_files(source: &TokenizerSource) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    if let TokenizerSource::Vocabulary(vocabulary) = source {
        let tokenizer = Tokenizer::from_vocabulary(&text::spec(vocabulary))
            .map_err(|e| e.within("the tokenizer"))?;
        let text = |id: Option<u32>| id.and_then(|id| vocabulary.tokens.get(id as usize));
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
        });
        for (key, id) in [
            ("bos_token", vocabulary.bos),
            ("eos_token", vocabulary.eos),
            ("unk_token", vocabulary.unk),
            ("pad_token", vocabulary.pad),
        ] {
            if let Some(token) = text(id) {
                config[key] = json!(token);
            }
        }
        match (&vocabulary.chat_template, &vocabulary.rare.tool_template) {
            (Some(template), None) => config["chat_template"] = json!(template),
            (default, Some(tool_use)) => {
                let named =
                    |name: &str, template: &String| json!({"name": name, "template": template});
                let default = default.iter().map(|template| named("default", template));
                let all: Vec<_> = default.chain([named("tool_use", tool_use)]).collect();
                config["chat_template"] = all.into();
            }
            (None, None) => {}
        }
        let mut ends = Vec::new();
        for id in vocabulary.ends() {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
        let mut generation = json!({ "eos_token_id": ends });
        if let Some(bos) = vocabulary.bos {
            generation["bos_token_id"] = json!(bos);
        }
        for (key, value) in &*vocabulary.sampling {
            generation[key] = value.clone();
        }
        files.push((
            "tokenizer.json".to_owned(),
            tokenizer.to_json()?.into_bytes(),
        ));
        for (name, value) in [
            ("tokenizer_config.json", config),
            ("generation_config.json", generation),
        ] {
            let text = serde_json::to_vec_pretty(&value)
                .map_err(|e| err!(Internal, "writing {name}: {e}"))?;
            files.push((name.to_owned(), text));
        }
    }
    Ok(files)
}
