//! Calibrated quantization of a model to NVFP4: quantizes linear weights block by block while text runs through the model, and minimizes
//! the error of their products with the inputs observed. Knows no text: it is given tokens.

mod checkpoint;
mod finished;
mod gathered;
mod options;
mod search;
mod trial;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

pub use self::checkpoint::Calibrated;
use self::finished::{Finished, identity};
pub use self::finished::{folder_of, forget};
use self::gathered::Gathered;
use self::options::Done;
pub use self::options::{CalibrateOptions, CalibrateProgress, CalibratedMatrix, CalibrationText};
pub use self::search::Choice;
use self::search::Search;
use self::trial::{Group, choose};
use super::training::{
    BlockLayout, MatrixId, MixerVectors, MlpLayout, Observer, ProjectionLayout, Source,
};
use crate::base::error::bail;
use crate::base::{Result, call};
use crate::checkpoint::Encoding;
use crate::cpu::Cpu;
use crate::format::nvfp4::{QuantizeOptions, Recipe, amax};
use crate::ops::Device;

/// One in this many texts is kept from the search, to evaluate its results.
const KEPT: usize = 8;
/// Number of evaluation texts that trials of blocks use, on a CPU and on a GPU.
const TRIED: [usize; 2] = [2, 4];

/// Quantizes the linear weights of the blocks of `source`, by their inputs when `texts` run through the model on `device`. The search runs
/// on `device`; reading from the checkpoint uses the threads of `host`. Returns a checkpoint with the quantized matrices in place of the
/// originals, and a report of each matrix. Matrices stored in NVFP4 keep their codes. Gives the same bits on any number of threads.
/// Cancelled with the thread's [`call`].
pub fn calibrate(
    device: &Device,
    host: &Arc<Cpu>,
    source: &Arc<Source>,
    texts: &[CalibrationText],
    options: &CalibrateOptions,
    progress: &mut dyn FnMut(CalibrateProgress),
) -> Result<(Calibrated, Vec<CalibratedMatrix>)> {
    if texts.len() < 2 {
        bail!(
            InvalidArgument,
            "{} texts to calibrate with; there must be two at least, one of which the search does not see",
            texts.len()
        );
    }
    let layout = source.layout();
    let finished = match &options.finished {
        Some(folder) => Some(Finished::new(folder, identity(source, texts, options)?)),
        None => None,
    };
    let mut of_blocks: Vec<Option<Vec<Done>>> = (0..layout.blocks.len())
        .map(|block| finished.as_ref()?.load(block, layout))
        .collect();
    let weights = |block: usize| -> u64 {
        let of_block = layout.matrices.iter().filter(|m| m.block == Some(block));
        of_block.map(|m| (m.rows * m.cols) as u64).sum()
    };
    let blocks = layout.blocks.len();
    let mut at = CalibrateProgress {
        block: 0,
        blocks,
        resumed: of_blocks.iter().flatten().count(),
        done: 0,
        total: 2 * (0..blocks).map(weights).sum::<u64>(),
    };
    // Text only runs as far as there are blocks to quantize.
    let end = of_blocks.iter().rposition(Option::is_none);
    let is_kept = |number: usize| number % KEPT == KEPT.min(texts.len()) - 1;
    let tried = (0..texts.len())
        .filter(|number| is_kept(*number))
        .take(TRIED[usize::from(device.is_cuda())]);
    let mut run = Run {
        device,
        host,
        source,
        options,
        observer: Observer::new(device, source.clone(), &runs(texts), tried)?,
        is_kept,
        experts: 0,
        starved: 0,
    };
    for block in 0..blocks {
        (at.block, at.done) = (block, 2 * (0..block).map(weights).sum::<u64>());
        progress(at);
        if end.is_none_or(|end| block > end) {
            continue;
        }
        if of_blocks[block].is_some() {
            run.observer.advance(&mut |_, _, _| call::check())?;
            continue;
        }
        let gathered = run.gather()?;
        at.done += weights(block);
        progress(at);
        let found = run.search(block, gathered, &mut |matrix| {
            let m = &layout.matrices[matrix];
            at.done += (m.rows * m.cols) as u64;
            progress(at);
        })?;
        let name = |id: MatrixId| layout.matrices[id].name.clone();
        let done = choose(&mut run.observer, run.host, found, name)?;
        if let Some(finished) = &finished {
            finished.save(block, &done)?;
        }
        of_blocks[block] = Some(done);
    }
    if run.starved > 0 {
        tracing::warn!(
            "{} of {} groups of projections of experts multiply fewer rows of the text than they have inputs; what all experts of their layer \
             multiply stands in for the rest, and more text would help",
            run.starved,
            run.experts
        );
    }
    (at.block, at.done) = (blocks, at.total);
    progress(at);
    let (mut quantized, mut reports) = (HashMap::new(), Vec::new());
    for done in of_blocks.into_iter().flatten().flatten() {
        quantized.insert(done.id, done.matrix);
        reports.push(done.report);
    }
    Ok((Calibrated::new(source, quantized)?, reports))
}

/// The texts in the form that an observer takes.
fn runs(texts: &[CalibrationText]) -> Vec<(Vec<u32>, Vec<usize>)> {
    let run = |text: &CalibrationText| (text.tokens.clone(), text.documents.clone());
    texts.iter().map(run).collect()
}

