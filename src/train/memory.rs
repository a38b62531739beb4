//! What memory training takes, phase by phase, and what would fit where there is too little.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::adapter;
use super::curve::write_whole;
use super::trainer::{Config, Phase};
use crate::base::error::err;
use crate::base::memory::{self, Tag};
use crate::base::size::readable;
use crate::base::{Error, ErrorKind, Result};
use crate::model::training::{Recompute, Source};
use crate::ops::Device;
use crate::ops::training::optimizer::WeightForm;

const FILE: &str = "memory.json";

/// Use of memory at the ends of phases.
pub struct MemoryReport {
    device: Device,
    phases: Vec<Value>,
}

impl MemoryReport {
    /// A report that begins here, with the phase `start`.
    pub fn new(device: &Device) -> MemoryReport {
        let mut report = MemoryReport {
            device: device.clone(),
            phases: Vec::new(),
        };
        report.add("start");
        report
    }

    /// Notes that the model has been loaded.
    pub fn model_loaded(&mut self) {
        self.add("model_loaded");
    }

    /// Notes the end of a phase of a step.
    pub(super) fn phase(&mut self, phase: Phase) {
        self.add(match phase {
            Phase::BatchReady => "batch_ready",
            Phase::ZeroGradDone => "zero_grad_done",
            Phase::BackwardDone => "backward_done",
            Phase::OptimizerStepDone => "optimizer_step_done",
        });
    }

    fn add(&mut self, phase: &str) {
        let use_of = |u: memory::Usage| json!({"current": u.current, "peak": u.peak});
        let tags = Tag::ALL.map(|tag| (tag.name().to_owned(), use_of(memory::usage(tag))));
        let driver = match &self.device {
            Device::Cuda(gpu) => gpu
                .memory()
                .ok()
                .map(|(free, total)| json!({"used": total - free, "free": free, "total": total})),
            _ => None,
        };
        self.phases.push(json!({
            "phase": phase,
            "tags": tags.into_iter().collect::<Map<_, _>>(),
            "total": use_of(memory::total()),
            "driver": driver,
        }));
    }

    /// Writes the report to `memory.json` in `directory`.
    pub(super) fn write(
        &self,
        directory: &Path,
        state_bytes: usize,
        parameters: usize,
        released: bool,
    ) -> Result<()> {
        let note = match released {
            true => {
                "Gradients are released: parameters change while gradients come, so backward_done includes the optimizer's step, and \
                 optimizer_step_done adds norms and biases alone."
            }
            false => "Gradients are kept until all have come.",
        };
        let report = json!({
            "device": self.device.name(),
            "bytes": "current and peak of the library's own account, by tag; driver: what the whole device has in use",
            "note": note,
            "state_bytes": state_bytes,
            "parameters": parameters,
            "phases": self.phases,
        });
        let text = serde_json::to_string_pretty(&report)
            .map_err(|e| err!(Internal, "writing {FILE}: {e}"))?;
        write_whole(&directory.join(FILE), &(text + "\n"))
    }
}

/// Bytes that training takes, by what they are for; a little more is taken for what is small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Weights and moments.
    pub states: u64,
    /// Gradients that are kept.
    pub gradients: u64,
    /// What the passes of a micro-batch hold, and the products' weights.
    pub activations: u64,
}

