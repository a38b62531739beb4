//! The parameters of a model under training, and the use of their gradients.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::OnceLock;

use twox_hash::XxHash3_64;

use super::adapter;
use super::beginning::Beginning;
use super::group::Group;
use super::inputs::ObservedInputs;
use super::offload::Offload;
use super::recipe::{Clip, Recipe, contains_one};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::Encoding;
use crate::format::adamw::GROUP_ROWS;
use crate::model::training::{
    Layout, MatrixId, ProjectionLayout, RowGradients, Source, Store, VectorId,
};
use crate::ops::training::array;
use crate::ops::training::operand::round_int8_rows;
use crate::ops::training::optimizer::{
    Coefficients, Hyperparameters, Matrix, RowsStep, StatePart, Vector, finish_steps, make_steps,
};
use crate::ops::training::statistics::{GradientStatistics, Statistics};
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// Gradient rows converted at a time.
const ROWS: usize = 1024;
const _: () = assert!(ROWS.is_multiple_of(GROUP_ROWS));

/// Settings of the current step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepPlan {
    /// The optimizer's settings, with this step's rate.
    pub(super) settings: Hyperparameters,
    /// Number of the step, from 1.
    pub(super) number: u64,
    /// Factor of all gradients, applied first.
    pub(super) factor: f32,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Norm of all gradients, before clipping.
    pub gradient_norm: f64,
    /// Weights whose stored code changed, and weights whose delivered code changed.
    pub changes: (u64, u64),
    /// Whether a gradient was not finite. Its parameter and all later ones were left unchanged.
    pub skipped: bool,
    /// Whether parameters had already been changed by then.
    pub partial: bool,
}

/// Optimizer settings that a group changes.
#[derive(Clone, Copy, Debug)]
struct Settings {
    rate_factor: f64,
    /// Replaces the optimizer's decay.
    decay: Option<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            rate_factor: 1.0,
            decay: None,
        }
    }
}

impl Settings {
    /// Settings of norms and biases, which have no decay.
    fn of_vectors() -> Settings {
        Settings {
            decay: Some(0.0),
            ..Settings::default()
        }
    }

    fn group(&mut self, group: &Group) {
        self.rate_factor = group.rate_factor;
        self.decay = group.decay.or(self.decay);
    }
}

/// The parameters of a model, in the stored form of a recipe.
#[derive(Debug)]
pub struct Parameters {
    device: Device,
    layout: Layout,
    recipe: Recipe,
    matrices: Vec<Matrix>,
    vectors: Vec<Vector>,
    trains: Vec<bool>,
    trains_vectors: Vec<bool>,
    /// Whether each matrix is trained in bfloat16 and delivered in int8 rows. Passes with delivered weights round such rows.
    rounds_rows: Vec<bool>,
    /// Whether each matrix has received gradients in the current step.
    came: Vec<bool>,
    /// Optimizer settings of each matrix, and of each vector.
    settings: Vec<Settings>,
    vector_settings: Vec<Settings>,
    /// Checksum of each frozen matrix.
    checksums: Vec<OnceLock<u64>>,
    /// Whether passes use the stored weights with their residuals, or the delivered weights.
    whole: bool,
    /// Gradient sum of each matrix, which waits for the end of a step.
    sums: Vec<Array>,
    /// The current step, which released gradients apply at once.
    plan: Option<StepPlan>,
    /// Statistics of the gradients received so far.
    statistics: GradientStatistics,
    report: StepReport,
    scratch: Array<Mixed>,
    /// Inputs of matrices, while passes record them.
    observed: Option<ObservedInputs>,
    /// Inputs of matrices with adapters.
    inputs: ObservedInputs,
}

impl Parameters {
    /// The initial parameters of a checkpoint.
    pub fn new(
        device: &Device,
        source: &Source,
        recipe: &Recipe,
        offload: Offload,
    ) -> Result<Parameters> {
        Self::with(device, source, recipe, offload, true)
    }

    /// The parameters of a checkpoint with zeros for everything trained, to be restored.
    pub(super) fn zeroed(
        device: &Device,
        source: &Source,
        recipe: &Recipe,
        offload: Offload,
    ) -> Result<Parameters> {
        Self::with(device, source, recipe, offload, false)
    }

