//! The records of a file of prefixes. Each holds a node of the index: the number of its parent's record, the number of its tree, the bytes
//! of the drafter's pages, the tokens, and for each slot when its block was last used, 0 if there is none. The blocks follow: the pages
//! of each layer, the recurrent state, and the drafter's pages. Parents come before their children.

use std::hash::Hasher;
use std::num::NonZeroU64;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::base::error::{bail, err};
use crate::base::sealed::{Format, Reader};
use crate::base::{Result, memory};
use crate::engine::prefix::{Content, Tree};
use crate::engine::windows::KEPT_MULTIPLE;
use crate::model::kv::{FILE_PAGE, KvCache, KvTables, NULL_BLOCK, PagesOf, StateArena};
use crate::model::{KvType, Model};

/// Version 1 had other fingerprints of models.
pub(super) const FORMAT: Format = Format {
    magic: *b"NVFP4PRE",
    version: 2,
    name: "a file of prefixes",
    older: "an older library wrote it; run the prompts again, and save their prefixes",
    newer: "a newer library wrote it; restore it with that one",
};

/// The number of the parent's record in a record of the first tokens.
pub(super) const NO_PARENT: u32 = u32::MAX;
/// Bytes of the numbers before a record's tokens.
const NUMBERS: u64 = 12;
/// Bytes of content that are checked at a time.
const PIECE: usize = 64 << 10;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    model: u64,
    activations: String,
    /// Tokens of a record.
    pub(super) unit: usize,
    /// Groups of layers.
    groups: usize,
    trees: Vec<TreeHeader>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TreeHeader {
    kv: String,
    long_ropes: usize,
    /// The identity of the adapter, if the prefixes were run with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adapter: Option<NonZeroU64>,
}

/// A record that was read, without its blocks.
pub(super) struct Record {
    /// The number of the parent's record.
    pub(super) parent: Option<usize>,
    /// The number of the tree.
    pub(super) tree: usize,
    pub(super) tokens: Vec<u32>,
    /// Whether the file has the drafter's pages.
    pub(super) is_followed: bool,
    /// By slot: when the block was last used; 0 if there is none.
    pub(super) last_uses: Vec<u64>,
    /// The place of the blocks in the file, their bytes and their checksum.
    pub(super) at: u64,
    pub(super) bytes: usize,
    sum: u64,
}

/// The trees of a file, by number, each with its cache and the parts of its records.
pub(super) struct Trees {
    all: Vec<Tree>,
    caches: Vec<(Arc<KvCache>, Parts)>,
}

impl Trees {
    /// Fails for a format that the model's device does not keep.
    pub(super) fn new(model: &Model, all: Vec<Tree>) -> Result<Trees> {
        let cache = |tree: &Tree| {
            let cache = model.kv().cache(tree.kind)?;
            Ok((cache.clone(), Parts::of(cache)))
        };
        Ok(Trees {
            caches: all.iter().map(cache).collect::<Result<_>>()?,
            all,
        })
    }

    pub(super) fn all(&self) -> &[Tree] {
        &self.all
    }

    pub(super) fn number(&self, tree: Tree) -> Option<usize> {
        self.all.iter().position(|of| *of == tree)
    }

    pub(super) fn cache(&self, number: usize) -> &KvCache {
        &self.caches[number].0
    }

    pub(super) fn parts(&self, number: usize) -> &Parts {
        &self.caches[number].1
    }

    /// Bytes of a block of a tree in the memory of the model.
    pub(super) fn block_bytes(&self, number: usize, slot: usize) -> u64 {
        self.cache(number).block_bytes(slot) as u64
    }
}

/// The parts of the blocks in a record.
pub(super) struct Parts {
    /// The group of each layer, and the bytes of its pages.
    layers: Vec<(usize, usize)>,
    /// The group and the page bytes of the drafter's layer; empty for a model without one.
    drafter: Vec<(usize, usize)>,
    /// Bytes of a recurrent state, whose slot comes after those of the groups.
    state: usize,
    state_slot: usize,
}

