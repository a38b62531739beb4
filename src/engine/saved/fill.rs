//! Fills blocks with what the records of a file hold.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::slice::ChunksExact;

use super::plan::Planned;
use super::record::{Parts, Record, tables};
use crate::base::error::bail;
use crate::base::{Error, Result, call, memory};
use crate::engine::blocks::Blocks;
use crate::engine::prefix::Place;
use crate::model::kv::{FILE_PAGE, KvCache, NULL_BLOCK, PagesOf};

/// A file whose records were checked.
pub(super) struct Source {
    pub(super) file: File,
    /// Tokens of a record.
    pub(super) unit: usize,
    pub(super) records: Vec<Record>,
}

/// The blocks of some records as the file has them.
#[derive(Default)]
pub(super) struct Loaded(Vec<(usize, Vec<u8>)>);

impl Loaded {
    /// Reads the records of a node. Those that it has in common with the last node are not read again.
    pub(super) fn load(&mut self, source: &Source, node: &Planned) -> Result<()> {
        let is_of_node = |number: &usize| node.sources.iter().any(|(of, _)| of == number);
        self.0.retain(|(number, _)| is_of_node(number));
        for &(number, _) in &node.sources {
            if self.0.iter().any(|(loaded, _)| *loaded == number) {
                continue;
            }
            let record = &source.records[number];
            let mut blocks = memory::zeros(record.bytes)?;
            source
                .file
                .read_exact_at(&mut blocks, record.at)
                .map_err(|e| Error::io("reading", e))?;
            record.check(&blocks)?;
            self.0.push((number, blocks));
            call::check()?;
        }
        Ok(())
    }

    fn of(&self, number: usize) -> &[u8] {
        let found = self.0.iter().find(|(loaded, _)| *loaded == number);
        found.map_or(&[], |(_, blocks)| blocks)
    }
}

/// The blocks of a node that is being filled. They are free again when it is dropped.
pub(super) struct Filling<'a> {
    blocks: &'a Blocks,
    cache: &'a KvCache,
    parts: &'a Parts,
    /// By slot; the null block where none is filled.
    taken: Vec<u32>,
}

impl<'a> Filling<'a> {
    pub(super) fn new(blocks: &'a Blocks, cache: &'a KvCache, parts: &'a Parts) -> Filling<'a> {
        Filling {
            blocks,
            cache,
            parts,
            taken: vec![NULL_BLOCK; parts.slots()],
        }
    }

    /// Takes a block for each of these slots, out of free memory.
    pub(super) fn take(&mut self, slots: &[usize]) -> Result<()> {
        for &slot in slots {
            self.taken[slot] = self.blocks.take_free(self.cache, slot)?;
        }
        Ok(())
    }

    fn is_taken(&self, slot: usize) -> bool {
        self.taken[slot] != NULL_BLOCK
    }

    /// Fills the blocks with those of a node whose records are loaded.
    pub(super) fn fill(&self, source: &Source, node: &Planned, loaded: &Loaded) -> Result<()> {
        self.write(PagesOf::Blocks, source, node, loaded)?;
        if node.is_followed {
            self.write(PagesOf::Drafter, source, node, loaded)?;
        }
        let slot = self.parts.slots() - 1;
        let Some(arena) = self.cache.state().filter(|_| self.is_taken(slot)) else {
            return Ok(());
        };
        // The last record ends where the node does.
        let Some(&(number, _)) = node.sources.last() else {
            bail!(Internal, "a node without a record");
        };
        let record = &source.records[number];
        let state = self.parts.state(source.unit, record, loaded.of(number));
        arena.write(self.taken[slot], |bytes| {
            bytes.copy_from_slice(state);
            Ok(())
        })
    }

    fn write(&self, of: PagesOf, source: &Source, node: &Planned, loaded: &Loaded) -> Result<()> {
        let tables = tables(self.cache.kind(), &self.taken);
        let mut pages = self.pages(of, source, node, loaded).into_iter();
        let next = |page: &mut [u8]| {
            match pages.next().filter(|from| from.len() == page.len()) {
                Some(from) => page.copy_from_slice(from),
                None => bail!(Internal, "a record lacks a page of {} bytes", page.len()),
            }
            Ok(())
        };
        self.cache.write_pages(of, &tables, node.tokens.len(), next)
    }

    /// The pages of a node for the blocks that were taken, layer by layer, each from the first tokens to the last.
    fn pages<'b>(
        &self,
        of: PagesOf,
        source: &Source,
        node: &Planned,
        loaded: &'b Loaded,
    ) -> Vec<&'b [u8]> {
        let records = node.sources.iter().map(|(number, tokens)| {
            let (record, blocks) = (&source.records[*number], loaded.of(*number));
            let is_taken = |slot: usize| self.is_taken(slot);
            let layers = match of {
                PagesOf::Blocks => self
                    .parts
                    .layer_pages(source.unit, record, blocks, is_taken),
                PagesOf::Drafter => self
                    .parts
                    .drafter_pages(source.unit, record, blocks, is_taken),
            };
            let of_node = |layer: &'b [u8]| {
                let page = layer.len() / (source.unit / FILE_PAGE);
                let range = page * tokens.start / FILE_PAGE..page * tokens.end / FILE_PAGE;
                layer[range].chunks_exact(page)
            };
            layers.into_iter().map(of_node).collect()
        });
        // By record and layer.
        let records: Vec<Vec<ChunksExact<'b, u8>>> = records.collect();
        let mut pages = Vec::new();
        for layer in 0..records.first().map_or(0, Vec::len) {
            for of_record in &records {
                pages.extend(of_record[layer].clone());
            }
        }
        pages
    }

    /// The filled blocks, by slot.
    pub(super) fn finish(mut self) -> Vec<u32> {
        std::mem::take(&mut self.taken)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        let kind = self.cache.kind();
        let taken = self.taken.iter().copied().enumerate();
        let taken = taken.filter(|(_, block)| *block != NULL_BLOCK);
        self.blocks
            .release(taken.map(|(slot, block)| Place { kind, slot, block }));
    }
}
