//! Adapters in the reference block: for the rows of each adapter in a pass, the low-rank products that are added to the outputs of
//! projections. They take the activations as they are, whatever the product with the weight makes of them.

use std::ops::Range;

use crate::base::Result;
use crate::base::error::bail;
use crate::model::Activations;
use crate::model::adapter::Adapter;
use crate::model::weights::Projection;
use crate::ops::linear::{Linear, linear};
use crate::ops::{Array, Device, Slice, SliceMut, Workspace};

/// Rows that are the input of projections.
#[derive(Clone, Copy)]
pub(super) struct InputRows<'r> {
    /// Number of rows.
    pub(super) count: usize,
    /// The rows with adapters among them.
    pub(super) adapted: &'r [AdaptedRows<'r>],
}

/// Rows with the same adapter.
pub(super) struct AdaptedRows<'a> {
    adapter: &'a Adapter,
    /// Ascending.
    rows: Vec<usize>,
}

/// Working memory of products.
#[derive(Debug)]
pub(super) struct Products {
    pub(super) workspace: Workspace,
    /// `[rows, inputs]`: the rows of an adapter, where they do not follow each other.
    taken: Array,
    /// `[rows, rank]` of each A factor.
    low: Array,
    /// `[rows, outputs]`: the product of a B factor.
    added: Array,
}

impl Default for Products {
    fn default() -> Self {
        Products {
            workspace: Workspace::new(),
            taken: Array::empty(),
            low: Array::empty(),
            added: Array::empty(),
        }
    }
}

impl Products {
    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        let arrays = [&self.taken, &self.low, &self.added];
        self.workspace.bytes() + arrays.map(Array::bytes).iter().sum::<usize>()
    }
}

/// The rows of segments that have adapters, adapter by adapter. A segment is its adapter and its rows.
pub(super) fn adapted_rows<'a>(
    segments: impl Iterator<Item = (Option<&'a Adapter>, Range<usize>)>,
) -> Vec<AdaptedRows<'a>> {
    let mut all: Vec<AdaptedRows<'a>> = Vec::new();
    let adapted = segments.filter_map(|(adapter, rows)| Some((adapter?, rows)));
    for (adapter, rows) in adapted {
        match all.iter_mut().find(|a| std::ptr::eq(a.adapter, adapter)) {
            Some(known) => known.rows.extend(rows),
            None => all.push(AdaptedRows {
                adapter,
                rows: rows.collect(),
            }),
        }
    }
    all
}

/// The adapted rows among `taken`, ascending rows of which an input is made: by their places in it.
pub(super) fn taken<'a>(
    adapted: &[AdaptedRows<'a>],
    taken: impl Iterator<Item = usize>,
) -> Vec<AdaptedRows<'a>> {
    if adapted.is_empty() {
        return Vec::new();
    }
    let taken: Vec<usize> = taken.collect();
    let of_adapter = |all: &AdaptedRows<'a>| AdaptedRows {
        adapter: all.adapter,
        rows: (0..taken.len())
            .filter(|&place| all.rows.binary_search(&taken[place]).is_ok())
            .collect(),
    };
    let adapted = adapted.iter().map(of_adapter);
    adapted.filter(|adapted| !adapted.rows.is_empty()).collect()
}

impl AdaptedRows<'_> {
    /// Adds `scale * B (A x)` to these rows of each output that the adapter has factors for. `x` is `[count, inputs]`, an output
    /// `[count, outputs]`. The bits of a row do not depend on other rows.
    pub(super) fn add(
        &self,
        device: &Device,
        x: Slice<'_>,
        count: usize,
        outputs: &mut [(&Projection, SliceMut<'_>)],
        products: &mut Products,
    ) -> Result<()> {
        let adapted = outputs.iter().enumerate();
        let adapted = adapted.filter_map(|(i, (p, _))| Some((i, self.adapter.factors(&p.name)?)));
        let adapted: Vec<_> = adapted.collect();
        if adapted.is_empty() {
            return Ok(());
        }
        let Products {
            workspace,
            taken,
            low,
            added,
        } = products;
        let n = self.rows.len();
        let x = self.input(device, x, count, taken)?;
        // Projections that a file stores as one share the A factor.
        let mut factors: Vec<&Linear> = Vec::new();
        for (_, of_output) in &adapted {
            if !factors.iter().any(|a| std::ptr::eq(*a, &*of_output.a)) {
                factors.push(&of_output.a);
            }
        }
        let len = factors.iter().map(|a| n * a.rows()).sum();
        low.grow(device, len)?;
        let mut rest = low.first_mut(len)?.host()?;
        let mut lows = Vec::with_capacity(factors.len());
        for a in factors {
            let (own, others) = rest.split_at_mut(n * a.rows());
            rest = others;
            lows.push((a, SliceMut::Host(own)));
        }
        linear(device, x, n, &mut lows, Activations::Exact, workspace)?;
        for (i, of_output) in adapted {
            let of_a = |(a, _): &&(&Linear, SliceMut<'_>)| std::ptr::eq(*a, &*of_output.a);
            let Some((_, low)) = lows.iter().find(of_a) else {
                bail!(Internal, "an adapter's product without its first factor");
            };
            let width = of_output.b.rows();
            added.grow(device, n * width)?;
            let out = added.first_mut(n * width)?;
            let product = &mut [(&of_output.b, out)];
            linear(
                device,
                low.as_slice(),
                n,
                product,
                Activations::Exact,
                workspace,
            )?;
            let added = added.first(n * width)?.host()?;
            let out = outputs[i].1.reborrow().host()?;
            for (row, added) in self.rows.iter().zip(added.chunks_exact(width)) {
                let out = &mut out[row * width..][..width];
                let scale = of_output.scale;
                out.iter_mut().zip(added).for_each(|(y, d)| *y += scale * d);
            }
        }
        Ok(())
    }

    /// The rows of `x` `[count, inputs]` that are these, in `taken` unless they follow each other.
    fn input<'x>(
        &self,
        device: &Device,
        x: Slice<'x>,
        count: usize,
        taken: &'x mut Array,
    ) -> Result<Slice<'x>> {
        let (n, width) = (self.rows.len(), x.len() / count);
        let (first, last) = match self.rows[..] {
            [] => (0, 0),
            [first, ..] => (first, self.rows[n - 1]),
        };
        if last + 1 - first == n {
            return x.part(first * width..(first + n) * width);
        }
        taken.grow(device, n * width)?;
        let (x, to) = (x.host()?, taken.first_mut(n * width)?.host()?);
        for (row, to) in self.rows.iter().zip(to.chunks_exact_mut(width)) {
            to.copy_from_slice(&x[row * width..][..width]);
        }
        taken.first(n * width)
    }
}
