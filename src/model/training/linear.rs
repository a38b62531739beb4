//! Projections that take the same rows, forward and backward: one product for all of them, their biases, and their adapters.

use super::Store;
use super::layout::{AdapterLayout, ProjectionLayout};
use crate::base::Result;
use crate::ops::training::matmul::{Form, Sizes, matmul};
use crate::ops::training::{array, norm};
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// Memory that projections use one after another.
#[derive(Debug)]
pub(super) struct LinearScratch {
    /// Biases side by side, or their gradients.
    bias: Array,
    /// A factor of an adapter, or its gradients.
    factor: Array<Mixed>,
    /// `[T, rank]`: rows times the first factor, and gradients of results times the second one.
    inner: Array<Mixed>,
    dinner: Array<Mixed>,
    /// `[T, n]`: a projection's share of results that stand side by side, or of their gradients.
    share: Array<Mixed>,
}

impl LinearScratch {
    pub(super) fn new() -> LinearScratch {
        LinearScratch {
            bias: Array::empty(),
            factor: Array::empty(),
            inner: Array::empty(),
            dinner: Array::empty(),
            share: Array::empty(),
        }
    }
}

/// What arrays of working memory are a multiple of, as kernels take that many elements at a time.
const PIECE: usize = 8;

/// Projections of the same rows `[T, k]`, whose results `[T, n]` stand side by side.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    pub(super) device: &'a Device,
    pub(super) projections: &'a [ProjectionLayout],
    /// T.
    pub(super) rows: usize,
    /// k.
    pub(super) inputs: usize,
}

