//! The list of instruction-set levels, with their names, detection and selection.

use crate::base::env;
use crate::base::error::{Result, bail};

/// An instruction-set level with kernels. All levels give the same bits, and differ only in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// Portable Rust; runs anywhere and is the specification of the others.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// AArch64 Advanced SIMD.
    Neon,
}

impl Level {
    /// Every level, slowest first.
    pub const ALL: [Level; 4] = [Level::Scalar, Level::Neon, Level::Avx2, Level::Avx512];

    /// The name used by `NVFP4_CPU`, by `NVFP4_REQUIRE` and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
        }
    }

    /// Whether this machine has every feature that the level's kernels need.
    pub fn is_present(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_present()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Level::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// Chooses the level in `NVFP4_CPU`, or else the best one present.
    pub fn choose() -> Result<Level> {
        let Some(name) = env::cpu_level() else {
            return Ok(Level::ALL
                .into_iter()
                .rev()
                .find(|l| l.is_present())
                .unwrap_or(Level::Scalar));
        };
        match Level::ALL.into_iter().find(|l| l.name() == name) {
            Some(level) if level.is_present() => Ok(level),
            Some(level) => {
                let present: Vec<_> = Level::ALL
                    .into_iter()
                    .filter(|l| l.is_present())
                    .map(Level::name)
                    .collect();
                bail!(
                    Unsupported,
                    "NVFP4_CPU asks for {}, which this machine does not have; it has {}",
                    level.name(),
                    present.join(", ")
                )
            }
            None => bail!(
                InvalidArgument,
                "NVFP4_CPU is '{name}'; it takes one of {}",
                Level::ALL.map(Level::name).join(", ")
            ),
        }
    }
}
