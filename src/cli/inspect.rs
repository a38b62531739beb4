//! `nvfp4 inspect`: lists the contents of a model file, or what the model would take of memory.

use std::collections::BTreeMap;
use std::ffi::OsString;

use NVFP4::base::Result;
use NVFP4::checkpoint::TokenizerSource;
use NVFP4::model::{open, verify_packed};
use serde_json::json;

use super::{model, output, plan};

#[derive(clap::Args)]
pub(super) struct Args {
    /// A file, a directory, or ORG/NAME on the hub
    file: OsString,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
    /// Read the file of packed weights beside the model whole, and fail unless its checksum is right
    #[arg(long, conflicts_with = "device")]
    verify: bool,
    #[command(flatten)]
    plan: plan::PlanArgs,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let path = model::resolve(&args.file)?;
    if let Some(device) = &args.plan.device {
        return plan::run(&path, device, &args.plan, args.json);
    }
    let checkpoint = open(&path)?;
    let verified = match args.verify {
        true => Some(verify_packed(&*checkpoint)?),
        false => None,
    };
    let (entries, unreadable) = (checkpoint.entries(), checkpoint.unreadable());
    let mut encodings: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    let (mut bytes, mut values) = (0, 0);
    for entry in entries {
        let sums = encodings.entry(entry.encoding.name()).or_default();
        sums.0 += 1;
        sums.1 += entry.bytes;
        bytes += entry.bytes;
        values += entry.shape.iter().product::<usize>() as u64;
    }
    let metadata = checkpoint.metadata();
    let tokenizer = match &metadata.tokenizer {
        TokenizerSource::None => "none".to_owned(),
        TokenizerSource::Unread(name) => format!("none that is read, but {name}"),
        TokenizerSource::Directory(_) | TokenizerSource::Given(_) => "tokenizer.json".to_owned(),
        TokenizerSource::Vocabulary(v) => format!(
            "{} with {} tokens, pre-tokenizer {}",
            v.model,
            v.tokens.len(),
            v.pre.as_deref().unwrap_or("default")
        ),
    };
    if args.json {
        let tensors: Vec<_> = entries
            .iter()
            .map(|e| json!({"name": e.name, "shape": e.shape, "encoding": e.encoding.name(), "bytes": e.bytes}))
            .chain(unreadable.iter().map(|u| {
                json!({"name": u.name, "shape": u.shape, "encoding": u.dtype, "bytes": u.bytes, "unreadable": u.reason})
            }))
            .collect();
        return output::json(&json!({
            "format": checkpoint.format(),
            "bytes": bytes,
            "values": values,
            "tokenizer": tokenizer,
            "config": metadata.config,
            "tensors": tensors,
            "verified_packed_bytes": verified,
        }));
    }
    let names = entries.iter().map(|e| e.name.len());
    let names = names.chain(unreadable.iter().map(|u| u.name.len()));
    let width = names.max().unwrap_or(0);
    let line = |name: &str, encoding: &str, shape: &[usize], bytes: u64| {
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        output::line(format_args!(
            "{name:width$}  {encoding:8}  {:>16}  {:>10}",
            shape.join(" x "),
            output::size(bytes)
        ))
    };
    for e in entries {
        line(&e.name, e.encoding.name(), &e.shape, e.bytes)?;
    }
    for u in unreadable {
        line(&u.name, &u.dtype, &u.shape, u.bytes)?;
    }
    output::line(format_args!(
        "{}: {} tensors, {:.3} billion values, {}",
        checkpoint.format(),
        entries.len(),
        values as f64 / 1e9,
        output::size(bytes)
    ))?;
    for (name, (count, bytes)) in encodings {
        output::line(format_args!("  {count} in {name}, {}", output::size(bytes)))?;
    }
    if !unreadable.is_empty() {
        output::line(format_args!(
            "  {} that cannot be read, beside these",
            unreadable.len()
        ))?;
    }
    if let Some(bytes) = verified {
        output::line(format_args!(
            "packed weights: {}, intact",
            output::size(bytes)
        ))?;
    }
    output::line(format_args!("tokenizer: {tokenizer}"))?;
    if let Some(config) = metadata.config.as_ref().and_then(|c| c.as_object()) {
        for (key, value) in config {
            output::line(format_args!("  {key}: {value}"))?;
        }
    }
    Ok(())
}
