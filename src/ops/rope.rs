//! Rotary position embedding in the half-rotation form (Su et al., 2021): of the first `rotary_dim` elements of a head, element i
//! pairs with element i + rotary_dim / 2; the others pass unchanged.

use super::{Array, Device, Slice, SliceMut};
use crate::base::error::{Result, bail};
use crate::cuda;

/// The angular frequency of each pair, and the attention factor that some scalings (yarn, longrope) apply to cosine and sine.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position for each of the rotary_dim / 2 pairs.
    pub frequencies: Vec<f32>,
    /// Multiplies cosine and sine; 1 for most models.
    pub attention_factor: f32,
    /// How queries grow with their position, if they do.
    pub growth: Option<QueryGrowth>,
}

/// A factor of queries by their position: `1 + rate * ln(1 + floor(position / positions))` (Llama 4). It is 1 for the first positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// Its rate.
    pub rate: f32,
    /// Positions with the same factor.
    pub positions: usize,
}

impl QueryGrowth {
    fn factor(self, position: u32) -> f32 {
        let steps = (position as usize / self.positions) as f32;
        1.0 + self.rate * (1.0 + steps).ln()
    }
}

/// Cosines and sines of rows, computed once and used by every layer with the same rotation.
#[derive(Debug)]
pub struct Angles {
    /// Rotated pairs of a head.
    half: usize,
    /// `[rows, half]`.
    cos: Array,
    sin: Array,
    /// `[rows]`: the factors of queries; empty if they do not grow.
    query_factors: Array,
}

fn upload(device: &Device, values: &[f32]) -> Result<Array> {
    let mut array = Array::scratch(device, values.len())?;
    array
        .first_mut(values.len())?
        .copy_from(Slice::Host(values))?;
    Ok(array)
}

impl RopeTable {
    /// Rotated elements of a head.
    pub fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Elements of a row of [`Angles`].
    pub fn row_width(&self) -> usize {
        self.rotary_dim() + usize::from(self.growth.is_some())
    }

    /// Appends the cosines and sines of a position, one for each pair.
    fn push_angles(&self, position: u32, cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        for frequency in &self.frequencies {
            let angle = position as f32 * frequency;
            cos.push(angle.cos() * self.attention_factor);
            sin.push(angle.sin() * self.attention_factor);
        }
    }
}

impl Angles {
    /// The angles of rows at these positions, each from its own table; all tables have the same size.
    pub fn new<'a>(
        device: &Device,
        rows: impl Iterator<Item = (&'a RopeTable, u32)>,
    ) -> Result<Angles> {
        let (mut half, mut cos, mut sin) = (0, Vec::new(), Vec::new());
        let mut factors = Vec::new();
        for (table, position) in rows {
            half = table.frequencies.len();
            table.push_angles(position, &mut cos, &mut sin);
            factors.extend(table.growth.map(|growth| growth.factor(position)));
        }
        Ok(Angles {
            half,
            cos: upload(device, &cos)?,
            sin: upload(device, &sin)?,
            query_factors: match factors[..] {
                [] => Array::empty(),
                _ => upload(device, &factors)?,
            },
        })
    }

    /// The angles of consecutive documents of these lengths. Positions restart at 0 in each document, and queries do not grow.
    pub fn of_documents(device: &Device, table: &RopeTable, documents: &[usize]) -> Result<Angles> {
        let half = table.frequencies.len();
        let longest = documents.iter().copied().max().unwrap_or(0);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..longest as u32 {
            table.push_angles(position, &mut cos, &mut sin);
        }
        let packed = |of_positions: &[f32]| {
            let rows = documents
                .iter()
                .map(|length| &of_positions[..length * half]);
            upload(device, &rows.collect::<Vec<_>>().concat())
        };
        Ok(Angles {
            half,
            cos: packed(&cos)?,
            sin: packed(&sin)?,
            query_factors: Array::empty(),
        })
    }

    /// Cosines and sines, `[rows, rotary_dim / 2]` each.
    pub(super) fn cos_sin(&self) -> (Slice<'_>, Slice<'_>) {
        (self.cos.all(), self.sin.all())
    }
}

