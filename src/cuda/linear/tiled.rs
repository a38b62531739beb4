//! The tiled GEMM kernels, for tens of rows with NVFP4 weights.

use std::fmt;

use super::adapted_rows::{AdaptedRows, AdapterDivision};
use super::hardware::Hardware;
use super::input::Input;
use super::matrix::{Biased, CHUNK_K, MatrixShape, matrix_arguments};
use super::output::{Layout, Output};
use super::tile::{Tile, WARPS};
use super::tiled_adapted::AdaptedTiling;
use super::tiles::{MOST_SPLIT_K, TileKernel, TileVariant, TiledArguments, Tiles};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use crate::cuda::kernel::kernels;

kernels! {
    /// Converts rows to [`Layout::FragmentMajor`].
    enum ToFragments(ToFragmentsArguments) {
        LinearRows { Rows = "linear_to_fragments" }
    }
}

/// Output code of kernels with a gated activation, which selects the layout of the result.
const STORE_ROWS: i32 = 0;
const STORE_ORDERED: i32 = 3;

#[repr(C)]
struct ToFragmentsArguments {
    x: u64,
    y: u64,
    k: i32,
}

/// The launches of a GEMM by a tiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    tiles: Tiles,
    /// Converts row-major activations to fragment-major ones first.
    order: Option<Planned<ToFragments>>,
    /// Its grid has CTAs along features, along rows, and along K.
    gemm: Planned<TileVariant>,
    /// Ranges of K, each with a sum of its own.
    split_k: usize,
    /// Adds up the accumulators of CTAs along K that form no cluster.
    sum: Option<Planned<TileVariant>>,
    /// The launch that takes the place of `gemm` for rows with adapters.
    pub(super) adapted: Option<AdaptedTiling>,
}

impl Tiling {
    /// The launches for `m` rows in a layout. `None` if the kernel does not take the layout or lacks the epilogue. `divides` says whether
    /// there is scratch memory for split-K.
    pub(super) fn choose(
        hardware: &Hardware,
        kernel: TileKernel,
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        layout: Layout,
        divides: bool,
    ) -> Option<Tiling> {
        let k = matrices[0].cols;
        let order = match (kernel, layout) {
            (TileKernel::Tiled, Layout::RowMajor) | (TileKernel::Wide, Layout::FragmentMajor) => {
                None
            }
            (TileKernel::Wide, Layout::RowMajor) => {
                let threads = k.next_multiple_of(CHUNK_K) / 8;
                let launch = Launch::new([m as u32, threads.div_ceil(256) as u32, 1], 256);
                Some(launch.of(ToFragments::Rows))
            }
            (TileKernel::Tiled, Layout::FragmentMajor) => return None,
        };
        let glu = output.applied().is_some();
        if glu && !kernel.has_glu() {
            return None;
        }
        let features = features(matrices, output);
        let tiles = |columns, whole| Tiles {
            kernel,
            glu,
            columns,
            whole,
        };
        let most_rows = kernel.most_rows();
        let along_features = along_features(kernel, &features);
        let ranges = match kernel {
            TileKernel::Wide if hardware.deterministic => Some(ranges(hardware, matrices, output)),
            _ => None,
        };
        let tiles = match ranges {
            // Many rows keep the device busy without CTAs that share K, and so do many features.
            Some(ranges) if ranges.count > 1 && (m > most_rows || !ranges.fit_clusters) => {
                let least = if glu { 32 } else { 64 };
                let blocks = along_features * m.div_ceil(most_rows);
                // CTAs of half the rows keep more multiprocessors busy.
                let most = match 3 * blocks < 2 * hardware.multiprocessors {
                    true => most_rows / 2,
                    false => most_rows,
                };
                tiles(m.next_power_of_two().clamp(least, most), true)
            }
            _ => tiles(m.next_power_of_two().clamp(8, most_rows), false),
        };
        let along_rows = m.div_ceil(tiles.columns);
        let split_k = match kernel {
            TileKernel::Tiled if !divides || hardware.deterministic => 1,
            _ => match ranges {
                Some(ranges) => ranges.count,
                None => split_k(tiles, hardware, along_features * along_rows, k),
            },
        };
        let along_k = if tiles.whole { 1 } else { split_k };
        let all: usize = features.iter().sum();
        let sum = Launch::new([all.div_ceil(256) as u32, m as u32, 1], 256);
        let sums = kernel == TileKernel::Tiled && split_k > 1;
        Some(Tiling {
            tiles,
            order,
            gemm: tiles.planned([along_features, along_rows, along_k]),
            split_k,
            sum: sums.then(|| sum.of(TileVariant::TiledSum)),
            adapted: None,
        })
    }

