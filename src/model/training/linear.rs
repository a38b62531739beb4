//! Projections of the same rows, forward and backward: one GEMM for all of them, their biases, and their adapters.

use super::layout::{AdapterLayout, Layout, ProjectionLayout};
use super::precision::Rounding;
use super::{MatrixId, RowGradients, Store};
use crate::base::Result;
use crate::ops::training::matmul::{GemmForm, Sizes, matmul};
use crate::ops::training::operand::{self, OperandRounding, ROTATED};
use crate::ops::training::{array, norm};
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// Scratch that projections use one after another.
#[derive(Debug)]
pub(super) struct LinearScratch {
    /// Concatenated biases, or their gradients.
    bias: Array,
    /// A factor of an adapter, or its gradients.
    factor: Array<Mixed>,
    /// `[T, rank]`: rows times the first factor, and output gradients times the second factor.
    inner: Array<Mixed>,
    dinner: Array<Mixed>,
    /// Rows, and output gradients, after rounding.
    rounded: Array<Mixed>,
    drounded: Array<Mixed>,
    /// `[T, n]`: one projection's columns of the concatenated output, or of its gradient.
    share: Array<Mixed>,
}

impl LinearScratch {
    pub(super) fn new() -> LinearScratch {
        LinearScratch {
            bias: Array::empty(),
            factor: Array::empty(),
            inner: Array::empty(),
            dinner: Array::empty(),
            rounded: Array::empty(),
            drounded: Array::empty(),
            share: Array::empty(),
        }
    }
}

/// Sizes of the scratch that projections use, in elements.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinearSizes {
    /// The matrices, and later their gradients.
    pub(super) weight: usize,
    /// Sizes of [`LinearScratch`]'s arrays.
    bias: usize,
    factor: usize,
    inner: usize,
    dinner: usize,
    rounded: usize,
    drounded: usize,
    share: usize,
}

/// The passes that projections run.
#[derive(Clone, Copy)]
pub(super) struct Passes {
    pub(super) forward: bool,
    pub(super) backward: bool,
    /// Whether the gradients of the rows are computed.
    pub(super) inputs: bool,
}

impl LinearSizes {
    /// Sizes for projections of `rows` rows. `trains` says which matrices get gradients.
    pub(super) fn new(
        layout: &Layout,
        projections: &[ProjectionLayout],
        rows: usize,
        rounding: &Rounding,
        (passes, trains): (Passes, &dyn Fn(MatrixId) -> bool),
    ) -> LinearSizes {
        let Passes {
            forward,
            backward,
            inputs,
        } = passes;
        let mut sizes = LinearSizes::default();
        if !forward && !backward {
            return sizes;
        }
        let matrices = projections.iter().map(|p| &layout.matrices[p.matrix]);
        let (n, k) = matrices.fold((0, 0), |(n, _), m| (n + m.rows, m.cols));
        sizes.weight = n * k;
        if projections.iter().any(|p| p.bias.is_some()) {
            sizes.bias = n;
        }
        let adapted = projections
            .iter()
            .filter_map(|p| Some((p.adapter?, p.matrix)));
        for (adapter, matrix) in adapted {
            let outputs = layout.matrices[matrix].rows;
            let inner = (rows * adapter.rank).next_multiple_of(PIECE);
            sizes.factor = sizes.factor.max(adapter.rank * k.max(outputs));
            sizes.inner = inner;
            sizes.dinner = if backward { inner } else { 0 };
            if outputs != n {
                sizes.share = sizes.share.max(rows * outputs);
            }
        }
        let trains = backward && projections.iter().any(|p| trains(p.matrix));
        let tokens = rows.next_multiple_of(ROTATED);
        match (rounding.gradients.is_some(), rounding.rows.is_some()) {
            // Both operands of the weight gradients are rotated.
            (true, _) if trains => sizes.rounded = tokens * k,
            (_, true) if forward || trains => sizes.rounded = rows * k,
            _ => {}
        }
        if rounding.gradients.is_some() && (trains || inputs) {
            sizes.drounded = n * if trains { tokens } else { rows };
        }
        sizes
    }