    fn with(
        device: &Device,
        source: &Source,
        recipe: &Recipe,
        offload: Offload,
        filled: bool,
    ) -> Result<Parameters> {
        let layout = recipe.layout(source)?;
        let base = source.layout().matrices.len();
        let host = device.host_cpu()?;
        let beginning = Beginning::new(source, recipe, &host)?;
        let first = recipe.first_block(source.spec().blocks.len());
        let adapts = recipe.lora.is_some();
        let ids = 0..layout.matrices.len();
        let trains: Vec<bool> = ids.map(|id| recipe.trains(source, &layout, id)).collect();
        // The last norm is always trained.
        let trains_vectors = layout
            .vectors
            .iter()
            .map(|v| !adapts && v.block.is_none_or(|block| block >= first))
            .collect();
        let matrices = layout.matrices.iter().zip(&trains).enumerate();
        let matrices = matrices
            .map(|(id, (m, &trains))| {
                let matrix = match id >= base {
                    true => adapter::factor(device, &host, recipe, id, m, filled),
                    false => beginning.matrix(device, &host, id, (trains, filled)),
                };
                let offloaded = matrix.and_then(|mut matrix| {
                    if offload.moments {
                        matrix.offload_moments(device)?;
                    }
                    Ok(matrix)
                });
                offloaded.map_err(|e| e.within(&m.name))
            })
            .collect::<Result<Vec<_>>>()?;
        let vectors = (0..layout.vectors.len()).map(|id| Vector::new(device, &source.vector(id)?));
        let vectors = vectors.collect::<Result<Vec<_>>>()?;
        let is_rounded = |(id, &trains): (MatrixId, &bool)| {
            Ok(trains && id < base && beginning.encoding(id)? == Encoding::Int8)
        };
        let rounds_rows = trains.iter().enumerate().map(is_rounded);
        let rounds_rows = rounds_rows.collect::<Result<_>>()?;
        let mut parameters = Parameters {
            device: device.clone(),
            came: vec![false; matrices.len()],
            settings: vec![Settings::default(); matrices.len()],
            vector_settings: vec![Settings::of_vectors(); vectors.len()],
            checksums: matrices.iter().map(|_| OnceLock::new()).collect(),
            layout,
            recipe: recipe.clone(),
            matrices,
            vectors,
            trains,
            trains_vectors,
            rounds_rows,
            whole: true,
            sums: Vec::new(),
            plan: None,
            statistics: GradientStatistics::new(device)?,
            report: StepReport::default(),
            scratch: Array::empty(),
            observed: None,
            inputs: ObservedInputs::default(),
        };
        if !recipe.release {
            for (matrix, trains) in parameters.matrices.iter().zip(&parameters.trains) {
                let (rows, cols) = matrix.shape();
                let len = if *trains { rows * cols } else { 0 };
                parameters.sums.push(Array::scratch(device, len)?);
            }
        }
        Ok(parameters)
    }

    /// Applies to each parameter the settings of the first group that names it.
    pub(super) fn set_groups(&mut self, groups: &[Group]) -> Result<()> {
        let mut used = vec![false; groups.len()];
        let mut of = |name: &str, settings: &mut Settings, trains: bool| {
            let names = |group: &Group| contains_one(name, &group.names);
            if let Some(number) = groups.iter().position(names) {
                used[number] |= trains;
                settings.group(&groups[number]);
            }
        };
        let matrices = self.layout.matrices.iter().zip(&mut self.settings);
        let matrices = matrices.zip(&self.trains);
        matrices.for_each(|((m, settings), trains)| of(&m.name, settings, *trains));
        let vectors = self.layout.vectors.iter().zip(&mut self.vector_settings);
        let vectors = vectors.zip(&self.trains_vectors);
        vectors.for_each(|((v, settings), trains)| of(&v.name, settings, *trains));
        match used.iter().position(|used| !used) {
            Some(unused) => bail!(
                InvalidArgument,
                "no parameter that is trained is in the group of names {:?}: there is none of such a name, or groups before it have them all",
                groups[unused].names
            ),
            None => Ok(()),
        }
    }

