//! `nvfp4 pull`: a model from the hub into the cache.

use std::time::Duration;

use NVFP4::base::Result;
use NVFP4::base::error::err;
use serde_json::json;

use super::{hub, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The model: ORG/NAME[@REVISION][:FILE]
    id: String,
    /// Give up if the hub has not answered after this many seconds
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    timeout: f32,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> std::result::Result<f32, String> {
    match text.parse::<f32>() {
        Ok(s) if s > 0.0 && s <= 86400.0 => Ok(s),
        _ => Err("takes a number of seconds above 0".to_owned()),
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    let id = hub::Id::parse(&args.id).ok_or_else(|| {
        err!(
            InvalidArgument,
            "'{}' is no model of the hub; one is named ORG/NAME, as in Qwen/Qwen3-0.6B",
            args.id
        )
    })?;
    let path = hub::pull(&id, Duration::from_secs_f32(args.timeout))?;
    if args.json {
        output::json(&json!({"model": args.id, "path": path}))
    } else {
        output::line(path.display())
    }
}
