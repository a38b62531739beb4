//! Searches for the NVFP4 codes and scales of a matrix that minimize the error of its product: see [`crate::format::calibrated`].

use std::borrow::Cow;
use std::sync::Arc;

use super::{Array, Device};
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::Cpu;
use crate::cpu::moments::{Factor, Moments};
use crate::cpu::training::Rows;
use crate::cuda::{DeviceBuffer, calibrated as cuda, is_finite};
use crate::format::calibrated::{BlockFactor, by_energy};
use crate::format::input_moments;
use crate::format::nvfp4::{self, BLOCK, Nvfp4, QuantizeOptions};
use crate::tensor::DType;

/// Second moments of a matrix's inputs: one set for the search, damped and factored, and one to evaluate the result.
pub struct FullMoments {
    host: Arc<Cpu>,
    cols: usize,
    placed: Placed,
}

enum Placed {
    Cpu {
        seen: Moments,
        factor: Option<Factor>,
        kept: Vec<f32>,
    },
    Cuda {
        seen: cuda::Moments,
        factor: Option<cuda::Factor>,
        kept: Arc<DeviceBuffer>,
    },
}

/// How a search chooses scales and codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchBy<'a> {
    /// Chooses the scale of each block by the error of its weights.
    Weights(&'a QuantizeOptions),
    /// Chooses the scale of each block by the error of its product.
    Blocks,
    /// Processes blocks in order, each compensating the errors of those before it. Requires [`FullMoments::has_factor`].
    Turns,
}

/// Rows of a matrix, on the device where a search reads them.
#[derive(Debug)]
pub struct MatrixRows<'a> {
    values: Cow<'a, [f32]>,
    cols: usize,
    on_gpu: Option<cuda::Weights>,
}

/// Codes and scales found by a search, on its device.
#[derive(Debug)]
pub struct FoundCodes {
    rows: usize,
    cols: usize,
    global: f32,
    placed: PlacedCodes,
}

#[derive(Debug)]
enum PlacedCodes {
    Host(Nvfp4),
    Cuda(cuda::Codes),
}

impl FoundCodes {
    /// The matrix in host memory; waits for a GPU.
    pub fn read(self) -> Result<Nvfp4> {
        let of_gpu = match self.placed {
            PlacedCodes::Host(matrix) => return Ok(matrix),
            PlacedCodes::Cuda(codes) => codes,
        };
        let mut matrix = zeros(self.rows, self.cols, self.global);
        of_gpu.read(&mut matrix.codes, &mut matrix.scales)?;
        Ok(matrix)
    }
}

impl MatrixRows<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.cols
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    fn on_gpu(&self) -> Result<&cuda::Weights> {
        match &self.on_gpu {
            Some(weights) => Ok(weights),
            None => bail!(
                Internal,
                "a search on a GPU was given a matrix of host memory"
            ),
        }
    }
}

fn zeros(rows: usize, cols: usize, global: f32) -> Nvfp4 {
    Nvfp4 {
        rows,
        cols,
        codes: vec![0; rows * cols / 2],
        scales: vec![0; rows * cols / BLOCK],
        global,
    }
}

fn rows_of(matrix: &mut Nvfp4) -> Rows<'_> {
    Rows {
        codes: &mut matrix.codes,
        scales: &mut matrix.scales,
    }
}

/// The damping of a diagonal with this mean: `share` of it, or 1 if all inputs were zero.
fn damping(mean: f64, share: f32) -> f32 {
    match mean > 0.0 {
        true => mean as f32 * share,
        false => 1.0,
    }
}

