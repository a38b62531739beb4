//! A model on disk to the same model in NVFP4 on disk, one tensor at a time: linear weights are quantized, tables as is asked for, the
//! rest keeps the encoding it has. Peak memory is a few megabytes, whatever the model. Knows no file format and runs nothing.

use std::collections::{HashMap, HashSet};
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Mutex;

use serde::Serialize;
use serde_json::json;

use crate::base::error::{bail, err};
use crate::base::file::folder_of;
use crate::base::threads::Pool;
use crate::base::{Result, call, memory};
use crate::checkpoint::{
    Checkpoint, DatWriter, Encoding, Entry, ModelOptWriter, Planned, TokenizerSource, Writer,
    check_not_read, is_of_text_model, missing_companions, write_companions,
};
use crate::format::int8;
use crate::format::nvfp4::{self, BLOCK, Levels, QuantizeOptions, Recipe};
use crate::text::Tokenizer;

use super::load::has_own_head;
use super::{check_loadable, families, text};
use crate::tensor::DType;

/// What kind of model is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A directory in ModelOpt's layout: safetensors with two-level scales, config and tokenizer.
    ModelOpt,
    /// TorchSharp's `.dat` with single-level scales, and config and tokenizer beside it.
    Dat,
}

/// Format in which a conversion writes the tables: the embedding and the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tables {
    /// int8 rows where the source has the table in at most 8 bits and the container holds them, else 16 bits: F16 as it is, and bfloat16.
    /// NVFP4 stays NVFP4.
    #[default]
    Auto,
    /// bfloat16.
    Bf16,
    /// int8 with a scale a row.
    Int8,
    /// NVFP4, as other weights.
    Nvfp4,
}

/// How to convert.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// What is written.
    pub container: Container,
    /// How weights are quantized.
    pub quantize: QuantizeOptions,
    /// Format of the embedding and the head. A tied head stays tied: one table is written for both.
    pub tables: Tables,
    /// Leaves the head, or the table that it shares with the embedding, in the precision that it has, whatever `tables` says: it is the
    /// weight that quantizing harms most, and a large one.
    pub keep_head: bool,
    /// Replaces a directory that holds a model, as a whole and at once. Without it one that is not empty is refused. A `.dat` file
    /// is replaced in any case, by a whole one.
    pub replace: bool,
}

impl ConvertOptions {
    /// Options for `container`, with the levels of scales that it holds.
    pub fn new(container: Container, recipe: Recipe) -> Self {
        ConvertOptions {
            container,
            quantize: QuantizeOptions {
                recipe,
                levels: match container {
                    Container::ModelOpt => Levels::Two,
                    Container::Dat => Levels::Single,
                },
                ..QuantizeOptions::default()
            },
            tables: Tables::Auto,
            keep_head: false,
            replace: false,
        }
    }
}

/// How far a conversion is.
#[derive(Clone, Copy, Debug)]
pub struct ConvertProgress<'a> {
    /// The tensor at hand.
    pub tensor: &'a str,
    /// Source bytes dealt with.
    pub done: u64,
    /// Source bytes in all.
    pub total: u64,
}

/// What a conversion did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ConvertReport {
    /// Tensors written.
    pub tensors: usize,
    /// Tensors that this conversion quantized to NVFP4.
    pub quantized: usize,
    /// Tensors that were NVFP4 already.
    pub kept_nvfp4: usize,
    /// Tensors written as int8 rows.
    pub int8: usize,
    /// Encoding of the embedding that was written; empty where there is none.
    pub embedding: &'static str,
    /// Encoding of the head that was written, which is the embedding's where they share a table.
    pub head: &'static str,
    /// Bytes of tensors read.
    pub bytes_in: u64,
    /// Bytes of tensors written.
    pub bytes_out: u64,
    /// Root mean square of the error over that of the weights that this conversion quantized to NVFP4.
    pub relative_error: f64,
}

/// What happens to one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Copy,
    /// Copies the codes and scales of some rows.
    CopyRows,
    Quantize,
    /// Rounds rows to int8.
    Int8,
}

struct Step<'a> {
    /// Differs from the entry's name for a head that is tied to the embedding, and for an expert of a stack.
    name: String,
    entry: &'a Entry,
    /// What becomes a tensor, of the entry seen as a matrix: all of it but for an expert of a stack.
    rows: Range<usize>,
    shape: Vec<usize>,
    action: Action,
    encoding: Encoding,
}

