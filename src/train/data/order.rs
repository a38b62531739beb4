//! The order in which windows come, and places in it.

use serde::{Deserialize, Serialize};

use super::window::shuffle;
use crate::format::random;

/// A place in an order: after `index` items of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// How often all items have been seen.
    pub epoch: u64,
    /// Items of this epoch that have been seen.
    pub index: u64,
}

/// All items again and again, each epoch in an order of its own that depends on nothing but the seed and the epoch's number.
#[derive(Clone, Debug)]
pub struct Order {
    seed: u64,
    count: usize,
    /// The epoch that `items` is the order of.
    epoch: u64,
    items: Vec<u32>,
    place: Place,
}

impl Order {
    /// An order of `count` items, which must be positive, from `place` on.
    pub fn new(seed: u64, count: usize, place: Place) -> Order {
        let mut order = Order {
            seed,
            count,
            epoch: 0,
            items: Vec::new(),
            place,
        };
        order.enter(place.epoch);
        order
    }

    fn enter(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.items = (0..self.count as u32).collect();
        shuffle(&mut self.items, random::bits(self.seed, epoch));
    }

    /// Where the next item is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The number of the next item.
    pub fn next_item(&mut self) -> usize {
        if self.place.index >= self.count as u64 {
            self.place = Place {
                epoch: self.place.epoch + 1,
                index: 0,
            };
        }
        if self.epoch != self.place.epoch {
            self.enter(self.place.epoch);
        }
        let item = self.items[self.place.index as usize];
        self.place.index += 1;
        item as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_has_every_item_and_any_place_goes_on() {
        let mut order = Order::new(3, 10, Place::default());
        let all: Vec<usize> = (0..35).map(|_| order.next_item()).collect();
        for epoch in all.chunks_exact(10) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(all[..10], all[10..20]);
        for stop in [0, 4, 10, 17, 30] {
            let mut first = Order::new(3, 10, Place::default());
            (0..stop).for_each(|_| {
                first.next_item();
            });
            let mut second = Order::new(3, 10, first.place());
            let rest: Vec<usize> = (stop..35).map(|_| second.next_item()).collect();
            assert_eq!(rest, all[stop..]);
        }
        assert_ne!(
            Order::new(4, 10, Place::default()).items,
            Order::new(3, 10, Place::default()).items
        );
    }
}
