//! A model in NVFP4 that is best for its products with what text makes of their inputs: its linear weights are quantized block by block of
//! the model, as text runs through it. Knows no text: it is given tokens.

mod checkpoint;
mod search;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Serialize;

pub use self::checkpoint::Calibrated;
pub use self::search::Choice;
use self::search::{Search, fit};
use super::training::{MatrixId, Observer, ProjectionLayout, Source};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::Encoding;
use crate::cpu::Cpu;
use crate::format::nvfp4::{Nvfp4, QuantizeOptions, Recipe, amax, global_scale};
use crate::ops::training::matmul::{Form, Sizes, matmul};
use crate::ops::{Array, Device, Mixed, Slice};

/// A text to calibrate with.
#[derive(Clone, Debug, Default)]
pub struct CalibrationText {
    /// Tokens of all documents, one after another.
    pub tokens: Vec<u32>,
    /// The documents' lengths.
    pub documents: Vec<usize>,
}

/// One of so many texts is kept from the search, to choose by what it has found.
const KEPT: usize = 8;

/// How far a calibration is.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateProgress {
    /// Blocks of the model that are done.
    pub done: usize,
    /// Blocks in all.
    pub total: usize,
}

/// A matrix that was quantized.
#[derive(Clone, Debug, Serialize)]
pub struct CalibratedMatrix {
    /// Its name.
    pub name: String,
    /// How its codes were found.
    pub choice: Choice,
    /// Relative error of its products for text that the search has not seen, with the codes of a sweep: the root of the mean square error over
    /// that of the products.
    pub error_of_sweep: f64,
    /// That error with the chosen codes.
    pub error: f64,
}

/// Second moments `[cols, cols]` of the inputs of some projections: of the texts that the search sees, and of those it does not.
struct Gathered {
    cols: usize,
    seen: Array,
    kept: Array,
    rows: [usize; 2],
}

impl Gathered {
    fn new(device: &Device, cols: usize) -> Result<Gathered> {
        Ok(Gathered {
            cols,
            seen: Array::zeroed(device, cols * cols)?,
            kept: Array::zeroed(device, cols * cols)?,
            rows: [0; 2],
        })
    }

    fn add(&mut self, device: &Device, x: Slice<'_, Mixed>, is_kept: bool) -> Result<()> {
        let rows = x.len() / self.cols;
        let to = if is_kept {
            &mut self.kept
        } else {
            &mut self.seen
        };
        self.rows[usize::from(is_kept)] += rows;
        let sizes = Sizes {
            m: self.cols,
            n: self.cols,
            k: rows,
        };
        matmul(device, Form::TN, sizes, x, x, to.all_mut(), true)
    }

    /// The sums of either, in host memory.
    fn read(&self) -> Result<[Vec<f32>; 2]> {
        let mut both = [const { Vec::new() }; 2];
        for (values, sums) in both.iter_mut().zip([&self.seen, &self.kept]) {
            values.resize(self.cols * self.cols, 0.0);
            sums.all().read(values)?;
        }
        Ok(both)
    }
}

/// Quantizes the linear weights of the blocks of `source`, by what they multiply when `texts` run through the model on `device`. The search
/// runs on the threads of `host`. Gives a checkpoint with them in the place of those that it was made of, and what became of each matrix.
/// Matrices that the checkpoint holds in NVFP4 keep their codes. Cancelled with the thread's [`call`](crate::base::call).
pub fn calibrate(
    device: &Device,
    host: &Cpu,
    source: &Arc<Source>,
    texts: &[CalibrationText],
    progress: &mut dyn FnMut(CalibrateProgress),
) -> Result<(Calibrated, Vec<CalibratedMatrix>)> {
    if texts.len() < 2 {
        bail!(
            InvalidArgument,
            "{} texts to calibrate with; there must be two at least, one of which the search does not see",
            texts.len()
        );
    }
    let is_kept = |number: usize| number % KEPT == KEPT.min(texts.len()) - 1;
    let given: Vec<_> = texts
        .iter()
        .map(|t| (t.tokens.clone(), t.documents.clone()))
        .collect();
    let mut observer = Observer::new(device, source.clone(), &given)?;
    let layout = source.layout();
    let (mut quantized, mut reports) = (HashMap::new(), Vec::new());
    let total = layout.blocks.len();
    for (done, block) in layout.blocks.iter().enumerate() {
        progress(CalibrateProgress { done, total });
        let mut gathered: BTreeMap<MatrixId, Gathered> = BTreeMap::new();
        observer.advance(&mut |number, first, x| {
            let cols = layout.matrices[first].cols;
            let entry = match gathered.entry(first) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(place) => place.insert(Gathered::new(device, cols)?),
            };
            entry.add(device, x, is_kept(number))
        })?;
        let alone = [
            std::slice::from_ref(&block.o),
            std::slice::from_ref(&block.down),
        ];
        let groups = [&block.qkv[..], alone[0], &block.gate_up[..], alone[1]];
        for group in groups {
            let Some(gathered) = gathered.remove(&group[0].matrix) else {
                bail!(Internal, "block {done} has projections without inputs");
            };
            of_group(host, source, group, &gathered, &mut |id, matrix, report| {
                quantized.insert(id, matrix);
                reports.push(report);
            })
            .map_err(|e| e.within(&layout.matrices[group[0].matrix].name))?;
        }
    }
    progress(CalibrateProgress { done: total, total });
    Ok((Calibrated::new(source, quantized)?, reports))
}

/// Quantizes the projections of the same inputs, under one global scale.
fn of_group(
    host: &Cpu,
    source: &Source,
    group: &[ProjectionLayout],
    gathered: &Gathered,
    give: &mut dyn FnMut(MatrixId, Nvfp4, CalibratedMatrix),
) -> Result<()> {
    let options = QuantizeOptions {
        recipe: Recipe::Sweep,
        ..QuantizeOptions::default()
    };
    let mut weights = Vec::new();
    for projection in group {
        if source.encoding(projection.matrix)? == Encoding::Nvfp4 {
            continue;
        }
        let m = &source.layout().matrices[projection.matrix];
        let mut values = vec![0f32; m.rows * m.cols];
        let read = |rows, out: &mut [f32]| source.matrix(projection.matrix, rows, out);
        host.read_rows(0..m.rows, m.cols, &read, &mut values)?;
        weights.push((projection.matrix, values));
    }
    if weights.is_empty() {
        return Ok(());
    }
    let mut largest = 0f32;
    for (_, values) in &weights {
        largest = largest.max(amax(values, 0, options.nonfinite)?);
    }
    let global = global_scale(largest, &options);
    let [mut seen, kept] = gathered.read()?;
    if seen.iter().chain(&kept).any(|v| !v.is_finite()) {
        bail!(
            InvalidArgument,
            "its inputs are not finite for the text that was given"
        );
    }
    fit(&mut seen, gathered.cols, gathered.rows[0]);
    let search = Search::new(host, &seen, &kept, gathered.cols)?;
    for (id, values) in weights {
        let m = &source.layout().matrices[id];
        let found = search.best(&values, m.rows, global, &options)?;
        let report = CalibratedMatrix {
            name: m.name.clone(),
            choice: found.choice,
            error_of_sweep: found.errors[0],
            error: found.errors[1],
        };
        give(id, found.matrix, report);
    }
    Ok(())
}
