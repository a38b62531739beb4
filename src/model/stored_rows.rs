//! The rows of a stored matrix that a tensor of the model is. `tensors` says which they are, and loading reads them.

use std::ops::Range;

/// Rows of a stored tensor, in the order of their tensor's: one pattern after the other, and all of them again for each group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRows {
    /// The patterns of the first group.
    patterns: Vec<RowPattern>,
    /// Number of groups.
    groups: usize,
    /// Rows from one group to the next.
    stride: usize,
}

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
        StoredRows::new(vec![RowPattern {
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
    /// Rows of these patterns.
    pub fn new(patterns: Vec<RowPattern>) -> Self {
        StoredRows::repeated(patterns, 1, 0)
    }

    /// Rows of these patterns in each of `groups`, `stride` rows apart.
    pub fn repeated(patterns: Vec<RowPattern>, groups: usize, stride: usize) -> Self {
        StoredRows {
            patterns,
            groups,
            stride,
        }
    }

    /// The first of them.
    pub fn first(&self) -> usize {
        self.patterns.first().map_or(0, |pattern| pattern.first)
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.groups * self.group()
    }

    /// Number of rows of a group.
    fn group(&self) -> usize {
        self.patterns.iter().map(RowPattern::count).sum()
    }

    /// The stored rows from the first to the last of `rows`, if every other of them is one of these. Reading all of them costs less than
    /// reading each alone.
    pub fn alternating(&self, rows: &Range<usize>) -> Option<Range<usize>> {
        match self.patterns[..] {
            [
                RowPattern {
                    first,
                    run: 1,
                    stride: 2,
                    ..
                },
            ] if self.groups == 1 && !rows.is_empty() => {
                Some(first + 2 * rows.start..first + 2 * rows.end - 1)
            }
            _ => None,
        }
    }

    /// The consecutive rows that `rows` of these are, in order. Each comes with the number of rows of `rows` before it.
    pub fn parts(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (mut next, end, group) = (rows.start, rows.end.min(self.count()), self.group());
        std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let (before, moved) = (next - rows.start, next / group * self.stride);
            let mut within = next % group;
            let pattern = self.patterns.iter().find(|pattern| {
                let is_here = within < pattern.count();
                within -= if is_here { 0 } else { pattern.count() };
                is_here
            })?;
            let run = pattern.run_from(within, pattern.count().min(within + end - next));
            next += run.len();
            Some((before, run.start + moved..run.end + moved))
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
        let rows = StoredRows::new(vec![pattern(0, 2), pattern(2, 3)]);
        let all = [0, 1, 10, 11, 2, 3, 4, 12, 13, 14];
        check(&rows, &all);
        let again = all.map(|row| row + 20);
        let groups = StoredRows::repeated(rows.patterns, 2, 20);
        check(&groups, &[all, again].concat());
    }

    fn check(rows: &StoredRows, all: &[usize]) {
        let stored = |range: Range<usize>| -> Vec<usize> {
            rows.parts(range).flat_map(|(_, part)| part).collect()
        };
        assert_eq!((rows.count(), &stored(0..all.len())[..]), (all.len(), all));
        for (first, last) in [(0, 0), (1, 3), (3, 6), (5, 10), (9, all.len())] {
            assert_eq!(stored(first..last), all[first..last]);
            let mut at = 0;
            for (before, part) in rows.parts(first..last) {
                assert_eq!(before, at);
                at += part.len();
            }
        }
    }
}