impl<'a> Step<'a> {
    fn whole(name: &str, entry: &'a Entry, action: Action, encoding: Encoding) -> Step<'a> {
        Step {
            name: name.to_owned(),
            entry,
            rows: 0..entry.rows(),
            shape: entry.shape.clone(),
            action,
            encoding,
        }
    }

    /// Bytes of the source.
    fn bytes(&self) -> u64 {
        self.entry.bytes * self.rows.len() as u64 / self.entry.rows() as u64
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Weights that serving engines fuse into one matrix, which then has one global scale.
const FUSED: [&[&str]; 2] = [
    &["q_proj.weight", "k_proj.weight", "v_proj.weight"],
    &["gate_proj.weight", "up_proj.weight"],
];

/// The others, of which some are stored fused.
const ALONE: [&str; 4] = [
    "o_proj.weight",
    "down_proj.weight",
    "qkv_proj.weight",
    "gate_up_proj.weight",
];

/// Whether `entry` is a weight of a linear layer of the text model, by name and shape.
fn is_linear(entry: &Entry) -> bool {
    let last_two = |suffix: &&str| {
        entry
            .name
            .strip_suffix(*suffix)
            .is_some_and(|rest| rest.ends_with('.'))
    };
    entry.shape.len() == 2
        && is_of_text_model(&entry.name)
        && (entry.name == HEAD || FUSED.concat().iter().chain(&ALONE).any(last_two))
}

/// Converts `source` to `destination`: a directory, or a `.dat` file for [`Container::Dat`]. Norms and biases stay dense, and tables
/// become what [`ConvertOptions::tables`] says. `progress` may stop the work, which leaves nothing behind. A source that loading would
/// refuse is refused before anything is written, except for its values.
pub fn convert(
    source: &dyn Checkpoint,
    destination: &Path,
    options: &ConvertOptions,
    pool: &Pool,
    progress: &mut dyn FnMut(ConvertProgress<'_>) -> ControlFlow<()>,
) -> Result<ConvertReport> {
    options.quantize.check()?;
    if options.container == Container::Dat && options.quantize.levels == Levels::Two {
        bail!(
            InvalidArgument,
            ".dat holds no global scale; quantize with a single-level scale"
        );
    }
    let used = check_loadable(source)?;
    let steps = plan(source, options, &used)?;
    if let [first, more @ ..] = source.unreadable() {
        tracing::warn!(
            "{} tensors are left out, as they cannot be read: {first}{}",
            more.len() + 1,
            if more.is_empty() { "" } else { ", ..." }
        );
    }
    let planned: Vec<Planned> = steps
        .iter()
        .map(|s| Planned {
            name: s.name.clone(),
            shape: s.shape.clone(),
            encoding: s.encoding,
        })
        .collect();
    let (metadata, files) = (source.metadata(), text_files(&source.metadata().tokenizer)?);
    let mut writer: Box<dyn Writer> = match options.container {
        Container::ModelOpt => {
            check_not_read(destination, source.files())?;
            let start = match options.replace {
                true => ModelOptWriter::replace,
                false => ModelOptWriter::create,
            };
            let mut writer = start(destination, &planned, metadata)?;
            for (name, content) in &files {
                writer.add_file(name, content.clone())?;
            }
            Box::new(writer)
        }
        Container::Dat => {
            missing_companions(folder_of(destination), metadata, &files)?;
            Box::new(DatWriter::create(destination, &planned)?)
        }
    };

    let mut work = Work {
        rows: RowConverter {
            source,
            pool,
            options: &options.quantize,
        },
        largest: HashMap::new(),
        done: 0,
        total: steps.iter().map(Step::bytes).sum(),
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
        embedding: encoding_of(&[EMBEDDING]),
        head: encoding_of(&[HEAD, EMBEDDING]),
        bytes_in: source.entries().iter().map(|e| e.bytes).sum(),
        ..ConvertReport::default()
    };
    let (mut squares, mut errors) = (0.0, 0.0);
    for step in &steps {
        work.tell(&step.name)?;
        let (rows, cols) = (step.rows.len() as u64, step.entry.cols() as u64);
        report.bytes_out += step.encoding.matrix_bytes(rows, cols).unwrap_or(0);
        report.int8 += usize::from(step.encoding == Encoding::Int8);
        match step.action {
            Action::Copy => {
                if !matches!(step.encoding, Encoding::Nvfp4 | Encoding::Int8)
                    && used.contains(&step.entry.name)
                {
                    work.rows
                        .check_finite(step.entry, step.rows.clone())
                        .map_err(|e| e.within(&step.entry.name))?;
                }
                writer
                    .copy(source, step.entry)
                    .map_err(|e| e.within(&step.entry.name))?;
                work.done += step.entry.bytes;
                report.kept_nvfp4 += usize::from(step.encoding == Encoding::Nvfp4);
            }
            Action::CopyRows => {
                copy_rows(source, step, &mut *writer).map_err(|e| e.within(&step.entry.name))?;
                work.done += step.bytes();
                report.kept_nvfp4 += 1;
            }
            Action::Quantize => {
                let sums = work
                    .quantize(step, &steps, &mut *writer)
                    .map_err(|e| e.within(&step.entry.name))?;
                squares += sums.0;
                errors += sums.1;
                report.quantized += 1;
            }
            Action::Int8 => work
                .int8(step, &mut *writer)
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
    writer.finish()?;
    Ok(report)
}

/// The steps of a conversion. Entries that are not `used` by the model stay as they are where NVFP4 cannot hold them.
fn plan<'a>(
    source: &'a dyn Checkpoint,
    options: &ConvertOptions,
    used: &HashSet<String>,
) -> Result<Vec<Step<'a>>> {
    let mut steps = Vec::with_capacity(source.entries().len());
    let is_tied = source.find(HEAD).is_none() || repeats_the_embedding(source)?;
    for entry in source.entries() {
        if is_tied && entry.name == HEAD {
            continue;
        }
        if let Some(experts) = experts(source, entry, options.container)? {
            steps.extend(experts);
            continue;
        }
        let fits = !entry.encoding.is_integer() && entry.cols().is_multiple_of(BLOCK);
        let is_quantized = is_linear(entry) && (fits || used.contains(&entry.name));
        let encoding = match is_table(entry) {
            true => table_encoding(entry, options, is_tied)?,
            false if entry.encoding == Encoding::Nvfp4 || is_quantized => Encoding::Nvfp4,
            false => kept(entry, options.container),
        };
        let is_as_stored = match encoding {
            Encoding::Nvfp4 => {
                entry.encoding == encoding
                    && (options.container == Container::ModelOpt
                        || source.global_scale(entry)? == 1.0)
            }
            Encoding::Int8 => entry.encoding == encoding,
            _ => true,
        };
        let action = match encoding {
            _ if is_as_stored => Action::Copy,
            Encoding::Int8 => Action::Int8,
            _ => Action::Quantize,
        };
        if (action != Action::Copy || is_table(entry)) && entry.encoding.is_integer() {
            bail!(
                Unsupported,
                "'{}' is stored as {}, and nothing says how weights come of that",
                entry.name,
                entry.encoding
            );
        }
        if encoding == Encoding::Nvfp4 && !entry.cols().is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "'{}' has K = {}, which is not a multiple of {BLOCK}; NVFP4 cannot hold it",
                entry.name,
                entry.cols()
            );
        }
        steps.push(Step::whole(&entry.name, entry, action, encoding));
    }
    if steps.iter().all(|s| s.encoding != Encoding::Nvfp4) {
        bail!(
            InvalidArgument,
            "none of the {} tensors is a linear weight (…q_proj.weight, …down_proj.weight, {HEAD}, …); the first is '{}'",
            steps.len(),
            steps.first().map_or("", |s| &s.name)
        );
    }
    Ok(steps)
}

/// Whether `entry` is the embedding or the head.
fn is_table(entry: &Entry) -> bool {
    entry.shape.len() == 2 && [EMBEDDING, HEAD].contains(&&*entry.name)
}

/// Encoding in which a table is written.
fn table_encoding(entry: &Entry, options: &ConvertOptions, is_tied: bool) -> Result<Encoding> {
    let bf16 = Encoding::Dense(DType::BF16);
    let holds_int8 = options.container == Container::ModelOpt;
    if options.keep_head && (is_tied || entry.name == HEAD) {
        return Ok(kept(entry, options.container));
    }
    Ok(match (options.tables, entry.encoding) {
        (Tables::Bf16, _) => bf16,
        (Tables::Int8, _) if !holds_int8 => bail!(
            Unsupported,
            ".dat holds no int8 tables; ask for bf16 or nvfp4, or write a directory"
        ),
        (Tables::Int8, _) => Encoding::Int8,
        (Tables::Nvfp4, _) | (Tables::Auto, Encoding::Nvfp4) => Encoding::Nvfp4,
        (Tables::Auto, same @ Encoding::Dense(DType::F16)) => same,
        // Integers that have no scales are refused where they are quantized.
        (Tables::Auto, narrow) if holds_int8 && bytes_of_value(narrow) == Some(1) => Encoding::Int8,
        (Tables::Auto, _) => bf16,
    })
}

/// Bytes that a value takes at most, scales left out.
fn bytes_of_value(encoding: Encoding) -> Option<usize> {
    match encoding {
        Encoding::Dense(_) => encoding.element_bytes(),
        Encoding::Nvfp4 | Encoding::Int8 | Encoding::Nf4 | Encoding::Ggml(_) => Some(1),
    }
}

/// Encoding of a tensor that is not quantized: its own, or a dense one where its own cannot be written.
fn kept(entry: &Entry, container: Container) -> Encoding {
    match entry.encoding {
        Encoding::Int8 if container == Container::ModelOpt => Encoding::Int8,
        Encoding::Int8 | Encoding::Nf4 | Encoding::Dense(DType::F8E4M3) | Encoding::Ggml(_)
            if entry.shape.len() > 1 =>
        {
            Encoding::Dense(DType::BF16)
        }
        Encoding::Nf4
        | Encoding::Dense(DType::F8E4M3)
        | Encoding::Ggml(_)
        | Encoding::Dense(DType::F64) => Encoding::Dense(DType::F32),
        same => same,
    }
}

/// Whether a model whose config ties the head to the embedding has both, with the same values.
fn repeats_the_embedding(source: &dyn Checkpoint) -> Result<bool> {
    let is_said_to_be_tied = (source.metadata().config.as_ref()).is_some_and(families::is_tied);
    Ok(is_said_to_be_tied && source.find(EMBEDDING).is_some() && !has_own_head(source)?)
}

/// A tensor for each expert of a stack, as serving engines and this library's loader have them: `mlp.experts.E.gate_proj.weight`. `None` for
/// what is no stack.
fn experts<'a>(
    source: &'a dyn Checkpoint,
    entry: &'a Entry,
    container: Container,
) -> Result<Option<Vec<Step<'a>>>> {
    const STACKED: &str = ".mlp.experts.";
    let (Some((block, projection)), &[count, rows, cols]) =
        (entry.name.split_once(STACKED), &entry.shape[..])
    else {
        return Ok(None);
    };
    if entry.encoding.is_integer() || !cols.is_multiple_of(BLOCK) {
        bail!(
            Unsupported,
            "'{}' is a stack of experts of shape {:?} stored as {}; NVFP4 holds rows of a multiple of {BLOCK} numbers",
            entry.name,
            entry.shape,
            entry.encoding
        );
    }
    let is_kept = entry.encoding == Encoding::Nvfp4
        && (container == Container::ModelOpt
            || source
                .global_scales(entry)?
                .iter()
                .all(|&scale| scale == 1.0));
    let step = |expert: usize| Step {
        name: format!("{block}{STACKED}{expert}.{projection}"),
        entry,
        rows: expert * rows..(expert + 1) * rows,
        shape: vec![rows, cols],
        action: match is_kept {
            true => Action::CopyRows,
            false => Action::Quantize,
        },
        encoding: Encoding::Nvfp4,
    };
    Ok(Some((0..count).map(step).collect()))
}

