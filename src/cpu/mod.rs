//! Floor 3: the CPU backend, which is the reference of every other. A [`Cpu`] is a level's kernels and a pool of threads; its methods check
//! their arguments, split the work by index and call the kernels.
//!
//! Results do not depend on the level, on the number of threads or on how many tokens share a call: see
//! `generic::linear` and `simd`. Knows nothing of models, sessions or files.

pub mod calibrated;
mod delta;
mod engine;
mod generic;
mod kv;
mod level;
mod mamba;
pub mod moments;
mod packed;
pub mod sample;
mod scalar;
mod simd;
mod table;
pub mod training;
mod workspace;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use delta::{DeltaGates, DeltaRuleRows};
pub use engine::Cpu;
pub use kv::{KvLayout, KvPages, PAGE};
pub use level::Level;
pub use mamba::{MambaScanRows, MambaSteps};
pub use packed::{Packed, ReadDense, ReadInt8, ReadNvfp4};
pub use workspace::{Workspace, WorkspaceSizes};
