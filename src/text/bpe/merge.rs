//! BPE merging of a word: the two neighbours whose merge has the lowest rank become one token, until no neighbours have a merge. Takes `n
//! log n` time for any word of `n` bytes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::vocabulary::mixed;

/// No token, no rank, no neighbour.
const NONE: u32 = u32::MAX;
/// Words up to this many bytes that become up to this many tokens are cached: nearly all words, except in scripts without spaces.
const REMEMBERED: usize = 15;
const REMEMBERED_TOKENS: usize = 4;
/// The number of cached words. With their tokens they fit in a core's L2 cache.
const WORDS: usize = 1 << 13;
/// The word length in bytes for which scratch memory is kept.
const LONG: usize = 1 << 12;

#[derive(Clone, Copy)]
struct Slot {
    /// Both tokens. All ones mark an empty slot, as no token is [`NONE`].
    pair: u64,
    rank: u32,
    merged: u32,
}

/// The merges of a model.
pub(super) struct Merges {
    /// The token of each byte; [`NONE`] if the model has none. Such a byte is left out.
    bytes: [u32; 256],
    slots: Vec<Slot>,
    count: usize,
}

fn pair_of(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Merges {
    /// Room for `count` merges.
    pub(super) fn new(bytes: [Option<u32>; 256], count: usize) -> Self {
        let empty = Slot {
            pair: u64::MAX,
            rank: NONE,
            merged: NONE,
        };
        Merges {
            bytes: bytes.map(|token| token.unwrap_or(NONE)),
            slots: vec![empty; (count * 3 / 2 + 1).next_power_of_two()],
            count: 0,
        }
    }

    fn place(&self, pair: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = mixed(0, pair) as usize & mask;
        while self.slots[at].pair != pair && self.slots[at].pair != u64::MAX {
            at = (at + 1) & mask;
        }
        at
    }

    /// Adds the next merge. An existing pair gets the new rank.
    pub(super) fn push(&mut self, left: u32, right: u32, merged: u32) {
        let pair = pair_of(left, right);
        let at = self.place(pair);
        self.slots[at] = Slot {
            pair,
            rank: self.count as u32,
            merged,
        };
        self.count += 1;
    }

    /// The rank of a merge, and the resulting token.
    #[inline]
    fn get(&self, left: u32, right: u32) -> (u32, u32) {
        let slot = self.slots[self.place(pair_of(left, right))];
        (slot.rank, slot.merged)
    }

    /// The pairs, by rank.
    pub(super) fn pairs(&self) -> Vec<(u32, u32)> {
        let mut slots: Vec<&Slot> = self.slots.iter().filter(|s| s.rank != NONE).collect();
        slots.sort_unstable_by_key(|slot| slot.rank);
        let pair = |slot: &Slot| ((slot.pair >> 32) as u32, slot.pair as u32);
        slots.into_iter().map(pair).collect()
    }

    /// Appends the tokens of `word` to `out`.
    pub(super) fn tokens(&self, word: &[u8], steps: &mut Steps, out: &mut Vec<u32>) {
        let Steps { symbols, queue } = steps;
        symbols.clear();
        for &byte in word {
            let token = self.bytes[byte as usize];
            if token != NONE {
                let at = symbols.len() as u32;
                symbols.push(Symbol {
                    token,
                    before: at.wrapping_sub(1),
                    next: at + 1,
                    rank: NONE,
                    merged: NONE,
                });
            }
        }
        let Some(last) = symbols.last_mut() else {
            return;
        };
        last.next = NONE;
        let mut first = std::mem::take(queue).into_vec();
        for at in 1..symbols.len() {
            let (rank, merged) = self.get(symbols[at - 1].token, symbols[at].token);
            if rank != NONE {
                (symbols[at - 1].rank, symbols[at - 1].merged) = (rank, merged);
                first.push(Reverse(u64::from(rank) << 32 | (at - 1) as u64));
            }
        }
        // Among equal ranks, the leftmost comes first.
        *queue = BinaryHeap::from(first);
        while let Some(Reverse(top)) = queue.pop() {
            let at = top as u32 as usize;
            let symbol = symbols[at];
            // One of the two has already been merged with another.
            if u64::from(symbol.rank) != top >> 32 {
                continue;
            }
            let after = symbols[symbol.next as usize].next;
            symbols[symbol.next as usize].rank = NONE;
            symbols[at].token = symbol.merged;
            symbols[at].next = after;
            if after != NONE {
                symbols[after as usize].before = at as u32;
            }
            for left in [symbol.before, at as u32] {
                let Some(right) = symbols.get(left as usize).map(|s| s.next) else {
                    continue;
                };
                let left = left as usize;
                let (rank, merged) = match right {
                    NONE => (NONE, NONE),
                    _ => self.get(symbols[left].token, symbols[right as usize].token),
                };
                (symbols[left].rank, symbols[left].merged) = (rank, merged);
                if rank != NONE {
                    queue.push(Reverse(u64::from(rank) << 32 | left as u64));
                }
            }
        }
        let mut at = 0;
        while let Some(symbol) = symbols.get(at as usize) {
            out.push(symbol.token);
            at = symbol.next;
        }
    }
}

/// A token of a word that is being merged, and the rank of its merge with the next one, if any.
#[derive(Clone, Copy)]
struct Symbol {
    token: u32,
    before: u32,
    next: u32,
    rank: u32,
    merged: u32,
}

/// Scratch memory for merging, kept from one word to the next.
#[derive(Default)]
pub(super) struct Steps {
    symbols: Vec<Symbol>,
    /// Rank and position of the pairs that have a merge.
    queue: BinaryHeap<Reverse<u64>>,
}

impl Steps {
    /// Frees memory that only an unusually long word needs.
    pub(super) fn trim(&mut self) {
        if self.symbols.capacity() > LONG {
            *self = Steps::default();
        }
    }
}

/// A direct-mapped cache of words and their tokens.
pub(super) struct Memory(Vec<(u128, [u32; REMEMBERED_TOKENS])>);

impl Default for Memory {
    fn default() -> Self {
        Memory(vec![(0, [NONE; REMEMBERED_TOKENS]); WORDS])
    }
}

impl Memory {
    /// Appends the tokens of `word` to `out`: cached ones, or those that `make` appends.
    #[inline]
    pub(super) fn tokens(
        &mut self,
        word: &[u8],
        out: &mut Vec<u32>,
        make: impl FnOnce(&mut Vec<u32>),
    ) {
        if word.len() > REMEMBERED {
            return make(out);
        }
        let mut bytes = [0; REMEMBERED + 1];
        bytes[..word.len()].copy_from_slice(word);
        bytes[REMEMBERED] = word.len() as u8;
        let key = u128::from_le_bytes(bytes);
        let hash = mixed(mixed(0, key as u64), (key >> 64) as u64);
        let (known, tokens) = &mut self.0[hash as usize % WORDS];
        if *known == key {
            out.extend(tokens.iter().take_while(|&&token| token != NONE));
            return;
        }
        let from = out.len();
        make(out);
        if let made = &out[from..]
            && made.len() <= REMEMBERED_TOKENS
        {
            *known = key;
            *tokens = [NONE; REMEMBERED_TOKENS];
            tokens[..made.len()].copy_from_slice(made);
        }
    }
}
