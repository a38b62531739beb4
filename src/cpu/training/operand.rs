//! Rounds the operands of training's GEMMs to NVFP4, see [`crate::format::operand`], or to int8 rows, see [`crate::format::int8`].

use super::rows::by_parts;
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;
use crate::format::int8;
use crate::format::nvfp4::BLOCK;
use crate::format::operand::{
    OperandRounding, ROTATED, global_of, rotate, rotated_amax, round_block,
};

/// The largest magnitude; infinity if any value is not finite.
fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |most, v| match v.is_finite() {
        true => most.max(v.abs()),
        false => f32::INFINITY,
    })
}

impl Cpu {
    /// Rounds `x` `[rows, width]` in blocks along rows, with one global scale per row, to `y` of the same size. A row with a value that is
    /// not finite becomes NaN.
    pub fn round_rows(
        &self,
        x: &[f32],
        width: usize,
        rounding: OperandRounding,
        y: &mut [f32],
    ) -> Result<()> {
        check(x.len(), width)?;
        by_parts(self.pool(), y, width, |row, y| {
            let x = &x[row * width..][..width];
            let amax = amax(x);
            if amax.is_infinite() {
                return y.fill(f32::NAN);
            }
            let global = global_of(amax);
            let blocks = x.as_chunks::<BLOCK>().0.iter();
            for (b, (x, y)) in blocks.zip(y.as_chunks_mut::<BLOCK>().0).enumerate() {
                let index = (row * width + b * BLOCK) as u32;
                *y = round_block(x, global, rounding, index, 1);
            }
        });
        Ok(())
    }

    /// Rounds the rows of `x` `[rows, width]` to int8 in place, each with its own scale. A row with a value that is not finite becomes NaN.
    pub fn round_int8_rows(&self, x: &mut [f32], width: usize) -> Result<()> {
        check(x.len(), width)?;
        by_parts(self.pool(), x, width, |_, row| {
            let amax = amax(row);
            if amax.is_infinite() {
                return row.fill(f32::NAN);
            }
            let scale = int8::row_scale(amax);
            row.iter_mut()
                .for_each(|v| *v = int8::decode(int8::encode(*v, scale), scale));
        });
        Ok(())
    }

    /// Rotates `x` `[rows, width]` in groups of 16 rows, the last one padded with zeros, and writes it to `y`. If `rounding` is given, also
    /// rounds it in blocks of those 16, with one global scale. Everything becomes NaN if any value is not finite.
    pub fn round_columns(
        &self,
        x: &[f32],
        width: usize,
        rounding: Option<OperandRounding>,
        y: &mut [f32],
    ) -> Result<()> {
        check(x.len(), width)?;
        let amax = amax(x);
        if amax.is_infinite() {
            y.fill(f32::NAN);
            return Ok(());
        }
        let global = global_of(rotated_amax(amax));
        by_parts(self.pool(), y, ROTATED * width, |group, y| {
            let first = group * ROTATED * width;
            for column in 0..width {
                let at = |i: usize| x.get(first + i * width + column).copied().unwrap_or(0.0);
                let rotated = rotate(&std::array::from_fn(at));
                let values = match rounding {
                    None => rotated,
                    Some(rounding) => {
                        let index = (first + column) as u32;
                        round_block(&rotated, global, rounding, index, width as u32)
                    }
                };
                for (i, value) in values.into_iter().enumerate() {
                    y[i * width + column] = value;
                }
            }
        });
        Ok(())
    }
}

/// Refuses rows that are not whole blocks, and more elements than random bits are numbered for.
fn check(len: usize, width: usize) -> Result<()> {
    if width == 0 || !width.is_multiple_of(BLOCK) || !len.is_multiple_of(width) {
        bail!(
            Unsupported,
            "an operand of {len} elements in rows of {width} in NVFP4: rows must be multiples of {BLOCK}"
        );
    }
    Ok(())
}