impl Header {
    pub(super) fn new(model: &Model, trees: &[Tree]) -> Header {
        let trees = trees.iter().map(|tree| TreeHeader {
            kv: tree.kind.name().to_owned(),
            long_ropes: tree.long_ropes,
            adapter: tree.adapter,
        });
        Header {
            model: model.fingerprint(),
            activations: model.info().activations.to_owned(),
            unit: model.kv().block_positions(),
            groups: model.kv().groups().len(),
            trees: trees.collect(),
        }
    }

    /// The trees. Fails unless the prefixes are those of this model.
    pub(super) fn check(&self, model: &Model) -> Result<Vec<Tree>> {
        if self.model != model.fingerprint() {
            bail!(
                InvalidArgument,
                "its prefixes were run by another model: its fingerprint is {:016x}, this one's {:016x}",
                self.model,
                model.fingerprint()
            );
        }
        if self.activations != model.info().activations {
            bail!(
                InvalidArgument,
                "its prefixes were run with {} activations; load the model with those, not with {}",
                self.activations,
                model.info().activations
            );
        }
        let groups = model.kv().groups().len();
        if self.groups != groups {
            bail!(
                InvalidArgument,
                "its prefixes have {} groups of layers, and this model has {groups}: they were run with another drafter",
                self.groups
            );
        }
        let divides = |unit: usize| unit > 0 && KEPT_MULTIPLE.is_multiple_of(unit);
        if !self.unit.is_multiple_of(FILE_PAGE) || !divides(self.unit) {
            bail!(
                CorruptFile,
                "its header says that a record has {} tokens; it has a multiple of {FILE_PAGE} that divides {KEPT_MULTIPLE}",
                self.unit
            );
        }
        let trees = self.trees.iter().map(|tree| {
            let kind = KvType::ALL.into_iter().find(|kind| kind.name() == tree.kv);
            Ok(Tree {
                kind: kind
                    .ok_or_else(|| err!(CorruptFile, "its header names '{}' for keys", tree.kv))?,
                long_ropes: tree.long_ropes,
                adapter: tree.adapter,
            })
        });
        trees.collect()
    }
}

impl Parts {
    pub(super) fn of(cache: &KvCache) -> Parts {
        Parts {
            layers: cache.page_sizes(PagesOf::Blocks).collect(),
            drafter: cache.page_sizes(PagesOf::Drafter).collect(),
            state: cache.state().map_or(0, StateArena::block_bytes),
            state_slot: cache.arenas().len(),
        }
    }

    pub(super) fn has_drafter(&self) -> bool {
        !self.drafter.is_empty()
    }

    /// Slots of a record.
    pub(super) fn slots(&self) -> usize {
        self.state_slot + 1
    }

    /// Bytes of a record's numbers and tokens.
    pub(super) fn head_bytes(&self, unit: usize) -> u64 {
        NUMBERS + 4 * unit as u64 + 8 * self.slots() as u64
    }

    /// Bytes of the layers of `unit` tokens, of which a record has those whose slots have blocks.
    fn layer_bytes(&self, unit: usize, has: impl Fn(usize) -> bool) -> usize {
        bytes_of(&self.layers, unit, has)
    }

    /// Bytes of the drafter's pages, likewise.
    pub(super) fn drafter_bytes(&self, unit: usize, has: impl Fn(usize) -> bool) -> usize {
        bytes_of(&self.drafter, unit, has)
    }

    /// Bytes of all blocks but for the drafter's pages.
    pub(super) fn block_bytes(&self, unit: usize, has: impl Fn(usize) -> bool) -> usize {
        let state = if has(self.state_slot) { self.state } else { 0 };
        self.layer_bytes(unit, has) + state
    }