/// Writes some rows of an NVFP4 entry as they are.
fn copy_rows(source: &dyn Checkpoint, step: &Step<'_>, writer: &mut dyn Writer) -> Result<()> {
    let (entry, rows) = (step.entry, step.rows.clone());
    let globals = source.global_scales(entry)?;
    writer.begin(
        &step.name,
        globals[rows.start / (entry.rows() / globals.len())],
    )?;
    let mut codes = memory::zeros(rows.len() * entry.cols() / 2)?;
    let mut scales = memory::zeros(rows.len() * entry.cols() / BLOCK)?;
    source.rows_nvfp4(entry, rows, &mut codes, &mut scales)?;
    writer.nvfp4(&codes, &scales)
}

/// Converts rows in parallel.
#[derive(Clone, Copy)]
struct RowConverter<'a> {
    source: &'a dyn Checkpoint,
    pool: &'a Pool,
    options: &'a QuantizeOptions,
}

/// The state that the steps of a conversion share.
struct Work<'a> {
    rows: RowConverter<'a>,
    /// The largest magnitude of each tensor looked at so far, by name.
    largest: HashMap<&'a str, f32>,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(ConvertProgress<'_>) -> ControlFlow<()>,
}

/// Values in one part of a parallel region, about.
const PART: usize = 1 << 16;

