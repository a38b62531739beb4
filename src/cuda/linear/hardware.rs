//! Device properties that the choice of GEMM kernels depends on.

use super::limits::TILED;
use crate::cuda::driver::Gpu;

/// Device properties that the choice of GEMM kernels depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// Compute capability, major and minor.
    pub arch: (i32, i32),
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Shared memory that a CTA may have, in bytes.
    pub shared_limit: usize,
    /// Whether cuBLASLt was found.
    pub cublas: bool,
}

impl Hardware {
    /// The properties of an open device.
    pub fn of(gpu: &Gpu) -> Hardware {
        Hardware {
            arch: gpu.arch(),
            multiprocessors: gpu.multiprocessors(),
            shared_limit: gpu.shared_limit(),
            cublas: gpu.blas().is_some(),
        }
    }

    /// Whether two CTAs may form a cluster and share the tiles of a GEMM.
    pub fn has_clusters(&self) -> bool {
        self.arch.0 >= 9
    }

    /// Whether a tiled kernel rather than cuBLASLt serves `m` rows, when they are too many for the skinny GEMM.
    pub(super) fn tiles_serve(&self, m: usize) -> bool {
        m <= TILED || !self.cublas
    }
}
