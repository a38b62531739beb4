//! The choice of recurrent states that a sequence keeps, so that it can be cut without running all its tokens again. Knows no memory.

/// States that a sequence keeps besides that of its end.
pub const SNAPSHOTS: usize = 4;

/// A state is kept at each multiple of this many positions, as long as there are no more than [`SNAPSHOTS`].
pub const SNAPSHOT_POSITIONS: usize = 1024;

/// The most blocks of states that a sequence holds while single tokens run: those kept, that of its end, the next one, and the one after it
/// that a GPU may run `ahead`.
pub(super) fn most_states(ahead: bool) -> usize {
    SNAPSHOTS + 2 + usize::from(ahead)
}
/// The fewest tokens of a prompt for which the state at the last end of a block is kept, so that another sequence can begin there. A state takes
/// as much memory as keys and values of hundreds of positions, and fewer tokens run again in less time.
pub(super) const SHARED_PROMPT: usize = 256;

/// The state after some positions, and its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) positions: usize,
    pub(super) block: u32,
}

/// The multiples of [`SNAPSHOT_POSITIONS`] between `first` and `end` at which states are kept, beside those kept `before`; few enough that
/// all can be kept.
pub(super) fn stops(before: &[usize], first: usize, end: usize) -> Vec<usize> {
    // Earlier ones than these would be dropped for them.
    let most = SNAPSHOTS * SNAPSHOT_POSITIONS;
    let from = first.max(end.saturating_sub(most)) / SNAPSHOT_POSITIONS + 1;
    let multiples = (from..).map(|n| n * SNAPSHOT_POSITIONS);
    let mut kept = before.to_vec();
    kept.extend(multiples.take_while(|stop| *stop < end));
    while let Some(index) = surplus(&kept, end) {
        kept.remove(index);
    }
    kept.retain(|position| *position > first);
    kept
}

/// The index of the state to drop if a sequence of `len` positions keeps too many: the one without which the way back to the next earlier
/// one is shortest, relative to how long ago that is. States become rarer towards the beginning.
pub(super) fn surplus(kept: &[usize], len: usize) -> Option<usize> {
    if kept.len() <= SNAPSHOTS {
        return None;
    }
    let cost = |index: usize| {
        let before = index.checked_sub(1).map_or(0, |i| kept[i]);
        let after = kept.get(index + 1).copied().unwrap_or(len);
        (after - before) as f64 / (len - before).max(1) as f64
    };
    (0..kept.len()).min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_stop_at_few_multiples() {
        assert_eq!(stops(&[], 0, 1), [0; 0]);
        assert_eq!(stops(&[], 0, 1024), [0; 0]);
        assert_eq!(stops(&[], 1023, 1025), [1024]);
        assert_eq!(stops(&[], 1024, 3000), [2048]);
        let long = stops(&[], 0, 131_072);
        assert!(
            long.len() <= SNAPSHOTS && long.last() == Some(&130_048),
            "{long:?}"
        );
    }

    /// However a sequence grows, few states are kept, the last turn's among them, and some near the beginning.
    #[test]
    fn states_become_rarer_towards_the_beginning() {
        let (mut kept, mut len) = (Vec::new(), 0);
        for turn in 0..200 {
            len += 100 + turn % 7 * 30;
            if let Some(index) = surplus(&kept, len) {
                kept.remove(index);
            }
            kept.push(len);
            assert!(kept.len() <= SNAPSHOTS + 1 && kept.is_sorted());
        }
        let ages: Vec<_> = kept.iter().map(|position| len - position).collect();
        assert!(ages[kept.len() - 1] == 0 && ages[0] > len / 4, "{ages:?}");
    }
}
