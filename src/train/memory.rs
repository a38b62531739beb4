//! Memory of training: the use at the end of each phase, estimates, and advice on what would fit.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::adapter;
use super::beginning::Beginning;
use super::curve::write_whole;
use super::parameters::Parameters;
use super::trainer::{Config, Phase};
use crate::base::error::err;
use crate::base::host_memory;
use crate::base::memory::{self, Tag};
use crate::base::size::readable;
use crate::base::{Error, ErrorKind, Result};
use crate::cpu::Cpu;
use crate::model::training::{MatrixId, PassMemory, Placement, Recompute, Source, TeacherMemory};
use crate::ops::training::input_moments::InputMoments;
use crate::ops::training::optimizer::{Forms, Matrix};
use crate::ops::{Array, Device, Mixed};

const FILE: &str = "memory.json";
/// An estimate needs one part in this many in addition, for small allocations.
const MARGIN: u64 = 50;

/// Use of memory at the ends of phases.
pub struct MemoryReport {
    device: Device,
    phases: Vec<Value>,
}

impl MemoryReport {
    /// Begins a report with the phase `start`.
    pub fn new(device: &Device) -> MemoryReport {
        let mut report = MemoryReport {
            device: device.clone(),
            phases: Vec::new(),
        };
        report.add("start");
        report
    }

    /// Records that the model has been loaded.
    pub fn model_loaded(&mut self) {
        self.add("model_loaded");
    }

    /// Records the end of a phase of a step.
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

/// Estimate of the bytes that training takes, by purpose. Small allocations come on top.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Weights and moments.
    pub states: u64,
    /// Stored gradients, and offloaded moments in transfer.
    pub gradients: u64,
    /// Peak memory of a micro-batch's passes, with the decoded weights of a product.
    pub activations: u64,
    /// A teacher's weights.
    pub teacher: u64,
    /// The part of all these that a GPU run keeps in host memory.
    pub offloaded: u64,
}

impl Estimate {
    /// Estimates training with micro-batches of `tokens` tokens.
    pub fn new(source: &Source, config: &Config, device: &Device, tokens: usize) -> Estimate {
        Self::with_teacher(source, config, device, tokens, None)
    }

    /// [`Estimate::new`] with a teacher.
    pub fn with_teacher(
        source: &Source,
        config: &Config,
        device: &Device,
        tokens: usize,
        teacher: Option<(&Source, Placement)>,
    ) -> Estimate {
        let recipe = &config.recipe;
        // An invalid layout fails before there is anything to explain.
        let layout = &recipe
            .layout(source)
            .unwrap_or_else(|_| source.layout().clone());
        let trains = |id| recipe.trains(source, layout, id);
        let own = source.layout().matrices.len();
        let beginning = Cpu::new(Some(1)).and_then(|host| Beginning::new(source, recipe, &host));
        let forms_of = |id: MatrixId, trains: bool| match &beginning {
            _ if id >= own => adapter::FORMS,
            Ok(beginning) => beginning.forms(id, trains).unwrap_or_default(),
            Err(_) => Forms::default(),
        };
        let (mut states, mut gradients, mut converted) = (0, 0, 0);
        let (mut offloaded, mut passing, mut copied) = (0, 0, 0);
        let copies = config.chooses_scales_after(source).is_some();
        for (id, m) in layout.matrices.iter().enumerate() {
            let trains = trains(id);
            let forms = forms_of(id, trains);
            let bytes = |frozen| {
                Matrix::bytes_of(device, forms, frozen, m.rows, m.cols).unwrap_or_default()
            };
            states += bytes(!trains);
            if config.offload.moments {
                let moments = bytes(!trains) - bytes(true);
                offloaded += moments;
                passing = passing.max(Matrix::offload_room(moments));
            }
            // These stay in host memory until the step is taken.
            if trains && copies && forms.weight.is_packed() {
                copied += bytes(true);
            }
            if trains && !recipe.release {
                gradients += size_of::<f32>() * m.rows * m.cols;
                converted = converted.max(Parameters::converted(m.rows, m.cols));
            }
        }
        gradients += Array::<Mixed>::element_bytes(device) * converted + passing;
        if recipe.observes_adapted() {
            let adapted = layout
                .adapted()
                .map(|(id, _)| layout.first_with_inputs_of(id));
            let noted: BTreeSet<_> = adapted.collect();
            let bytes = |id: MatrixId| InputMoments::bytes_of(layout.matrices[id].cols);
            states += noted.into_iter().map(bytes).sum::<usize>();
        }
        // Vectors, with their moments and gradients.
        let vectors: usize = layout.vectors.iter().map(|v| v.len).sum();
        states += 4 * size_of::<f32>() * vectors;
        let pass = PassMemory {
            device,
            spec: source.spec(),
            layout,
            options: config.pass_options(),
            precision: &recipe.precision(layout),
            trains: &trains,
            first_block: recipe.first_block(layout.blocks.len()),
        };
        let away = pass.offloaded(tokens);
        let teacher = teacher.map(|(source, placement)| {
            TeacherMemory::new(device, source, placement, (tokens, config.head_chunk))
        });
        let passes = match teacher {
            None => pass.bytes(tokens),
            // The teacher's pass through the blocks comes before the model's own.
            Some(teacher) => (pass.resting_bytes(tokens) + teacher.blocks)
                .max(pass.lesson_bytes(tokens) + teacher.head),
        };
        Estimate {
            states: states as u64,
            gradients: gradients as u64,
            activations: (passes + away + copied) as u64,
            teacher: teacher.map_or(0, |teacher| teacher.weights) as u64,
            offloaded: match device.is_cuda() {
                true => (offloaded + away + copied) as u64,
                false => (offloaded + away) as u64,
            },
        }
    }