/// Parts in one region: enough to keep many threads busy, few enough to keep memory small.
const PARTS: usize = 64;

impl<'a> Work<'a> {
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

    /// The global scale for `step`, common to the weights that are fused with it.
    fn global(&mut self, step: &'a Step<'_>, steps: &'a [Step<'_>]) -> Result<f32> {
        if self.rows.options.levels != Levels::Two {
            return Ok(1.0);
        }
        let fused = FUSED
            .iter()
            .find_map(|group| {
                let prefix = group.iter().find_map(|s| step.name.strip_suffix(s))?;
                Some(
                    group
                        .iter()
                        .map(|s| format!("{prefix}{s}"))
                        .collect::<Vec<_>>(),
                )
            })
            .unwrap_or_else(|| vec![step.name.clone()]);
        let mut largest = 0f32;
        for other in steps {
            if other.action != Action::Quantize || !fused.contains(&other.name) {
                continue;
            }
            let amax = match self.largest.get(other.name.as_str()) {
                Some(&amax) => amax,
                None => {
                    let amax = self
                        .rows
                        .amax(other.entry, other.rows.clone())
                        .map_err(|e| e.within(format_args!("'{}'", other.name)))?;
                    self.largest.insert(&other.name, amax);
                    amax
                }
            };
            largest = largest.max(amax);
        }
        Ok(nvfp4::global_scale(largest, self.rows.options))
    }

    /// Writes `step` quantized. Returns the sum of squares of the weights and of their errors.
    fn quantize(
        &mut self,
        step: &'a Step<'_>,
        steps: &'a [Step<'_>],
        writer: &mut dyn Writer,
    ) -> Result<(f64, f64)> {
        let global = self.global(step, steps)?;
        writer.begin(&step.name, global)?;
        let entry = step.entry;
        let (rows, cols) = (step.rows.clone(), entry.cols());
        let per_part = (PART / cols).max(1);
        let per_region = per_part * PARTS;
        let before = self.done;
        let (mut squares, mut errors) = (0.0, 0.0);
        for first in rows.clone().step_by(per_region) {
            let region = first..rows.end.min(first + per_region);
            let mut codes = memory::zeros(region.len() * cols / 2)?;
            let mut scales = memory::zeros(region.len() * cols / BLOCK)?;
            let sums = self.rows.region(
                entry,
                region.clone(),
                per_part,
                global,
                &mut codes,
                &mut scales,
            )?;
            squares += sums.0;
            errors += sums.1;
            writer.nvfp4(&codes, &scales)?;
            let done = (region.end - rows.start) as u128;
            self.done = before + (step.bytes() as u128 * done / rows.len() as u128) as u64;
            self.tell(&step.name)?;
        }
        Ok((squares, errors))
    }
}