    /// Elementwise maximum, for uses that follow one another.
    pub(super) fn max(self, other: LinearSizes) -> LinearSizes {
        LinearSizes {
            weight: self.weight.max(other.weight),
            bias: self.bias.max(other.bias),
            factor: self.factor.max(other.factor),
            inner: self.inner.max(other.inner),
            dinner: self.dinner.max(other.dinner),
            rounded: self.rounded.max(other.rounded),
            drounded: self.drounded.max(other.drounded),
            share: self.share.max(other.share),
        }
    }

    /// Bytes of [`LinearScratch`]. An element of activations has `element` bytes.
    pub(super) fn scratch_bytes(&self, element: usize) -> usize {
        let elements =
            self.factor + self.inner + self.dinner + self.rounded + self.drounded + self.share;
        element * elements + size_of::<f32>() * self.bias
    }
}

/// Arrays of scratch have a multiple of this many elements, because kernels process that many at a time.
const PIECE: usize = 8;

/// Projections of the same rows `[T, k]`, with concatenated outputs `[T, n]`.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    pub(super) device: &'a Device,
    pub(super) projections: &'a [ProjectionLayout],
    /// T.
    pub(super) rows: usize,
    /// k.
    pub(super) inputs: usize,
    pub(super) rounding: Rounding,
}

/// A projection with an adapter, and the first of its columns in the concatenated output.
struct Adapted {
    adapter: AdapterLayout,
    first: usize,
    outputs: usize,
}