/// Rotates `x` `[m, heads, head_dim]` in place, row `i` by the angles of row `i`.
pub fn apply(
    device: &Device,
    x: SliceMut<'_>,
    heads: usize,
    head_dim: usize,
    angles: &Angles,
) -> Result<()> {
    let (half, row) = (angles.half, heads * head_dim);
    let rows = angles.cos.len().checked_div(half).unwrap_or(0);
    if half == 0 || 2 * half > head_dim || x.len() != rows * row {
        bail!(
            InvalidArgument,
            "rope: {} elements for {rows} positions of {heads} heads of {head_dim}, of which {} rotate",
            x.len(),
            2 * half
        );
    }
    let Device::Cpu(cpu) = device else {
        let (cos, sin) = (angles.cos.all().cuda()?, angles.sin.all().cuda()?);
        return cuda::rotate(x.cuda()?, heads, head_dim, cos, sin);
    };
    let (cosines, sines) = (angles.cos.all().host()?, angles.sin.all().host()?);
    for_each_row(cpu, x.host()?, row, |i, x| {
        let (cos, sin) = (&cosines[i * half..][..half], &sines[i * half..][..half]);
        for head in x.chunks_exact_mut(head_dim) {
            let (low, high) = head[..2 * half].split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    });
    Ok(())
}

/// Multiplies the rows of `queries`, `[m, width]`, by their factors, if they grow with their positions: on the CPU alone.
pub fn grow(device: &Device, queries: SliceMut<'_>, width: usize, angles: &Angles) -> Result<()> {
    if angles.query_factors.is_empty() {
        return Ok(());
    }
    let Device::Cpu(cpu) = device else {
        bail!(Internal, "queries that grow with their position on a GPU");
    };
    let factors = angles.query_factors.all().host()?;
    for_each_row(cpu, queries.host()?, width, |i, row| {
        row.iter_mut().for_each(|x| *x *= factors[i]);
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
    // Threads take whole rows, so a lock per row costs next to nothing and keeps this code safe.
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
            growth: None,
        };
        let (q, k) = ([0.3, -1.0, 0.7, 2.0], [1.5, 0.2, -0.4, 0.9]);
        let at = |x: [f32; 4], p: u32| {
            let mut x = x;
            let angles = Angles::new(&device, [(&table, p)].into_iter()).unwrap();
            apply(&device, SliceMut::Host(&mut x), 1, 4, &angles).unwrap();
            x
        };
        let dot = |a: [f32; 4], b: [f32; 4]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert!((dot(at(q, 9), at(q, 9)) - dot(q, q)).abs() < 1e-5);
        assert!((dot(at(q, 9), at(k, 4)) - dot(at(q, 25), at(k, 20))).abs() < 1e-5);
        assert!((dot(at(q, 9), at(k, 4)) - dot(at(q, 9), at(k, 3))).abs() > 1e-2);
    }

    #[test]
    fn a_part_of_a_head_rotates_and_the_rest_passes() {
        let device = Device::cpu(Some(1)).unwrap();
        let table = RopeTable {
            frequencies: vec![0.5],
            attention_factor: 3.0,
            growth: None,
        };
        let mut x = [1.0, 2.0, 5.0, 7.0];
        let angles = Angles::new(&device, [(&table, 2)].into_iter()).unwrap();
        apply(&device, SliceMut::Host(&mut x), 1, 4, &angles).unwrap();
        let (c, s) = (3.0 * 1f32.cos(), 3.0 * 1f32.sin());
        assert_eq!(x, [c - 2.0 * s, 2.0 * c + s, 5.0, 7.0]);
    }

    #[test]
    fn queries_grow_in_steps() {
        let device = Device::cpu(Some(1)).unwrap();
        let growth = QueryGrowth {
            rate: 0.5,
            positions: 4,
        };
        let table = RopeTable {
            frequencies: vec![0.0],
            attention_factor: 1.0,
            growth: Some(growth),
        };
        let positions = [0, 3, 4, 7, 8];
        let rows = positions.into_iter().map(|position| (&table, position));
        let angles = Angles::new(&device, rows).unwrap();
        let mut x = [2.0; 10];
        grow(&device, SliceMut::Host(&mut x), 2, &angles).unwrap();
        let [first, second] = [2f32, 3.0].map(|steps| 2.0 * (1.0 + 0.5 * steps.ln()));
        let want = [2.0, 2.0, first, first, second].map(|x| [x, x]);
        assert_eq!(x, want.concat()[..]);
    }
}
