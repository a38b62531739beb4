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

impl Waiting {
    /// Whether its tokens are those of a prompt, and not a step.
    pub(super) fn is_prompt(&self) -> bool {
        self.from.is_some() && self.left > 1
    }

    /// Whether they are few, so that a pass with them takes hardly longer.
    pub(super) fn is_short(&self) -> bool {
        self.left <= SHORT
    }
}

/// The kinds of tokens that a pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Both,
    Prompts,
    Steps,
}

impl Turn {
    /// The next turn. Where prompts and steps run `apart`, they take turns.
    pub(super) fn next(waiting: &[Waiting], apart: bool, ran_prompts: bool) -> Turn {
        let has_prompts = waiting.iter().any(Waiting::is_prompt);
        let has_steps = !waiting.iter().all(Waiting::is_prompt);
        match (apart && has_prompts && has_steps, ran_prompts) {
            (false, _) => Turn::Both,
            (true, false) => Turn::Prompts,
            (true, true) => Turn::Steps,
        }
    }
}

/// The number of tokens of each caller that run in the next pass, with up to `budget` tokens of prompts. Callers without a prompt all run
/// when it is their turn. Of prompts, short ones come first, and then those that came first; the one that has waited longest always goes on.
pub(super) fn plan(waiting: &[Waiting], turn: Turn, budget: usize) -> Vec<usize> {
    let mut counts = vec![0; waiting.len()];
    let (mut prompts, mut others): (Vec<_>, Vec<_>) =
        (0..waiting.len()).partition(|&i| waiting[i].is_prompt());
    match turn {
        Turn::Both => {}
        Turn::Prompts => others.clear(),
        Turn::Steps => prompts.clear(),
    }
    for i in others {
        counts[i] = waiting[i].left;
    }
    let mut left = budget;
    let Some(&oldest) = prompts.first() else {
        return counts;
    };
    // Short ones leave half of the budget to the oldest.
    let share = waiting[oldest].left.min(budget / 2);
    let short = prompts.iter().filter(|&&i| waiting[i].is_short());
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
        assert_eq!(plan(&[], Turn::Both, 256), [0; 0]);
        assert_eq!(plan(&[STEPS, prompt(1, 77)], Turn::Both, 0), [8, 1]);
        assert_eq!(plan(&[prompt(1000, 0), STEPS], Turn::Both, 256), [256, 8]);
        assert_eq!(
            plan(&[prompt(100, 0), prompt(900, 0)], Turn::Both, 256),
            [100, 144]
        );
    }

    #[test]
    fn prompts_and_steps_take_turns_where_they_run_apart() {
        let waiting = [STEPS, prompt(1000, 0), prompt(1, 7)];
        let counts = |turn| plan(&waiting, turn, 256);
        assert_eq!(counts(Turn::Both), [8, 256, 1]);
        assert_eq!(counts(Turn::Prompts), [0, 256, 0]);
        assert_eq!(counts(Turn::Steps), [8, 0, 1]);
        assert_eq!(Turn::next(&waiting, false, false), Turn::Both);
        assert_eq!(Turn::next(&waiting, true, false), Turn::Prompts);
        assert_eq!(Turn::next(&waiting, true, true), Turn::Steps);
        // One kind alone does not wait for the other.
        assert_eq!(Turn::next(&[STEPS], true, false), Turn::Both);
        assert_eq!(Turn::next(&waiting[1..2], true, true), Turn::Both);
    }

    #[test]
    fn prompts_are_divided_at_borders() {
        assert_eq!(plan(&[prompt(1000, 30)], Turn::Both, 256), [242]);
        assert_eq!(plan(&[prompt(200, 30)], Turn::Both, 256), [200]);
        // Rather than nothing, the tokens up to a border run.
        assert_eq!(plan(&[prompt(1000, 30)], Turn::Both, 1), [2]);
        assert_eq!(plan(&[prompt(1000, 0)], Turn::Both, 0), [16]);
    }

    #[test]
    fn short_prompts_overtake_long_ones_but_leave_them_half() {
        assert_eq!(
            plan(&[prompt(4096, 0), prompt(20, 0)], Turn::Both, 256),
            [224, 20]
        );
        let many: Vec<Waiting> = std::iter::once(prompt(4096, 0))
            .chain((0..10).map(|_| prompt(60, 0)))
            .collect();
        assert_eq!(plan(&many, Turn::Both, 256)[..4], [128, 60, 60, 0]);
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
            let counts = plan(&waiting, Turn::Both, 256);
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