impl FullMoments {
    /// Takes sums `[cols, cols]` on `device`, valid on and above the diagonal. Adds `share` of the mean of the diagonal to the diagonal of
    /// the sums for the search. Fails if a sum is not finite.
    pub fn new(
        device: &Device,
        host: &Arc<Cpu>,
        [seen, kept]: [Array; 2],
        cols: usize,
        share: f32,
    ) -> Result<FullMoments> {
        let placed = match device {
            Device::Cpu(_) => {
                let [mut seen, kept] = [on_host(&seen, cols)?, on_host(&kept, cols)?];
                let diagonal = (0..cols).map(|i| f64::from(seen[i * (cols + 1)]));
                let more = damping(diagonal.sum::<f64>() / cols as f64, share);
                (0..cols).for_each(|i| seen[i * (cols + 1)] += more);
                Placed::Cpu {
                    factor: host.factor(&seen, cols)?,
                    seen: host.moments(&seen, cols),
                    kept,
                }
            }
            Device::Cuda(_) => {
                for sums in [&seen, &kept] {
                    let values = sums.all().cuda()?;
                    check_finite(is_finite(values, (cols, cols), DType::F32)?)?;
                }
                let [seen, kept] = [seen.shared_on_gpu()?, kept.shared_on_gpu()?].map(Arc::clone);
                let mut blocks = cuda::diagonal_blocks(&seen, cols)?;
                let diagonal = |block: &[f32; BLOCK * BLOCK]| -> [f32; BLOCK] {
                    std::array::from_fn(|i| block[i * (BLOCK + 1)])
                };
                let all = blocks.iter().flat_map(diagonal).map(f64::from);
                let more = damping(all.sum::<f64>() / cols as f64, share);
                for block in &mut blocks {
                    (0..BLOCK).for_each(|i| block[i * (BLOCK + 1)] += more);
                }
                cuda::complete(&seen, cols, more)?;
                cuda::complete(&kept, cols, 0.0)?;
                let factors: Vec<_> = blocks.iter().map(|b| BlockFactor::of(b).r).collect();
                let energies = blocks.iter().map(|b| diagonal(b).iter().sum());
                let order: Vec<u32> = by_energy(&energies.collect::<Vec<_>>())
                    .into_iter()
                    .map(|block| block as u32)
                    .collect();
                let seen = cuda::Moments::new(seen, cols, &blocks, &factors)?;
                Placed::Cuda {
                    factor: seen.factor(cols, &order)?,
                    seen,
                    kept,
                }
            }
        };
        Ok(FullMoments {
            host: host.clone(),
            cols,
            placed,
        })
    }

    /// Whether the sums are positive definite, as damped sums usually are.
    pub fn has_factor(&self) -> bool {
        match &self.placed {
            Placed::Cpu { factor, .. } => factor.is_some(),
            Placed::Cuda { factor, .. } => factor.is_some(),
        }
    }

