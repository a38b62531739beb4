//! Converts tensors to NF4 and back, in host memory only: there are no GPU kernels for NF4.

use std::borrow::Cow;

use super::types::{float_input, row_major};
use crate::base::error::{Result, bail};
use crate::base::memory::{Buffer, Tag};
use crate::format::nf4;
use crate::tensor::{DType, Shape, Tensor};

/// Quantizes `x`, flattened, to NF4 blocks of `block` values: codes `[ceil(n / 2)]` as uint8 and `absmax` as float32.
pub fn quantize_nf4(x: &Tensor, block: usize) -> Result<(Tensor, Tensor)> {
    float_input(x, "the input")?;
    let packed = nf4::quantize(&x.to_f32()?, block)?;
    let codes = Tensor::build(&[packed.codes.len()], DType::U8, |bytes| {
        bytes.copy_from_slice(&packed.codes);
        Ok(())
    })?;
    let absmax = Tensor::from_f32(&packed.absmax, &[packed.absmax.len()], DType::F32)?;
    Ok((codes, absmax))
}

/// A tensor in NF4, flattened, its parts as tensors.
#[derive(Clone, Debug)]
pub struct Nf4Tensor {
    /// Packed codes, two to a byte, the first in the high nibble; uint8 of any shape.
    pub codes: Tensor,
    /// The largest magnitude of each block, of a floating type and any shape.
    pub absmax: Tensor,
    /// The 16 values of the codes, if not the standard ones.
    pub map: Option<Tensor>,
    /// Values in a block.
    pub block: usize,
}

/// The parts of an [`Nf4Tensor`] as plain numbers.
pub(super) struct Nf4Parts<'a> {
    codes: Cow<'a, [u8]>,
    absmax: Buffer<f32>,
    map: [f32; 16],
    block: usize,
}

impl Nf4Tensor {
    /// Reads and checks the parts of a tensor of `values` values.
    pub(super) fn read(&self, values: usize) -> Result<Nf4Parts<'_>> {
        if self.codes.dtype() != DType::U8 || !self.absmax.dtype().is_float() {
            bail!(
                InvalidArgument,
                "NF4 takes codes as uint8 and absmax of a floating type, not {} and {}",
                self.codes.dtype().name(),
                self.absmax.dtype().name()
            );
        }
        let map = match &self.map {
            None => nf4::VALUES,
            Some(map) if map.dtype().is_float() && map.shape().elements() == 16 => {
                let mut values = [0.0; 16];
                values.copy_from_slice(&map.to_f32()?);
                values
            }
            Some(map) => bail!(
                InvalidArgument,
                "the quant map is {} of shape {:?}; NF4 has 16 values of a floating type",
                map.dtype().name(),
                map.shape().sizes()
            ),
        };
        let codes = row_major(&self.codes)?;
        let absmax = self.absmax.to_f32()?;
        nf4::check(values, &codes, &absmax, self.block)?;
        Ok(Nf4Parts {
            codes,
            absmax,
            map,
            block: self.block,
        })
    }
}

impl Nf4Parts<'_> {
    /// Decodes the values from index `first` on.
    pub(super) fn expand(&self, first: usize, out: &mut [f32]) -> Result<()> {
        nf4::dequantize_from(first, &self.codes, &self.absmax, &self.map, self.block, out)
    }
}

/// Expands NF4 to a tensor of shape `sizes` and a floating `dtype`.
pub fn dequantize_nf4(x: &Nf4Tensor, sizes: &[usize], dtype: DType) -> Result<Tensor> {
    let mut out = Buffer::zeroed(Tag::Scratch, Shape::contiguous(sizes)?.elements())?;
    x.read(out.len())?.expand(0, &mut out)?;
    Tensor::from_f32(&out, sizes, dtype)
}

#[cfg(test)]
mod tests {
    use super::super::tests::random;
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn nf4_goes_both_ways() {
        let x = random(&[5, 13], 5, DType::F32);
        let (codes, absmax) = quantize_nf4(&x, 64).unwrap();
        assert_eq!(codes.shape().sizes(), [33]);
        assert_eq!(absmax.shape().sizes(), [2]);
        let mut q = Nf4Tensor {
            codes,
            absmax,
            map: None,
            block: 64,
        };
        let y = dequantize_nf4(&q, &[5, 13], DType::F32).unwrap();
        let packed = nf4::quantize(&x.to_f32().unwrap(), 64).unwrap();
        let mut wanted = vec![0.0; 65];
        nf4::dequantize(&packed.codes, &packed.absmax, &nf4::VALUES, 64, &mut wanted).unwrap();
        assert_eq!(&y.to_f32().unwrap()[..], wanted);
        expect_kind(
            dequantize_nf4(&q, &[5, 16], DType::F32),
            ErrorKind::InvalidArgument,
            "not 33 and 2",
        );
        q.map = Some(q.absmax.clone());
        expect_kind(
            dequantize_nf4(&q, &[5, 13], DType::F32),
            ErrorKind::InvalidArgument,
            "the quant map is float32 of shape [2]",
        );
    }
}