    /// The device that holds them.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Lets passes record the inputs of matrices, until [`Parameters::observed_inputs`].
    pub(super) fn observe_inputs(&mut self) {
        self.observed = Some(ObservedInputs::default());
    }

    /// Stops the recording, and returns the inputs.
    pub(super) fn observed_inputs(&mut self) -> ObservedInputs {
        self.observed.take().unwrap_or_default()
    }

    /// The recorded inputs of matrices with adapters, if any.
    pub(super) fn inputs(&self) -> &ObservedInputs {
        &self.inputs
    }

    pub(super) fn set_inputs(&mut self, inputs: ObservedInputs) {
        self.inputs = inputs;
    }

    /// The inputs of matrices with adapters, for restoring.
    pub(super) fn inputs_mut(&mut self) -> &mut ObservedInputs {
        &mut self.inputs
    }

    /// The layout of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The matrices.
    pub fn matrices(&self) -> &[Matrix] {
        &self.matrices
    }

    /// The matrices, for restoring.
    pub(super) fn matrices_mut(&mut self) -> &mut [Matrix] {
        &mut self.matrices
    }

    /// The norms and biases.
    pub fn vectors(&self) -> &[Vector] {
        &self.vectors
    }

    /// The norms and biases, for restoring.
    pub(super) fn vectors_mut(&mut self) -> &mut [Vector] {
        &mut self.vectors
    }

    /// Checksum of the stored data of a frozen matrix; `None` for a trained one.
    pub(super) fn checksum(&self, id: MatrixId) -> Result<Option<u64>> {
        let matrix = &self.matrices[id];
        if self.trains[id] {
            return Ok(None);
        }
        if let Some(sum) = self.checksums[id].get() {
            return Ok(Some(*sum));
        }
        let mut sum = XxHash3_64::new();
        for part in [StatePart::Codes, StatePart::Scales, StatePart::Rest] {
            sum.write(&matrix.read_part(&self.device, part)?);
        }
        sum.write(&matrix.global().to_le_bytes());
        Ok(Some(*self.checksums[id].get_or_init(|| sum.finish())))
    }

    /// Checksum of a frozen norm or bias; `None` for a trained one.
    pub(super) fn vector_checksum(&self, id: VectorId) -> Result<Option<u64>> {
        if self.trains_vectors[id] {
            return Ok(None);
        }
        let [values, ..] = self.vectors[id].read_state()?;
        Ok(Some(XxHash3_64::oneshot(&values)))
    }

    /// Whether a matrix is trained.
    pub(super) fn is_trained(&self, id: MatrixId) -> bool {
        self.trains[id]
    }

    /// Whether a matrix may differ from its initial values: a step has changed it, or it has an adapter.
    pub(super) fn may_have_moved(&self, id: MatrixId) -> bool {
        let is_adapted = self.layout.adapted().any(|(adapted, _)| adapted == id);
        is_adapted || (self.trains[id] && self.matrices[id].has_moved())
    }

    /// Whether a norm or bias is trained.
    pub(super) fn is_trained_vector(&self, id: VectorId) -> bool {
        self.trains_vectors[id]
    }

    /// Rounds rows of a matrix to their delivered values, if passes use those and the stored form does not have them.
    fn round(&self, matrix: MatrixId, out: SliceMut<'_, Mixed>) -> Result<()> {
        match !self.whole && self.rounds_rows[matrix] {
            true => round_int8_rows(&self.device, out, self.matrices[matrix].shape().1),
            false => Ok(()),
        }
    }

    /// Bytes of all stored state.
    pub fn bytes(&self) -> usize {
        let matrices: usize = self.matrices.iter().map(Matrix::bytes).sum();
        let vectors: usize = self.vectors.iter().map(Vector::bytes).sum();
        matrices + vectors + self.inputs.bytes()
    }

    /// Number of elements of the trained matrices.
    pub fn trained(&self) -> usize {
        let trained = self
            .matrices
            .iter()
            .zip(&self.trains)
            .filter(|(_, trains)| **trains);
        trained
            .map(|(matrix, _)| matrix.shape().0 * matrix.shape().1)
            .sum()
    }

