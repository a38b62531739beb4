//! A checkpoint with the result of a conversion, computed on reading. Training starts from it, and delivers unchanged weights from it.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use once_cell::sync::OnceCell;

use super::options::ConvertOptions;
use super::plan::{Action, PlannedTensor, plan};
use super::rows::{PART, RowConverter};
use crate::base::error::{bail, err};
use crate::base::{Result, memory};
use crate::checkpoint::{Checkpoint, Encoding, Entry, Metadata, Part};
use crate::cpu::Cpu;
use crate::format::{int8, nvfp4};
use crate::model::check_loadable;
use crate::model::load::rows_nvfp4;

/// The entries that [`convert`](super::convert) would write, in its order and with its bytes. Rows are quantized on every read; global
/// scales are cached.
pub struct Quantized {
    source: Arc<dyn Checkpoint>,
    options: ConvertOptions,
    host: Arc<Cpu>,
    steps: Vec<PlannedTensor>,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    globals: Vec<OnceCell<Vec<f32>>>,
    /// The largest magnitudes of weights, by name.
    largest: Mutex<HashMap<String, f32>>,
}

impl Quantized {
    /// `source` converted by `options`, on the threads of `host`. Reads no weights. Fails if the conversion would fail before it reads any.
    pub fn new(
        source: Arc<dyn Checkpoint>,
        options: ConvertOptions,
        host: Arc<Cpu>,
    ) -> Result<Quantized> {
        options.quantize.check()?;
        let used = check_loadable(&*source)?;
        let steps = plan(&*source, &options, &used)?;
        let entries: Vec<Entry> = steps
            .iter()
            .map(|step| {
                let (rows, cols) = (step.height() as u64, step.entry.cols() as u64);
                Entry {
                    name: step.name.clone(),
                    shape: step.shape.clone(),
                    encoding: step.encoding,
                    bytes: step.encoding.matrix_bytes(rows, cols).unwrap_or(0),
                }
            })
            .collect();
        let names = entries.iter().enumerate();
        Ok(Quantized {
            by_name: names.map(|(i, e)| (e.name.clone(), i)).collect(),
            globals: steps.iter().map(|_| OnceCell::new()).collect(),
            largest: Mutex::default(),
            source,
            options,
            host,
            steps,
            entries,
        })
    }

    /// The original checkpoint.
    pub fn source(&self) -> &Arc<dyn Checkpoint> {
        &self.source
    }

    fn index(&self, entry: &Entry) -> Result<usize> {
        let found = self.by_name.get(&entry.name).copied();
        found.ok_or_else(|| err!(NotFound, "the conversion writes no '{}'", entry.name))
    }

    fn step(&self, entry: &Entry) -> Result<&PlannedTensor> {
        Ok(&self.steps[self.index(entry)?])
    }

    fn converter(&self) -> RowConverter<'_> {
        RowConverter {
            source: &*self.source,
            pool: self.host.pool(),
            options: &self.options.quantize,
        }
    }

    fn find_globals(&self, step: &PlannedTensor) -> Result<Vec<f32>> {
        if step.action == Action::Quantize {
            let mut largest = self.largest.lock().unwrap_or_else(PoisonError::into_inner);
            let converter = self.converter();
            return Ok(vec![converter.global(step, &self.steps, &mut largest)?]);
        }
        let globals = self.source.global_scales(&step.entry)?;
        if step.action == Action::CopyRows {
            let each = step.entry.rows() / globals.len();
            return Ok(vec![globals[step.rows.first() / each]]);
        }
        Ok(globals.to_vec())
    }
}

impl Checkpoint for Quantized {
    fn format(&self) -> &'static str {
        self.source.format()
    }

    fn files(&self) -> Vec<&Path> {
        self.source.files()
    }

    fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn find(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&i| &self.entries[i])
    }

    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let step = self.step(entry)?;
        let cols = entry.cols();
        match (step.action, step.encoding) {
            (Action::Copy, _) => self.source.rows_f32(&step.entry, rows, out),
            (_, Encoding::Int8) => {
                let mut codes = memory::zeros(rows.len() * cols)?;
                let mut scales = memory::zeros(rows.len())?;
                self.rows_int8(entry, rows, &mut codes, &mut scales)?;
                int8::dequantize_rows(&codes, &scales, cols, out)
            }
            _ => {
                let mut codes = memory::zeros(rows.len() * cols / 2)?;
                let mut scales = memory::zeros(rows.len() * cols / nvfp4::BLOCK)?;
                self.rows_nvfp4(entry, rows, &mut codes, &mut scales)?;
                nvfp4::dequantize(&codes, &scales, self.global_scale(entry)?, out)
            }
        }
    }

    fn rows_nvfp4(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        let step = self.step(entry)?;
        if step.action != Action::Quantize {
            return rows_nvfp4(&*self.source, &step.entry, &step.rows, rows, codes, scales);
        }
        let global = self.global_scale(entry)?;
        let per_part = (PART / entry.cols()).max(1);
        self.converter()
            .region(step, rows, per_part, global, codes, scales)
            .map(|_| ())
    }

    fn rows_int8(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<()> {
        let step = self.step(entry)?;
        if step.action != Action::Int8 {
            return self.source.rows_int8(&step.entry, rows, codes, scales);
        }
        let per_part = (PART / entry.cols()).max(1);
        self.converter().int8(step, rows, per_part, codes, scales)
    }

    fn global_scales(&self, entry: &Entry) -> Result<&[f32]> {
        let index = self.index(entry)?;
        let step = &self.steps[index];
        if step.encoding != Encoding::Nvfp4 {
            bail!(
                InvalidArgument,
                "'{}' is {}, not {}",
                entry.name,
                step.encoding,
                Encoding::Nvfp4
            );
        }
        let globals = self.globals[index].get_or_try_init(|| self.find_globals(step))?;
        Ok(globals)
    }

    fn plain(&self, entry: &Entry) -> Option<Part<'_>> {
        let step = self.step(entry).ok()?;
        match step.action == Action::Copy && step.encoding == step.entry.encoding {
            true => self.source.plain(&step.entry),
            false => None,
        }
    }

    fn parts(&self, entry: &Entry) -> Result<Vec<Part<'_>>> {
        let step = self.step(entry)?;
        match step.action == Action::Copy && step.encoding == step.entry.encoding {
            true => self.source.parts(&step.entry),
            false => Ok(Vec::new()),
        }
    }

    fn read_part(&self, part: &Part<'_>, at: usize, out: &mut [u8]) -> Result<()> {
        self.source.read_part(part, at, out)
    }

    fn metadata(&self) -> &Metadata {
        self.source.metadata()
    }
}
