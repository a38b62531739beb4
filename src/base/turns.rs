//! Whose turn it is to use what only one caller can use at a time: first come, first served, and who waits can give up.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

/// How often one who waits asks whether to give up.
const PATIENCE: Duration = Duration::from_millis(10);

/// A queue in front of a resource. Unlike a mutex it is fair: a caller who comes back at once stands behind those who wait.
#[derive(Debug, Default)]
pub struct Turns {
    queue: Mutex<Queue>,
}

/// Tickets and who holds them, in the order of their arrival; the first has its turn.
#[derive(Debug, Default)]
struct Queue {
    tickets: VecDeque<(u64, Thread)>,
    last: u64,
}

impl Queue {
    fn is_first(&self, ticket: u64) -> bool {
        self.tickets
            .front()
            .is_some_and(|&(first, _)| first == ticket)
    }
}

impl Turns {
    /// An empty queue.
    pub fn new() -> Turns {
        Turns::default()
    }

    /// Waits for this caller's turn, which lasts until what is returned is dropped. Nothing if `give_up` says so before; it is
    /// asked every few milliseconds.
    pub fn take(&self, give_up: impl Fn() -> bool) -> Option<Turn<'_>> {
        let own = {
            let mut queue = self.queue();
            queue.last += 1;
            let own = queue.last;
            queue.tickets.push_back((own, thread::current()));
            own
        };
        while !self.queue().is_first(own) {
            if give_up() {
                let mut queue = self.queue();
                // The turn may have come just now.
                if !queue.is_first(own) {
                    queue.tickets.retain(|&(ticket, _)| ticket != own);
                    return None;
                }
            } else {
                thread::park_timeout(PATIENCE);
            }
        }
        Some(Turn { turns: self })
    }

    /// Whether someone waits.
    pub fn is_contended(&self) -> bool {
        self.queue().tickets.len() > 1
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A caller's turn.
#[derive(Debug)]
#[must_use = "the turn ends when this is dropped"]
pub struct Turn<'a> {
    turns: &'a Turns,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let next = {
            let mut queue = self.turns.queue();
            queue.tickets.pop_front();
            queue.tickets.front().map(|(_, thread)| thread.clone())
        };
        if let Some(next) = next {
            next.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Waits until so many stand in the queue.
    fn until(turns: &Turns, count: usize) {
        while turns.queue().tickets.len() != count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn turns_come_in_the_order_of_arrival() {
        let (turns, order) = (Turns::new(), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            let first = turns.take(|| false).unwrap();
            assert!(!turns.is_contended());
            for i in 0..5 {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let _turn = turns.take(|| false).unwrap();
                    order.lock().unwrap().push(i);
                });
                until(turns, i + 2);
            }
            assert!(turns.is_contended());
            drop(first);
        });
        assert_eq!(order.into_inner().unwrap(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn who_gives_up_holds_nobody_up() {
        let (turns, stop) = (Turns::new(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let first = turns.take(|| false).unwrap();
            let gives_up = scope.spawn(|| turns.take(|| stop.load(Ordering::Relaxed)).is_none());
            until(&turns, 2);
            let waits = scope.spawn(|| turns.take(|| false).is_some());
            until(&turns, 3);
            stop.store(true, Ordering::Relaxed);
            assert!(gives_up.join().unwrap());
            until(&turns, 2);
            drop(first);
            assert!(waits.join().unwrap());
        });
        assert!(turns.queue().tickets.is_empty());
    }
}