impl Linear<'_> {
    /// n.
    fn outputs(&self, store: &dyn Store) -> usize {
        let outputs = self.projections.iter().map(|p| store.shape(p.matrix).0);
        outputs.sum()
    }

    fn adapted(&self, store: &dyn Store) -> Vec<Adapted> {
        let mut first = 0;
        let mut all = Vec::new();
        for projection in self.projections {
            let outputs = store.shape(projection.matrix).0;
            if let Some(adapter) = projection.adapter {
                all.push(Adapted {
                    adapter,
                    first,
                    outputs,
                });
            }
            first += outputs;
        }
        all
    }

    /// Reads the matrices, one below the other; returns the total number of rows.
    fn read(&self, store: &mut dyn Store, to: &mut Array<Mixed>) -> Result<usize> {
        let n = self.outputs(store);
        to.grow(self.device, n * self.inputs)?;
        let mut at = 0;
        for projection in self.projections {
            let (rows, cols) = store.shape(projection.matrix);
            let part = to.part_mut(at..at + rows * cols)?;
            store.read(projection.matrix, 0..rows, part)?;
            at += rows * cols;
        }
        Ok(n)
    }

    /// Computes the output in `out`, or adds it to `out`. `weight` receives the matrices.
    pub(super) fn forward(
        &self,
        store: &mut dyn Store,
        x: Slice<'_, Mixed>,
        out: &mut Array<Mixed>,
        add: bool,
        (weight, s): (&mut Array<Mixed>, &mut LinearScratch),
    ) -> Result<()> {
        let (device, k) = (self.device, self.inputs);
        store.observe(self.projections, x)?;
        let n = self.read(store, weight)?;
        let len = self.rows * n;
        let sizes = Sizes { m: self.rows, n, k };
        let weight = weight.first(n * k)?;
        let rows = match self.rounding.rows {
            None => x,
            Some(rounding) => rounded_rows(device, x, k, rounding, &mut s.rounded)?,
        };
        let to = out.first_mut(len)?;
        matmul(device, GemmForm::NT, sizes, rows, weight, to, add)?;
        for adapted in self.adapted(store) {
            self.add_adapter(store, &adapted, n, x, out.first_mut(len)?, s)?;
        }
        if self.projections.iter().all(|p| p.bias.is_none()) {
            return Ok(());
        }
        s.bias.grow(device, n)?;
        let mut at = 0;
        for projection in self.projections {
            let rows = store.shape(projection.matrix).0;
            let mut to = s.bias.part_mut(at..at + rows)?;
            match projection.bias {
                Some(bias) => to.copy_from(store.vector(bias)?)?,
                None => crate::ops::activation::fill(device, to.reborrow(), 0.0)?,
            }
            at += rows;
        }
        norm::add_bias(device, out.first_mut(len)?, s.bias.first(n)?)
    }

    /// Computes the gradient of the rows in `dx`, from the output gradient `dy`. `weight` receives the matrices.
    pub(super) fn input_gradients(
        &self,
        store: &mut dyn Store,
        dy: Slice<'_, Mixed>,
        mut dx: SliceMut<'_, Mixed>,
        (weight, s): (&mut Array<Mixed>, &mut LinearScratch),
    ) -> Result<()> {
        let k = self.inputs;
        let n = self.read(store, weight)?;
        let sizes = Sizes::mnk(self.rows, k, n);
        let weight = weight.first(n * k)?;
        let gradients = match self.rounding.gradients {
            None => dy,
            Some([rounding, _]) => rounded_rows(self.device, dy, n, rounding, &mut s.drounded)?,
        };
        matmul(
            self.device,
            GemmForm::NN,
            sizes,
            gradients,
            weight,
            dx.reborrow(),
            false,
        )?;
        for adapted in self.adapted(store) {
            let rank = adapted.adapter.rank;
            self.take_share(&adapted, n, dy, s)?;
            self.inner_gradients(store, &adapted, dy, s)?;
            self.factor(store, adapted.adapter.a, s)?;
            let sizes = Sizes::mnk(self.rows, k, rank);
            matmul(
                self.device,
                GemmForm::NN,
                sizes,
                s.dinner.first(self.rows * rank)?,
                s.factor.first(rank * k)?,
                dx.reborrow(),
                true,
            )?;
        }
        Ok(())
    }

    /// Gives the store the gradients of those matrices, biases and adapters that it trains, from the output gradient `dy` and the rows `x`.
    /// `gradient` receives the matrices' gradients, and stays empty if they are frozen.
    pub(super) fn weight_gradients(
        &self,
        store: &mut dyn Store,
        dy: Slice<'_, Mixed>,
        x: Slice<'_, Mixed>,
        (gradient, s): (&mut Array<Mixed>, &mut LinearScratch),
    ) -> Result<()> {
        let (device, k, n) = (self.device, self.inputs, self.outputs(store));
        self.bias_gradients(store, dy, n, s)?;
        for adapted in self.adapted(store) {
            self.adapter_gradients(store, &adapted, n, dy, x, s)?;
        }
        if !self.projections.iter().any(|p| store.trains(p.matrix)) {
            return Ok(());
        }
        gradient.grow(device, n * k)?;
        let (dy, x, tokens) = match (self.rounding.gradients, self.rounding.rows) {
            (None, None) => (dy, x, self.rows),
            (None, Some(rounding)) => {
                let x = rounded_rows(device, x, k, rounding, &mut s.rounded)?;
                (dy, x, self.rows)
            }
            (Some([_, rounding]), rows) => {
                let tokens = self.rows.next_multiple_of(ROTATED);
                let dy = rotated(device, dy, (n, tokens), Some(rounding), &mut s.drounded)?;
                let x = rotated(device, x, (k, tokens), rows, &mut s.rounded)?;
                (dy, x, tokens)
            }
        };
        let sizes = Sizes::mnk(n, k, tokens);
        let to = gradient.first_mut(n * k)?;
        matmul(device, GemmForm::TN, sizes, dy, x, to, false)?;
        let mut of_trained = Vec::with_capacity(self.projections.len());
        let mut at = 0;
        for &ProjectionLayout { matrix, .. } in self.projections {
            let rows = store.shape(matrix).0;
            if store.trains(matrix) {
                of_trained.push(RowGradients {
                    matrix,
                    first_row: 0,
                    values: gradient.part(at * k..(at + rows) * k)?,
                });
            }
            at += rows;
        }
        store.gradients(&of_trained)
    }

    /// Gives the store gradients of zero for what it trains of the matrices and adapters: no row was multiplied by them.
    pub(super) fn no_gradients(
        &self,
        store: &mut dyn Store,
        (gradient, s): (&mut Array<Mixed>, &mut LinearScratch),
    ) -> Result<()> {
        let factors = self.projections.iter().filter_map(|p| p.adapter);
        let factors = factors.flat_map(|adapter| [adapter.b, adapter.a]);
        let matrices = self.projections.iter().map(|p| p.matrix);
        let all = factors
            .map(|id| (id, true))
            .chain(matrices.map(|id| (id, false)));
        for (matrix, is_factor) in all.filter(|(id, _)| store.trains(*id)).collect::<Vec<_>>() {
            let (rows, cols) = store.shape(matrix);
            let zeros = match is_factor {
                true => &mut s.factor,
                false => &mut *gradient,
            };
            zeros.grow(self.device, rows * cols)?;
            array::clear(self.device, zeros.first_mut(rows * cols)?)?;
            store.gradients(&[RowGradients {
                matrix,
                first_row: 0,
                values: zeros.first(rows * cols)?,
            }])?;
        }
        Ok(())
    }

    fn bias_gradients(
        &self,
        store: &mut dyn Store,
        dy: Slice<'_, Mixed>,
        n: usize,
        s: &mut LinearScratch,
    ) -> Result<()> {
        if self.projections.iter().all(|p| p.bias.is_none()) {
            return Ok(());
        }
        s.bias.grow(self.device, n)?;
        crate::ops::activation::fill(self.device, s.bias.first_mut(n)?, 0.0)?;
        norm::add_bias_backward(self.device, dy, s.bias.first_mut(n)?)?;
        let mut at = 0;
        for projection in self.projections {
            let rows = store.shape(projection.matrix).0;
            if let Some(bias) = projection.bias {
                let (_, to) = store.vector_with_gradient(bias)?;
                crate::ops::activation::add(self.device, to, s.bias.part(at..at + rows)?)?;
            }
            at += rows;
        }
        Ok(())
    }

    /// Reads a factor of an adapter into `s.factor`.
    fn factor(&self, store: &mut dyn Store, matrix: MatrixId, s: &mut LinearScratch) -> Result<()> {
        let (rows, cols) = store.shape(matrix);
        s.factor.grow(self.device, rows * cols)?;
        store.read(matrix, 0..rows, s.factor.first_mut(rows * cols)?)
    }

    /// `out += (scale * x A^T) B^T` in the columns of an adapter's projection.
    fn add_adapter(
        &self,
        store: &mut dyn Store,
        adapted: &Adapted,
        n: usize,
        x: Slice<'_, Mixed>,
        out: SliceMut<'_, Mixed>,
        s: &mut LinearScratch,
    ) -> Result<()> {
        let (adapter, outputs) = (adapted.adapter, adapted.outputs);
        self.inner(store, adapter, x, s)?;
        self.factor(store, adapter.b, s)?;
        let sizes = Sizes::mnk(self.rows, outputs, adapter.rank);
        let inner = s.inner.first(self.rows * adapter.rank)?;
        let b = s.factor.first(adapter.rank * outputs)?;
        if outputs == n {
            return matmul(self.device, GemmForm::NN, sizes, inner, b, out, true);
        }
        let len = self.rows * outputs;
        s.share.grow(self.device, len)?;
        let share = s.share.first_mut(len)?;
        matmul(self.device, GemmForm::NN, sizes, inner, b, share, false)?;
        array::add_columns(self.device, out, n, adapted.first, s.share.first(len)?)
    }

    /// Computes `scale * x A^T` in `s.inner`.
    fn inner(
        &self,
        store: &mut dyn Store,
        adapter: AdapterLayout,
        x: Slice<'_, Mixed>,
        s: &mut LinearScratch,
    ) -> Result<()> {
        self.factor(store, adapter.a, s)?;
        self.narrow(adapter, x, self.inputs, &s.factor, &mut s.inner)
    }

    /// Computes `scale` times rows of `width` elements times a transposed factor in `to` `[T, rank]`.
    fn narrow(
        &self,
        adapter: AdapterLayout,
        rows: Slice<'_, Mixed>,
        width: usize,
        factor: &Array<Mixed>,
        to: &mut Array<Mixed>,
    ) -> Result<()> {
        let sizes = Sizes::mnk(self.rows, adapter.rank, width);
        let len = self.rows * adapter.rank;
        to.grow(self.device, len.next_multiple_of(PIECE))?;
        let factor = factor.first(adapter.rank * width)?;
        let out = to.first_mut(len)?;
        matmul(self.device, GemmForm::NT, sizes, rows, factor, out, false)?;
        let all = to.first_mut(len.next_multiple_of(PIECE))?;
        array::scale(self.device, all, adapter.scale)
    }

    /// Copies the columns of an adapter's projection from the output gradient to `s.share`, unless they are all columns.
    fn take_share(
        &self,
        adapted: &Adapted,
        n: usize,
        dy: Slice<'_, Mixed>,
        s: &mut LinearScratch,
    ) -> Result<()> {
        let (len, first) = (self.rows * adapted.outputs, adapted.first);
        if adapted.outputs == n {
            return Ok(());
        }
        s.share.grow(self.device, len)?;
        array::copy_columns(self.device, dy, n, first, s.share.first_mut(len)?)
    }

    /// Computes `scale * dy B` in `s.dinner`, for an adapter whose share has been taken.
    fn inner_gradients(
        &self,
        store: &mut dyn Store,
        adapted: &Adapted,
        dy: Slice<'_, Mixed>,
        s: &mut LinearScratch,
    ) -> Result<()> {
        let (adapter, outputs) = (adapted.adapter, adapted.outputs);
        self.factor(store, adapter.b, s)?;
        let own = match dy.len() == self.rows * outputs {
            true => dy,
            false => s.share.first(self.rows * outputs)?,
        };
        self.narrow(adapter, own, outputs, &s.factor, &mut s.dinner)
    }

    /// Gives the store the gradients of an adapter's factors. Reads both factors before either may change.
    fn adapter_gradients(
        &self,
        store: &mut dyn Store,
        adapted: &Adapted,
        n: usize,
        dy: Slice<'_, Mixed>,
        x: Slice<'_, Mixed>,
        s: &mut LinearScratch,
    ) -> Result<()> {
        let (adapter, outputs, k) = (adapted.adapter, adapted.outputs, self.inputs);
        if !store.trains(adapter.a) {
            return Ok(());
        }
        self.take_share(adapted, n, dy, s)?;
        self.inner_gradients(store, adapted, dy, s)?;
        self.inner(store, adapter, x, s)?;
        let own = match outputs == n {
            true => dy,
            false => s.share.first(self.rows * outputs)?,
        };
        let narrow = self.rows * adapter.rank;
        for (matrix, left, right, width) in [
            (adapter.b, s.inner.first(narrow)?, own, outputs),
            (adapter.a, s.dinner.first(narrow)?, x, k),
        ] {
            let sizes = Sizes::mnk(adapter.rank, width, self.rows);
            let len = adapter.rank * width;
            s.factor.grow(self.device, len)?;
            let to = s.factor.first_mut(len)?;
            matmul(self.device, GemmForm::TN, sizes, left, right, to, false)?;
            store.gradients(&[RowGradients {
                matrix,
                first_row: 0,
                values: s.factor.first(len)?,
            }])?;
        }
        Ok(())
    }
}