impl Work<'_> {
    /// Writes `step` as int8 rows.
    fn int8(&mut self, step: &Step<'_>, writer: &mut dyn Writer) -> Result<()> {
        writer.begin(&step.name, 1.0)?;
        let (rows, cols) = (step.rows.clone(), step.entry.cols());
        let per_part = (PART / cols).max(1);
        let before = self.done;
        for first in rows.clone().step_by(per_part * PARTS) {
            let region = first..rows.end.min(first + per_part * PARTS);
            let mut codes = memory::zeros(region.len() * cols)?;
            let mut scales = memory::zeros(region.len())?;
            self.rows.int8(
                step.entry,
                region.clone(),
                per_part,
                &mut codes,
                &mut scales,
            )?;
            writer.int8(&codes, &scales)?;
            let done = (region.end - rows.start) as u128;
            self.done = before + (step.bytes() as u128 * done / rows.len() as u128) as u64;
            self.tell(&step.name)?;
        }
        Ok(())
    }
}

impl RowConverter<'_> {
    /// Rounds the rows of `region` to int8, `per_part` at a time.
    fn int8(
        &self,
        entry: &Entry,
        region: Range<usize>,
        per_part: usize,
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<()> {
        let cols = entry.cols();
        let parts: Vec<_> = codes
            .chunks_mut(per_part * cols)
            .zip(scales.chunks_mut(per_part))
            .map(Mutex::new)
            .collect();
        let found = Mutex::new(Vec::new());
        call::with(|call| {
            self.pool.run(parts.len(), |part| {
                if call.is_over() {
                    return;
                }
                let mut out = lock(&parts[part]);
                let (codes, scales) = &mut *out;
                let first = region.start + part * per_part;
                let rows = first..first + scales.len();
                let made = memory::zeros(codes.len()).and_then(|mut values| {
                    self.source.rows_f32(entry, rows, &mut values)?;
                    int8::quantize_rows(&values, cols, first, codes, scales)
                });
                lock(&found).push((part, made));
            })
        });
        call::check()?;
        in_order(found).collect()
    }

    /// The largest magnitude of some rows.
    fn amax(&self, entry: &Entry, rows: Range<usize>) -> Result<f32> {
        self.largest(entry, rows, &|values, first| {
            nvfp4::amax(values, first, self.options.nonfinite)
        })
    }

    /// Refuses values that loading would refuse.
    fn check_finite(&self, entry: &Entry, rows: Range<usize>) -> Result<()> {
        self.largest(
            entry,
            rows,
            &|values, first| match values.iter().position(|v| !v.is_finite()) {
                None => Ok(0.0),
                Some(i) => bail!(
                    CorruptFile,
                    "the value at index {} is {}; weights must be finite",
                    first + i,
                    values[i]
                ),
            },
        )
        .map(|_| ())
    }

    /// The largest number that `of` gives for runs of rows and the index of their first value.
    fn largest(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        of: &(dyn Fn(&[f32], usize) -> Result<f32> + Sync),
    ) -> Result<f32> {
        let cols = entry.cols();
        let step = (PART / cols).max(1);
        let starts: Vec<usize> = rows.clone().step_by(step).collect();
        let found = Mutex::new(Vec::new());
        call::with(|call| {
            self.pool.run(starts.len(), |part| {
                if call.is_over() {
                    return;
                }
                let rows = starts[part]..rows.end.min(starts[part] + step);
                let first = rows.start * cols;
                let number = memory::zeros(rows.len() * cols).and_then(|mut values| {
                    self.source.rows_f32(entry, rows, &mut values)?;
                    of(&values, first)
                });
                lock(&found).push((part, number));
            })
        });
        call::check()?;
        let mut largest = 0f32;
        for number in in_order(found) {
            largest = largest.max(number?);
        }
        Ok(largest)
    }

    fn region(
        &self,
        entry: &Entry,
        region: Range<usize>,
        per_part: usize,
        global: f32,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(f64, f64)> {
        let cols = entry.cols();
        let parts: Vec<_> = codes
            .chunks_mut(per_part * cols / 2)
            .zip(scales.chunks_mut(per_part * cols / BLOCK))
            .map(Mutex::new)
            .collect();
        let found = Mutex::new(Vec::new());
        call::with(|call| {
            self.pool.run(parts.len(), |part| {
                if call.is_over() {
                    return;
                }
                let mut out = lock(&parts[part]);
                let (codes, scales) = &mut *out;
                let first = region.start + part * per_part;
                let rows = first..region.end.min(first + per_part);
                let sums = self.part(entry, rows, global, codes, scales);
                lock(&found).push((part, sums));
            })
        });
        call::check()?;
        let (mut squares, mut errors) = (0.0, 0.0);
        for sums in in_order(found) {
            let (s, e) = sums?;
            squares += s;
            errors += e;
        }
        Ok((squares, errors))
    }

    fn part(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        global: f32,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(f64, f64)> {
        let cols = entry.cols();
        let mut values = memory::zeros(rows.len() * cols)?;
        self.source.rows_f32(entry, rows.clone(), &mut values)?;
        nvfp4::quantize_rows(
            &values,
            cols,
            rows.start,
            global,
            self.options,
            codes,
            scales,
        )?;
        let mut held = vec![0.0; values.len()];
        nvfp4::dequantize(codes, scales, global, &mut held)?;
        let (mut squares, mut errors) = (0.0, 0.0);
        for (&value, &held) in values.iter().zip(&held) {
            if value.is_finite() {
                squares += f64::from(value) * f64::from(value);
                errors += f64::from(value - held) * f64::from(value - held);
            }
        }
        Ok((squares, errors))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// What the parts found, by part, so that neither sums nor the error reported depend on timing.
fn in_order<T>(found: Mutex<Vec<(usize, T)>>) -> impl Iterator<Item = T> {
    let mut found = found
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    found.sort_by_key(|(part, _)| *part);
    found.into_iter().map(|(_, value)| value)
}

/// The files of a directory, by their names, that hold the tokenizer, the template and the sampling of a source which has them inside;
/// none for other sources, whose own files are copied.
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
