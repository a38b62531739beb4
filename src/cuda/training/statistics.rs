//! What is asked of a gradient before it is used.

use super::super::driver::{DeviceSlice, Launch};
use super::super::units::Unit;
use super::sizes::{expect_room, pieces};
use crate::base::Result;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("gradient_statistics", size_of::<StatisticsArguments>()),
    ("gradient_statistics_total", size_of::<TotalArguments>()),
];

const THREADS: u32 = 256;
/// Blocks, whatever the size; the threads of the kernel that adds up what they leave, too.
const BLOCKS: u32 = 512;
/// What is known of a gradient.
const STATISTICS: usize = 3;

/// Elements of f32 that the partial statistics of [`gradient_statistics`] take.
pub const STATISTICS_PARTIAL: usize = BLOCKS as usize * STATISTICS;

#[repr(C)]
struct StatisticsArguments {
    g: u64,
    partial: u64,
    pieces: u64,
}

#[repr(C)]
struct TotalArguments {
    partial: u64,
    total: u64,
}

/// f32 `out` `[3]`: the sum of squares and the largest magnitude of the finite elements of bf16 `g`, and how many elements are not
/// finite, exactly up to 2^24. The size of `g` is a multiple of 8. `partial` has room for [`STATISTICS_PARTIAL`] elements.
pub fn gradient_statistics(
    g: DeviceSlice<'_>,
    partial: DeviceSlice<'_>,
    out: DeviceSlice<'_>,
) -> Result<()> {
    let pieces = pieces("a gradient", g)?;
    expect_room("partial statistics", partial, &[STATISTICS_PARTIAL])?;
    out.holds("statistics", &[STATISTICS, size_of::<f32>()])?;
    let arguments = StatisticsArguments {
        g: g.address(),
        partial: partial.address(),
        pieces: pieces as u64,
    };
    let launch = Launch::new([BLOCKS, 1, 1], THREADS);
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe {
        launch.run(
            out.gpu(),
            Unit::Statistics,
            "gradient_statistics",
            &arguments,
        )?
    };
    let arguments = TotalArguments {
        partial: partial.address(),
        total: out.address(),
    };
    let launch = Launch::new([1, 1, 1], BLOCKS);
    // SAFETY: as above.
    unsafe {
        launch.run(
            out.gpu(),
            Unit::Statistics,
            "gradient_statistics_total",
            &arguments,
        )
    }
}
