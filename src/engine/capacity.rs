//! How much memory a model and its conversations take, and how many conversations fit, before the model is loaded.

use std::path::Path;

use serde::Serialize;

use super::snapshots::{SNAPSHOTS, most_states};
use super::windows::most_blocks;
use crate::base::error::bail;
use crate::base::memory::{self, Bytes};
use crate::base::{Error, Result};
use crate::checkpoint::Checkpoint;
use crate::model::footprint::{Footprint, Passes};
use crate::model::kv::{BlockSizes, GroupBlocks};
use crate::model::{KvType, LoadOptions, open};

/// Most conversations that are counted.
const MOST_SEQUENCES: u64 = 1 << 20;

/// Options of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Conversations, at least one, that take steps together.
    pub sequences: usize,
    /// Positions that each comes to; `None` for those that the model was made for.
    pub context: Option<usize>,
    /// Element type of keys and values.
    pub kv: KvType,
    /// Bytes of the memory of the device, host memory for the CPU, in which conversations are to fit; `None` for what is free.
    pub budget: Option<u64>,
}

impl Default for PlanOptions {
    /// One conversation as long as the model allows, with keys and values in f16.
    fn default() -> Self {
        PlanOptions {
            sequences: 1,
            context: None,
            kv: KvType::F16,
            budget: None,
        }
    }
}

/// Memory of a model and its conversations, in bytes. The memory of a GPU and that of the host are apart; the CPU has only the latter.
///
/// Not counted: the driver, its libraries and compiled kernels; tokenizer and chat template; logits and texts of conversations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The device.
    pub device: String,
    /// Conversations that were asked for.
    pub sequences: usize,
    /// Positions of each.
    pub context: usize,
    /// Weights as they are held, with tables in page-locked host memory. They stay as long as the model.
    pub weights: Bytes,
    /// Weights beside these that are mapped from a file of packed weights: host memory that processes share.
    pub mapped_bytes: u64,
    /// Weights and working memory while the model is loaded, at most, without what is mapped.
    pub load_peak: Bytes,
    /// Working memory of steps of these conversations. On the CPU it belongs to the session that makes the step.
    pub step_workspace: Bytes,
    /// Working memory of steps and prompts of these conversations. On the CPU each session that runs a prompt itself keeps its own.
    pub workspace: Bytes,
    /// Most bytes of recorded passes, held by a GPU's driver on both sides together.
    pub graph_bytes_bound: u64,
    /// Sizes of blocks of keys and values, and of recurrent states.
    pub blocks: BlockSizes,
    /// Bytes of keys and values of one position.
    pub kv_bytes_per_token: u64,
    /// Bytes of blocks of one conversation of this context. Windows free what they have passed.
    pub sequence_bytes: u64,
    /// The recurrent states among these blocks: that of the end, and those of earlier positions that a sequence keeps.
    pub sequence_state_bytes: u64,
    /// Bytes of blocks of all conversations: what to reserve for them when the model is loaded.
    pub kv_bytes: u64,
    /// Bytes that the device has free now, or those of the budget; `None` if the system does not say.
    pub free_bytes: Option<u64>,
    /// Conversations of this context that fit there beside the model; `None` if what is free is not known.
    pub sequences_that_fit: Option<u64>,
}

impl Plan {
    /// Weights, mapped ones included, working memory, recorded passes and blocks of all conversations.
    pub fn total(&self) -> u64 {
        let model = (self.weights + self.workspace).total();
        model
            .saturating_add(self.mapped_bytes)
            .saturating_add(self.graph_bytes_bound)
            .saturating_add(self.kv_bytes)
    }
}

/// Plans the memory of the model at `path`: a directory, or a `.safetensors`, `.dat` or `.gguf` file. Reads headers only. Fails, with the
/// error of loading, for what cannot be loaded with these options.
pub fn plan(path: &Path, load: &LoadOptions, options: &PlanOptions) -> Result<Plan> {
    let checkpoint = open(path)?;
    let named = |e: Error| e.within(path.display());
    plan_of(&*checkpoint, load, options).map_err(named)
}

/// Plans the memory of the model in an opened checkpoint.
pub fn plan_of(
    checkpoint: &dyn Checkpoint,
    load: &LoadOptions,
    options: &PlanOptions,
) -> Result<Plan> {
    let footprint = Footprint::of(checkpoint, load)?;
    let spec = footprint.spec();
    let context = options.context.unwrap_or(spec.max_positions);
    spec.check_context(context)?;
    if options.sequences == 0 {
        bail!(
            InvalidArgument,
            "a plan for no sequences; it takes at least one"
        );
    }
    let needs = Needs::new(footprint, context, options.kv, load.kv_bytes)?;
    let free = match options.budget {
        Some(bytes) => Some(bytes),
        None => needs.footprint.free_bytes()?,
    };
    let left = memory::budget().map(|budget| budget.saturating_sub(memory::total().current));
    let fits = |count: u64| -> Result<bool> {
        let needs = needs.of(count as usize)?;
        let in_budget = left.is_none_or(|left| needs.accounted <= left);
        Ok(needs.kv_fits && in_budget && free.is_none_or(|free| needs.of_device <= free))
    };
    let is_known = free.is_some() || left.is_some() || load.kv_bytes.is_some();
    let Needs {
        footprint, blocks, ..
    } = &needs;
    Ok(Plan {
        device: load.device.name(),
        sequences: options.sequences,
        context,
        weights: footprint.weights(),
        mapped_bytes: footprint.mapped_bytes(),
        load_peak: footprint.load_peak(),
        step_workspace: needs.workspace(options.sequences, 1)?,
        workspace: needs.workspace(options.sequences, needs.pass_rows(options.sequences))?,
        graph_bytes_bound: footprint.graph_bytes_bound(),
        kv_bytes_per_token: blocks.position_bytes(),
        sequence_bytes: needs.sequence,
        sequence_state_bytes: needs.states,
        kv_bytes: needs.kv_bytes(options.sequences as u64),
        free_bytes: free,
        sequences_that_fit: match is_known {
            true => Some(most_that(fits)?),
            false => None,
        },
        blocks: blocks.clone(),
    })
}

