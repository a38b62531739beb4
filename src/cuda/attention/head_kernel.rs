//! Kernels that are compiled for several sizes of heads.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

use super::ring::Ring;
use crate::base::Result;
use crate::base::error::err;
use crate::cuda::driver::Kernel;
use crate::cuda::units::Unit;

/// A kernel that is compiled for several sizes of heads. Its name says which one it is.
pub(super) struct HeadKernel<A> {
    pub(super) unit: Unit,
    pub(super) dim: usize,
    /// `None` for kernels of prompts.
    pub(super) ring: Option<Ring>,
    pub(super) name: &'static str,
    pub(super) arguments: PhantomData<fn(A)>,
}

impl<A> Clone for HeadKernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for HeadKernel<A> {}

impl<A> fmt::Debug for HeadKernel<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl<A> PartialEq for HeadKernel<A> {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl<A> Eq for HeadKernel<A> {}

impl<A> Hash for HeadKernel<A> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl<A> Kernel for HeadKernel<A> {
    type Arguments = A;
    type Unit = Unit;

    fn unit(self) -> Unit {
        self.unit
    }

    fn name(self) -> &'static str {
        self.name
    }
}

/// Declares the kernels with one parameter type: for each unit and ring, the sizes of heads, and what comes in the name before and after
/// them.
macro_rules! head_kernels {
    ($all:ident($arguments:ty): $($unit:ident, $ring:expr, $start:literal [$($dim:literal)+] $end:literal;)+) => {
        const $all: &[HeadKernel<$arguments>] = &[$($(HeadKernel {
            unit: Unit::$unit,
            dim: $dim,
            ring: $ring,
            name: concat!($start, $dim, $end),
            arguments: PhantomData,
        },)+)+];
    };
}

pub(super) use head_kernels;

/// The names of some kernels, and the bytes of their arguments.
pub(super) fn sizes<A: 'static>(
    kernels: &'static [HeadKernel<A>],
) -> impl Iterator<Item = (&'static str, usize)> {
    kernels.iter().map(|kernel| (kernel.name, size_of::<A>()))
}

/// The one of these kernels that `is` accepts.
pub(super) fn one<A>(
    kernels: &[HeadKernel<A>],
    dim: usize,
    is: impl Fn(&HeadKernel<A>) -> bool,
) -> Result<HeadKernel<A>> {
    let found = kernels
        .iter()
        .find(|kernel| kernel.dim == dim && is(kernel));
    found
        .copied()
        .ok_or_else(|| err!(Internal, "no attention kernel for heads of {dim} elements"))
}
