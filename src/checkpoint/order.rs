//! The order of rows, columns and elements in GGUF files, where it is not that of Hugging Face's.

/// Where a file has the rows or the columns of a matrix, or the elements of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// As the entry has them.
    Same,
    /// That many attention heads are interleaved: in each, the two halves that rotate together take turns.
    Interleaved { heads: usize },
    /// From `first` on, heads of `width` that belong to that many groups. In order, the heads of a group follow each other; the file has
    /// the first head of every group, then the second of every group, and so on.
    Tiled {
        first: usize,
        width: usize,
        groups: usize,
    },
}

impl Order {
    /// The place in the file of `index` among `all`.
    pub(super) fn place(self, index: usize, all: usize) -> usize {
        match self {
            Order::Same => index,
            Order::Interleaved { heads } => {
                let width = all / heads;
                let (within, half) = (index % width, width / 2);
                index - within + 2 * (within % half) + within / half
            }
            Order::Tiled { first, .. } if index < first => index,
            Order::Tiled {
                first,
                width,
                groups,
            } => {
                let of_group = (all - first) / width / groups;
                let (head, within) = ((index - first) / width, (index - first) % width);
                let tiled = head % of_group * groups + head / of_group;
                first + tiled * width + within
            }
        }
    }

    /// The end of a run that begins at `index`, whose places in the file are a range: at most `most`, unless heads are wider.
    pub(super) fn run_end(self, index: usize, all: usize, most: usize) -> usize {
        let next = |run: usize| (index / run + 1) * run;
        match self {
            Order::Same => next(most),
            Order::Interleaved { heads } => next(all / heads),
            Order::Tiled { first, .. } if index < first => next(most).min(first),
            Order::Tiled { first, width, .. } => first + ((index - first) / width + 1) * width,
        }
    }

    /// Whether runs of `block` that begin at a multiple of it stay together and begin at a multiple of it in the file.
    pub(super) fn keeps_blocks(self, block: usize) -> bool {
        match self {
            Order::Same => true,
            Order::Interleaved { .. } => false,
            Order::Tiled { first, width, .. } => {
                first.is_multiple_of(block) && width.is_multiple_of(block)
            }
        }
    }

    /// Puts stored values in order.
    pub(super) fn restore<T: Copy>(self, stored: &[T], out: &mut [T]) {
        for (i, value) in out.iter_mut().enumerate() {
            *value = stored[self.place(i, stored.len())];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_groups_are_stored_tile_by_tile() {
        // Two elements before; groups a, b and c of two heads of two elements each.
        let order = Order::Tiled {
            first: 2,
            width: 2,
            groups: 3,
        };
        let stored = [
            "p", "q", "a0", "a0'", "b0", "b0'", "c0", "c0'", "a1", "a1'", "b1", "b1'", "c1", "c1'",
        ];
        let mut restored = [""; 14];
        order.restore(&stored, &mut restored);
        let expected = [
            "p", "q", "a0", "a0'", "a1", "a1'", "b0", "b0'", "b1", "b1'", "c0", "c0'", "c1", "c1'",
        ];
        assert_eq!(restored, expected);
        assert!(order.keeps_blocks(2) && !order.keeps_blocks(4));
    }

    #[test]
    fn the_interleaved_order_is_a_permutation_within_each_head() {
        // Two heads of four rows: rotation pairs (0, 2) and (1, 3) are adjacent in the file.
        let order = Order::Interleaved { heads: 2 };
        let places: Vec<usize> = (0..8).map(|row| order.place(row, 8)).collect();
        assert_eq!(places, [0, 2, 1, 3, 4, 6, 5, 7]);
        let order = Order::Interleaved { heads: 3 };
        let mut seen: Vec<usize> = (0..3 * 64).map(|row| order.place(row, 3 * 64)).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..3 * 64));
    }

    #[test]
    fn a_run_lies_in_one_range_of_the_file() {
        let orders = [
            Order::Same,
            Order::Interleaved { heads: 3 },
            Order::Tiled {
                first: 6,
                width: 3,
                groups: 2,
            },
        ];
        for order in orders {
            let (all, mut index, mut seen) = (18, 0, Vec::new());
            while index < all {
                let end = order.run_end(index, all, 4).min(all);
                let mut places: Vec<usize> = (index..end).map(|i| order.place(i, all)).collect();
                places.sort_unstable();
                assert!(
                    places.windows(2).all(|w| w[1] == w[0] + 1),
                    "{order:?} {places:?}"
                );
                seen.extend(places);
                index = end;
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..all).collect::<Vec<_>>(), "{order:?}");
        }
    }
}