    /// Chooses the weights of passes: the stored ones if `whole`, else the delivered ones.
    pub(super) fn multiply_with_all(&mut self, whole: bool) {
        self.whole = whole;
    }

    /// Begins a step. Gradients arrive until [`Parameters::finish_step`].
    pub(super) fn begin_step(&mut self, plan: StepPlan) -> Result<()> {
        self.statistics.clear();
        self.report = StepReport::default();
        self.plan = Some(plan);
        self.came.fill(false);
        for sum in &mut self.sums {
            crate::ops::activation::fill(&self.device, sum.all_mut(), 0.0)?;
        }
        for vector in &mut self.vectors {
            vector.clear_gradient(&self.device)?;
        }
        Ok(())
    }

    /// Abandons a step. Returns whether released gradients had already changed parameters.
    pub(super) fn abandon_step(&mut self) -> bool {
        self.plan = None;
        self.report.partial
    }

    /// Optimizer coefficients of one tensor.
    fn coefficients(&self, plan: &StepPlan, factor: f64, of: Settings) -> Coefficients {
        let mut settings = plan.settings;
        settings.rate *= of.rate_factor;
        settings.decay = of.decay.unwrap_or(settings.decay);
        Coefficients::new(
            &settings,
            plan.number,
            (f64::from(plan.factor) * factor) as f32,
        )
    }

    /// Ends the step: updates the parameters whose gradients have waited.
    pub(super) fn finish_step(&mut self) -> Result<StepReport> {
        let Some(plan) = self.plan.take() else {
            bail!(Internal, "a step ended that had not begun");
        };
        let device = self.device.clone();
        for (vector, trains) in self.vectors.iter_mut().zip(&self.trains_vectors) {
            if *trains {
                let gradient = vector.gradient();
                self.statistics
                    .add_floats(&device, gradient.as_slice(), f32::INFINITY)?;
            }
        }
        let mut sums = std::mem::take(&mut self.sums);
        for (sum, came) in sums.iter().zip(&self.came) {
            if *came {
                self.statistics
                    .add_floats(&device, sum.all(), f32::INFINITY)?;
            }
        }
        let found = self.statistics.read(&device)?;
        self.report.skipped = !found.iter().all(Statistics::is_finite);
        // Released gradients came first, and were applied up to the first one that is not finite.
        self.report.partial &= found.first().is_some_and(Statistics::is_finite);
        let squares: f64 = found.iter().map(|of| of.squares).sum();
        self.report.gradient_norm = squares.sqrt() * f64::from(plan.factor);
        if !self.report.skipped {
            let factor = match self.recipe.clip {
                Clip::Global(most) | Clip::Previous(most) if self.report.gradient_norm > most => {
                    most / self.report.gradient_norm
                }
                _ => 1.0,
            };
            for (id, sum) in sums.iter_mut().enumerate() {
                if self.came[id] {
                    self.step_from(id, sum, &plan, factor)?;
                }
            }
            for id in 0..self.vectors.len() {
                if self.trains_vectors[id] {
                    let c = self.coefficients(&plan, factor, self.vector_settings[id]);
                    self.vectors[id].step(&self.device, &c)?;
                }
            }
            let all = self.matrices.iter_mut().zip(&self.came);
            let mut stepped: Vec<_> = all
                .filter(|(_, came)| **came)
                .map(|(matrix, _)| matrix)
                .collect();
            let changes = finish_steps(&device, &mut stepped)?;
            self.report.changes = (changes.stored, changes.delivered);
        }
        self.sums = sums;
        Ok(self.report)
    }

    /// Elements of the scratch in which stored gradients of a matrix are converted.
    pub(super) fn converted(rows: usize, cols: usize) -> usize {
        ROWS.min(rows) * cols
    }

