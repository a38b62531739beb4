//! Repetitions in the tokens of a session: n-grams that may not occur again, and DRY penalties of tokens that would extend a repetition.
//! The adjustments of logits use it.

use std::collections::HashMap;

use crate::base::error::bail;
use crate::base::{Result, memory};

/// DRY ("don't repeat yourself") penalties. Where the last tokens of the session have occurred before, the token that followed them there
/// loses `multiplier * base^(length - allowed_length)`, with the length of the longest such repetition in tokens, if that is at least
/// `allowed_length`. The definition is that of p-e-w (text-generation-webui, pull request 5677), with the breakers of llama.cpp.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Strength of the penalty; 0 turns it off.
    pub multiplier: f32,
    /// Growth of the penalty with each token of the repetition, at least 1.
    pub base: f32,
    /// Length of the shortest repetition with a penalty, at least 1.
    pub allowed_length: usize,
    /// Tokens at the session's end in which repetitions are found; 0 for all.
    pub window: usize,
    /// Strings that no repetition contains: one begins after the last of them. A token whose own text contains one has no penalty. The text
    /// of a special token is its name. `None` stands for newline, colon, quotation mark and asterisk.
    pub sequence_breakers: Option<Vec<String>>,
}

/// Breakers by default.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

impl Default for Dry {
    fn default() -> Self {
        Dry {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            window: 0,
            sequence_breakers: None,
        }
    }
}

impl Dry {
    /// Whether it changes nothing.
    pub(super) fn is_off(&self) -> bool {
        self.multiplier == 0.0
    }

    /// Strings that no repetition contains.
    pub(super) fn breakers(&self) -> impl Iterator<Item = &str> {
        let (given, own) = match &self.sequence_breakers {
            Some(given) => (&given[..], &[][..]),
            None => (&[][..], &BREAKERS[..]),
        };
        given.iter().map(String::as_str).chain(own.iter().copied())
    }

    /// Fails for values that describe no penalty.
    pub(super) fn check(&self) -> Result<()> {
        let (multiplier, base) = (self.multiplier, self.base);
        if !(multiplier.is_finite() && multiplier >= 0.0) {
            bail!(
                InvalidArgument,
                "dry_multiplier is {multiplier}; it must be 0 or a positive number"
            );
        }
        if !(base.is_finite() && base >= 1.0) {
            bail!(
                InvalidArgument,
                "dry_base is {base}; it must be a number of at least 1"
            );
        }
        if self.allowed_length == 0 {
            bail!(
                InvalidArgument,
                "dry_allowed_length is 0; it must be at least 1"
            );
        }
        if let Some(i) = self.breakers().position(str::is_empty) {
            bail!(
                InvalidArgument,
                "dry sequence breaker {i} is empty, which every text contains"
            );
        }
        Ok(())
    }

    /// The tokens that lose something after `tokens`, of which `repeats` were found, with what they lose. `text` gives the bytes of a token.
    pub(super) fn penalties<'t>(
        &self,
        tokens: &[u32],
        repeats: &Repeats,
        text: impl Fn(u32) -> &'t [u8],
    ) -> Vec<(u32, f32)> {
        let window = match self.window {
            0 => tokens.len(),
            window => window.min(tokens.len()),
        };
        // Within the window a repetition ends at its beginning.
        let repeats = || {
            let each = repeats.iter().take(window);
            each.map(|(back, length)| (back, length.min(window - back)))
        };
        let longest = repeats().map(|(_, length)| length).max().unwrap_or(0);
        if longest < self.allowed_length {
            return Vec::new();
        }
        let unbroken = self.unbroken(&tokens[tokens.len() - window..], longest, &text);
        let mut lengths: HashMap<u32, usize> = HashMap::new();
        for (back, length) in repeats() {
            let length = length.min(unbroken);
            if length >= self.allowed_length {
                let most = lengths.entry(tokens[tokens.len() - back]).or_default();
                *most = length.max(*most);
            }
        }
        lengths.retain(|&token, _| self.last_breaker(text(token)).is_none());
        let penalty = |length: usize| {
            let exponent = i32::try_from(length - self.allowed_length).unwrap_or(i32::MAX);
            (self.multiplier * self.base.powi(exponent)).min(f32::MAX)
        };
        let each = lengths.into_iter();
        each.map(|(token, length)| (token, penalty(length)))
            .collect()
    }

    /// Number of tokens at the end, at most `most`, that follow the last breaker in the text of `tokens`.
    fn unbroken<'t>(&self, tokens: &[u32], most: usize, text: impl Fn(u32) -> &'t [u8]) -> usize {
        let Some(longest) = self.breakers().map(str::len).max() else {
            return most;
        };
        // The text from the token at hand on, as far as a breaker that begins in it reaches; and the bytes of each token, the last one first.
        let (mut window, mut lengths) = (Vec::new(), Vec::new());
        // A breaker that ends among the last `most` tokens may begin before them.
        let within = tokens.iter().rev().take(most.saturating_add(longest));
        for (after, &token) in within.enumerate() {
            let bytes = text(token);
            window.truncate(longest - 1);
            window.splice(0..0, bytes.iter().copied());
            lengths.push(bytes.len());
            if let Some(end) = self.last_breaker(&window) {
                let mut passed = 0;
                let completes = lengths.iter().rev().position(|length| {
                    passed += length;
                    passed >= end
                });
                return most.min(after - completes.unwrap_or(0));
            }
        }
        most
    }

    /// The end of the breaker in `text` that ends last.
    fn last_breaker(&self, text: &[u8]) -> Option<usize> {
        let end = |breaker: &str| {
            let mut places = text.windows(breaker.len());
            let start = places.rposition(|place| place == breaker.as_bytes());
            start.map(|start| start + breaker.len())
        };
        self.breakers().filter_map(end).max()
    }
}