    /// For each layer whose slot is wanted, its pages in a record's blocks, first to last.
    pub(super) fn layer_pages<'a>(
        &self,
        unit: usize,
        record: &Record,
        blocks: &'a [u8],
        wanted: impl Fn(usize) -> bool,
    ) -> Vec<&'a [u8]> {
        pages_of(&self.layers, unit, record, blocks, wanted)
    }

    /// The drafter's pages, likewise.
    pub(super) fn drafter_pages<'a>(
        &self,
        unit: usize,
        record: &Record,
        blocks: &'a [u8],
        wanted: impl Fn(usize) -> bool,
    ) -> Vec<&'a [u8]> {
        let start = self.block_bytes(unit, |slot| record.last_uses[slot] > 0);
        pages_of(&self.drafter, unit, record, &blocks[start..], wanted)
    }

    /// The recurrent state of a record that has one.
    pub(super) fn state<'a>(&self, unit: usize, record: &Record, blocks: &'a [u8]) -> &'a [u8] {
        let start = self.layer_bytes(unit, |slot| record.last_uses[slot] > 0);
        &blocks[start..start + self.state]
    }
}

/// Bytes of layers of `unit` tokens whose slots have blocks.
fn bytes_of(layers: &[(usize, usize)], unit: usize, has: impl Fn(usize) -> bool) -> usize {
    let held = layers.iter().filter(|(slot, _)| has(*slot));
    held.map(|(_, page)| unit / FILE_PAGE * page).sum()
}

/// For each layer whose slot is wanted, the bytes of its pages in a record's blocks.
fn pages_of<'a>(
    layers: &[(usize, usize)],
    unit: usize,
    record: &Record,
    mut blocks: &'a [u8],
    wanted: impl Fn(usize) -> bool,
) -> Vec<&'a [u8]> {
    let held = layers
        .iter()
        .filter(|(slot, _)| record.last_uses[*slot] > 0);
    let pages = held.filter_map(|&(slot, page)| {
        let (of_layer, rest) = blocks.split_at(unit / FILE_PAGE * page);
        blocks = rest;
        wanted(slot).then_some(of_layer)
    });
    pages.collect()
}

/// Tables of the blocks of one node, or of several that follow each other.
pub(super) fn tables(kind: KvType, slots: &[u32]) -> KvTables {
    let mut tables = KvTables::new(kind, slots.len() - 1);
    let groups = slots[..slots.len() - 1].iter().enumerate();
    groups.for_each(|(group, &block)| tables.push(group, block));
    tables
}

/// The record of a node, in place of what `out` has.
pub(super) fn encode(
    out: &mut Vec<u8>,
    trees: &Trees,
    tree: usize,
    parent: Option<u32>,
    content: &Content,
) -> Result<()> {
    let (cache, parts) = (trees.cache(tree), trees.parts(tree));
    let (unit, blocks) = (content.tokens.len(), &content.blocks);
    let has = |slot: usize| blocks[slot] != NULL_BLOCK;
    let drafter = match content.is_followed {
        true => parts.drafter_bytes(unit, has),
        false => 0,
    };
    let drafter_word = u32::try_from(drafter).map_err(|_| {
        err!(
            Unsupported,
            "the drafter's pages of {unit} tokens take {drafter} bytes; a file of prefixes holds 4 GB of them"
        )
    })?;
    out.clear();
    let bytes = parts.head_bytes(unit) as usize + parts.block_bytes(unit, has) + drafter;
    memory::make_room(out, bytes)?;
    let numbers = [parent.unwrap_or(NO_PARENT), tree as u32, drafter_word];
    let words = numbers.iter().chain(content.tokens.iter());
    out.extend(words.flat_map(|word| word.to_le_bytes()));
    out.extend(content.last_uses.iter().flat_map(|time| time.to_le_bytes()));
    let mut append = |bytes: &[u8]| {
        out.extend_from_slice(bytes);
        Ok(())
    };
    let tables = tables(content.tree.kind, blocks);
    cache.read_pages(PagesOf::Blocks, &tables, unit, &mut append)?;
    let state = blocks[parts.state_slot];
    if let Some(arena) = cache.state().filter(|_| state != NULL_BLOCK) {
        arena.read(state, &mut append)?;
    }
    match drafter {
        0 => Ok(()),
        _ => cache.read_pages(PagesOf::Drafter, &tables, unit, append),
    }
}

