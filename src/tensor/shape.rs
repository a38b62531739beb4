//! Shapes and strides, checked once on construction.

use crate::base::error::{Result, bail, err};

/// Upper limit of dimensions.
pub const MAX_RANK: usize = 8;

/// Sizes and strides, both in elements. Rank 0 is a scalar. Strides are not negative; a dimension with stride 0 repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    sizes: Vec<usize>,
    strides: Vec<usize>,
    len: usize,
    extent: usize,
}

impl Shape {
    /// A row-major shape without gaps.
    pub fn contiguous(sizes: &[usize]) -> Result<Shape> {
        let mut strides = vec![1usize; sizes.len()];
        for i in (1..sizes.len()).rev() {
            strides[i - 1] = strides[i].saturating_mul(sizes[i].max(1));
        }
        Shape::strided(sizes, &strides)
    }

    /// A shape with given strides in elements.
    pub fn strided(sizes: &[usize], strides: &[usize]) -> Result<Shape> {
        if sizes.len() > MAX_RANK {
            bail!(
                InvalidArgument,
                "a tensor has at most {MAX_RANK} dimensions, not {}",
                sizes.len()
            );
        }
        if sizes.len() != strides.len() {
            bail!(
                InvalidArgument,
                "{} sizes and {} strides; a stride belongs to each size",
                sizes.len(),
                strides.len()
            );
        }
        let too_large = || {
            err!(
                InvalidArgument,
                "a tensor of shape {sizes:?} and strides {strides:?} does not fit in the address space"
            )
        };
        // Zero sizes count as 1 here, so that a shape with a zero cannot hide an overflow from later views.
        let mut len = 1usize;
        let mut last = 0usize;
        for (&n, &stride) in sizes.iter().zip(strides) {
            let n = n.max(1);
            len = len.checked_mul(n).ok_or_else(too_large)?;
            last = (n - 1)
                .checked_mul(stride)
                .and_then(|d| last.checked_add(d))
                .ok_or_else(too_large)?;
        }
        // An element has at most 16 bytes, and no object is larger than isize::MAX.
        if len.max(last) > isize::MAX as usize / 16 {
            return Err(too_large());
        }
        let empty = sizes.contains(&0);
        Ok(Shape {
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
            len: if empty { 0 } else { len },
            extent: if empty { 0 } else { last + 1 },
        })
    }

