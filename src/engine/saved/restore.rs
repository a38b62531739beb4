//! Restores the prefixes of a file. The file is checked as a whole before a block is filled, so that one that is refused changes nothing.

use std::fs::File;
use std::path::Path;

use super::counts::{RestoredPrefixes, check_sharing};
use super::fill::{Filling, Loaded, Source};
use super::plan::{Kept, Planned, in_units, keep};
use super::record::{self, FORMAT, Header, Trees};
use crate::base::error::{bail, err};
use crate::base::sealed::Reader;
use crate::base::{Error, Result, alloc, call, file};
use crate::engine::blocks::Blocks;
use crate::engine::pools::Entry;
use crate::engine::prefix::NodeId;

/// Bytes that planning takes for a record: its tokens, its times and its places in tables.
const PLANNED: usize = 2048;

/// Fills free blocks with those of a file; see [`Served::restore_prefixes`](crate::engine::Served::restore_prefixes).
pub(in crate::engine) fn restore(blocks: &Blocks, path: &Path) -> Result<RestoredPrefixes> {
    check_sharing(blocks)?;
    if blocks.room().is_none() {
        bail!(
            InvalidArgument,
            "the model keeps no prefix that no session uses, so none can be restored; load it with prefix_bytes or kv_bytes"
        );
    }
    let file =
        file::open(path).map_err(|e| Error::io(format_args!("opening {}", path.display()), e))?;
    restore_from(blocks, file).map_err(|e| e.within(path.display()))
}

fn restore_from(blocks: &Blocks, file: File) -> Result<RestoredPrefixes> {
    let size = file
        .metadata()
        .map_err(|e| Error::io("reading its size", e))?
        .len();
    // It is read once to check it, and again to fill blocks.
    call::expect(size.saturating_mul(2));
    let (mut input, json) = Reader::open(file, &FORMAT)?;
    let _texts = alloc::Budget::fields(json.len()).set_aside()?;
    let header: Header =
        serde_json::from_slice(&json).map_err(|e| err!(CorruptFile, "its header: {e}"))?;
    let trees = Trees::new(blocks.model(), header.check(blocks.model())?)?;
    let records = record::read(&mut input, &header, &trees, blocks.model())?;
    let file = input.into_file()?;
    let _plan = alloc::Budget::copies(records.len().saturating_mul(PLANNED)).set_aside()?;
    let nodes = in_units(&records, header.unit, blocks.unit());
    let mut restoring = Restoring {
        blocks,
        trees: &trees,
        source: Source {
            file,
            unit: header.unit,
            records,
        },
        at: vec![None; nodes.len()],
        nodes,
        loaded: Loaded::default(),
        entered: Vec::new(),
        left: size,
        restored: RestoredPrefixes::default(),
    };
    let result = restoring.fill_all();
    // A node whose blocks found no room is there for those after it, which may have found none either.
    blocks.prune(restoring.entered.into_iter().rev());
    result?;
    call::add(restoring.left);
    Ok(restoring.restored)
}

/// A restore on its way.
struct Restoring<'a> {
    blocks: &'a Blocks,
    trees: &'a Trees,
    source: Source,
    nodes: Vec<Planned>,
    /// By node: where it is in the index.
    at: Vec<Option<NodeId>>,
    loaded: Loaded,
    /// The nodes that were entered into the index.
    entered: Vec<NodeId>,
    /// Bytes of the file that are not reported as read again.
    left: u64,
    restored: RestoredPrefixes,
}

