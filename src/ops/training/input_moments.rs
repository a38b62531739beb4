//! Second moments of the inputs of GEMMs, in blocks of 16: see [`crate::format::input_moments`].

use super::super::{Array, Device, Mixed, Slice};
use super::optimizer::{floats_of, put_floats};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::training as cuda;
use crate::format::nvfp4::BLOCK;

pub use crate::format::input_moments::{BlockMoments, MOMENTS};

/// Sums of products of inputs, in f32.
#[derive(Debug)]
pub struct InputMoments {
    sums: Array,
}

impl InputMoments {
    /// Zero sums, for rows of `cols` inputs.
    pub fn new(device: &Device, cols: usize) -> Result<InputMoments> {
        if cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                Unsupported,
                "second moments of {cols} inputs; there must be a multiple of {BLOCK}"
            );
        }
        Ok(InputMoments {
            sums: Array::zeroed(device, cols * BLOCK)?,
        })
    }

    /// Adds the rows `x` `[rows, cols]`, in order.
    pub fn add(&mut self, device: &Device, x: Slice<'_, Mixed>) -> Result<()> {
        let cols = self.sums.len() / BLOCK;
        if !x.len().is_multiple_of(cols) {
            bail!(Internal, "{} inputs are not rows of {cols}", x.len());
        }
        let sums = self.sums.all_mut();
        match device {
            Device::Cpu(cpu) => cpu.add_input_moments(x.host()?, cols, sums.host()?),
            Device::Cuda(_) => cuda::add_input_moments(x.cuda()?, cols, sums.cuda()?),
        }
    }

    /// Bytes of the sums for `cols` inputs.
    pub const fn bytes_of(cols: usize) -> usize {
        size_of::<f32>() * cols * BLOCK
    }

    /// Bytes of [`InputMoments::read_state`].
    pub fn state_bytes(&self) -> usize {
        self.sums.len() * size_of::<f32>()
    }

    /// The unprocessed sums, little-endian.
    pub fn read_state(&self) -> Result<Vec<u8>> {
        floats_of(&self.sums)
    }

    /// Restores the result of [`InputMoments::read_state`].
    pub fn write_state(&mut self, bytes: &[u8]) -> Result<()> {
        put_floats(&mut self.sums, bytes)
    }

    /// The damped sums, from which block scales can be chosen.
    pub fn read(&self) -> Result<Vec<BlockMoments>> {
        let mut sums = vec![[0.0; MOMENTS]; self.sums.len() / MOMENTS];
        self.sums.all().read(sums.as_flattened_mut())?;
        sums.iter_mut().for_each(crate::format::input_moments::damp);
        Ok(sums)
    }
}