impl Estimate {
    /// Of a micro-batch of `tokens` tokens.
    pub fn new(source: &Source, config: &Config, device: &Device, tokens: usize) -> Estimate {
        let spec = source.spec();
        let recipe = &config.recipe;
        // A layout that is refused is an error before there is anything to explain.
        let layout = &recipe
            .layout(source)
            .unwrap_or_else(|_| source.layout().clone());
        let base = source.layout().matrices.len();
        let element: u64 = if matches!(device, Device::Cuda(_)) {
            2
        } else {
            4
        };
        let (mut states, mut gradients, mut widest) = (0u64, 0u64, 0u64);
        for (id, m) in layout.matrices.iter().enumerate() {
            let weights = (m.rows * m.cols) as u64;
            let forms = recipe.forms_of(&m.name);
            let weight_bytes = |form: WeightForm| form.codes().of_block() + form.rest().of_block();
            let trains = recipe.trains(source, layout, id);
            let block_bytes = if id >= base {
                3 * weight_bytes(WeightForm::F32)
            } else if trains {
                forms.block_bytes()
            } else if recipe.lora.is_some() {
                let form = adapter::base_form(source, recipe, id, &m.name);
                weight_bytes(form.unwrap_or(WeightForm::F32))
            } else {
                weight_bytes(forms.weight)
            };
            states += weights / 16 * block_bytes as u64;
            if trains && !recipe.release {
                gradients += 4 * weights;
            }
            if m.block.is_some() {
                widest = widest.max(weights);
            }
        }
        states += layout
            .vectors
            .iter()
            .map(|v| 16 * v.len as u64)
            .sum::<u64>();
        let (t, hidden) = (tokens as u64, spec.hidden_size as u64);
        let (mut saved, mut most) = (0, 0);
        for block in &spec.blocks {
            let a = &block.attention;
            let q = (a.heads * a.head_dim) as u64;
            let width = q + 2 * (a.kv_heads * a.head_dim) as u64;
            let wide = block.mlp.intermediate_size() as u64;
            let post = if block.norms.post { hidden } else { 0 };
            let heads = a.heads as u64;
            let parts = config.recompute.parts();
            // Elements, f32 beside them, and whether they are computed again.
            let arrays = [
                (2 * hidden, 0, parts.norms),
                (width, 0, parts.qkv),
                (width, 0, parts.heads),
                (q, heads, parts.attention),
                (hidden + post, 0, parts.output),
                (2 * wide, 0, parts.gate_up),
                (post, 0, parts.down),
            ];
            let (mut kept, mut again) = (0, 0);
            for (elements, floats, recomputed) in arrays {
                let bytes = t * (element * elements + 4 * floats);
                *if recomputed { &mut again } else { &mut kept } += bytes;
            }
            most = most.max(again + t * element * (wide + 3 * hidden + q + width));
            saved += kept;
        }
        let streams = (spec.blocks.len() as u64 + 1) * t * hidden * element;
        let chunk = config.head_chunk.min(spec.vocab_size) as u64;
        let head = t * hidden * (element + 4) + t * chunk * (4 + element);
        let products = 2 * element * widest.max(chunk * hidden).max(2 * widest);
        Estimate {
            states,
            gradients,
            activations: streams + saved + most + head + products,
        }
    }

    /// All together.
    pub fn total(&self) -> u64 {
        self.states + self.gradients + self.activations
    }
}

/// Adds to an error of memory what training takes as it was asked for, and what would fit. `batch` windows of `window` tokens go through
/// the model at a time.
pub fn explain(
    error: Error,
    source: &Source,
    config: &Config,
    device: &Device,
    (batch, window): (usize, usize),
) -> Error {
    if !matches!(error.kind(), ErrorKind::OverBudget | ErrorKind::OutOfMemory) {
        return error;
    }
    let of = |config: &Config, tokens| Estimate::new(source, config, device, tokens);
    let asked = of(config, batch * window);
    let there = match (memory::budget(), device) {
        (Some(budget), _) => Some(budget),
        (None, Device::Cuda(gpu)) => gpu.memory().ok().map(|(_, total)| total as u64),
        (None, _) => memory::of_machine(),
    };
    let mut advice = String::new();
    if let Some(there) = there {
        advice = what_fits(&of, config, (batch, window), there);
    }
    Error::new(
        error.kind(),
        format_args!(
            "{error}; training as it was asked for takes about {}: {} for weights and moments, {} for gradients, {} for the passes of \
             {batch} x {window} tokens{advice}",
            readable(asked.total()),
            readable(asked.states),
            readable(asked.gradients),
            readable(asked.activations)
        ),
    )
}

/// The first of several ways to take less that fits in `there` bytes.
fn what_fits(
    of: &dyn Fn(&Config, usize) -> Estimate,
    config: &Config,
    (batch, window): (usize, usize),
    there: u64,
) -> String {
    let mut small = config.clone();
    let mut changes = Vec::new();
    let mut tokens = batch * window;
    let fits = |small: &Config, tokens| of(small, tokens).total() <= there;
    if !fits(&small, tokens) && small.recompute != Recompute::Block {
        small.recompute = Recompute::Block;
        changes.push("computing activations again (--recompute block)".to_owned());
    }
    if !fits(&small, tokens) && !small.recipe.release {
        small.recipe.release = true;
        changes.push("releasing gradients (--release-gradients)".to_owned());
    }
    if !fits(&small, tokens) && batch > 1 {
        let most = (1..batch)
            .rev()
            .find(|b| fits(&small, b * window))
            .unwrap_or(1);
        tokens = most * window;
        changes.push(format!("--batch {most}"));
    }
    if !fits(&small, tokens) {
        let mut less = window;
        while less > 64 && !fits(&small, less) {
            less /= 2;
        }
        tokens = less;
        changes.push(format!("--window {less}"));
    }
    let found = of(&small, tokens);
    if found.total() > there {
        return format!(
            "; of {}, that leaves no way: even {} takes {}",
            readable(there),
            changes.join(", "),
            readable(found.total())
        );
    }
    match changes.is_empty() {
        true => format!(
            "; {} are there, so something else must hold memory",
            readable(there)
        ),
        false => format!(
            "; about {}, which fits in {}, with {}",
            readable(found.total()),
            readable(there),
            changes.join(", ")
        ),
    }
}
