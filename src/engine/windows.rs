//! The positions that layers with a window keep. Pure: knows numbers of positions.

/// Positions past a layer's window that are kept, so that a sequence may be cut by as many tokens without being computed again.
pub const REWIND: usize = 1024;

/// A multiple of every cache's block: what is no longer kept ends at a multiple of this, on every device.
pub(super) const KEPT_MULTIPLE: usize = 64;

/// The first position that the token after `len` positions sees through a window; all if it is `None`.
pub(super) fn sees_from(window: Option<usize>, len: usize) -> usize {
    window.map_or(0, |window| (len + 1).saturating_sub(window))
}

/// The first position that must be kept for the token after `len` positions.
pub(super) fn needed_from(window: Option<usize>, len: usize) -> usize {
    sees_from(window, len) / KEPT_MULTIPLE * KEPT_MULTIPLE
}

/// The first position that a sequence of `len` positions keeps.
pub(super) fn kept_from(window: Option<usize>, len: usize) -> usize {
    let first = sees_from(window, len).saturating_sub(REWIND);
    first / KEPT_MULTIPLE * KEPT_MULTIPLE
}

/// The number of blocks of `positions` positions at the beginning of a sequence of `len` positions that are no longer kept.
fn passed_blocks(window: Option<usize>, len: usize, positions: usize) -> usize {
    kept_from(window, len) / positions
}

/// The most blocks of `positions` positions that a sequence holds until it has `context` positions, if up to `run` of them run at a time.
pub(super) fn most_blocks(
    window: Option<usize>,
    context: usize,
    positions: usize,
    run: usize,
) -> usize {
    let held = |len: usize| {
        let end = len.saturating_add(run).min(context);
        end.div_ceil(positions) - passed_blocks(window, len, positions).min(end.div_ceil(positions))
    };
    // Blocks become more with each multiple until the last run begins.
    let last = context.saturating_sub(run);
    let first = last.saturating_sub(KEPT_MULTIPLE);
    (first..=last).map(held).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sequence_holds_more_blocks_than_that() {
        for (window, context, positions) in [
            (None, 1, 16),
            (None, 100, 16),
            (None, 5000, 64),
            (Some(8), 100, 16),
            (Some(128), 1151, 16),
            (Some(128), 1300, 64),
            (Some(512), 9000, 16),
            (Some(512), 9001, 64),
        ] {
            for run in [1usize, 2, 100, 512, 4096] {
                let mut most = 0;
                let mut len = 0usize;
                while len < context {
                    let end = (len + run).min(context);
                    let blocks = end.div_ceil(positions);
                    most = most.max(blocks - passed_blocks(window, len, positions));
                    len = end;
                }
                let planned = most_blocks(window, context, positions, run);
                assert!(
                    (most..=most + KEPT_MULTIPLE / positions).contains(&planned),
                    "{window:?}, {context}, {positions}, {run}: {planned} for {most}"
                );
                if run == 1 {
                    assert_eq!(planned, most, "{window:?}, {context}, {positions}");
                }
            }
        }
    }
}