    /// These launches by a kernel that applies the adapters of its rows. `None` if there is none.
    pub(super) fn for_adapted_rows(
        &self,
        hardware: &Hardware,
        matrices: &[MatrixShape],
        division: AdapterDivision,
    ) -> Option<Tiling> {
        let [along_features, along_rows, split_k] = self.gemm.launch.grid.map(|n| n as usize);
        if along_rows > 1 || hardware.deterministic {
            return None;
        }
        let tiles = self.tiles;
        let chosen =
            AdaptedTiling::choose(hardware, tiles, along_features, split_k, matrices, division);
        chosen.map(|(adapted, split_k)| Tiling {
            split_k,
            adapted: Some(adapted),
            ..*self
        })
    }
}

/// The output features of each matrix, or of those that a gated activation joins.
fn features(matrices: &[MatrixShape], output: Output) -> Vec<usize> {
    match output {
        // A CTA has half as many features of each matrix. A fragment-major result is padded with zeros.
        Output::Glu(_) => vec![2 * matrices[0].rows],
        Output::GluFragmentMajor(_) => vec![2 * matrices[0].rows.next_multiple_of(CHUNK_K)],
        _ => matrices.iter().map(|w| w.rows).collect(),
    }
}

/// CTAs along output features.
fn along_features(kernel: TileKernel, features: &[usize]) -> usize {
    features.iter().map(|n| n.div_ceil(kernel.features())).sum()
}

/// The ranges of K of Hopper's deterministic products, whatever their rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranges {
    pub(super) count: usize,
    /// Whether all CTAs of wide tiles with the most rows run at once if each takes a range. Else each takes all.
    fit_clusters: bool,
}

/// The ranges of wide tiles with the most rows that run at once; of gated activations with so many features that these have one each,
/// those with which the skinny GEMM has the least work for a warp.
pub(super) fn ranges(hardware: &Hardware, matrices: &[MatrixShape], output: Output) -> Ranges {
    // Rows of either layout have the same ranges.
    let output = output.applied().map_or(output, Output::GluFragmentMajor);
    let kernel = TileKernel::Wide;
    let most = Tiles {
        kernel,
        glu: output.applied().is_some(),
        columns: kernel.most_rows(),
        whole: false,
    };
    let blocks = along_features(kernel, &features(matrices, output));
    let k = matrices[0].cols;
    match split_k(most, hardware, blocks, k) {
        1 if most.glu => Ranges {
            count: gated_ranges(hardware, matrices[0].rows, k),
            fit_clusters: false,
        },
        count => Ranges {
            count,
            fit_clusters: true,
        },
    }
}

/// The least number of ranges with which the warps of the skinny GEMM, each of which takes whole ranges of tiles of gate and up, have the
/// fewest steps at most. Each costs products of many rows a sum.
fn gated_ranges(hardware: &Hardware, features: usize, k: usize) -> usize {
    const MOST: usize = 4;
    let tiles = features.div_ceil(Tile::GateUp.features());
    let tiles = tiles.div_ceil(hardware.multiprocessors.max(1));
    let steps = k.div_ceil(Tile::GateUp.step());
    let longest = |ranges: &usize| (tiles * ranges).div_ceil(WARPS) * steps.div_ceil(*ranges);
    let fewest = (1..=MOST.min(steps)).min_by_key(longest);
    fewest.unwrap_or(1)
}

