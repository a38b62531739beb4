//! Mixed precision within a budget of bits: chooses the blocks that get int8 rows, by how much harm quantization does per byte saved.

use std::collections::HashSet;
use std::sync::Arc;

use super::stage::Stage;
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::Encoding;
use crate::format::nvfp4::BLOCK;
use crate::model::calibrate::{Calibrated, CalibrationText};
use crate::model::compare::block_divergences;
use crate::model::training::Source;
use crate::ops::Device;

/// Bits per weight in NVFP4, and the upper limit of a budget.
const NVFP4_BITS: f64 = 4.0 + 8.0 / BLOCK as f64;
const MOST_BITS: f64 = 8.0;
/// Measurement of blocks: tokens per window, and windows on a CPU and on a GPU.
const WINDOW: usize = 512;
const WINDOWS: [usize; 2] = [2, 8];

/// Blocks with int8 rows.
pub(super) struct Wide {
    pub(super) blocks: Vec<usize>,
    /// Their linear weights in the checkpoint.
    pub(super) entries: HashSet<String>,
}

pub(super) fn check(bits: f64) -> Result<()> {
    if (NVFP4_BITS..=MOST_BITS).contains(&bits) {
        return Ok(());
    }
    bail!(
        InvalidArgument,
        "a budget of {bits} bits a weight; it can be {NVFP4_BITS}, for NVFP4 alone, to {MOST_BITS}"
    )
}

/// A block that could get int8 rows.
struct Candidate {
    block: usize,
    entries: Vec<String>,
    /// Additional bits over NVFP4.
    more: f64,
    divergence: f64,
}

/// Chooses blocks by the divergence of the model's predictions when only that block is quantized, per additional byte. Takes the largest
/// first, while the average over all blocks' weights stays within `bits`. In `calibrated`, the chosen blocks then stay as in the source.
pub(super) fn choose(
    bits: f64,
    device: &Device,
    (source, calibrated): (&Arc<Source>, &mut Calibrated),
    texts: &[CalibrationText],
    progress: &mut dyn FnMut(Stage),
) -> Result<Wide> {
    let windows = windows(texts, WINDOWS[usize::from(device.is_cuda())]);
    let examined = Arc::new(Source::new(Arc::new(calibrated.clone()))?);
    let divergences = block_divergences(device, &examined, source, &windows, &mut |p| {
        progress(Stage::Measure(p.done, p.total));
    })?;
    let (mut candidates, mut weights) = (Vec::new(), 0.0);
    for (block, divergence) in divergences.into_iter().enumerate() {
        let (mut entries, mut more) = (Vec::new(), 0.0);
        let of_block = source.layout().matrices.iter().enumerate();
        for (id, m) in of_block.filter(|(_, m)| m.block == Some(block)) {
            let size = (m.rows * m.cols) as f64;
            weights += size;
            // NVFP4 codes of the source stay.
            if source.encoding(id)? != Encoding::Nvfp4 {
                more += size * (MOST_BITS - NVFP4_BITS) + 32.0 * m.rows as f64;
                entries.push(source.entry(id)?.name.clone());
            }
        }
        if !entries.is_empty() {
            candidates.push(Candidate {
                block,
                entries,
                more,
                divergence,
            });
        }
    }
    candidates.sort_by(|a, b| (b.divergence / b.more).total_cmp(&(a.divergence / a.more)));
    let mut left = (bits - NVFP4_BITS) * weights;
    let mut wide = Wide {
        blocks: Vec::new(),
        entries: HashSet::new(),
    };
    for candidate in candidates {
        if candidate.more <= left {
            left -= candidate.more;
            wide.blocks.push(candidate.block);
            wide.entries.extend(candidate.entries);
        }
    }
    if wide.blocks.is_empty() {
        tracing::warn!("a budget of {bits} bits a weight has no room for a block in 8 bits");
    }
    wide.blocks.sort_unstable();
    calibrated.leave_out(&wide.entries);
    Ok(wide)
}

/// Up to `count` windows from the texts that the calibration's search leaves out, or from other texts if those are too few.
fn windows(texts: &[CalibrationText], count: usize) -> Vec<&[u32]> {
    let mut windows: Vec<&[u32]> = Vec::new();
    for text in texts.iter().rev() {
        let window = &text.tokens[..text.tokens.len().min(WINDOW)];
        if window.len() > 1 && windows.len() < count {
            windows.push(window);
        }
    }
    windows
}
