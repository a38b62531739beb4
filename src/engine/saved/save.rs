//! Writes the prefix index to a file while sequences go on: a node is held as long as it is copied.

use std::collections::HashMap;
use std::path::Path;

use super::counts::{PrefixCounts, check_sharing};
use super::plan::in_order;
use super::record::{self, FORMAT, Header, Parts, Trees};
use crate::base::Result;
use crate::base::error::err;
use crate::base::sealed::Writer;
use crate::engine::blocks::Blocks;
use crate::engine::prefix::{Listed, NodeId, Tree};
use crate::model::kv::NULL_BLOCK;

/// Writes the nodes of the index to a file; see [`Served::save_prefixes`](crate::engine::Served::save_prefixes).
pub(in crate::engine) fn save(blocks: &Blocks, path: &Path) -> Result<PrefixCounts> {
    check_sharing(blocks)?;
    let nodes = in_order(blocks.list());
    let mut trees: Vec<Tree> = Vec::new();
    for node in &nodes {
        if !trees.contains(&node.tree) {
            trees.push(node.tree);
        }
    }
    let header = serde_json::to_vec(&Header::new(blocks.model(), &trees))
        .map_err(|e| err!(Internal, "writing the header of prefixes: {e}"))?;
    let trees = Trees::new(blocks.model(), trees)?;
    let unit = blocks.unit();
    let bytes = nodes.iter().filter_map(|node| {
        let number = trees.number(node.tree)?;
        Some(record_bytes(trees.parts(number), unit, node))
    });
    let mut out = Writer::create(path, &FORMAT, &header, bytes.sum())?;
    let mut counts = PrefixCounts::default();
    let mut record = Vec::new();
    let mut records: HashMap<NodeId, u32> = HashMap::with_capacity(nodes.len());
    for node in nodes {
        let parent = match node.parent.map(|parent| records.get(&parent)) {
            None => None,
            Some(Some(number)) => Some(*number),
            // The index has given up the parent meanwhile, and what came after it.
            Some(None) => continue,
        };
        let (Some(tree), Some(pinned)) = (trees.number(node.tree), blocks.pin(node.id)) else {
            continue;
        };
        let number = u32::try_from(records.len())
            .ok()
            .filter(|number| *number != record::NO_PARENT)
            .ok_or_else(|| {
                err!(
                    Unsupported,
                    "a file of prefixes holds 4,294,967,295 records"
                )
            })?;
        record::encode(&mut record, &trees, tree, parent, &pinned.content)?;
        let held = pinned.content.blocks.iter().enumerate();
        let held = held.filter(|(_, block)| **block != NULL_BLOCK);
        held.for_each(|(slot, _)| counts.add(trees.block_bytes(tree, slot)));
        // The disk may be slow.
        drop(pinned);
        out.write(&record)?;
        records.insert(node.id, number);
    }
    out.finish()?;
    Ok(counts)
}

/// Bytes of the record of a node.
fn record_bytes(parts: &Parts, unit: usize, node: &Listed) -> u64 {
    let has = |slot: usize| node.blocks[slot] != NULL_BLOCK;
    let drafter = match node.is_followed {
        true => parts.drafter_bytes(unit, has),
        false => 0,
    };
    parts.head_bytes(unit) + (parts.block_bytes(unit, has) + drafter) as u64
}