/// The number of CTAs along K = `k` that lets as many CTAs as possible run, all at once. `blocks` counts the CTAs without split-K.
fn split_k(tiles: Tiles, hardware: &Hardware, blocks: usize, k: usize) -> usize {
    let most = k.div_ceil(CHUNK_K) / tiles.kernel.part_chunks();
    match tiles.kernel {
        TileKernel::Tiled => {
            let at_once = tiles.kernel.blocks() * hardware.multiprocessors;
            (at_once / blocks).min(most).max(1)
        }
        TileKernel::Wide => {
            let fits = |split_k: &usize| blocks <= hardware.clusters.at_once(tiles, *split_k);
            (2..=most.min(MOST_SPLIT_K)).rev().find(fits).unwrap_or(1)
        }
    }
}

impl Tiling {
    /// The kernel, and the parts into which it divides K.
    pub(super) fn sums(&self) -> (String, u32) {
        (format!("{:?}", self.tiles.kernel), self.split_k as u32)
    }
}

impl fmt::Display for Tiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(order) = &self.order {
            write!(f, "{order}, ")?;
        }
        match &self.adapted {
            Some(adapted) => write!(f, "{adapted}")?,
            None => write!(f, "{}", self.gemm)?,
        }
        match &self.sum {
            Some(sum) => write!(f, ", {sum}"),
            None => Ok(()),
        }
    }
}

