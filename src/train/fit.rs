//! Checks settings against the model that they are for: the names in them must exist.

use super::recipe::{Recipe, contains_one};
use super::trainer::Config;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::training::{Layout, Source};

/// Upper limit of kinds of names in a message.
const LISTED: usize = 24;

impl Config {
    /// Refuses settings with names that the model lacks. The error lists what it has.
    pub fn check_for(&self, source: &Source) -> Result<()> {
        let recipe = &self.recipe;
        let layout = source.layout();
        let blocks = layout.blocks.len();
        if let Some(last) = recipe.last_blocks
            && !(1..=blocks).contains(&last)
        {
            bail!(
                InvalidArgument,
                "the last {last} blocks of a model with {blocks} cannot be trained; name 1 to {blocks}, or leave last_blocks \
                 (--last-blocks) out to train them all"
            );
        }
        let matrices = || layout.matrices.iter().map(|m| m.name.as_str());
        if let Some(part) = unmatched(&recipe.keep_high, matrices()) {
            bail!(
                InvalidArgument,
                "no matrix has a name with {part:?}, which is to be kept high (keep_high, --keep-high); there are {}",
                kinds(matrices())
            );
        }
        let vectors = layout.vectors.iter().map(|v| v.name.as_str());
        let adapted = recipe.layout(source)?;
        let factors = adapted.matrices.iter().map(|m| m.name.as_str());
        let parameters = || factors.clone().chain(vectors.clone());
        for group in &self.groups {
            if let Some(part) = unmatched(&group.names, parameters()) {
                bail!(
                    InvalidArgument,
                    "no parameter has a name with {part:?}, which a group names; there are {}",
                    kinds(parameters())
                );
            }
        }
        match &recipe.lora {
            Some(lora) => check_adapters(recipe, &adapted, &lora.targets, lora.rank),
            None => Ok(()),
        }
    }
}

/// Refuses targets that match no projection, and a rank higher than that of every matrix.
fn check_adapters(recipe: &Recipe, layout: &Layout, targets: &[String], rank: usize) -> Result<()> {
    let first = recipe.first_block(layout.blocks.len());
    let projections = || {
        let blocks = layout.blocks[first..].iter();
        let all = blocks.flat_map(|block| block.projections());
        all.map(|p| layout.matrices[p.matrix].name.as_str())
    };
    if let Some(part) = unmatched(targets, projections()) {
        bail!(
            InvalidArgument,
            "no projection of the trained blocks has a name with {part:?}, which adapters are to stand beside (targets, \
             --adapter-targets); there are {}",
            kinds(projections())
        );
    }
    // A rank that is too high for some matrices may be needed for others.
    let adapted = layout.adapted().map(|(id, _)| &layout.matrices[id]);
    let Some(widest) = adapted.max_by_key(|m| m.rows.min(m.cols)) else {
        return Ok(());
    };
    let most = widest.rows.min(widest.cols);
    if rank > most {
        bail!(
            InvalidArgument,
            "adapters of rank {rank} beside {} of [{}, {}], whose own rank is at most {most}; give a rank of 1 to {most} (--adapter), or \
             name other targets",
            widest.name,
            widest.rows,
            widest.cols
        );
    }
    Ok(())
}

/// The first of these parts that no name contains.
fn unmatched<'a>(
    parts: &'a [String],
    names: impl Iterator<Item = &'a str> + Clone,
) -> Option<&'a String> {
    let is_in = |part: &String| {
        names
            .clone()
            .any(|n| contains_one(n, std::slice::from_ref(part)))
    };
    parts.iter().find(|part| part.is_empty() || !is_in(part))
}

/// The distinct names without block numbers.
fn kinds<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut found: Vec<String> = Vec::new();
    for name in names {
        let parts = name.trim_end_matches(".weight").split('.');
        let parts = parts.map(|part| match part.parse::<usize>() {
            Ok(_) => "N",
            Err(_) => part,
        });
        let kind = parts.collect::<Vec<_>>().join(".");
        if !found.contains(&kind) {
            found.push(kind);
        }
    }
    let more = found.len().saturating_sub(LISTED);
    found.truncate(LISTED);
    match more {
        0 => found.join(", "),
        more => format!("{} and {more} more", found.join(", ")),
    }
}
