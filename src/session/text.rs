//! The text of a generation as tokens arrive: shows whole characters and no part of a stop string. A possible beginning of a stop string is
//! held back until it is decided. [`Transcript`](super::Transcript) and chat turns use it.

use crate::base::error::bail;
use crate::base::{ErrorKind, Result};
use crate::engine::Served;
use crate::text::Detokenizer;

/// The text of a generation: the part that may be shown, and the part held back.
pub(super) struct GenerationText {
    /// `None` if the model has no tokenizer; then there is no text.
    detokenizer: Option<Detokenizer>,
    all: String,
    /// Matches the stop strings in `all`.
    shown: Watch,
    /// Matches the stop strings that name a special token, in the text with the names of special tokens.
    spelled: Watch,
    /// Bytes of `all` that may be shown; `given` of them were shown already.
    free: usize,
    given: usize,
    /// Number of tokens to come whose text may contain stop strings.
    spared: usize,
    /// Special tokens whose names count as text.
    named: Vec<&'static str>,
    /// Tokens that end a turn although the vocabulary lists them as ordinary text. They add no text.
    ends: Vec<u32>,
}

impl GenerationText {
    /// A text that continues that of `tokens`, which may end within a character.
    pub(super) fn after(tokens: &[u32], model: &Served, stops: &[String]) -> Result<Self> {
        if stops.iter().any(String::is_empty) {
            bail!(
                InvalidArgument,
                "a stop string is empty, which every text contains"
            );
        }
        let tokenizer = match model.tokenizer() {
            Ok(tokenizer) => Some(tokenizer),
            Err(e) if stops.is_empty() && e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(e.within("stop strings")),
        };
        let names_special = |stop: &str| tokenizer.is_some_and(|t| t.names_special(stop));
        let detokenizer = tokenizer.map(|t| Detokenizer::new(t).after(tokens));
        let mut text = Self::new(detokenizer, stops, names_special);
        if let Some(tokenizer) = tokenizer {
            let ends = model.stop_tokens().iter().copied();
            let ends = ends.filter(|&id| tokenizer.is_control(id) && !tokenizer.is_special(id));
            text.ends = ends.collect();
        }
        Ok(text)
    }