    /// Total bytes.
    pub fn total(&self) -> u64 {
        self.states + self.gradients + self.activations + self.teacher
    }
}

/// Where a teacher's weights are. All choices give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TeacherPlacement {
    /// On the device if both models fit, else [`TeacherPlacement::Streamed`].
    #[default]
    Auto,
    /// On the device.
    Resident,
    /// In the checkpoint's files. Each pass reads one matrix after another.
    Streamed,
}

impl TeacherPlacement {
    /// Chooses the place of a teacher's weights, beside training with micro-batches of `tokens` tokens.
    pub(super) fn resolve(
        self,
        source: &Source,
        config: &Config,
        device: &Device,
        (teacher, tokens): (&Source, usize),
    ) -> Placement {
        match self {
            TeacherPlacement::Resident => Placement::Resident,
            TeacherPlacement::Streamed => Placement::Streamed,
            TeacherPlacement::Auto => {
                let both = Some((teacher, Placement::Resident));
                let estimate = Estimate::with_teacher(source, config, device, tokens, both);
                match MemoryLimit::of_device(device) {
                    Some(room) if !room.has(&estimate) => Placement::Streamed,
                    _ => Placement::Resident,
                }
            }
        }
    }
}

/// Extends an out-of-memory error with the memory that the requested training takes, and with changes that would fit. `batch` windows of
/// `window` tokens go through the model, and through a teacher, at a time.
pub fn explain(
    error: Error,
    source: &Source,
    config: &Config,
    device: &Device,
    (batch, window): (usize, usize),
    teacher: Option<(&Source, TeacherPlacement)>,
) -> Error {
    if !matches!(error.kind(), ErrorKind::OverBudget | ErrorKind::OutOfMemory) {
        return error;
    }
    let placed = teacher.map(|(teacher, placement)| {
        let place = placement.resolve(source, config, device, (teacher, batch * window));
        (teacher, place)
    });
    let of = |plan: &Plan, tokens| {
        let teacher = placed.map(|(teacher, _)| (teacher, plan.teacher));
        Estimate::with_teacher(source, &plan.config, device, tokens, teacher)
    };
    let plan = Plan {
        config: config.clone(),
        teacher: placed.map_or(Placement::Streamed, |(_, placement)| placement),
    };
    let asked = of(&plan, batch * window);
    let mut advice = String::new();
    if let Some(room) = MemoryLimit::of_device(device) {
        advice = what_fits(&of, &plan, (batch, window), room);
    }
    let of_teacher = match asked.teacher {
        0 => String::new(),
        bytes => format!(", {} for the teacher's weights", readable(bytes)),
    };
    Error::new(
        error.kind(),
        format_args!(
            "{error}; training as it was asked for takes about {}: {} for weights and moments, {} for gradients{of_teacher}, {} for the \
             passes of {batch} x {window} tokens{advice}",
            readable(asked.total()),
            readable(asked.states),
            readable(asked.gradients),
            readable(asked.activations)
        ),
    )
}

