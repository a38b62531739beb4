//! Rotary position embedding in the half-rotation form: element i of a head pairs with element i + head_dim / 2.

use super::Device;
use crate::base::error::{Result, bail};

/// The angular frequency of each pair, and the factor on cosine and sine that some scalings (yarn) ask for.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position for each of the head_dim / 2 pairs.
    pub frequencies: Vec<f32>,
    /// Multiplies cosine and sine; 1 for most models.
    pub attention_factor: f32,
}

/// Cosines and sines for a run of positions, computed once and used by every layer.
#[derive(Clone, Debug)]
pub struct Angles {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Cosines and sines at `positions`.
    pub fn angles(&self, positions: &[u32]) -> Angles {
        let half = self.frequencies.len();
        let angles = || {
            positions
                .iter()
                .flat_map(|&p| self.frequencies.iter().map(move |f| p as f32 * f))
        };
        Angles {
            half,
            cos: angles().map(|a| a.cos() * self.attention_factor).collect(),
            sin: angles().map(|a| a.sin() * self.attention_factor).collect(),
        }
    }
}

/// Rotates `x` `[m, heads, head_dim]` in place, row `i` by the angles of position `i`.
pub fn apply(device: &Device, x: &mut [f32], heads: usize, angles: &Angles) -> Result<()> {
    let half = angles.half;
    let row = heads * half * 2;
    if row == 0 || x.len() != angles.cos.len() / half * row {
        bail!(
            InvalidArgument,
            "rope: {} elements for {} positions of {heads} heads of {}",
            x.len(),
            angles.cos.len().checked_div(half).unwrap_or(0),
            2 * half
        );
    }
    let cpu = device.host()?;
    for_each_row(cpu, x, row, |i, x| {
        let (cos, sin) = (
            &angles.cos[i * half..][..half],
            &angles.sin[i * half..][..half],
        );
        for head in x.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    });
    Ok(())
}

/// Calls `each(i, row)` for every row of `x`, over the device's threads.
fn for_each_row(
    cpu: &crate::cpu::Cpu,
    x: &mut [f32],
    row: usize,
    each: impl Fn(usize, &mut [f32]) + Sync,
) {
    use std::sync::Mutex;
    // Rows are handed out whole, so a lock per row costs nothing beside the row and keeps this safe code.
    let rows: Vec<Mutex<&mut [f32]>> = x.chunks_exact_mut(row).map(Mutex::new).collect();
    cpu.by_rows(rows.len(), row, |i| {
        each(i, &mut rows[i].lock().expect("no row is locked twice"))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_keeps_length_and_depends_on_distance() {
        let device = Device::cpu(Some(1)).unwrap();
        let table = RopeTable {
            frequencies: vec![1.0, 0.1],
            attention_factor: 1.0,
        };
        let (q, k) = ([0.3, -1.0, 0.7, 2.0], [1.5, 0.2, -0.4, 0.9]);
        let at = |x: [f32; 4], p: u32| {
            let mut x = x;
            apply(&device, &mut x, 1, &table.angles(&[p])).unwrap();
            x
        };
        let dot = |a: [f32; 4], b: [f32; 4]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert!((dot(at(q, 9), at(q, 9)) - dot(q, q)).abs() < 1e-5);
        assert!((dot(at(q, 9), at(k, 4)) - dot(at(q, 25), at(k, 20))).abs() < 1e-5);
        assert!((dot(at(q, 9), at(k, 4)) - dot(at(q, 9), at(k, 3))).abs() > 1e-2);
    }
}