/// Rounds rows of `width` elements into `to`.
fn rounded_rows<'a>(
    device: &Device,
    x: Slice<'_, Mixed>,
    width: usize,
    rounding: OperandRounding,
    to: &'a mut Array<Mixed>,
) -> Result<Slice<'a, Mixed>> {
    to.grow(device, x.len())?;
    operand::round_rows(device, x, width, rounding, to.first_mut(x.len())?)?;
    to.first(x.len())
}

/// Rotates rows of `width` elements along `tokens` tokens into `to`, and optionally rounds them.
fn rotated<'a>(
    device: &Device,
    x: Slice<'_, Mixed>,
    (width, tokens): (usize, usize),
    rounding: Option<OperandRounding>,
    to: &'a mut Array<Mixed>,
) -> Result<Slice<'a, Mixed>> {
    let len = tokens * width;
    to.grow(device, len)?;
    operand::round_columns(device, x, width, rounding, to.first_mut(len)?)?;
    to.first(len)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::format::operand::{global_of, rotate, rotated_amax, round_block};
    use crate::format::random::uniform;
    use crate::model::training::{ProductForm, ProductPrecision, VectorId};
    use crate::ops::training::operand::ScaleRule;

    const T: usize = 21;
    const K: usize = 32;
    const N: usize = 48;

    /// One matrix, and its gradient.
    struct One {
        weight: Vec<f32>,
        gradient: Vec<f32>,
    }

    impl Store for One {
        fn shape(&self, _: MatrixId) -> (usize, usize) {
            (N, K)
        }

        fn read(&mut self, _: MatrixId, _: Range<usize>, out: SliceMut<'_, Mixed>) -> Result<()> {
            out.copy_from(Slice::Host(&self.weight))
        }

        fn embed(&mut self, _: MatrixId, _: &[u32], _: SliceMut<'_, Mixed>) -> Result<()> {
            unreachable!("no embedding")
        }

        fn vector(&self, _: VectorId) -> Result<Slice<'_>> {
            unreachable!("no vector")
        }

        fn vector_with_gradient(&mut self, _: VectorId) -> Result<(Slice<'_>, SliceMut<'_>)> {
            unreachable!("no vector")
        }

        fn trains(&self, _: MatrixId) -> bool {
            true
        }

        fn gradients(&mut self, gradients: &[RowGradients<'_>]) -> Result<()> {
            self.gradient = gradients[0].values.host()?.to_vec();
            Ok(())
        }
    }

    fn values(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64)
            .map(|i| (2.0 * uniform(seed, i) - 1.0).powi(3))
            .collect()
    }

    fn amax(x: &[f32]) -> f32 {
        x.iter().fold(0f32, |most, v| most.max(v.abs()))
    }

    /// `[rows, width]`, rounded along rows.
    fn along_rows(x: &[f32], width: usize, rounding: Option<OperandRounding>) -> Vec<f32> {
        let Some(rounding) = rounding else {
            return x.to_vec();
        };
        let blocks = x.as_chunks::<16>().0.iter().enumerate();
        let rounded = blocks.map(|(b, block)| {
            let row = b * 16 / width;
            let global = global_of(amax(&x[row * width..][..width]));
            round_block(block, global, rounding, 16 * b as u32, 1)
        });
        rounded.flatten().collect()
    }

    /// `[rows up to a multiple of 16, width]`, rotated and rounded along columns.
    fn along_columns(x: &[f32], width: usize, rounding: Option<OperandRounding>) -> Vec<f32> {
        let rows = (x.len() / width).next_multiple_of(16);
        let mut y = vec![0.0; rows * width];
        let global = global_of(rotated_amax(amax(x)));
        for first in (0..rows).step_by(16) {
            for j in 0..width {
                let at = |i: usize| x.get((first + i) * width + j).copied().unwrap_or(0.0);
                let mut column = rotate(&std::array::from_fn(at));
                if let Some(rounding) = rounding {
                    let index = (first * width + j) as u32;
                    column = round_block(&column, global, rounding, index, width as u32);
                }
                for (i, v) in column.into_iter().enumerate() {
                    y[(first + i) * width + j] = v;
                }
            }
        }
        y
    }

    /// The sum over `k` of `a(i, p) * b(p, j)` in f64.
    fn product(
        (m, n, k): (usize, usize, usize),
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
    ) -> Vec<f64> {
        let at = |i: usize, j: usize| {
            let terms = (0..k).map(|p| f64::from(a(i, p)) * f64::from(b(p, j)));
            terms.sum()
        };
        (0..m * n).map(|i| at(i / n, i % n)).collect()
    }

    fn expect_near(what: &str, found: &[f32], exact: &[f64]) {
        assert_eq!(found.len(), exact.len());
        for (f, e) in found.iter().zip(exact) {
            assert!((f64::from(*f) - e).abs() < 1e-5, "{what}: {f}, not {e}");
        }
    }

    /// All three GEMMs of a projection in every precision, compared with f64 on operands rounded by the format.
    #[test]
    fn products_are_those_of_rounded_operands() {
        let device = Device::cpu(Some(2)).unwrap();
        let (x, dy, weight) = (values(1, T * K), values(2, T * N), values(3, N * K));
        let projections = [ProjectionLayout {
            matrix: 5,
            bias: None,
            adapter: None,
        }];
        let plain = product((N, K, T), |i, p| dy[p * N + i], |p, j| x[p * K + j]);
        for activations in [ProductForm::Bf16, ProductForm::Nvfp4] {
            for gradients in [ProductForm::Bf16, ProductForm::Nvfp4] {
                let precision = ProductPrecision {
                    activations,
                    activation_scales: ScaleRule::FourOverSix,
                    gradients,
                    high: Vec::new(),
                };
                let rounding = precision.of(&projections, 77);
                let linear = Linear {
                    device: &device,
                    projections: &projections,
                    rows: T,
                    inputs: K,
                    rounding,
                };
                let mut store = One {
                    weight: weight.clone(),
                    gradient: Vec::new(),
                };
                let (mut memory, mut s) = (Array::empty(), LinearScratch::new());
                let mut y = Array::scratch(&device, T * N).unwrap();
                let (rows, results) = (Slice::Host(&x), Slice::Host(&dy));
                let memory = &mut memory;
                linear
                    .forward(&mut store, rows, &mut y, false, (&mut *memory, &mut s))
                    .unwrap();
                let xq = along_rows(&x, K, rounding.rows);
                let exact = product((T, N, K), |i, p| xq[i * K + p], |p, j| weight[j * K + p]);
                expect_near("results", y.all().host().unwrap(), &exact);

                let mut dx = vec![0.0; T * K];
                let to = SliceMut::Host(&mut dx);
                linear
                    .input_gradients(&mut store, results, to, (&mut *memory, &mut s))
                    .unwrap();
                let dyq = along_rows(&dy, N, rounding.gradients.map(|of| of[0]));
                let exact = product((T, K, N), |i, p| dyq[i * N + p], |p, j| weight[p * K + j]);
                expect_near("gradients of rows", &dx, &exact);

                linear
                    .weight_gradients(&mut store, results, rows, (&mut *memory, &mut s))
                    .unwrap();
                let exact = match rounding.gradients {
                    None => product((N, K, T), |i, p| dy[p * N + i], |p, j| xq[p * K + j]),
                    Some([_, of]) => {
                        let dyr = along_columns(&dy, N, Some(of));
                        let xr = along_columns(&x, K, rounding.rows);
                        let tokens = T.next_multiple_of(16);
                        product((N, K, tokens), |i, p| dyr[p * N + i], |p, j| xr[p * K + j])
                    }
                };
                expect_near("gradients of the weight", &store.gradient, &exact);
                let same = activations == ProductForm::Bf16 && gradients == ProductForm::Bf16;
                let differs = store
                    .gradient
                    .iter()
                    .zip(&plain)
                    .any(|(a, b)| (f64::from(*a) - b).abs() > 1e-4);
                assert_eq!(same, !differs, "{precision:?}");
            }
        }
    }

    /// Without rounding, rotation leaves the product unchanged.
    #[test]
    fn rotation_leaves_products_as_they_are() {
        let (x, dy) = (values(1, T * K), values(2, T * N));
        let (xr, dyr) = (along_columns(&x, K, None), along_columns(&dy, N, None));
        let exact = product((N, K, T), |i, p| dy[p * N + i], |p, j| x[p * K + j]);
        let tokens = T.next_multiple_of(16);
        let rotated = product((N, K, tokens), |i, p| dyr[p * N + i], |p, j| xr[p * K + j]);
        for (a, b) in rotated.iter().zip(exact) {
            assert!((a - b).abs() < 1e-5, "{a}, not {b}");
        }
    }
}