impl Restoring<'_> {
    /// Fills what finds room, parents first. Each node is in the index once it is filled: from then on sequences begin with it, and it gives
    /// way to them.
    fn fill_all(&mut self) -> Result<()> {
        let held = self.held();
        let (mut in_file, nodes) = (self.restored.in_file, &self.nodes);
        for (number, slot) in (0..nodes.len()).flat_map(|number| self.slots(number)) {
            in_file.add(self.bytes(number, slot));
        }
        self.restored.in_file = in_file;
        let missing = |number: usize, slot: usize| match held[number][slot] {
            true => 0,
            false => self.bytes(number, slot),
        };
        let room = self.blocks.room().unwrap_or(0) as u64;
        let layers = self.blocks.layers();
        let kept = keep(nodes, self.trees.all(), &layers, missing, room)?;
        let first_time = self.blocks.reserve_times(kept.blocks);
        for number in 0..self.nodes.len() {
            if kept.nodes[number] && !self.enter(number, &kept, first_time)? {
                break;
            }
        }
        Ok(())
    }

    /// Fills and enters a node. Returns false if there is no memory: sequences have taken it meanwhile.
    fn enter(&mut self, number: usize, kept: &Kept, first_time: u64) -> Result<bool> {
        let node = &self.nodes[number];
        let parent = match node.parent.map(|parent| self.at[parent]) {
            None => None,
            Some(Some(parent)) => Some(parent),
            // The index has given it up meanwhile.
            Some(None) => return Ok(true),
        };
        let (tree, order) = (self.trees.all()[node.tree], &kept.order[number]);
        let there = self.blocks.held(tree, parent, &node.tokens);
        let is_wanted = |slot: &usize| {
            let is_there = there.as_ref().is_some_and(|(_, has)| has[*slot]);
            order[*slot] > 0 && !is_there
        };
        let wanted: Vec<usize> = (0..order.len()).filter(is_wanted).collect();
        if let (Some((id, _)), true) = (&there, wanted.is_empty()) {
            self.at[number] = Some(*id);
            return Ok(true);
        }
        let (cache, parts) = (self.trees.cache(node.tree), self.trees.parts(node.tree));
        self.loaded.load(&self.source, node)?;
        // No callback runs meanwhile: it may take blocks, and would wait for the end of this.
        let hold = self.blocks.hold();
        let mut filling = Filling::new(self.blocks, cache, parts);
        match filling.take(&wanted) {
            Err(e) if e.kind().is_lack_of_memory() => return Ok(false),
            taken => taken?,
        }
        filling.fill(&self.source, node, &self.loaded)?;
        let times = order.iter().map(|place| match place {
            0 => 0,
            place => first_time + place - 1,
        });
        let entry = Entry {
            tree,
            parent,
            tokens: &node.tokens,
            is_followed: node.is_followed,
            blocks: &filling.finish(),
            times: &times.collect::<Vec<_>>(),
        };
        let id = self.blocks.enter(&entry);
        drop(hold);
        if let Some(id) = id {
            self.at[number] = Some(id);
            self.entered.push(id);
            for slot in wanted {
                let bytes = self.bytes(number, slot);
                self.restored.filled.add(bytes);
            }
        }
        self.report(number);
        Ok(true)
    }

    /// Reports the part of the file that a node was read from.
    fn report(&mut self, number: usize) {
        let sources = self.nodes[number].sources.iter();
        let bytes = sources.map(|(record, tokens)| {
            let all = self.source.records[*record].bytes as u64;
            all * tokens.len() as u64 / self.source.unit as u64
        });
        let bytes = self.left.min(bytes.sum());
        self.left -= bytes;
        call::add(bytes);
    }

    /// A node's number with each slot of which the file has the block.
    fn slots(&self, number: usize) -> impl Iterator<Item = (usize, usize)> + use<'_> {
        let slots = self.nodes[number].last_uses.iter().enumerate();
        slots
            .filter(|(_, last_use)| **last_use > 0)
            .map(move |(slot, _)| (number, slot))
    }

    /// Bytes of a node's block in the memory of the model.
    fn bytes(&self, number: usize, slot: usize) -> u64 {
        self.trees.block_bytes(self.nodes[number].tree, slot)
    }

    /// By node and slot, whether the index has the block.
    fn held(&self) -> Vec<Vec<bool>> {
        let mut at: Vec<Option<NodeId>> = Vec::with_capacity(self.nodes.len());
        let held = self.nodes.iter().map(|node| {
            let there = match node.parent.map(|parent| at[parent]) {
                Some(None) => None,
                parent => {
                    let tree = self.trees.all()[node.tree];
                    self.blocks.held(tree, parent.flatten(), &node.tokens)
                }
            };
            let (id, has) = there.unzip();
            at.push(id);
            has.unwrap_or_else(|| vec![false; node.last_uses.len()])
        });
        held.collect()
    }
}