/// A projection with an adapter, and where its results begin among those of all.
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

    /// Reads the matrices, one below the other; gives the rows of all.
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

    /// Makes `out` the results, or adds them to it. `weight` takes the matrices.
    pub(super) fn forward(
        &self,
        store: &mut dyn Store,
        x: Slice<'_, Mixed>,
        out: &mut Array<Mixed>,
        add: bool,
        (weight, s): (&mut Array<Mixed>, &mut LinearScratch),
    ) -> Result<()> {
        let (device, k) = (self.device, self.inputs);
        let n = self.read(store, weight)?;
        let len = self.rows * n;
        let sizes = Sizes { m: self.rows, n, k };
        let weight = weight.first(n * k)?;
        matmul(device, Form::NT, sizes, x, weight, out.first_mut(len)?, add)?;
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

    /// Makes `dx` the gradients of the rows, from `dy` of the results. `weight` takes the matrices.
    pub(super) fn input_gradients(
        &self,
        store: &mut dyn Store,
        dy: Slice<'_, Mixed>,
        mut dx: SliceMut<'_, Mixed>,
        (weight, s): (&mut Array<Mixed>, &mut LinearScratch),
    ) -> Result<()> {
        let k = self.inputs;
        let n = self.read(store, weight)?;
        let sizes = Sizes {
            m: self.rows,
            n: k,
            k: n,
        };
        let weight = weight.first(n * k)?;
        matmul(
            self.device,
            Form::NN,
            sizes,
            dy,
            weight,
            dx.reborrow(),
            false,
        )?;
        for adapted in self.adapted(store) {
            let rank = adapted.adapter.rank;
            self.take_share(&adapted, n, dy, s)?;
            self.inner_gradients(store, &adapted, dy, s)?;
            self.factor(store, adapted.adapter.a, s)?;
            let sizes = Sizes {
                m: self.rows,
                n: k,
                k: rank,
            };
            matmul(
                self.device,
                Form::NN,
                sizes,
                s.dinner.first(self.rows * rank)?,
                s.factor.first(rank * k)?,
                dx.reborrow(),
                true,
            )?;
        }
        Ok(())
    }

    /// Gives the store the gradients of what it trains of the matrices, biases and adapters: from `dy` of the results, and the rows `x`.
    /// `gradient` takes the matrices' gradients, and nothing where they are frozen.
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
        let sizes = Sizes {
            m: n,
            n: k,
            k: self.rows,
        };
        let to = gradient.first_mut(n * k)?;
        matmul(device, Form::TN, sizes, dy, x, to, false)?;
        let mut at = 0;
        for projection in self.projections {
            let rows = store.shape(projection.matrix).0;
            if store.trains(projection.matrix) {
                let own = gradient.part(at * k..(at + rows) * k)?;
                store.gradient(projection.matrix, 0, own)?;
            }
            at += rows;
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
    fn factor(
        &self,
        store: &mut dyn Store,
        matrix: super::MatrixId,
        s: &mut LinearScratch,
    ) -> Result<()> {
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
        let sizes = Sizes {
            m: self.rows,
            n: outputs,
            k: adapter.rank,
        };
        let inner = s.inner.first(self.rows * adapter.rank)?;
        let b = s.factor.first(adapter.rank * outputs)?;
        if outputs == n {
            return matmul(self.device, Form::NN, sizes, inner, b, out, true);
        }
        let len = self.rows * outputs;
        s.share.grow(self.device, len)?;
        let share = s.share.first_mut(len)?;
        matmul(self.device, Form::NN, sizes, inner, b, share, false)?;
        array::add_columns(self.device, out, n, adapted.first, s.share.first(len)?)
    }

    /// Makes `s.inner` `scale * x A^T`.
    fn inner(
        &self,
        store: &mut dyn Store,
        adapter: AdapterLayout,
        x: Slice<'_, Mixed>,
        s: &mut LinearScratch,
    ) -> Result<()> {
        self.factor(store, adapter.a, s)?;
        let sizes = Sizes {
            m: self.rows,
            n: adapter.rank,
            k: self.inputs,
        };
        let len = self.rows * adapter.rank;
        s.inner.grow(self.device, len.next_multiple_of(PIECE))?;
        let a = s.factor.first(adapter.rank * self.inputs)?;
        let to = s.inner.first_mut(len)?;
        matmul(self.device, Form::NT, sizes, x, a, to, false)?;
        let all = s.inner.first_mut(len.next_multiple_of(PIECE))?;
        array::scale(self.device, all, adapter.scale)
    }

    /// Makes `s.share` the gradients of an adapter's projection among those of all, unless they are all.
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

    /// Makes `s.dinner` `scale * dy B`, of an adapter whose gradients have been taken.
    fn inner_gradients(
        &self,
        store: &mut dyn Store,
        adapted: &Adapted,
        dy: Slice<'_, Mixed>,
        s: &mut LinearScratch,
    ) -> Result<()> {
        let (adapter, outputs) = (adapted.adapter, adapted.outputs);
        self.factor(store, adapter.b, s)?;
        let sizes = Sizes {
            m: self.rows,
            n: adapter.rank,
            k: outputs,
        };
        let len = self.rows * adapter.rank;
        s.dinner.grow(self.device, len.next_multiple_of(PIECE))?;
        let own = match dy.len() == self.rows * outputs {
            true => dy,
            false => s.share.first(self.rows * outputs)?,
        };
        let b = s.factor.first(adapter.rank * outputs)?;
        let to = s.dinner.first_mut(len)?;
        matmul(self.device, Form::NT, sizes, own, b, to, false)?;
        let all = s.dinner.first_mut(len.next_multiple_of(PIECE))?;
        array::scale(self.device, all, adapter.scale)
    }

    /// Gives the store the gradients of an adapter's factors, which are both read before either may change.
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
            let sizes = Sizes {
                m: adapter.rank,
                n: width,
                k: self.rows,
            };
            let len = adapter.rank * width;
            s.factor.grow(self.device, len)?;
            let to = s.factor.first_mut(len)?;
            matmul(self.device, Form::TN, sizes, left, right, to, false)?;
            store.gradient(matrix, 0, s.factor.first(len)?)?;
        }
        Ok(())
    }
}
