//! `nvfp4 diagnose`: features of this machine and build, and reasons for missing ones.

use NVFP4::base::Result;
use NVFP4::base::host_memory::{self, HostMemory};
use NVFP4::base::memory;
use NVFP4::base::size::readable;
use NVFP4::base::threads::Pool;
use NVFP4::cpu::{Cpu, Level};
use NVFP4::cuda::{self, DeviceReport, Report};
use serde_json::{Value, json};

use super::{bandwidth, output};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Also measure the read bandwidth of memory, which takes about a second
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
    let cuda = cuda::report();
    let host = host_memory::read();
    if args.json {
        let mut named = json!({"name": "cuda"});
        if let (Value::Object(named), Value::Object(report)) = (&mut named, json!(cuda)) {
            named.extend(report);
        }
        return output::json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "target": {"arch": std::env::consts::ARCH, "os": std::env::consts::OS},
            "backends": [
                {"name": "cpu", "available": true, "threads": threads, "levels": levels,
                 "read_bandwidth": bandwidth},
                named,
            ],
            "memory": {"current": memory::total().current, "budget": memory::budget(), "host": host},
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
    if let Some(host) = host {
        output::line(format_args!("memory: {}", summary(&host)))?;
    }
    print_cuda(&cuda)
}

fn summary(host: &HostMemory) -> String {
    let (available, total) = (readable(host.available), readable(host.total));
    match &host.limit {
        None => format!("{available} of {total} available"),
        Some(limit) => format!("{available} of {total} available; {} limits it", limit.file),
    }
}

fn print_cuda(cuda: &Report) -> Result<()> {
    match (&cuda.reason, &cuda.driver_version) {
        (Some(reason), _) => output::line(format_args!("cuda: unavailable, {reason}"))?,
        (None, driver) => output::line(format_args!(
            "cuda: driver for CUDA {}, NVRTC {}",
            driver.as_deref().unwrap_or("unknown"),
            cuda.nvrtc.version.as_deref().unwrap_or("unknown")
        ))?,
    }
    cuda.devices.iter().try_for_each(print_device)
}

fn print_device(device: &DeviceReport) -> Result<()> {
    let index = device.index;
    let Some(d) = &device.details else {
        let reason = device.reason.as_deref().unwrap_or("no reason given");
        return output::line(format_args!("  cuda:{index}: unavailable, {reason}"));
    };
    output::line(format_args!(
        "  cuda:{index}: {}, compute capability {}, {} multiprocessors, {:.1} of {:.1} GB free, managed memory {}",
        d.name,
        d.compute_capability,
        d.multiprocessors,
        d.free_bytes as f64 / 1e9,
        d.total_bytes as f64 / 1e9,
        match d.concurrent_managed_access {
            true => "shared with the host",
            false => "not shared with the host",
        },
    ))?;
    match &d.cublaslt.reason {
        Some(reason) => output::line(format_args!("    {reason}")),
        None => Ok(()),
    }
}
