//! `nvfp4 rm`: removes a model from the cache.

use NVFP4::base::Result;
use serde_json::json;

use super::{hub, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The model: ORG/NAME for everything fetched of it, ORG/NAME@REVISION for one revision, ORG/NAME:PART for a file or
    /// folder
    name: String,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let name = hub::Name::parse_or_explain(&args.name)?;
    let freed = hub::remove(&name)?;
    if args.json {
        output::json(&json!({"model": name.to_string(), "freed_bytes": freed}))
    } else {
        output::line(format_args!("{name}: {} freed", output::size(freed)))
    }
}