/// The largest number up to [`MOST_SEQUENCES`] that fits; numbers fit up to some number.
fn most_that(fits: impl Fn(u64) -> Result<bool>) -> Result<u64> {
    let (mut fitting, mut beyond) = (0, MOST_SEQUENCES + 1);
    while fitting + 1 < beyond {
        let middle = fitting + (beyond - fitting) / 2;
        match fits(middle)? {
            true => fitting = middle,
            false => beyond = middle,
        }
    }
    Ok(fitting)
}

/// Memory needs of conversations of one context.
struct Needs {
    footprint: Footprint,
    blocks: BlockSizes,
    context: usize,
    /// Bytes reserved for keys and values, if any are.
    reserved: Option<u64>,
    /// Bytes of blocks of a conversation, its states included.
    sequence: u64,
    states: u64,
    /// Bytes of blocks that prompts take while they run, beside those of their conversations, and of null blocks.
    shared: u64,
}

/// Memory that a number of conversations needs.
struct Needed {
    /// Bytes under the budget of the process.
    accounted: u64,
    /// Bytes of the device's memory.
    of_device: u64,
    /// Whether the blocks fit in what is reserved for them.
    kv_fits: bool,
}

impl Needs {
    fn new(
        footprint: Footprint,
        context: usize,
        kv: KvType,
        reserved: Option<usize>,
    ) -> Result<Needs> {
        let blocks = footprint.blocks(kv)?;
        let is_cuda = footprint.device().is_cuda();
        // A GPU runs a step ahead.
        let step = 1 + usize::from(is_cuda);
        let held = |run: usize| -> u64 {
            let bytes = |group: &GroupBlocks| {
                let most = most_blocks(group.window, context, group.positions, run);
                (most as u64).saturating_mul(group.bytes)
            };
            blocks.groups.iter().map(bytes).fold(0, u64::saturating_add)
        };
        let (kept, prompted) = (held(step), held(footprint.pass_rows()));
        let states = (most_states(is_cuda) as u64).saturating_mul(blocks.state_bytes);
        Ok(Needs {
            context,
            reserved: reserved.map(|bytes| bytes as u64),
            sequence: kept.saturating_add(states),
            states,
            // States that a prompt stops at take the place of earlier ones.
            shared: prompted.saturating_sub(kept) + blocks.null_bytes,
            blocks,
            footprint,
        })
    }

    fn kv_bytes(&self, sequences: u64) -> u64 {
        let own = self.sequence.saturating_mul(sequences);
        own.saturating_add(self.shared)
    }

    /// Rows of the longest pass of prompts of some conversations.
    fn pass_rows(&self, sequences: usize) -> usize {
        let rows = self.context.saturating_mul(sequences);
        rows.min(self.footprint.pass_rows())
    }

    fn workspace(&self, sequences: usize, rows: usize) -> Result<Bytes> {
        self.footprint.workspace(&Passes {
            sequences,
            rows,
            states: match (self.blocks.state_bytes, rows) {
                (0, _) | (_, 1) => 1,
                _ => sequences.saturating_add(SNAPSHOTS),
            },
            context: self.context,
        })
    }

    /// Memory that a number of conversations needs if each runs its own prompts.
    fn of(&self, sequences: usize) -> Result<Needed> {
        let footprint = &self.footprint;
        let (weights, graphs) = (footprint.weights(), footprint.graph_bytes_bound());
        let mut workspace = self.workspace(sequences, self.pass_rows(sequences))?;
        let is_cuda = footprint.device().is_cuda();
        if !is_cuda {
            let own = self.workspace(1, self.pass_rows(1))?;
            workspace = workspace + own.times(sequences as u64 - 1);
        }
        let blocks = self.kv_bytes(sequences as u64);
        let model = weights + workspace;
        let kv = self.reserved.unwrap_or(blocks);
        let physical = self.blocks.physical_bytes(kv).saturating_add(graphs);
        Ok(Needed {
            accounted: model.total().saturating_add(kv),
            of_device: physical.saturating_add(match is_cuda {
                true => model.device,
                false => model.host.saturating_add(footprint.mapped_bytes()),
            }),
            kv_fits: self.reserved.is_none_or(|reserved| blocks <= reserved),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_that_fits_is_found() {
        for most in [0, 1, 2, 3, 100, MOST_SEQUENCES] {
            assert_eq!(most_that(|count| Ok(count <= most)).unwrap(), most);
        }
        assert_eq!(most_that(|_| Ok(true)).unwrap(), MOST_SEQUENCES);
    }
}
