//! The order of windows over epochs, and places in it.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::window::shuffle;
use crate::format::random;

/// A place in an order: `index` items into an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Completed epochs.
    pub epoch: u64,
    /// Completed items of the current epoch.
    pub index: u64,
}

/// An endless order of all items, shuffled in each epoch. It depends only on the seed, the epoch's number and the items per step; no step
/// has an item twice.
#[derive(Clone, Debug)]
pub struct Order {
    seed: u64,
    count: usize,
    /// Items per step.
    step: usize,
    /// The epoch whose order `items` holds.
    epoch: u64,
    items: Vec<u32>,
    place: Place,
}

impl Order {
    /// An order of `count` items for steps of `step` items, from `place` on. Neither number may be 0, and `step` must not exceed `count`.
    pub fn new(seed: u64, (count, step): (usize, usize), place: Place) -> Order {
        let mut order = Order {
            seed,
            count,
            step,
            epoch: 0,
            items: shuffled(seed, count, 0),
            place,
        };
        (0..place.epoch).for_each(|_| order.enter_next());
        order
    }

    /// Enters the next epoch. If a step spans its beginning, items that the step already had come at the epoch's end.
    fn enter_next(&mut self) {
        self.epoch += 1;
        let before = (self.epoch as u128 * self.count as u128 % self.step as u128) as usize;
        let had: HashSet<u32> = self.items[self.count - before.min(self.count)..]
            .iter()
            .copied()
            .collect();
        let mut items = shuffled(self.seed, self.count, self.epoch);
        items.sort_by_key(|item| had.contains(item));
        self.items = items;
    }

    /// The place of the next item.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Index of the next item; advances the order.
    pub fn next_item(&mut self) -> usize {
        if self.place.index >= self.count as u64 {
            self.place = Place {
                epoch: self.place.epoch + 1,
                index: 0,
            };
        }
        if self.epoch != self.place.epoch {
            self.enter_next();
        }
        let item = self.items[self.place.index as usize];
        self.place.index += 1;
        item as usize
    }
}

/// All items, shuffled by the seed and the epoch.
fn shuffled(seed: u64, count: usize, epoch: u64) -> Vec<u32> {
    let mut items = (0..count as u32).collect::<Vec<_>>();
    shuffle(&mut items, random::bits(seed, epoch));
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_has_every_item_and_any_place_goes_on() {
        let mut order = Order::new(3, (10, 4), Place::default());
        let all: Vec<usize> = (0..35).map(|_| order.next_item()).collect();
        for epoch in all.chunks_exact(10) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(all[..10], all[10..20]);
        for stop in [0, 4, 10, 17, 30] {
            let mut first = Order::new(3, (10, 4), Place::default());
            (0..stop).for_each(|_| {
                first.next_item();
            });
            let mut second = Order::new(3, (10, 4), first.place());
            let rest: Vec<usize> = (stop..35).map(|_| second.next_item()).collect();
            assert_eq!(rest, all[stop..]);
        }
        assert_ne!(
            Order::new(4, (10, 4), Place::default()).items,
            Order::new(3, (10, 4), Place::default()).items
        );
    }

    #[test]
    fn no_step_has_an_item_twice() {
        for (count, step) in [(10, 4), (7, 7), (9, 8), (5, 3), (2, 1)] {
            let mut order = Order::new(5, (count, step), Place::default());
            let all: Vec<usize> = (0..40 * step).map(|_| order.next_item()).collect();
            for step in all.chunks_exact(step) {
                let mut sorted = step.to_vec();
                sorted.sort_unstable();
                sorted.dedup();
                assert_eq!(sorted.len(), step.len(), "{count}: {step:?}");
            }
            for epoch in all.chunks_exact(count) {
                let mut sorted = epoch.to_vec();
                sorted.sort_unstable();
                assert!(sorted.into_iter().eq(0..count));
            }
        }
    }
}
