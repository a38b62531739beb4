//! The rows of a stored matrix that a tensor of the model is. `tensors` says which they are, and loading reads them.

use std::ops::Range;

/// Rows of a stored tensor, in the order of their tensor's: one pattern after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRows(pub Vec<RowPattern>);

/// Runs of consecutive rows, all of one length and equally far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPattern {
    /// The first row of the first run.
    pub first: usize,
    /// Rows of a run.
    pub run: usize,
    /// Rows from one run to the next.
    pub stride: usize,
    /// Number of runs.
    pub runs: usize,
}

impl From<Range<usize>> for StoredRows {
    fn from(rows: Range<usize>) -> Self {
        StoredRows(vec![RowPattern {
            first: rows.start,
            run: rows.len(),
            stride: rows.len(),
            runs: 1,
        }])
    }
}

impl RowPattern {
    fn count(&self) -> usize {
        self.run * self.runs
    }

    /// The longest run from row `index` of the pattern on, up to `end`.
    fn run_from(&self, index: usize, end: usize) -> Range<usize> {
        let within = index % self.run;
        let start = self.first + index / self.run * self.stride + within;
        start..start + (self.run - within).min(end - index)
    }
}

impl StoredRows {
    /// The first of them.
    pub fn first(&self) -> usize {
        self.0.first().map_or(0, |pattern| pattern.first)
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.0.iter().map(RowPattern::count).sum()
    }

    /// The stored rows from the first to the last of `rows`, if every other of them is one of these. Reading all of them costs less than
    /// reading each alone.
    pub fn alternating(&self, rows: &Range<usize>) -> Option<Range<usize>> {
        match self.0[..] {
            [
                RowPattern {
                    first,
                    run: 1,
                    stride: 2,
                    ..
                },
            ] if !rows.is_empty() => Some(first + 2 * rows.start..first + 2 * rows.end - 1),
            _ => None,
        }
    }

    /// The consecutive rows that `rows` of these are, in order. Each comes with the number of rows of `rows` before it.
    pub fn parts(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (mut next, mut patterns, mut passed) = (rows.start, self.0.iter(), 0);
        let mut pattern = patterns.next();
        std::iter::from_fn(move || {
            while pattern.is_some_and(|p| next >= passed + p.count()) {
                passed += pattern?.count();
                pattern = patterns.next();
            }
            if next >= rows.end {
                return None;
            }
            let end = rows.end.min(passed + pattern?.count());
            let run = pattern?.run_from(next - passed, end - passed);
            let before = next - rows.start;
            next += run.len();
            Some((before, run))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_in_the_order_of_their_tensor() {
        let pattern = |first, run| RowPattern {
            first,
            run,
            stride: 10,
            runs: 2,
        };
        let rows = StoredRows(vec![pattern(0, 2), pattern(2, 3)]);
        let stored = |range: Range<usize>| -> Vec<usize> {
            rows.parts(range).flat_map(|(_, part)| part).collect()
        };
        let all = [0, 1, 10, 11, 2, 3, 4, 12, 13, 14];
        assert_eq!((rows.count(), stored(0..10)), (10, all.to_vec()));
        for (first, last) in [(0, 0), (1, 3), (3, 6), (5, 10), (9, 10)] {
            assert_eq!(stored(first..last), all[first..last]);
            let mut at = 0;
            for (before, part) in rows.parts(first..last) {
                assert_eq!(before, at);
                at += part.len();
            }
        }
    }
}
