//! Decides which tokens the next pass runs. Pure: knows numbers of tokens, in the order of arrival.

/// Prompts with no more tokens than this come before longer ones: they hardly hold them up.
const SHORT: usize = 64;
/// Where a prompt is divided, its position is a multiple of this: blocks of keys and values begin here on every device.
const BORDER: usize = 16;

/// A caller that waits for tokens to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    /// Tokens that have not run.
    pub(super) left: usize,
    /// The position of the first of them, for tokens of one sequence that may run in several passes. `None` for others, which run as they
    /// came, whatever the budget.
    pub(super) from: Option<usize>,
}

/// The number of tokens of each caller that run in the next pass, with up to `budget` tokens of prompts beside steps. Callers without a
/// prompt all run. Of prompts, short ones come first, and then those that came first; the one that has waited longest always goes on.
pub(super) fn plan(waiting: &[Waiting], budget: usize) -> Vec<usize> {
    let mut counts = vec![0; waiting.len()];
    let is_prompt = |caller: &Waiting| caller.from.is_some() && caller.left > 1;
    let (prompts, others): (Vec<_>, Vec<_>) =
        (0..waiting.len()).partition(|&i| is_prompt(&waiting[i]));
    for i in others {
        counts[i] = waiting[i].left;
    }
    let mut left = budget;
    let Some(&oldest) = prompts.first() else {
        return counts;
    };
    // Short ones leave half of the budget to the oldest.
    let share = waiting[oldest].left.min(budget / 2);
    let short = prompts.iter().filter(|&&i| waiting[i].left <= SHORT);
    for &i in short {
        let of_others = if i == oldest { 0 } else { share };
        if waiting[i].left + of_others <= left {
            counts[i] = waiting[i].left;
            left -= counts[i];
        }
    }
    for i in prompts {
        if counts[i] == 0 {
            counts[i] = part(waiting[i], left);
            left -= counts[i].min(left);
        }
    }
    if counts[oldest] == 0 {
        // Up to the next border.
        counts[oldest] = part(waiting[oldest], BORDER);
    }
    counts
}

/// The tokens of a prompt that run with up to `most`: all, or those up to a border.
fn part(prompt: Waiting, most: usize) -> usize {
    if prompt.left <= most {
        return prompt.left;
    }
    let from = prompt.from.unwrap_or(0);
    let end = (from + most) / BORDER * BORDER;
    end.saturating_sub(from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random::bits;

    fn prompt(left: usize, from: usize) -> Waiting {
        Waiting {
            left,
            from: Some(from),
        }
    }

    const STEPS: Waiting = Waiting {
        left: 8,
        from: None,
    };

    #[test]
    fn steps_run_beside_as_much_of_prompts_as_the_budget_allows() {
        assert_eq!(plan(&[], 256), [0; 0]);
        assert_eq!(plan(&[STEPS, prompt(1, 77)], 0), [8, 1]);
        assert_eq!(plan(&[prompt(1000, 0), STEPS], 256), [256, 8]);
        assert_eq!(plan(&[prompt(100, 0), prompt(900, 0)], 256), [100, 144]);
    }

    #[test]
    fn prompts_are_divided_at_borders() {
        assert_eq!(plan(&[prompt(1000, 30)], 256), [242]);
        assert_eq!(plan(&[prompt(200, 30)], 256), [200]);
        // Rather than nothing, the tokens up to a border run.
        assert_eq!(plan(&[prompt(1000, 30)], 1), [2]);
        assert_eq!(plan(&[prompt(1000, 0)], 0), [16]);
    }

    #[test]
    fn short_prompts_overtake_long_ones_but_leave_them_half() {
        assert_eq!(plan(&[prompt(4096, 0), prompt(20, 0)], 256), [224, 20]);
        let many: Vec<Waiting> = std::iter::once(prompt(4096, 0))
            .chain((0..10).map(|_| prompt(60, 0)))
            .collect();
        assert_eq!(plan(&many, 256)[..4], [128, 60, 60, 0]);
    }

    /// In virtual time: arrivals of random prompts. Each prompt ends, and the one that waits longest goes on in every pass.
    #[test]
    fn no_prompt_starves() {
        let (mut waiting, mut arrived, mut ended) = (Vec::<Waiting>::new(), 0u64, 0u64);
        let mut pass = 0;
        while ended < 100_000 {
            pass += 1;
            if arrived < 100_000 {
                for i in 0..bits(5, pass) % 3 {
                    let drawn = bits(6, 3 * pass + i);
                    let left = match drawn % 8 {
                        0 => 1 + (drawn >> 8) as usize % 4000,
                        _ => 1 + (drawn >> 8) as usize % 100,
                    };
                    waiting.push(prompt(left, (drawn >> 40) as usize % 1000));
                    arrived += 1;
                }
            }
            let counts = plan(&waiting, 256);
            assert!(waiting.is_empty() || counts.iter().any(|&count| count > 0));
            let oldest = waiting.iter().position(|w| w.left > 1);
            assert!(oldest.is_none_or(|i| counts[i] > 0), "{waiting:?}");
            let rows: usize = counts.iter().filter(|c| **c > 1).sum();
            assert!(rows <= 256, "{rows} rows of prompts in a pass");
            for (caller, count) in waiting.iter_mut().zip(counts) {
                assert!(count <= caller.left);
                caller.left -= count;
                caller.from = caller.from.map(|from| from + count);
            }
            let before = waiting.len();
            waiting.retain(|caller| caller.left > 0);
            ended += (before - waiting.len()) as u64;
        }
    }
}