    /// Places rows `[rows, cols]` where the searches read them.
    pub fn rows<'a>(&self, values: impl Into<Cow<'a, [f32]>>) -> Result<MatrixRows<'a>> {
        let values = values.into();
        let on_gpu = match &self.placed {
            Placed::Cpu { .. } => None,
            Placed::Cuda { kept, .. } => Some(cuda::Weights::new(kept.gpu(), &values, self.cols)?),
        };
        Ok(MatrixRows {
            values,
            cols: self.cols,
            on_gpu,
        })
    }

    /// Runs one search: the codes and scales of finite weights under a given global scale.
    pub fn search(
        &self,
        by: SearchBy<'_>,
        rows: &MatrixRows<'_>,
        global: f32,
    ) -> Result<FoundCodes> {
        let placed = match (by, &self.placed) {
            (SearchBy::Weights(options), _) => {
                return self.place(self.swept(options, rows, global)?);
            }
            (SearchBy::Blocks, Placed::Cpu { seen, .. }) => {
                let mut matrix = zeros(rows.rows(), self.cols, global);
                let each = |row, codes: &mut [u8], scales: &mut [u8]| {
                    let blocks = seen.blocks();
                    input_moments::quantize_rows(rows.row(row), global, blocks, codes, scales);
                    Ok(())
                };
                self.host
                    .by_code_rows(self.cols, rows_of(&mut matrix), each)?;
                PlacedCodes::Host(matrix)
            }
            (SearchBy::Blocks, Placed::Cuda { seen, .. }) => {
                PlacedCodes::Cuda(seen.by_blocks(rows.on_gpu()?, global)?)
            }
            (SearchBy::Turns, Placed::Cpu { factor, .. }) => {
                let mut matrix = zeros(rows.rows(), self.cols, global);
                let out = rows_of(&mut matrix);
                let factor = present(factor.as_ref())?;
                self.host.round_in_turn(&rows.values, global, factor, out)?;
                PlacedCodes::Host(matrix)
            }
            (SearchBy::Turns, Placed::Cuda { factor, .. }) => {
                let factor = present(factor.as_ref())?;
                PlacedCodes::Cuda(factor.round_in_turn(rows.on_gpu()?, global)?)
            }
        };
        Ok(FoundCodes {
            rows: rows.rows(),
            cols: self.cols,
            global,
            placed,
        })
    }

    /// Places a matrix where errors are computed.
    pub fn place(&self, matrix: Nvfp4) -> Result<FoundCodes> {
        Ok(FoundCodes {
            rows: matrix.rows,
            cols: matrix.cols,
            global: matrix.global,
            placed: match &self.placed {
                Placed::Cpu { .. } => PlacedCodes::Host(matrix),
                Placed::Cuda { kept, .. } => {
                    PlacedCodes::Cuda(cuda::Codes::upload(kept.gpu(), &matrix)?)
                }
            },
        })
    }

    fn swept(
        &self,
        options: &QuantizeOptions,
        rows: &MatrixRows<'_>,
        global: f32,
    ) -> Result<Nvfp4> {
        let cols = self.cols;
        let mut matrix = zeros(rows.rows(), cols, global);
        let each = |row, codes: &mut [u8], scales: &mut [u8]| {
            nvfp4::quantize_rows(rows.row(row), cols, row, global, options, codes, scales)
        };
        self.host.by_code_rows(cols, rows_of(&mut matrix), each)?;
        Ok(matrix)
    }

    /// Block coordinate descent from the result of another search. In each pass, each block takes the scale and codes with the least error,
    /// given the other blocks.
    pub fn descend(
        &self,
        rows: &MatrixRows<'_>,
        passes: usize,
        found: &mut FoundCodes,
    ) -> Result<()> {
        let global = found.global;
        match (&self.placed, &mut found.placed) {
            (Placed::Cpu { seen, .. }, PlacedCodes::Host(matrix)) => {
                let out = rows_of(matrix);
                self.host.descend(&rows.values, global, seen, passes, out)
            }
            (Placed::Cuda { seen, .. }, PlacedCodes::Cuda(codes)) => {
                seen.descend(rows.on_gpu()?, passes, codes)
            }
            _ => elsewhere(),
        }
    }

    /// The sum over rows of `e^T M e`, with `e` the error of the codes (without codes, the weights themselves), and `M` the sums kept for
    /// evaluation.
    pub fn error(&self, rows: &MatrixRows<'_>, found: Option<&FoundCodes>) -> Result<f64> {
        let on_host = |matrix: &Nvfp4, kept: &[f32]| {
            let of = (&matrix.codes[..], &matrix.scales[..], matrix.global);
            self.host.product_error(&rows.values, kept, self.cols, of)
        };
        match (&self.placed, found.map(|f| &f.placed)) {
            (Placed::Cpu { kept, .. }, None) => on_host(&zeros(rows.rows(), self.cols, 1.0), kept),
            (Placed::Cpu { kept, .. }, Some(PlacedCodes::Host(matrix))) => on_host(matrix, kept),
            (Placed::Cuda { kept, .. }, None) => cuda::product_error(rows.on_gpu()?, None, kept),
            (Placed::Cuda { kept, .. }, Some(PlacedCodes::Cuda(codes))) => {
                cuda::product_error(rows.on_gpu()?, Some(codes), kept)
            }
            _ => elsewhere(),
        }
    }
}

fn elsewhere<T>() -> Result<T> {
    bail!(Internal, "codes and moments are on different devices")
}

fn present<F>(factor: Option<&F>) -> Result<&F> {
    match factor {
        Some(factor) => Ok(factor),
        None => bail!(Internal, "a search in turn by moments that have no factor"),
    }
}

fn check_finite(is_finite: bool) -> Result<()> {
    if !is_finite {
        bail!(
            InvalidArgument,
            "its inputs are not finite for the text that was given: the model computes infinities or NaN there"
        );
    }
    Ok(())
}

/// Reads sums `[cols, cols]`, filling both triangles.
fn on_host(sums: &Array, cols: usize) -> Result<Vec<f32>> {
    let mut values = vec![0f32; cols * cols];
    sums.all().read(&mut values)?;
    for row in 1..cols {
        for col in 0..row {
            values[row * cols + col] = values[col * cols + row];
        }
    }
    check_finite(values.iter().all(|v| v.is_finite()))?;
    Ok(values)
}