/// Reads all records but for their blocks, which are only added to the checksums.
pub(super) fn read(
    input: &mut Reader,
    header: &Header,
    trees: &Trees,
    model: &Model,
) -> Result<Vec<Record>> {
    let mut records: Vec<Record> = Vec::new();
    let mut piece = memory::zeros(PIECE)?;
    while input.left() > 0 {
        memory::make_room(&mut records, 1)?;
        let number = records.len();
        let record = read_one(input, header.unit, trees, model, &records, &mut piece)
            .map_err(|e| e.within(format_args!("its record {number}")))?;
        records.push(record);
    }
    Ok(records)
}

fn read_one(
    input: &mut Reader,
    unit: usize,
    trees: &Trees,
    model: &Model,
    before: &[Record],
    piece: &mut [u8],
) -> Result<Record> {
    let is_there = |input: &Reader, bytes: u64| match bytes <= input.left() {
        true => Ok(()),
        false => Err(err!(
            CorruptFile,
            "{bytes} bytes are needed, and {} are left; the file is damaged or cut off",
            input.left()
        )),
    };
    is_there(input, NUMBERS)?;
    let [parent, tree, drafter] = [input.array()?, input.array()?, input.array()?];
    let [parent, tree, drafter] = [parent, tree, drafter].map(u32::from_le_bytes);
    let count = trees.all.len();
    if tree as usize >= count {
        bail!(
            CorruptFile,
            "it is of tree {tree}, and the header has {count}"
        );
    }
    let parts = trees.parts(tree as usize);
    let of_parent = match parent {
        NO_PARENT => None,
        _ => before.get(parent as usize),
    };
    let is_parent = |record: &Record| record.tree == tree as usize;
    if parent != NO_PARENT && !of_parent.is_some_and(is_parent) {
        bail!(
            CorruptFile,
            "it comes after record {parent}, which is not an earlier one of the same tree"
        );
    }
    is_there(input, parts.head_bytes(unit) - NUMBERS)?;
    let tokens = input.words(unit)?;
    model
        .check_tokens(&tokens)
        .map_err(|e| err!(CorruptFile, "{e}"))?;
    let mut last_uses = memory::with_room(parts.slots())?;
    for _ in 0..parts.slots() {
        last_uses.push(u64::from_le_bytes(input.array()?));
    }
    let has = |slot: usize| last_uses[slot] > 0;
    if has(parts.state_slot) && parts.state == 0 {
        bail!(
            CorruptFile,
            "it has a recurrent state, and the model has none"
        );
    }
    let expected = parts.drafter_bytes(unit, has);
    // A model without a drafter leaves the pages of another one out.
    if drafter > 0 && parts.has_drafter() && drafter as usize != expected {
        bail!(
            CorruptFile,
            "it has {drafter} bytes of the drafter's keys and values; {unit} tokens take {expected}"
        );
    }
    let bytes = parts.block_bytes(unit, has) + drafter as usize;
    is_there(input, bytes as u64)?;
    let (at, mut left, mut sum) = (input.at(), bytes, XxHash3_64::new());
    while left > 0 {
        let count = left.min(piece.len());
        let piece = &mut piece[..count];
        input.read(piece)?;
        sum.write(piece);
        left -= count;
    }
    Ok(Record {
        parent: of_parent.map(|_| parent as usize),
        tree: tree as usize,
        tokens,
        is_followed: drafter > 0 && parts.has_drafter(),
        last_uses,
        at,
        bytes,
        sum: sum.finish(),
    })
}

impl Record {
    #[cfg(test)]
    pub(super) fn of(parent: Option<usize>, tokens: Vec<u32>, last_uses: Vec<u64>) -> Record {
        Record {
            parent,
            tree: 0,
            tokens,
            is_followed: false,
            last_uses,
            at: 0,
            bytes: 0,
            sum: 0,
        }
    }

    /// Fails unless these are the bytes of the blocks as they were when the record was read.
    pub(super) fn check(&self, blocks: &[u8]) -> Result<()> {
        match XxHash3_64::oneshot(blocks) == self.sum {
            true => Ok(()),
            false => Err(err!(
                CorruptFile,
                "it has changed while it was read; save to another file, or restore again"
            )),
        }
    }
}
