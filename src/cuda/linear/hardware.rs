//! Properties of a device by which kernels are chosen.

use super::limits::{HALF_SM_ROWS, TILED};
use super::tiles::{MOST_SPLIT_K, TileKernel, Tiles};
use crate::base::Result;
use crate::cuda::driver::{Attached, Gpu};

/// Properties of a device by which kernels of GEMMs and of attention are chosen, and whether the choice may depend on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// Compute capability, major and minor.
    pub arch: (i32, i32),
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Shared memory that a CTA may have, in bytes.
    pub shared_limit: usize,
    /// Whether cuBLASLt may serve: it was found, and the plan need not be deterministic.
    pub cublas: bool,
    /// Whether the bits of a product's row depend on that row and the matrices alone: however many rows there are, their sums over K have
    /// one order.
    pub deterministic: bool,
    /// Clusters of Hopper's kernel of wide tiles.
    pub clusters: WideClusters,
}

impl Hardware {
    /// The properties of an open device. The first call loads Hopper's kernel of wide tiles.
    pub fn of(gpu: &Gpu) -> Result<Hardware> {
        Ok(Hardware {
            arch: gpu.arch(),
            multiprocessors: gpu.multiprocessors(),
            shared_limit: gpu.shared_limit(),
            cublas: gpu.blas().is_some(),
            deterministic: false,
            clusters: *gpu.attached_or(|| WideClusters::measure(gpu))?,
        })
    }

    /// This device, with deterministic plans: without cuBLASLt, which chooses its kernels by the number of rows.
    pub fn deterministic(self) -> Hardware {
        Hardware {
            cublas: false,
            deterministic: true,
            ..self
        }
    }

    /// Whether two CTAs may form a cluster and share the tiles of a GEMM.
    pub fn has_clusters(&self) -> bool {
        self.arch.0 >= 9
    }

    /// The most CTAs with `tiles` of a GEMM of `rows` rows that a norm may precede. A multiprocessor with a CTA of the norm, one for each row,
    /// has no registers for one of the GEMM beside the kernel before both: that CTA would begin after the norm and end last. So for a few rows
    /// the GEMM leaves as many multiprocessors free as it can while no CTA has more tiles because of that.
    pub(super) fn beside_norm(&self, rows: usize, tiles: usize) -> usize {
        let all = self.multiprocessors;
        match rows <= HALF_SM_ROWS {
            true => tiles.div_ceil(tiles.div_ceil(all).max(1)),
            false => all,
        }
    }

    /// The least shared memory of a CTA of a GEMM of `rows` rows, with which at most two CTAs share a multiprocessor: one of this kernel and one
    /// of the next, which fills its rings while the first computes. With room for three, CTAs of the next kernel would gather where CTAs of this
    /// one have ended, and leave other multiprocessors idle. With more activation rows there is no room for a CTA of the next kernel; then two
    /// CTAs of this kernel would gather in the same way.
    pub(super) fn least_shared(&self, rows: usize) -> usize {
        match rows <= HALF_SM_ROWS {
            true => self.shared_limit / 3 + 1024,
            false => self.alone_shared(),
        }
    }

    /// The least shared memory of a CTA with which no other CTA of its kernel shares a multiprocessor.
    pub(super) fn alone_shared(&self) -> usize {
        self.shared_limit / 2 + 1024
    }

    /// Whether a tiled kernel rather than cuBLASLt serves `m` rows, when they are too many for the skinny GEMM.
    pub(super) fn tiles_serve(&self, m: usize) -> bool {
        m <= TILED || !self.cublas
    }
}

/// Numbers of clusters of Hopper's kernel of wide tiles that a device runs at the same time: without and with a gated activation, by the
/// activation rows of a CTA (8, 16, 32, 64 and 128), by cluster size from 2 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WideClusters([[[u16; MOST_SPLIT_K - 1]; 5]; 2]);

impl Attached for WideClusters {}

impl WideClusters {
    /// Clusters of a device on which any multiprocessors, with a CTA each, can form one.
    pub const fn unconstrained(multiprocessors: usize) -> WideClusters {
        let mut counts = [0; MOST_SPLIT_K - 1];
        let mut size = 2;
        while size <= MOST_SPLIT_K {
            counts[size - 2] = (multiprocessors / size) as u16;
            size += 1;
        }
        WideClusters([[counts; 5]; 2])
    }

    /// Asks the driver; zeros for devices without that kernel.
    fn measure(gpu: &Gpu) -> Result<WideClusters> {
        let kernel = TileKernel::Wide;
        let mut clusters = WideClusters::unconstrained(0);
        if !TileKernel::all(gpu.arch()).contains(&kernel) {
            return Ok(clusters);
        }
        for (glu, variants) in [false, true].into_iter().zip(&mut clusters.0) {
            for (index, counts) in variants.iter_mut().enumerate() {
                let columns = 8 << index;
                let tiles = Tiles {
                    kernel,
                    glu,
                    columns,
                    whole: false,
                };
                for (size, count) in (2..).zip(counts) {
                    *count = tiles.planned([1, 1, size]).clusters_at_once(gpu)? as u16;
                }
            }
        }
        Ok(clusters)
    }

    /// The number of clusters of `size` CTAs.
    pub(super) fn at_once(&self, tiles: Tiles, size: usize) -> usize {
        usize::from(self.0[usize::from(tiles.glu)][tiles.index()][size - 2])
    }
}
