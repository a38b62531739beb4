//! What the choice of kernels depends on of a device.

use super::limits::TILED;
use crate::cuda::driver::Gpu;

/// What the choice of kernels depends on of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// Compute capability, major and minor.
    pub arch: (i32, i32),
    /// How many multiprocessors there are.
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have.
    pub shared_limit: usize,
    /// Whether cuBLASLt was found.
    pub cublas: bool,
}

impl Hardware {
    /// That of a device.
    pub fn of(gpu: &Gpu) -> Hardware {
        Hardware {
            arch: gpu.arch(),
            multiprocessors: gpu.multiprocessors(),
            shared_limit: gpu.shared_limit(),
            cublas: gpu.blas().is_some(),
        }
    }

    /// Whether two blocks may share the tiles of a product.
    pub fn has_clusters(&self) -> bool {
        self.arch.0 >= 9
    }

    /// Whether a kernel of tiles, and not the library, serves `m` rows that are too many for the fused one.
    pub(super) fn tiles_serve(&self, m: usize) -> bool {
        m <= TILED || !self.cublas
    }
}
