//! `nvfp4 pull`: fetches a model from the hub into the cache.

use std::time::Duration;

use NVFP4::base::Result;
use serde_json::json;

use super::{hub, model, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The model: ORG/NAME[@REVISION][:PART], where PART is a file, a folder or a quantization as in Q4_K_M, or the address of
    /// its page
    id: String,
    /// Give up if the hub does not answer, or sends nothing, for this many seconds. A transfer that has begun is tried once more on a
    /// new connection, for half as long and at most 5 s. A time that the hub asks to wait does not count
    #[arg(long, default_value_t = hub::TIMEOUT.as_secs_f32(), value_parser = seconds)]
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
    let name = hub::Name::parse_or_explain(&args.id)?;
    let pulled = hub::pull(&name, Duration::from_secs_f32(args.timeout))?;
    if args.json {
        output::json(&json!({
            "model": name.to_string(),
            "commit": pulled.commit,
            "path": model::shown(pulled.path.as_os_str()),
            "bytes": pulled.bytes,
            "fetched_bytes": pulled.fetched,
        }))
    } else {
        output::line(pulled.path.display())
    }
}