impl Tiling {
    /// Enqueues the GEMM with NVFP4 weights; `room` has the size of [`TileKernel::scratch`]. [`GemmPlan`](super::GemmPlan) checks sizes.
    pub(super) fn enqueue(
        &self,
        gpu: &Gpu,
        input: Input<'_>,
        m: usize,
        matrices: &[Biased<'_>],
        output: Output,
        out: &DeviceBuffer,
        stride: usize,
        room: &DeviceBuffer,
        adapters: Option<&AdaptedRows<'_>>,
    ) -> Result<()> {
        let k = matrices[0].0.cols;
        let (Input::Plain(x, factor) | Input::FragmentMajor(x, factor)) = input else {
            bail!(Internal, "a tiled kernel takes no fused norm");
        };
        let x = match &self.order {
            Some(order) => {
                let elements = Layout::FragmentMajor.elements(m, k);
                room.holds("fragment-major rows", &[elements, 2])?;
                let arguments = ToFragmentsArguments {
                    x: x.address(),
                    y: room.address(),
                    k: int("K", k)?,
                };
                // SAFETY: the size of `x` was checked with the plan.
                unsafe { order.run(gpu, &arguments)? };
                room
            }
            None => x,
        };
        let split_k = self.split_k;
        if self.sum.is_some() {
            let features = matrices.iter().map(|(w, _)| w.rows).sum();
            let sums = [split_k, m, features, 4];
            room.holds("the split-K workspace of a product", &sums)?;
        }
        let mut matrix = matrix_arguments(matrices)?;
        matrix.iter_mut().for_each(|w| w.global *= factor);
        let glu = output.applied().unwrap_or_default();
        let arguments = TiledArguments {
            x: x.address(),
            out: out.address(),
            partial: room.address(),
            matrix,
            matrices: matrices.len() as i32,
            m: int("rows", m)?,
            k: int("K", k)?,
            out_stride: int("the stride of a product", stride)?,
            output: match output {
                Output::Glu(_) => STORE_ROWS,
                Output::GluFragmentMajor(_) => STORE_ORDERED,
                _ => output.plain()?,
            },
            split_k: split_k as i32,
            out_scale: glu.factor(),
            activation: glu.activation as i32,
        };
        match (&self.adapted, adapters) {
            (None, None) => {}
            (Some(adapted), Some(rows)) if adapted.serves(rows) => {
                return adapted.enqueue(gpu, arguments, rows, factor);
            }
            (_, rows) => bail!(
                Internal,
                "a product for {:?}, planned as {self}",
                rows.map(|rows| rows.division)
            ),
        }
        // SAFETY: sizes were checked here and with the plan.
        unsafe {
            self.gemm.run(gpu, &arguments)?;
            match &self.sum {
                Some(sum) => sum.run(gpu, &arguments),
                None => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hardware::WideClusters;
    use super::*;
    use crate::tensor::WeightType;

    fn hardware(multiprocessors: usize) -> Hardware {
        Hardware {
            arch: (9, 0),
            multiprocessors,
            shared_limit: 227 << 10,
            cublas: true,
            deterministic: false,
            clusters: WideClusters::unconstrained(multiprocessors),
        }
    }

    #[test]
    fn accumulators_of_split_k_fit_the_scratch() {
        for kernel in [TileKernel::Tiled, TileKernel::Wide] {
            for multiprocessors in [1, 48, 132] {
                for features in [&[64][..], &[4096, 1024, 1024], &[2560], &[151_936]] {
                    for m in [5, 17, 32, 64, 100, 1000] {
                        let matrices: Vec<MatrixShape> = features
                            .iter()
                            .map(|&rows| MatrixShape {
                                storage: WeightType::Nvfp4,
                                rows,
                                cols: 9728,
                            })
                            .collect();
                        let choose = |multiprocessors, divides| {
                            let (hardware, layout) = (hardware(multiprocessors), Layout::RowMajor);
                            let output = Output::F32;
                            Tiling::choose(&hardware, kernel, m, &matrices, output, layout, divides)
                                .unwrap()
                        };
                        let whole = choose(0, false).gemm.launch.grid;
                        let tiling = choose(multiprocessors, true);
                        let [tiles, rows, split_k] = tiling.gemm.launch.grid.map(|n| n as usize);
                        assert_eq!(whole, [tiles as u32, rows as u32, 1]);
                        assert!(rows * tiling.tiles.columns >= m);
                        assert!(tiling.tiles.columns <= kernel.most_rows());
                        let blocks = kernel.blocks() * multiprocessors;
                        assert!(
                            split_k == 1 || tiles * rows * split_k <= blocks,
                            "{tiling:?}"
                        );
                        // GB10 has 99 KB, Hopper 227.
                        let most = match kernel {
                            TileKernel::Tiled => {
                                let sums = split_k * m * features.iter().sum::<usize>() * 4;
                                let room = kernel.scratch(m, 9728, multiprocessors);
                                assert!(split_k == 1 || sums <= room, "{tiling:?}");
                                99 << 10
                            }
                            TileKernel::Wide => {
                                assert!(split_k <= MOST_SPLIT_K);
                                227 << 10
                            }
                        };
                        assert!(tiling.gemm.launch.shared <= most, "{tiling:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn ranges_of_deterministic_products_fit_shared_memory() {
        let hardware = Hardware {
            deterministic: true,
            ..hardware(132)
        };
        for (features, k, count) in [(9728, 2560, 3), (12_288, 4096, 4), (3072, 1024, 2)] {
            let shape = MatrixShape {
                storage: WeightType::Nvfp4,
                rows: features,
                cols: k,
            };
            let output = Output::GluFragmentMajor(Default::default());
            for m in [17, 33, 64, 128, 129, 4096] {
                let choose = |matrices: &[MatrixShape], output| {
                    let (kernel, layout) = (TileKernel::Wide, Layout::FragmentMajor);
                    Tiling::choose(&hardware, kernel, m, matrices, output, layout, false).unwrap()
                };
                let gated = choose(&[shape; 2], output);
                assert_eq!(gated.split_k, count, "{gated:?}");
                for tiling in [gated, choose(&[shape], Output::F32)] {
                    assert!(tiling.gemm.launch.shared <= 227 << 10, "{tiling:?}");
                }
            }
        }
    }
}
