//! Passes pieces from a connection to the digest: pieces in order are hashed while they are in the CPU's cache, and need
//! not be read back from the file. Pieces out of order, or faster than they are hashed, are not taken.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most pieces that wait.
const MOST: usize = 16;

#[derive(Default)]
pub(super) struct Handover {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The pieces by offset, in order and without gaps.
    waiting: VecDeque<(u64, Vec<u8>)>,
    /// The offset of the next piece.
    next: u64,
    /// Buffers for reuse.
    spare: Vec<Vec<u8>>,
}

impl Handover {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands over the piece that begins at `offset`, if it is the next one and there is room, and leaves another buffer in
    /// its place, whose contents are unspecified.
    pub(super) fn give(&self, offset: u64, piece: &mut Vec<u8>, length: usize) {
        let mut state = self.lock();
        if length == 0 || offset != state.next || state.waiting.len() >= MOST {
            return;
        }
        let size = piece.len();
        let mut other = state.spare.pop().unwrap_or_default();
        other.resize(size, 0);
        let mut given = std::mem::replace(piece, other);
        given.truncate(length);
        state.next += length as u64;
        state.waiting.push_back((offset, given));
    }

    /// The piece that begins at `offset`, if it was handed over.
    pub(super) fn take(&self, offset: u64) -> Option<Vec<u8>> {
        let mut state = self.lock();
        match state.waiting.front() {
            Some((at, _)) if *at == offset => state.waiting.pop_front().map(|(_, piece)| piece),
            _ => None,
        }
    }

    /// Takes back the buffer of a piece.
    pub(super) fn give_back(&self, piece: Vec<u8>) {
        let mut state = self.lock();
        if state.spare.len() < MOST {
            state.spare.push(piece);
        }
    }

    /// Everything before `offset` was read from the file: pieces are taken from there on.
    pub(super) fn skip_to(&self, offset: u64) {
        let mut state = self.lock();
        while state.waiting.front().is_some_and(|(at, _)| *at < offset) {
            state.waiting.pop_front();
        }
        if state.waiting.is_empty() {
            state.next = state.next.max(offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_in_order_are_handed_over() {
        let handover = Handover::default();
        let mut piece = vec![1; 8];
        handover.give(0, &mut piece, 8);
        assert_eq!(piece.len(), 8);
        piece.fill(2);
        handover.give(8, &mut piece, 3);
        // Not the next one.
        handover.give(12, &mut piece, 8);
        assert_eq!(handover.take(8), None);
        let first = handover.take(0).unwrap();
        assert_eq!(first, [1; 8]);
        handover.give_back(first);
        assert_eq!(handover.take(8), Some(vec![2; 3]));
        assert_eq!(handover.take(11), None);
        // The reader continues from the file.
        handover.skip_to(20);
        handover.give(11, &mut piece, 8);
        assert_eq!(handover.take(11), None);
        handover.give(20, &mut piece, 8);
        assert_eq!(handover.take(20).map(|p| p.len()), Some(8));
        for offset in 0..100 {
            handover.give(28 + 8 * offset, &mut piece, 8);
        }
        assert_eq!(handover.lock().waiting.len(), MOST);
        handover.skip_to(28 + 8 * 50);
        assert_eq!(handover.lock().next, 28 + 8 * 50);
    }
}
