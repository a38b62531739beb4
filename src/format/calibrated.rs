//! NVFP4 codes and block scales that are best for a GEMM, by all second moments of its inputs. The error of a row's product is `e^T M e`
//! with `e = w - q` and `M = E[x x^T]`; [`super::input_moments`] uses only the blocks on the diagonal of M.
//!
//! With `M = R R^T`, R upper triangular, the error is the sum of the squares of `(R^T e)_i = R_ii e_i + sum_{j<i} R_ji e_j`. A weight that
//! is rounded after others can therefore compensate for their errors: it goes to the code nearest to `w_i + s_i / R_ii`, where `s_i` is
//! that sum (Babai's nearest plane, which is GPTQ: Frantar et al., arXiv 2210.17323; Chen et al., arXiv 2507.18553). Here one block of 16
//! is rounded after another, each with the scale that is best at that point.

use super::input_moments::{BlockMoments, MOMENTS};
use super::nvfp4::BLOCK;

/// Blocks in the order of rounding. Those with the largest input energy come first, because more blocks then compensate for their errors.
pub fn by_energy(energies: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..energies.len()).collect();
    order.sort_by(|a, b| energies[*b].total_cmp(&energies[*a]));
    order
}

/// Upper triangular factor of a block's moments.
#[derive(Clone, Copy, Debug)]
pub struct BlockFactor {
    /// Row-major R, with `M = R R^T`.
    pub r: BlockMoments,
    /// Reciprocals of R's diagonal.
    pub inverses: [f32; BLOCK],
}

impl BlockFactor {
    /// Completes a factor with the reciprocals of its diagonal.
    pub fn new(r: BlockMoments) -> BlockFactor {
        BlockFactor {
            inverses: std::array::from_fn(|i| 1.0 / r[i * (BLOCK + 1)]),
            r,
        }
    }

    /// Factorizes moments. Moments that are not positive definite give zeros; damped ones always are.
    pub fn of(moments: &BlockMoments) -> BlockFactor {
        let mut r = [0f32; MOMENTS];
        for i in (0..BLOCK).rev() {
            for j in (0..=i).rev() {
                let products = (i + 1..BLOCK)
                    .map(|k| f64::from(r[i * BLOCK + k]) * f64::from(r[j * BLOCK + k]));
                let rest = f64::from(moments[j * BLOCK + i]) - products.sum::<f64>();
                r[j * BLOCK + i] = match i == j {
                    true if rest > 0.0 => rest.sqrt() as f32,
                    true => return BlockFactor::new([0.0; MOMENTS]),
                    false => (rest / f64::from(r[i * BLOCK + i])) as f32,
                };
            }
        }
        BlockFactor::new(r)
    }
}