    /// Steps a matrix by f32 gradients.
    fn step_from(&mut self, id: MatrixId, sum: &Array, plan: &StepPlan, factor: f64) -> Result<()> {
        let (rows, cols) = self.matrices[id].shape();
        let coefficients = self.coefficients(plan, factor, self.settings[id]);
        self.scratch
            .grow(&self.device, Self::converted(rows, cols))?;
        for first in (0..rows).step_by(ROWS) {
            let last = rows.min(first + ROWS);
            let len = (last - first) * cols;
            array::convert(
                &self.device,
                sum.part(first * cols..last * cols)?,
                self.scratch.first_mut(len)?,
            )?;
            let step = RowsStep {
                coefficients,
                seed: self.recipe.seed,
                tensor: id as u64,
                first_row: first,
                gradients: self.scratch.first(len)?,
                clip: None,
            };
            self.matrices[id].step(&self.device, &step)?;
        }
        Ok(())
    }

    /// Steps rows of matrices as their gradients arrive.
    fn step_at_once(&mut self, gradients: &[RowGradients<'_>]) -> Result<()> {
        let Some(plan) = self.plan else {
            bail!(Internal, "a gradient came outside a step");
        };
        let bound = match self.recipe.clip {
            Clip::PerTensor(most) => (most / f64::from(plan.factor)) as f32,
            _ => f32::INFINITY,
        };
        let numbers = gradients
            .iter()
            .map(|of| self.statistics.add(&self.device, of.values, bound))
            .collect::<Result<Vec<_>>>()?;
        self.report.partial = true;
        let mut of_rows = Vec::with_capacity(gradients.len());
        for (of, number) in gradients.iter().zip(numbers) {
            of_rows.push(RowsStep {
                coefficients: self.coefficients(&plan, 1.0, self.settings[of.matrix]),
                seed: self.recipe.seed,
                tensor: of.matrix as u64,
                first_row: of.first_row,
                gradients: of.values,
                clip: Some(self.statistics.factor(number)?),
            });
        }
        let matrices = self.matrices.iter_mut().enumerate();
        let mut steps: Vec<_> = matrices
            .filter_map(|(id, matrix)| {
                let of = gradients.iter().position(|of| of.matrix == id)?;
                Some((matrix, of_rows[of]))
            })
            .collect();
        make_steps(&self.device, &mut steps)
    }
}

impl Store for Parameters {
    fn shape(&self, matrix: MatrixId) -> (usize, usize) {
        self.matrices[matrix].shape()
    }

    fn read(
        &mut self,
        matrix: MatrixId,
        rows: Range<usize>,
        mut out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        self.matrices[matrix].decode(&self.device, rows, self.whole, out.reborrow())?;
        self.round(matrix, out)
    }

    fn embed(
        &mut self,
        matrix: MatrixId,
        tokens: &[u32],
        mut out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        self.matrices[matrix].decode_rows(&self.device, tokens, self.whole, out.reborrow())?;
        self.round(matrix, out)
    }

    fn vector(&self, vector: VectorId) -> Result<Slice<'_>> {
        Ok(self.vectors[vector].values())
    }

    fn vector_with_gradient(&mut self, vector: VectorId) -> Result<(Slice<'_>, SliceMut<'_>)> {
        Ok(self.vectors[vector].with_gradient())
    }

    fn observe(&mut self, projections: &[ProjectionLayout], x: Slice<'_, Mixed>) -> Result<()> {
        let Some(observed) = &mut self.observed else {
            return Ok(());
        };
        let adapts = self.recipe.lora.is_some();
        let counts = |p: &ProjectionLayout| p.adapter.is_some() || !adapts && self.trains[p.matrix];
        if !projections.iter().any(counts) {
            return Ok(());
        }
        let first = projections[0].matrix;
        let cols = self.matrices[first].shape().1;
        observed.add(&self.device, (first, cols), x)
    }

    fn trains(&self, matrix: MatrixId) -> bool {
        self.trains[matrix]
    }

    fn gradients(&mut self, gradients: &[RowGradients<'_>]) -> Result<()> {
        for of in gradients {
            self.came[of.matrix] = true;
        }
        if self.recipe.release {
            return self.step_at_once(gradients);
        }
        for of in gradients {
            let first = of.first_row * self.matrices[of.matrix].shape().1;
            let sums = self.sums[of.matrix].part_mut(first..first + of.values.len())?;
            array::accumulate(&self.device, sums, of.values)?;
        }
        Ok(())
    }
}