    /// Sizes of the dimensions.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.sizes.len()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.len
    }

    /// Number of elements of memory from the first to the last one addressed, both included.
    pub fn extent(&self) -> usize {
        self.extent
    }

    /// Whether elements stand in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.len == 0
            || self.sizes.iter().zip(&self.strides).rev().all(|(&n, &s)| {
                let fits = n == 1 || s == expected;
                expected *= n;
                fits
            })
    }

    /// The shape seen as a matrix: the last dimension, and all before it folded into rows. A scalar is 1 by 1.
    pub fn matrix(&self) -> (usize, usize) {
        match self.sizes.split_last() {
            Some((&cols, leading)) => (leading.iter().product(), cols),
            None => (1, 1),
        }
    }

    /// The distance in elements between rows of [`matrix`](Self::matrix), if it is uniform and rows have no gaps; for a single row, its
    /// length.
    pub fn row_stride(&self) -> Option<usize> {
        let (_, cols) = self.matrix();
        let leading = self.sizes.len().checked_sub(1)?;
        if self.sizes[leading] > 1 && self.strides[leading] != 1 {
            return None;
        }
        // From the innermost dimension outwards, each must continue where those within it end.
        let mut run: Option<(usize, usize)> = None;
        for (&n, &stride) in self.sizes[..leading]
            .iter()
            .zip(&self.strides[..leading])
            .rev()
            .filter(|&(&n, _)| n != 1)
        {
            run = match run {
                None => Some((stride, stride * n)),
                Some((first, next)) if stride == next => Some((first, stride * n)),
                Some(_) => return None,
            };
        }
        Some(run.map_or(cols, |(first, _)| first))
    }

    /// The sizes with the last replaced by `last`.
    pub fn with_last(&self, last: usize) -> Vec<usize> {
        let mut sizes = self.sizes.clone();
        match sizes.last_mut() {
            Some(n) => *n = last,
            None => sizes.push(last),
        }
        sizes
    }

    /// The element offset of row `row` of [`matrix`](Self::matrix).
    pub fn row_offset(&self, row: usize) -> usize {
        let leading = self.sizes.len().saturating_sub(1);
        let mut rest = row;
        let mut offset = 0;
        for (&n, &stride) in self.sizes[..leading]
            .iter()
            .zip(&self.strides[..leading])
            .rev()
        {
            offset += rest % n * stride;
            rest /= n;
        }
        offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn contiguous_strides_and_extent() {
        let s = Shape::contiguous(&[2, 3, 4]).unwrap();
        assert_eq!(s.strides(), [12, 4, 1]);
        assert_eq!((s.elements(), s.extent()), (24, 24));
        assert!(s.is_contiguous());
        assert_eq!(s.matrix(), (6, 4));
        assert_eq!(s.row_offset(4), 16);
        assert_eq!(Shape::contiguous(&[]).unwrap().elements(), 1);
        let empty = Shape::contiguous(&[3, 0]).unwrap();
        assert_eq!((empty.elements(), empty.extent()), (0, 0));
    }

    #[test]
    fn a_transpose_is_not_contiguous() {
        let t = Shape::strided(&[3, 2], &[1, 3]).unwrap();
        assert!(!t.is_contiguous());
        assert_eq!(t.extent(), 6);
        assert_eq!(t.row_offset(2), 2);
        assert!(Shape::strided(&[1, 2], &[7, 1]).unwrap().is_contiguous());
    }

    #[test]
    fn rows_at_even_distances_are_found() {
        let stride = |sizes: &[usize], strides: &[usize]| {
            Shape::strided(sizes, strides).unwrap().row_stride()
        };
        assert_eq!(stride(&[4, 8], &[8, 1]), Some(8));
        assert_eq!(stride(&[4, 8], &[11, 1]), Some(11));
        assert_eq!(stride(&[2, 3, 8], &[33, 11, 1]), Some(11));
        assert_eq!(stride(&[2, 1, 3, 8], &[33, 7, 11, 1]), Some(11));
        assert_eq!(stride(&[2, 3, 8], &[40, 11, 1]), None);
        assert_eq!(stride(&[4, 8], &[0, 1]), Some(0));
        assert_eq!(stride(&[1, 8], &[99, 1]), Some(8));
        assert_eq!(stride(&[8], &[1]), Some(8));
        assert_eq!(stride(&[8, 4], &[1, 8]), None);
        assert_eq!(stride(&[4, 1], &[3, 7]), Some(3));
        assert_eq!(stride(&[], &[]), None);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        expect_kind(
            Shape::contiguous(&[usize::MAX, 2]),
            ErrorKind::InvalidArgument,
            "shape [18446744073709551615, 2]",
        );
        expect_kind(
            Shape::contiguous(&[0, usize::MAX, usize::MAX]),
            ErrorKind::InvalidArgument,
            "shape [0, 18446744073709551615, 18446744073709551615]",
        );
        expect_kind(
            Shape::strided(&[2, 2], &[usize::MAX, 1]),
            ErrorKind::InvalidArgument,
            "does not fit in the address space",
        );
        expect_kind(
            Shape::strided(&[2], &[1, 1]),
            ErrorKind::InvalidArgument,
            "1 sizes and 2 strides",
        );
        expect_kind(
            Shape::contiguous(&[1; MAX_RANK + 1]),
            ErrorKind::InvalidArgument,
            "at most 8 dimensions, not 9",
        );
    }
}
