//! The tokens of a model by text and by id, in one text and one table.

/// FNV's start and a multiplier whose upper half depends on every bit of the input.
const SEED: u64 = 0xcbf2_9ce4_8422_2325;
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes `word` into `hash`.
#[inline]
pub(super) fn mixed(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ word) * u128::from(FACTOR);
    (product as u64) ^ ((product >> 64) as u64)
}

fn hash(text: &str) -> u64 {
    let (words, rest) = text.as_bytes().as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let hash = words
        .iter()
        .fold(SEED, |hash, word| mixed(hash, u64::from_le_bytes(*word)));
    mixed(mixed(hash, u64::from_le_bytes(last)), text.len() as u64)
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// The upper half of the hash, which rules out most other tokens.
    tag: u32,
    /// The number of the token, counted from 1; 0 in an empty slot.
    number: u32,
}

/// Token text to id and back.
pub(super) struct Vocabulary {
    text: String,
    /// The number `n` counted from 1 has `ends[n - 1]..ends[n]` of the text.
    ends: Vec<u32>,
    ids: Vec<u32>,
    slots: Vec<Slot>,
}

impl Vocabulary {
    /// The table of `tokens`; None if two have the same text or the same id.
    pub(super) fn new<'t>(tokens: impl ExactSizeIterator<Item = (&'t str, u32)>) -> Option<Self> {
        let count = tokens.len();
        let mut vocabulary = Vocabulary {
            text: String::new(),
            ends: Vec::with_capacity(count + 1),
            ids: Vec::with_capacity(count),
            slots: vec![Slot::default(); (count * 3 / 2 + 1).next_power_of_two()],
        };
        vocabulary.ends.push(0);
        // Gaps between ids may be as large as the vocabulary; a file with larger ids is not a vocabulary.
        let mut used = vec![false; 2 * count];
        for (text, id) in tokens {
            if std::mem::replace(used.get_mut(id as usize)?, true) {
                return None;
            }
            let Err((slot, tag)) = vocabulary.find(text) else {
                return None;
            };
            vocabulary.text.push_str(text);
            vocabulary
                .ends
                .push(u32::try_from(vocabulary.text.len()).ok()?);
            vocabulary.ids.push(id);
            vocabulary.slots[slot] = Slot {
                tag,
                number: vocabulary.ids.len() as u32,
            };
        }
        Some(vocabulary)
    }

    fn spelling(&self, number: usize) -> &str {
        &self.text[self.ends[number - 1] as usize..self.ends[number] as usize]
    }

    /// The id of `text`, or the slot for it.
    fn find(&self, text: &str) -> Result<u32, (usize, u32)> {
        let hash = hash(text);
        let tag = (hash >> 32) as u32;
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot.number == 0 {
                return Err((at, tag));
            }
            if slot.tag == tag && self.spelling(slot.number as usize) == text {
                return Ok(self.ids[slot.number as usize - 1]);
            }
            at = (at + 1) & mask;
        }
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.find(text).ok()
    }

    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        (1..=self.len()).map(|number| (self.spelling(number), self.ids[number - 1]))
    }
}
