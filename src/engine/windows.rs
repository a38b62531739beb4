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
