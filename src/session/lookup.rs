//! Prompt lookup: the end of a sequence has often occurred in it before, in a prompt that the answer quotes. What followed there is a draft
//! of what follows now (Saxena, "Prompt Lookup Decoding", 2023). Pure: knows tokens.

/// Tokens of an occurrence at least: a single token has occurred too often before to tell what follows.
const SHORTEST: usize = 2;
/// Tokens by which occurrences are compared at most.
const LONGEST: usize = 8;
/// Tokens that are compared at a time.
const CHUNK: usize = 128;

/// Drafts `count` tokens after `tokens`: those after the latest of the longest earlier occurrences of its end. Where these come to the end,
/// the sequence repeats itself, and they begin anew. Empty if the end has not occurred before.
pub(super) fn continuation(tokens: &[u32], count: usize) -> Vec<u32> {
    match after_occurrence(tokens) {
        None => Vec::new(),
        Some(start) => tokens[start..]
            .iter()
            .cycle()
            .take(count)
            .copied()
            .collect(),
    }
}

/// The position after the latest of the longest earlier occurrences of the end of `tokens`.
fn after_occurrence(tokens: &[u32]) -> Option<usize> {
    let (&last, before) = tokens.split_last()?;
    let (mut best, mut longest) = (None, SHORTEST - 1);
    let mut end = before.len();
    while end > longest {
        let start = end.saturating_sub(CHUNK);
        let chunk = &before[start..end];
        // Without a branch for each token, which takes a fraction of the time.
        let has_last = chunk
            .iter()
            .fold(false, |found, token| found | (*token == last));
        for at in (start..end).rev().filter(|_| has_last) {
            let length = match before[at] == last {
                true => 1 + common_end(&before[..at], before),
                false => 0,
            };
            if length > longest {
                (best, longest) = (Some(at + 1), length);
            }
            if longest == LONGEST {
                return best;
            }
        }
        end = start;
    }
    best
}

/// The number of tokens, short of [`LONGEST`], with which both end.
fn common_end(a: &[u32], b: &[u32]) -> usize {
    let pairs = a.iter().rev().zip(b.iter().rev());
    pairs.take(LONGEST - 1).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_the_longest_occurrences_continues() {
        for (tokens, want) in [
            (&[][..], &[][..]),
            (&[1], &[]),
            (&[1, 1], &[]),
            (&[1, 2, 3, 2], &[]),
            (&[1, 2, 3, 1, 2], &[3, 1, 2, 3]),
            (&[1, 2, 3, 4, 5, 6, 1, 2], &[3, 4, 5, 6]),
            // The latest.
            (&[1, 2, 3, 1, 2, 4, 1, 2], &[4, 1, 2, 4]),
            // The longest.
            (&[9, 1, 2, 3, 0, 1, 2, 4, 9, 1, 2], &[3, 0, 1, 2]),
            // A token that repeats itself.
            (&[1, 7, 7, 7], &[7, 7, 7, 7]),
        ] {
            assert_eq!(continuation(tokens, 4), want, "after {tokens:?}");
        }
    }

    #[test]
    fn chunks_find_what_a_comparison_of_all_ends_finds() {
        for seed in 0..400 {
            let draw = |i: u64| crate::format::random::bits(seed, i);
            let len = draw(0) % 500;
            let tokens: Vec<u32> = (1..=len)
                .map(|i| (draw(i) % (2 + seed % 40)) as u32)
                .collect();
            let ends = (1..tokens.len()).map(|end| {
                let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
                let same = pairs.take(LONGEST).take_while(|(a, b)| a == b).count();
                (same, end)
            });
            let best = ends.filter(|(same, _)| *same >= SHORTEST).max();
            assert_eq!(
                after_occurrence(&tokens),
                best.map(|(_, end)| end),
                "seed {seed}"
            );
        }
    }
}