/// For each token of a sequence, how many of the tokens before it are also the last ones of the sequence. The memory is used again.
#[derive(Clone, Debug, Default)]
pub(super) struct Repeats {
    /// By the distance from the end.
    lengths: Vec<usize>,
}

impl Repeats {
    /// Finds those of `tokens`, in time linear in their number: the Z-function of the reversed sequence.
    pub(super) fn find(&mut self, tokens: &[u32]) -> Result<()> {
        let (z, n) = (&mut self.lengths, tokens.len());
        z.clear();
        memory::make_room(z, n + 1)?;
        z.resize(n + 1, 0);
        // The repetition that reaches furthest back, from `start` to `end` counted from the end of the sequence.
        let (mut start, mut end) = (0, 0);
        for k in 1..n {
            let known = z[k - start].min(end.max(k) - k);
            let (here, there) = (&tokens[..n - known], &tokens[..n - k - known]);
            let more = here.iter().rev().zip(there.iter().rev());
            z[k] = known + more.take_while(|(a, b)| a == b).count();
            if k + z[k] > end {
                (start, end) = (k, k + z[k]);
            }
        }
        Ok(())
    }

    /// For each token, its distance from the end of the sequence, 1 for the last one, and the length of the repetition before it.
    fn iter(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.lengths.iter().copied().enumerate().skip(1)
    }

    /// The tokens after which an n-gram of `size` tokens would have occurred in `tokens` twice.
    pub(super) fn completing(&self, size: usize, tokens: &[u32]) -> impl Iterator<Item = u32> {
        let complete = self.iter().filter(move |&(_, length)| length + 1 >= size);
        complete.map(|(back, _)| tokens[tokens.len() - back])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    /// Texts of tokens: some contain a breaker, some are part of one.
    const TEXTS: [&str; 7] = ["a", "b", "x\ny", "#", "##", "", "# c"];

    fn text(token: u32) -> &'static [u8] {
        TEXTS[token as usize].as_bytes()
    }

    fn dry(breakers: &[&str]) -> Dry {
        Dry {
            multiplier: 0.5,
            sequence_breakers: Some(breakers.iter().map(|&b| b.to_owned()).collect()),
            ..Dry::default()
        }
    }

    /// Penalties as the definition says, by comparing at every place.
    fn by_definition(dry: &Dry, tokens: &[u32]) -> BTreeMap<u32, f64> {
        let tokens = match dry.window {
            0 => tokens,
            window => &tokens[tokens.len().saturating_sub(window)..],
        };
        let breakers = || dry.sequence_breakers.iter().flatten().map(String::as_str);
        // The token of each byte.
        let (mut all, mut owners) = (String::new(), Vec::new());
        for (i, &token) in tokens.iter().enumerate() {
            all += TEXTS[token as usize];
            owners.resize(all.len(), i);
        }
        // Breakers by the token in which they begin and the one in which they end.
        let found = breakers().flat_map(|breaker| {
            let places = (0..all.len()).filter(|&at| all[at..].starts_with(breaker));
            let place = |at: usize| (owners[at], owners[at + breaker.len() - 1]);
            places.map(place).collect::<Vec<_>>()
        });
        let unbroken = match found.max() {
            Some((_, last)) => tokens.len() - 1 - last,
            None => tokens.len(),
        };
        let mut lengths: BTreeMap<u32, usize> = BTreeMap::new();
        for (i, &next) in tokens.iter().enumerate() {
            let (before, end) = (tokens[..i].iter().rev(), tokens.iter().rev());
            let length = before.zip(end).take_while(|(a, b)| a == b).count();
            let length = length.min(unbroken);
            let is_breaker = breakers().any(|b| TEXTS[next as usize].contains(b));
            if length >= dry.allowed_length && !is_breaker {
                let most = lengths.entry(next).or_default();
                *most = length.max(*most);
            }
        }
        let penalty = |length: usize| {
            let exponent = (length - dry.allowed_length) as f64;
            f64::from(dry.multiplier) * f64::from(dry.base).powf(exponent)
        };
        let each = lengths.into_iter();
        each.map(|(token, length)| (token, penalty(length)))
            .collect()
    }