/// Projections of a block, by the unit of choice: queries, keys and values; attention's output; gate and up; down. Each unit consists of
/// groups of projections with the same input; in a mixture, each expert has its own groups. A shared expert and the projections of a gated
/// delta net are not quantized to NVFP4.
fn units(block: &BlockLayout) -> Vec<Vec<&[ProjectionLayout]>> {
    let mlps = match &block.mlp {
        MlpLayout::Dense(mlp) => std::slice::from_ref(mlp),
        MlpLayout::Experts(mixture) => &mixture.experts[..],
    };
    let mut units = match block.vectors {
        MixerVectors::Attention(_) => vec![
            vec![&block.inputs[..]],
            vec![std::slice::from_ref(&block.output)],
        ],
        MixerVectors::GatedDelta(_) => Vec::new(),
    };
    units.push(mlps.iter().map(|mlp| &mlp.gate_up[..]).collect());
    let downs = mlps.iter().map(|mlp| std::slice::from_ref(&mlp.down));
    units.push(downs.collect());
    units
}

/// Text that runs through a model while its blocks are quantized.
struct Run<'a, K> {
    device: &'a Device,
    host: &'a Arc<Cpu>,
    source: &'a Source,
    options: &'a CalibrateOptions,
    observer: Observer,
    /// Whether a text, by its index, is kept from the search.
    is_kept: K,
    /// Number of groups of expert projections so far, and of those with fewer rows than inputs.
    experts: usize,
    starved: usize,
}

impl<K: Fn(usize) -> bool> Run<'_, K> {
    /// Runs the texts through the next block. Returns moments by the first projection of each group.
    fn gather(&mut self) -> Result<BTreeMap<MatrixId, Gathered>> {
        let mut gathered = BTreeMap::new();
        let (layout, is_kept, device) = (self.source.layout(), &self.is_kept, self.device);
        let units = units(&layout.blocks[self.observer.block()]);
        let groups = units.iter().flatten();
        let wanted: HashSet<MatrixId> = groups.map(|group| group[0].matrix).collect();
        self.observer.advance(&mut |number, first, x| {
            call::check()?;
            if !wanted.contains(&first) {
                return Ok(());
            }
            let cols = layout.matrices[first].cols;
            let entry = match gathered.entry(first) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(place) => place.insert(Gathered::new(device, cols)?),
            };
            entry.add(device, x, is_kept(number))
        })?;
        Ok(gathered)
    }

    /// Finds candidates for the projections of a block, by unit. Reports progress after each matrix.
    fn search(
        &mut self,
        block: usize,
        mut gathered: BTreeMap<MatrixId, Gathered>,
        told: &mut dyn FnMut(MatrixId),
    ) -> Result<Vec<Group>> {
        let (source, device) = (self.source, self.device);
        let layout = source.layout();
        let mut found = Vec::new();
        for unit in units(&layout.blocks[block]) {
            let all = match unit.len() {
                1 => None,
                _ => Some(self.sum(&unit, &gathered)?),
            };
            let mut of_unit = Vec::new();
            for group in unit {
                let first = &layout.matrices[group[0].matrix];
                let mut own = match gathered.remove(&group[0].matrix) {
                    Some(own) => own,
                    None if all.is_some() => Gathered::new(device, first.cols)?,
                    None => bail!(Internal, "block {block} has projections without inputs"),
                };
                if let Some(all) = &all {
                    self.experts += 1;
                    self.starved += usize::from(own.fill_up(device, all)?);
                }
                let of_group = self
                    .quantize(group, own)
                    .map_err(|e| e.within(&first.name))?;
                of_group.iter().for_each(|(id, _)| told(*id));
                of_unit.extend(of_group);
            }
            found.push(of_unit);
        }
        Ok(found)
    }

    /// The sums of moments over all groups of a unit.
    fn sum(
        &self,
        unit: &[&[ProjectionLayout]],
        gathered: &BTreeMap<MatrixId, Gathered>,
    ) -> Result<Gathered> {
        let cols = self.source.layout().matrices[unit[0][0].matrix].cols;
        let mut all = Gathered::new(self.device, cols)?;
        for group in unit {
            if let Some(own) = gathered.get(&group[0].matrix) {
                all.add_all(self.device, own)?;
            }
        }
        Ok(all)
    }

    /// Finds candidates for the projections of a group, under one global scale.
    fn quantize(&self, group: &[ProjectionLayout], gathered: Gathered) -> Result<Group> {
        let layout = self.source.layout();
        let options = QuantizeOptions {
            recipe: Recipe::Sweep,
            levels: self.options.levels,
            ..QuantizeOptions::default()
        };
        let (mut ids, mut weights, mut largest) = (Vec::new(), Vec::new(), 0f32);
        for projection in group {
            if self.source.encoding(projection.matrix)? == Encoding::Nvfp4 {
                continue;
            }
            let m = &layout.matrices[projection.matrix];
            let mut values = vec![0f32; m.rows * m.cols];
            let read = |rows, out: &mut [f32]| self.source.matrix(projection.matrix, rows, out);
            self.host.read_rows(0..m.rows, m.cols, &read, &mut values)?;
            largest =
                largest.max(amax(&values, 0, options.nonfinite).map_err(|e| e.within(&m.name))?);
            ids.push(projection.matrix);
            weights.push(values);
        }
        if weights.is_empty() {
            return Ok(Vec::new());
        }
        let cols = gathered.cols;
        let moments = gathered.moments(self.device, self.host)?;
        let search = Search::new(moments, cols, options);
        let global = search.best_global(&weights, largest)?;
        let mut candidates = Vec::new();
        for (id, values) in ids.into_iter().zip(weights) {
            call::check()?;
            candidates.push((id, search.candidates(&values, global)?));
        }
        Ok(candidates)
    }
}
