//! The order of nodes in a file of prefixes, and the choice of nodes that a restore keeps. Pure: knows no memory and no file.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::RandomState;
use std::ops::Range;

use super::record::Record;
use crate::base::Result;
use crate::base::error::bail;
use crate::engine::prefix::{Layers, Listed, NodeId, PrefixIndex, Tree};

/// Puts nodes into the order of a file: those used last come first, and each after its parent.
pub(super) fn in_order(mut nodes: Vec<Listed>) -> Vec<Listed> {
    // A node is younger than its parent.
    nodes.sort_unstable_by_key(|node| node.id);
    let places = nodes.iter().enumerate().map(|(i, node)| (node.id, i));
    let places: HashMap<NodeId, usize> = places.collect();
    for i in (0..nodes.len()).rev() {
        let (parent, last_use) = (nodes[i].parent, nodes[i].last_use);
        if let Some(&parent) = parent.and_then(|parent| places.get(&parent)) {
            nodes[parent].last_use = nodes[parent].last_use.max(last_use);
        }
    }
    nodes.sort_by_key(|node| Reverse(node.last_use));
    nodes
}

/// A node that can be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    /// The number of the parent's node, which is less.
    pub(super) parent: Option<usize>,
    /// The number of the tree.
    pub(super) tree: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) is_followed: bool,
    /// By slot: when the block was last used; 0 if there is none.
    pub(super) last_uses: Vec<u64>,
    /// The records that it is made of, each with the range of its tokens.
    pub(super) sources: Vec<(usize, Range<usize>)>,
}

/// The nodes of records of `from` tokens as nodes of `to` tokens, of which one is a multiple of the other. Records at the end of a path
/// that do not fill a node are left out.
pub(super) fn in_units(records: &[Record], from: usize, to: usize) -> Vec<Planned> {
    match from >= to {
        true => split(records, from, to),
        false => join(records, to / from),
    }
}

fn split(records: &[Record], from: usize, to: usize) -> Vec<Planned> {
    let count = from / to;
    let mut nodes = Vec::with_capacity(records.len() * count);
    for (number, record) in records.iter().enumerate() {
        for part in 0..count {
            let range = part * to..(part + 1) * to;
            let mut last_uses = record.last_uses.clone();
            if let Some(state) = last_uses.last_mut().filter(|_| part + 1 < count) {
                *state = 0;
            }
            nodes.push(Planned {
                parent: match part {
                    0 => record.parent.map(|parent| (parent + 1) * count - 1),
                    _ => Some(nodes.len() - 1),
                },
                tree: record.tree,
                tokens: record.tokens[range.clone()].to_vec(),
                is_followed: record.is_followed,
                last_uses,
                sources: vec![(number, range)],
            });
        }
    }
    nodes
}

fn join(records: &[Record], count: usize) -> Vec<Planned> {
    let mut nodes: Vec<Planned> = Vec::new();
    let mut depths: Vec<usize> = Vec::with_capacity(records.len());
    // By record: the node that ends with it.
    let mut ends: Vec<Option<usize>> = Vec::with_capacity(records.len());
    for (number, record) in records.iter().enumerate() {
        let depth = record.parent.map_or(0, |parent| depths[parent] + 1);
        depths.push(depth);
        if depth % count != count - 1 {
            ends.push(None);
            continue;
        }
        let up = std::iter::successors(Some(number), |&number| records[number].parent);
        let mut chain: Vec<usize> = up.take(count).collect();
        chain.reverse();
        let parts = || chain.iter().map(|&part| &records[part]);
        let last_uses = record.last_uses.iter().enumerate().map(|(slot, &of_last)| {
            let mut uses = parts().map(|part| part.last_uses[slot]);
            match slot + 1 == record.last_uses.len() {
                true => of_last,
                false if uses.clone().any(|time| time == 0) => 0,
                false => uses.by_ref().max().unwrap_or(0),
            }
        });
        let node = Planned {
            parent: records[chain[0]].parent.and_then(|parent| ends[parent]),
            tree: record.tree,
            tokens: parts().flat_map(|part| part.tokens.clone()).collect(),
            is_followed: parts().all(|part| part.is_followed),
            last_uses: last_uses.collect(),
            sources: chain
                .iter()
                .map(|&part| (part, 0..records[part].tokens.len()))
                .collect(),
        };
        ends.push(Some(nodes.len()));
        nodes.push(node);
    }
    nodes
}

