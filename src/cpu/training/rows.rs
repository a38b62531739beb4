//! Splits arrays into disjoint parts for the threads of a pool.

use crate::base::threads::Pool;

/// Calls `each(i, part)` for parts of `length` elements of `x`, over the threads of `pool`. The last part may be shorter.
pub(in crate::cpu) fn by_parts<T: Send>(
    pool: &Pool,
    x: &mut [T],
    length: usize,
    each: impl Fn(usize, &mut [T]) + Sync,
) {
    let whole = DisjointParts(x.as_mut_ptr());
    let len = x.len();
    pool.run(len.div_ceil(length.max(1)), |i| {
        let first = i * length;
        // SAFETY: parts do not overlap, and a pool runs each once.
        let part = unsafe { whole.part(first, length.min(len - first)) };
        each(i, part);
    });
}

/// As [`by_parts`], for two arrays: part i of one belongs to part i of the other. `lengths` are the elements per part; both have equally
/// many parts.
pub(in crate::cpu) fn by_parts_of_two<T: Send, U: Send>(
    pool: &Pool,
    (x, y): (&mut [T], &mut [U]),
    lengths: (usize, usize),
    each: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    let (xs, ys) = (DisjointParts(x.as_mut_ptr()), DisjointParts(y.as_mut_ptr()));
    let (x_len, y_len) = (x.len(), y.len());
    let parts = x_len.div_ceil(lengths.0.max(1));
    assert_eq!(
        parts,
        y_len.div_ceil(lengths.1.max(1)),
        "parts that belong together"
    );
    pool.run(parts, |i| {
        let (a, b) = (i * lengths.0, i * lengths.1);
        // SAFETY: as above, of either array.
        let (x, y) = unsafe {
            (
                xs.part(a, lengths.0.min(x_len - a)),
                ys.part(b, lengths.1.min(y_len - b)),
            )
        };
        each(i, x, y);
    });
}

/// Memory of which threads write disjoint parts.
struct DisjointParts<T>(*mut T);
// SAFETY: each part is one thread's.
unsafe impl<T: Send> Sync for DisjointParts<T> {}

impl<T> DisjointParts<T> {
    /// # Safety
    /// The elements must exist, and nobody else may use them.
    #[allow(clippy::mut_from_ref, reason = "parts are disjoint")]
    unsafe fn part(&self, first: usize, len: usize) -> &mut [T] {
        // SAFETY: forwarded.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(first), len) }
    }
}