/// A training setup, as far as memory depends on it.
#[derive(Clone)]
struct Plan {
    config: Config,
    teacher: Placement,
}

/// The available memory.
#[derive(Clone, Copy)]
enum MemoryLimit {
    /// A budget for all memory, wherever it is.
    Budget(u64),
    /// Memory of a GPU, from which something may be offloaded.
    Device { bytes: u64, offloads: bool },
}

impl MemoryLimit {
    /// The memory for training: the budget, or the device's memory.
    fn of_device(device: &Device) -> Option<MemoryLimit> {
        match (memory::budget(), device) {
            (Some(budget), _) => Some(MemoryLimit::Budget(budget)),
            (None, Device::Cuda(gpu)) => gpu.memory().ok().map(|(_, total)| MemoryLimit::Device {
                bytes: total as u64,
                offloads: device.check_offload().is_ok(),
            }),
            // The library's own memory counts as available: it is freed before another try.
            (None, _) => host_memory::read().map(|host| {
                MemoryLimit::Budget(host.total.min(host.available + memory::on_host()))
            }),
        }
    }

    /// Whether an estimate fits.
    fn has(self, estimate: &Estimate) -> bool {
        self.of(estimate) + self.of(estimate) / MARGIN <= self.bytes()
    }

    fn bytes(self) -> u64 {
        match self {
            MemoryLimit::Budget(bytes) | MemoryLimit::Device { bytes, .. } => bytes,
        }
    }

    /// The part of an estimate that counts.
    fn of(self, estimate: &Estimate) -> u64 {
        match self {
            MemoryLimit::Budget(_) => estimate.total(),
            MemoryLimit::Device { .. } => estimate.total() - estimate.offloaded,
        }
    }
}

/// The first of several reductions that fits.
fn what_fits(
    of: &dyn Fn(&Plan, usize) -> Estimate,
    plan: &Plan,
    (batch, window): (usize, usize),
    room: MemoryLimit,
) -> String {
    let there = room.bytes();
    let mut small = plan.clone();
    let mut changes = Vec::new();
    let mut tokens = batch * window;
    let fits = |small: &Plan, tokens| room.has(&of(small, tokens));
    if !fits(&small, tokens) && small.teacher == Placement::Resident {
        small.teacher = Placement::Streamed;
        changes.push(
            "the teacher's weights read as they are needed (--teacher-memory streamed)".to_owned(),
        );
    }
    if !fits(&small, tokens) && small.config.recompute != Recompute::Block {
        small.config.recompute = Recompute::Block;
        changes.push("computing activations again (--recompute block)".to_owned());
    }
    if !fits(&small, tokens) && !small.config.recipe.release {
        small.config.recipe.release = true;
        changes.push("releasing gradients (--release-gradients)".to_owned());
    }
    if !fits(&small, tokens)
        && let MemoryLimit::Device { offloads: true, .. } = room
        && !small.config.offload.moments
    {
        small.config.offload.moments = true;
        changes.push("moments in the host's memory (--offload moments)".to_owned());
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
    if !room.has(&found) {
        return format!(
            "; of {}, that leaves no way: even {} takes {}",
            readable(there),
            changes.join(", "),
            readable(room.of(&found))
        );
    }
    match changes.is_empty() {
        true => format!(
            "; {} are there, so something else must hold memory",
            readable(there)
        ),
        false => format!(
            "; about {}, which fits in {}, with {}",
            readable(room.of(&found)),
            readable(there),
            changes.join(", ")
        ),
    }
}