/// The nodes and blocks that are restored.
pub(super) struct Kept {
    /// By node.
    pub(super) nodes: Vec<bool>,
    /// By node and slot: the block's number in the order of last use, from 1 on; 0 if it is not kept.
    pub(super) order: Vec<Vec<u64>>,
    /// Blocks of all nodes.
    pub(super) blocks: u64,
}

/// Chooses what takes up to `room` bytes: gives up blocks as the index does until the others fit. `bytes` gives those that a block takes.
pub(super) fn keep(
    nodes: &[Planned],
    trees: &[Tree],
    layers: &Layers,
    bytes: impl Fn(usize, usize) -> u64,
    room: u64,
) -> Result<Kept> {
    let mut index = PrefixIndex::new(layers.clone(), RandomState::new());
    let mut ids: Vec<NodeId> = Vec::with_capacity(nodes.len());
    let mut blocks = Vec::new();
    for (number, node) in nodes.iter().enumerate() {
        let parent = node.parent.map(|parent| ids[parent]);
        let tree = trees[node.tree];
        if index.child(tree, parent, &node.tokens).is_some() {
            bail!(
                CorruptFile,
                "two of its records have the same parent and the same tokens"
            );
        }
        let id = index.add(tree, parent, &node.tokens);
        ids.push(id);
        for (slot, &last_use) in node.last_uses.iter().enumerate() {
            if last_use > 0 {
                index.put(id, slot, number as u32 + 1);
                blocks.push((last_use, Reverse(number), slot));
            }
        }
    }
    // Blocks in use have no time of their own: later tokens are given up before earlier ones.
    blocks.sort_unstable();
    let mut order: Vec<Vec<u64>> = nodes.iter().map(|n| vec![0; n.last_uses.len()]).collect();
    let mut taken = 0;
    for (place, &(_, Reverse(number), slot)) in (1..).zip(&blocks) {
        index.leave(ids[number], slot);
        order[number][slot] = place;
        taken += bytes(number, slot);
    }
    while taken > room {
        for place in index.give_up_oldest() {
            let number = place.block as usize - 1;
            order[number][place.slot] = 0;
            taken -= bytes(number, place.slot);
        }
    }
    Ok(Kept {
        nodes: ids.iter().map(|id| index.contains(*id)).collect(),
        order,
        blocks: blocks.len() as u64,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::format::random::bits;
    use crate::model::KvType;
    use crate::model::kv::NULL_BLOCK;

    const TREE: Tree = Tree {
        kind: KvType::F16,
        long_ropes: 0,
        adapter: None,
    };

    /// Records of a random tree, of 16 tokens and with slots of all positions, of a window and of a state. Parents are used after children.
    fn records(seed: u64, count: usize) -> Vec<Record> {
        let mut records: Vec<Record> = Vec::new();
        for number in 0..count {
            let drawn = bits(seed, number as u64);
            // Long paths with few branches.
            let parent = match drawn % 16 {
                0 => None,
                1 => (drawn >> 8).checked_rem(number as u64).map(|p| p as usize),
                _ => number.checked_sub(1),
            };
            let tokens = (0..16).map(|i| i + 16 * number as u32).collect();
            let used = 1 + 100 * (count - number) as u64;
            let last_uses =
                [0, 1, 2].map(
                    |slot: u64| match slot > 0 && drawn >> (32 + slot) & 1 == 0 {
                        true => 0,
                        false => used + slot,
                    },
                );
            let mut record = Record::of(parent, tokens, last_uses.to_vec());
            record.is_followed = drawn >> 40 & 3 > 0;
            records.push(record);
        }
        records
    }

    fn layers() -> Layers {
        Layers {
            unit: 16,
            windows: vec![None, Some(20)],
            has_states: true,
        }
    }

    /// All tokens up to the end of a node.
    fn path(nodes: &[Planned], number: usize) -> Vec<u32> {
        let mut path = match nodes[number].parent {
            None => Vec::new(),
            Some(parent) => path(nodes, parent),
        };
        path.extend(&nodes[number].tokens);
        path
    }

    #[test]
    fn a_file_has_parents_first_and_what_was_used_last() {
        for seed in 0..50 {
            let count = 1 + bits(seed, 0) % 60;
            let mut nodes: Vec<Listed> = (1..=count)
                .map(|id| {
                    let drawn = bits(seed, id);
                    let parent = (!drawn.is_multiple_of(5))
                        .then(|| (drawn >> 8) % id)
                        .filter(|p| *p > 0);
                    Listed {
                        id: NodeId::of(id),
                        parent: parent.map(NodeId::of),
                        tree: TREE,
                        last_use: (drawn >> 32) % 100,
                        is_followed: false,
                        blocks: [NULL_BLOCK].into(),
                    }
                })
                .collect();
            nodes.sort_by_key(|node| bits(seed + 100, node.last_use));
            let ordered = in_order(nodes.clone());
            let place = |id: NodeId| ordered.iter().position(|node| node.id == id).unwrap();
            for (i, node) in ordered.iter().enumerate() {
                assert!(node.parent.is_none_or(|parent| place(parent) < i));
                let own = nodes.iter().find(|of| of.id == node.id).unwrap();
                let children = ordered.iter().filter(|of| of.parent == Some(node.id));
                let last = children.map(|of| of.last_use).max().unwrap_or(0);
                assert_eq!(node.last_use, own.last_use.max(last));
            }
            assert!(ordered.is_sorted_by_key(|node| Reverse(node.last_use)));
            assert_eq!(ordered.len(), nodes.len());
        }
    }

    /// A file of a GPU on the CPU and the other way, against the tokens of all paths.
    #[test]
    fn nodes_of_other_units_have_the_same_paths() {
        for seed in 0..30 {
            let records = records(seed, 60);
            let same = in_units(&records, 16, 16);
            assert_eq!(same.len(), records.len());
            for (number, (node, record)) in same.iter().zip(&records).enumerate() {
                assert_eq!(node.parent, record.parent);
                assert_eq!(node.sources, [(number, 0..16)]);
                assert_eq!(
                    (&node.tokens, &node.last_uses),
                    (&record.tokens, &record.last_uses)
                );
            }
            let joined = in_units(&records, 16, 64);
            let originals = &same;
            let paths = |nodes: &[Planned]| -> BTreeMap<Vec<u32>, usize> {
                (0..nodes.len()).map(|n| (path(nodes, n), n)).collect()
            };
            let (whole, of_joined) = (paths(&same), paths(&joined));
            let want = whole.keys().filter(|path| path.len() % 64 == 0);
            assert!(of_joined.keys().eq(want));
            for (path, &number) in &of_joined {
                let node = &joined[number];
                let parts: Vec<usize> = (1..=4)
                    .rev()
                    .map(|n| whole[&path[..path.len() + 16 - 16 * n]])
                    .collect();
                assert!(node.sources.iter().map(|(of, _)| of).eq(&parts));
                assert!(node.sources.iter().all(|(_, tokens)| *tokens == (0..16)));
                let of = |slot: usize| {
                    parts
                        .iter()
                        .map(move |&part| originals[part].last_uses[slot])
                };
                for slot in 0..2 {
                    let has_all = of(slot).all(|time| time > 0);
                    let last = if has_all { of(slot).max() } else { None };
                    assert_eq!(node.last_uses[slot], last.unwrap_or(0));
                }
                assert_eq!(Some(node.last_uses[2]), of(2).next_back());
                assert_eq!(
                    node.is_followed,
                    parts.iter().all(|&part| same[part].is_followed)
                );
            }
            // Divided again, they are the nodes that were joined, but that only the last has the state.
            let wide = joined.iter().map(|node| {
                let mut record =
                    Record::of(node.parent, node.tokens.clone(), node.last_uses.clone());
                record.is_followed = node.is_followed;
                record
            });
            let wide: Vec<Record> = wide.collect();
            let divided = in_units(&wide, 64, 16);
            assert_eq!(divided.len(), 4 * joined.len());
            for (number, node) in divided.iter().enumerate() {
                let of = path(&divided, number);
                assert_eq!(same[whole[&of]].tokens, node.tokens);
                let (record, part) = (number / 4, number % 4);
                assert_eq!(node.sources, [(record, 16 * part..16 * part + 16)]);
                let wide = &wide[record];
                assert_eq!(node.last_uses[..2], wide.last_uses[..2]);
                assert_eq!(
                    node.last_uses[2],
                    if part == 3 { wide.last_uses[2] } else { 0 }
                );
            }
        }
    }

    /// The blocks that are kept fit, leave no gap, and were used last.
    #[test]
    fn the_last_used_prefixes_are_kept() {
        for seed in 0..30 {
            let nodes = in_units(&records(seed, 40), 16, 16);
            let bytes = |number: usize, slot: usize| {
                assert!(nodes[number].last_uses[slot] > 0);
                [100, 30, 70][slot]
            };
            let sizes = |order: &[Vec<u64>]| {
                let blocks = order.iter().enumerate().flat_map(|(number, slots)| {
                    let kept = slots.iter().enumerate().filter(|(_, place)| **place > 0);
                    kept.map(move |(slot, _)| (number, slot))
                });
                blocks
                    .map(|(number, slot)| bytes(number, slot))
                    .sum::<u64>()
            };
            let kept = |room| keep(&nodes, &[TREE], &layers(), bytes, room).unwrap();
            let all = kept(u64::MAX);
            assert!(all.nodes.iter().all(|is_kept| *is_kept));
            let whole = sizes(&all.order);
            let times = all.order.iter().zip(&nodes);
            let mut times: Vec<_> = times
                .flat_map(|(order, node)| order.iter().copied().zip(node.last_uses.clone()))
                .filter(|(place, _)| *place > 0)
                .collect();
            times.sort_unstable();
            assert!(times.is_sorted_by_key(|(_, last_use)| *last_use));
            assert!((1..=all.blocks).eq(times.iter().map(|(place, _)| *place)));
            for part in 0..=10 {
                let room = whole * part / 10;
                let some = kept(room);
                assert!(sizes(&some.order) <= room);
                let mut oldest_kept = u64::MAX;
                for (number, node) in nodes.iter().enumerate() {
                    let has_parent = node
                        .parent
                        .is_none_or(|p| some.nodes[p] && some.order[p][0] > 0);
                    let order = &some.order[number];
                    let is_bare = order.iter().all(|place| *place == 0);
                    assert!(some.nodes[number] || is_bare);
                    assert!(!some.nodes[number] || has_parent && order[0] > 0);
                    for (place, of_all) in order.iter().zip(&all.order[number]) {
                        assert!([0, *of_all].contains(place));
                        oldest_kept = oldest_kept.min(if *place > 0 { *place } else { u64::MAX });
                    }
                }
                // A younger block is given up only with a node that is.
                let lost: BTreeSet<usize> = (0..nodes.len()).filter(|n| !some.nodes[*n]).collect();
                for (number, order) in some.order.iter().enumerate() {
                    for (slot, of_all) in all.order[number].iter().enumerate() {
                        let is_given_up = order[slot] == 0 && *of_all > 0;
                        assert!(!is_given_up || *of_all < oldest_kept || lost.contains(&number));
                    }
                }
                assert!(sizes(&some.order) + 200 > room);
            }
        }
    }

    #[test]
    fn repeated_records_are_refused() {
        let tokens = || (0..16).collect::<Vec<u32>>();
        let records = [None, Some(0), Some(0)].map(|p| Record::of(p, tokens(), vec![1, 0, 0]));
        let nodes = in_units(&records, 16, 16);
        let kept =
            |nodes: &[Planned]| keep(nodes, &[TREE], &layers(), |_, _| 1, 9).map(|k| k.blocks);
        assert_eq!(kept(&nodes[..2]).unwrap(), 2);
        let refused = kept(&nodes).unwrap_err();
        assert!(refused.message().contains("the same tokens"), "{refused}");
    }
}