    fn new(
        detokenizer: Option<Detokenizer>,
        stops: &[String],
        names_special: impl Fn(&str) -> bool,
    ) -> Self {
        let all = stops.iter().map(String::as_str);
        GenerationText {
            detokenizer,
            all: String::new(),
            spelled: Watch::of(all.clone().filter(|stop| names_special(stop))),
            shown: Watch::of(all),
            free: 0,
            given: 0,
            spared: 0,
            named: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Writes the names of these special tokens as text.
    pub(super) fn showing(mut self, named: &[&'static str]) -> Self {
        self.named = named.to_vec();
        self
    }

    /// Looks for no stop string in the text of the first `count` tokens.
    pub(super) fn sparing(mut self, count: usize) -> Self {
        self.spared = count;
        self
    }

    /// Adds a token. Returns whether it completes a stop string, which is then cut off.
    pub(super) fn push(&mut self, token: u32) -> bool {
        let Some(detokenizer) = &mut self.detokenizer else {
            return false;
        };
        if self.ends.contains(&token) {
            return false;
        }
        // A model may have rows for ids without text in its tokenizer.
        let text = detokenizer.push(token).unwrap_or_default();
        let name = detokenizer.name_of_special(token).to_owned();
        let (text, name) = match self.named.contains(&&*name) {
            true => (text + &name, String::new()),
            false => (text, name),
        };
        if self.spared == 0 {
            return self.add(&text, &name);
        }
        self.spared -= 1;
        self.all.push_str(&text);
        self.free = self.all.len();
        false
    }

    /// Adds text, and after it the name of a special token. Returns whether that completes a stop string.
    fn add(&mut self, text: &str, name: &str) -> bool {
        let start = self.all.len();
        self.all.push_str(text);
        let end = self.all.len();
        self.shown.add(text, start..end);
        self.spelled.add(text, start..end);
        self.spelled.add(name, name.bytes().map(|_| end));
        let found = [self.shown.look(), self.spelled.look()];
        let cut = found.into_iter().flatten().min();
        self.free = cut.unwrap_or_else(|| {
            let waiting = [&self.shown, &self.spelled].map(|w| w.places.first().copied());
            waiting.into_iter().flatten().min().unwrap_or(end)
        });
        if let Some(cut) = cut {
            self.all.truncate(cut);
        }
        cut.is_some()
    }

    /// Ends the text and releases a held-back possible beginning of a stop string. An incomplete character is not shown; the next
    /// generation's tokens may complete it.
    pub(super) fn finish(&mut self) {
        self.free = self.all.len();
    }

    /// The text that may be shown and was not shown yet.
    pub(super) fn next(&mut self) -> &str {
        let from = std::mem::replace(&mut self.given, self.free);
        &self.all[from..self.free]
    }

    /// The whole text.
    pub(super) fn into_string(self) -> String {
        self.all
    }
}

/// Looks for stop strings in a text as it arrives.
struct Watch {
    stops: Vec<String>,
    /// The end of the text, from the first possible beginning of a stop string.
    waiting: String,
    /// Position of each byte of `waiting` in the shown text.
    places: Vec<usize>,
}

impl Watch {
    fn of<'a>(stops: impl Iterator<Item = &'a str>) -> Self {
        Watch {
            stops: stops.map(str::to_owned).collect(),
            waiting: String::new(),
            places: Vec::new(),
        }
    }

    fn add(&mut self, text: &str, places: impl Iterator<Item = usize>) {
        self.waiting.push_str(text);
        self.places.extend(places);
    }

    /// Position of the first stop string. If there is none, releases everything before its first possible beginning.
    fn look(&mut self) -> Option<usize> {
        let waiting = &*self.waiting;
        if let Some(at) = self.stops.iter().filter_map(|s| waiting.find(&**s)).min() {
            return Some(self.places[at]);
        }
        let may_begin_stop = |rest: &str| self.stops.iter().any(|s| s.starts_with(rest));
        let mut starts = waiting.char_indices().map(|(i, _)| i);
        let first = starts.find(|&i| may_begin_stop(&waiting[i..]));
        let done = first.unwrap_or(waiting.len());
        self.waiting.drain(..done);
        self.places.drain(..done);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The name of a special token.
    const NAME: &str = "<S>";

    /// The text shown for `pieces`, in which `NAME` is a special token, and whether a stop string ended it.
    fn show(pieces: &[String], stops: &[String]) -> (Vec<String>, bool) {
        let mut text = GenerationText::new(None, stops, |stop| stop.contains(NAME));
        let mut shown = Vec::new();
        for piece in pieces {
            let stopped = match &**piece {
                NAME => text.add("", NAME),
                piece => text.add(piece, ""),
            };
            shown.push(text.next().to_owned());
            if stopped {
                return (shown, true);
            }
        }
        text.finish();
        shown.push(text.next().to_owned());
        assert_eq!(text.into_string(), shown.concat());
        (shown, false)
    }

    fn strings(parts: &[&str]) -> Vec<String> {
        parts.iter().map(|&p| p.to_owned()).collect()
    }

    #[test]
    fn what_may_begin_a_stop_string_waits() {
        let stops = strings(&["</end>", "STOP"]);
        let (shown, stopped) = show(&strings(&["a <", "/e", "n</", "end", "> b"]), &stops);
        assert_eq!(shown, ["a ", "", "</en", "", ""]);
        assert!(stopped);
        let (shown, stopped) = show(&strings(&["é</", "é S", "TO"]), &stops);
        assert_eq!(shown, ["é", "</é ", "", "STO"]);
        assert!(!stopped);
    }

    #[test]
    fn special_tokens_count_where_a_stop_string_names_them() {
        let (shown, stopped) = show(&strings(&["ab", NAME]), &strings(&[NAME]));
        assert_eq!((shown, stopped), (strings(&["ab", ""]), true));
        let around = strings(&["b<S>c"]);
        let (shown, stopped) = show(&strings(&["ab", NAME, "d", "b", NAME, "cd"]), &around);
        assert_eq!(shown, ["a", "", "bd", "", "", ""]);
        assert!(stopped);
        // Spelled by ordinary tokens, the name is ordinary text.
        assert_eq!(show(&strings(&["ab<", "S>c"]), &around).0, ["a", ""]);
        // Other stop strings do not match the names of special tokens.
        let (shown, stopped) = show(&strings(&["a", NAME, "b"]), &strings(&["ab", "S"]));
        assert_eq!((shown, stopped), (strings(&["", "", ""]), true));
        let (shown, stopped) = show(&strings(&[NAME, "a"]), &strings(&["S", "<"]));
        assert_eq!((shown, stopped), (strings(&["", "a", ""]), false));
    }

    proptest! {
        #[test]
        fn streaming_shows_what_stands_before_the_first_stop_string(
            pieces in proptest::collection::vec("[abé]{0,3}|<S>", 0..12),
            stops in proptest::collection::vec("[abé]{1,4}|[abé]{0,2}<S>[abé]{0,2}", 0..3),
        ) {
            let (mut whole, mut spelled, mut places) = (String::new(), String::new(), Vec::new());
            let mut cut = None;
            for piece in &pieces {
                spelled.push_str(piece);
                for i in 0..piece.len() {
                    places.push(whole.len() + if piece == NAME { 0 } else { i });
                }
                if piece != NAME {
                    whole.push_str(piece);
                }
                let shown = stops.iter().filter_map(|s| whole.find(&**s));
                let named = stops.iter().filter(|s| s.contains(NAME));
                let named = named.filter_map(|s| spelled.find(&**s)).map(|at| places[at]);
                cut = shown.chain(named).min();
                if cut.is_some() {
                    break;
                }
            }
            let (shown, stopped) = show(&pieces, &stops);
            prop_assert_eq!(stopped, cut.is_some());
            prop_assert_eq!(shown.concat(), &whole[..cut.unwrap_or(whole.len())]);
        }
    }
}