    fn penalties(dry: &Dry, tokens: &[u32]) -> BTreeMap<u32, f32> {
        let mut repeats = Repeats::default();
        repeats.find(tokens).unwrap();
        dry.penalties(tokens, &repeats, text).into_iter().collect()
    }

    proptest! {
        #[test]
        fn repetitions_are_those_of_a_comparison_at_every_place(
            tokens in proptest::collection::vec(0u32..3, 0..40),
            size in 1usize..6,
        ) {
            let mut repeats = Repeats::default();
            repeats.find(&[1, 1, 1]).unwrap();
            repeats.find(&tokens).unwrap();
            for (back, length) in repeats.iter() {
                let before = tokens[..tokens.len() - back].iter().rev();
                let same = before.zip(tokens.iter().rev()).take_while(|(a, b)| a == b);
                prop_assert_eq!(length, same.count());
            }
            prop_assert_eq!(repeats.iter().count(), tokens.len());
            // N-grams as transformers forbids them.
            let mut completing: Vec<u32> = repeats.completing(size, &tokens).collect();
            completing.sort_unstable();
            completing.dedup();
            let would_repeat = |&token: &u32| {
                let with = [&tokens[..], &[token]].concat();
                with.len() >= size && tokens.windows(size).any(|w| *w == with[with.len() - size..])
            };
            prop_assert_eq!(completing, (0..3).filter(would_repeat).collect::<Vec<_>>());
        }

        #[test]
        fn penalties_are_those_of_the_definition(
            tokens in proptest::collection::vec(0u32..7, 0..30),
            repeated in 0usize..30,
            allowed_length in 1usize..4,
            window in 0usize..40,
            breakers in proptest::sample::subsequence(vec!["\n", "###", "# c", "b", "#a"], 0..4),
        ) {
            let again = &tokens[tokens.len().saturating_sub(repeated)..];
            let tokens = [&tokens[..], again].concat();
            let dry = Dry { allowed_length, window, ..dry(&breakers) };
            let (got, want) = (penalties(&dry, &tokens), by_definition(&dry, &tokens));
            prop_assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
            for (got, want) in got.values().zip(want.values()) {
                prop_assert!((f64::from(*got) - want).abs() <= 1e-5 * want, "{} and not {}", got, want);
            }
        }
    }

    #[test]
    fn a_longer_repetition_costs_more_and_a_breaker_ends_it() {
        let plain = dry(&[]);
        // "abab": after "ab" comes "a", after a repetition of two tokens.
        assert_eq!(penalties(&plain, &[0, 1, 0, 1]), [(0, 0.5)].into());
        let longer = penalties(&plain, &[0, 0, 1, 3, 0, 0, 1]);
        assert_eq!(longer, [(3, 0.5 * 1.75)].into());
        assert_eq!(penalties(&plain, &[0, 0, 1, 2, 0, 0, 1])[&2], 0.5 * 1.75);
        // A token with a breaker in its text ends repetitions, and is not penalized.
        let lines = Dry {
            sequence_breakers: None,
            ..plain.clone()
        };
        assert_eq!(penalties(&lines, &[0, 0, 1, 2, 0, 0, 1]), BTreeMap::new());
        assert_eq!(penalties(&lines, &[2, 0, 1, 2, 0]), BTreeMap::new());
        assert_eq!(penalties(&lines, &[2, 0, 0, 1, 2, 0, 0]), [(1, 0.5)].into());
        // A breaker of several tokens, of which the last one counts as much.
        let hashes = dry(&["###"]);
        assert_eq!(penalties(&hashes, &[3, 4, 0, 1, 3, 4, 0]), BTreeMap::new());
        assert_eq!(penalties(&plain, &[3, 4, 0, 1, 3, 4, 0])[&1], 0.5 * 1.75);
        // However long it is, a penalty is finite.
        let loops = [0; 4000];
        assert_eq!(penalties(&plain, &loops), [(0, f32::MAX)].into());
    }
}
