//! Statistics of a gradient: its norm, its largest magnitude and its non-finite values, for clipping.

use super::super::driver::{DeviceSlice, Launch};
use super::sizes::{expect_room, pieces};
use crate::base::Result;
use crate::cuda::kernel::kernels;

kernels! {
    /// Partial statistics of a gradient, by its type.
    enum Partial(StatisticsArguments) {
        Statistics {
            Bf16 = "gradient_statistics",
            F32 = "gradient_statistics_f32",
        }
    }

    /// Their total.
    enum Total(TotalArguments) {
        Statistics { Sum = "gradient_statistics_total" }
    }
}

const THREADS: u32 = 256;
/// CTAs, independent of the size; also the threads of the kernel that sums their partial results.
const BLOCKS: u32 = 512;
/// Floats of the statistics of a gradient.
const STATISTICS: usize = 3;

/// f32 elements of the partial statistics of [`gradient_statistics`].
pub const STATISTICS_PARTIAL: usize = BLOCKS as usize * STATISTICS;
/// f32 elements of an entry that [`gradient_statistics`] writes.
pub const STATISTICS_ENTRY: usize = STATISTICS + 1;

#[repr(C)]
struct StatisticsArguments {
    g: u64,
    partial: u64,
    pieces: u64,
}

#[repr(C)]
struct TotalArguments {
    partial: u64,
    entry: u64,
    previous: u64,
    bound: f32,
}

/// Writes f32 `entry` `[4]` for the bf16 or f32 gradient `g`: the sum of squares and the largest magnitude of its finite elements; the
/// number of elements that are not finite, exact up to 2^24; and the clipping factor, at most 1, that brings its norm to at most `bound`.
/// The factor is infinite if `g` is not finite, or if that of the entry `previous` is infinite. `g` has a multiple of 8 elements. `partial`
/// has room for [`STATISTICS_PARTIAL`] elements.
pub fn gradient_statistics(
    g: DeviceSlice<'_>,
    is_f32: bool,
    partial: DeviceSlice<'_>,
    previous: Option<DeviceSlice<'_>>,
    bound: f32,
    entry: DeviceSlice<'_>,
) -> Result<()> {
    let (kernel, narrower) = match is_f32 {
        true => (Partial::F32, 2),
        false => (Partial::Bf16, 1),
    };
    let pieces = pieces("a gradient", g)? / narrower;
    expect_room("partial statistics", partial, &[STATISTICS_PARTIAL])?;
    for entry in [Some(entry), previous].into_iter().flatten() {
        entry.holds("statistics", &[STATISTICS_ENTRY, size_of::<f32>()])?;
    }
    let arguments = StatisticsArguments {
        g: g.address(),
        partial: partial.address(),
        pieces: pieces as u64,
    };
    let launch = Launch::new([BLOCKS, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(entry.gpu(), &arguments)? };
    let arguments = TotalArguments {
        partial: partial.address(),
        entry: entry.address(),
        previous: previous.map_or(0, |p| p.address()),
        bound,
    };
    let launch = Launch::new([1, 1, 1], BLOCKS);
    // SAFETY: as above.
    unsafe { launch.of(Total::Sum).run(entry.gpu(), &arguments) }
}
