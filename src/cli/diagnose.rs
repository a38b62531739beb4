//! `nvfp4 diagnose`: what this machine and build can do, and why something cannot be done.

use NVFP4::base::Result;
use NVFP4::base::memory;
use NVFP4::base::threads::Pool;
use NVFP4::cpu::{Cpu, Level};
use serde_json::json;

use super::{bandwidth, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Also measure how fast memory can be read; takes about a second
    #[arg(long)]
    bandwidth: bool,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let threads = Pool::default_threads()?;
    let chosen = Level::choose()?;
    let levels: Vec<_> = Level::ALL
        .into_iter()
        .map(|l| json!({"name": l.name(), "present": l.is_present(), "chosen": l == chosen}))
        .collect();
    let bandwidth = match args.bandwidth {
        true => Some(bandwidth::read(&*Cpu::new(Some(threads))?)?),
        false => None,
    };
    if args.json {
        return output::json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "target": {"arch": std::env::consts::ARCH, "os": std::env::consts::OS},
            "backends": [
                {"name": "cpu", "available": true, "threads": threads, "levels": levels,
                 "read_bandwidth": bandwidth},
                {"name": "cuda", "available": false, "reason": NO_CUDA},
            ],
            "memory": {"current": memory::total().current, "budget": memory::budget()},
        }));
    }
    output::line(format_args!(
        "nvfp4 {} for {} on {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        std::env::consts::OS
    ))?;
    output::line(format_args!(
        "cpu: {} threads, kernels {}",
        threads,
        chosen.name()
    ))?;
    for level in Level::ALL {
        let state = if level.is_present() {
            "present"
        } else {
            "absent"
        };
        output::line(format_args!("  {}: {state}", level.name()))?;
    }
    if let Some(b) = bandwidth {
        output::line(format_args!("  reads memory at {:.1} GB/s", b / 1e9))?;
    }
    output::line(format_args!("cuda: unavailable, {NO_CUDA}"))
}

const NO_CUDA: &str = "this build has no CUDA backend";
