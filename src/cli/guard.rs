//! `nvfp4 guard`: runs a command, and kills it when GPU memory passes a limit. On a machine whose GPU shares the system's memory, that is what
//! keeps the machine alive.

use std::ffi::OsString;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Result, leftover, process};

/// The exit code after the limit was passed.
const KILLED: u8 = 124;
/// The shortest interval between two looks at the memory.
const SHORTEST_POLL: f64 = 0.05;
/// Interval between two looks at whether the command has ended.
const LOOK: Duration = Duration::from_millis(20);
const SIGKILL: i32 = 9;
const SIGINT: i32 = 2;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The most GPU memory in GB (10^9 bytes): of the command's processes, and of all processes on all GPUs
    #[arg(long, default_value_t = 108.0, value_parser = positive)]
    limit_gb: f64,
    /// Seconds for which the limit must be passed
    #[arg(long, default_value_t = 0.0, value_parser = not_negative)]
    over_secs: f64,
    /// Seconds between two looks at the memory, 0.05 at least
    #[arg(long, default_value_t = 0.5, value_parser = positive)]
    poll_secs: f64,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn positive(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x <= 1e9 => Ok(x),
        _ => Err("takes a number above 0".to_owned()),
    }
}

fn not_negative(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (0.0..=1e9).contains(&x) => Ok(x),
        _ => Err("takes a number, 0 or above".to_owned()),
    }
}

/// Runs the command. Its exit code is that of the command, 128 and the signal that ended it, or 124 if the limit was passed.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    // The command does not begin unless its memory can be read.
    read_memory(&[])?;
    let (name, arguments) = (&args.command[0], &args.command[1..]);
    let mut command = Command::new(name);
    let mut child = process::unblock_signals(&mut command)
        .args(arguments)
        .spawn()
        .map_err(|e| err!(NotFound, "{}: {e}", name.display()))?;
    let status = watch(args, &mut child)?;
    Ok(match status {
        Some(status) => code_of(status),
        None => ExitCode::from(KILLED),
    })
}

fn code_of(status: ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;
    let signal = status.signal().map(|signal| 128 + signal);
    let code = status.code().or(signal).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Waits for the end of the command. `None` if it was killed.
fn watch(args: &Args, child: &mut Child) -> Result<Option<ExitStatus>> {
    let poll = Duration::from_secs_f64(args.poll_secs.max(SHORTEST_POLL));
    let limit = (args.limit_gb * 1e9) as u64;
    let signalled = Arc::new(AtomicI32::new(0));
    let mut handler = forwarding(&signalled);
    let (mut looked, mut over, mut is_blind) = (None::<Instant>, None::<Instant>, false);
    loop {
        if let Some(status) = ended(child)? {
            return Ok(Some(status));
        }
        let signal = signalled.swap(0, Ordering::Relaxed);
        if signal != 0 {
            // The terminal sends an interrupt to both.
            if signal != SIGINT || !std::io::IsTerminal::is_terminal(&std::io::stdin()) {
                process::signal(child.id(), signal);
            }
            drop(handler);
            handler = forwarding(&signalled);
        }
        if looked.is_some_and(|looked| looked.elapsed() < poll) {
            continue;
        }
        looked = Some(Instant::now());
        let memory = match read_memory(&process::tree(child.id())) {
            Ok(memory) => memory,
            Err(e) => {
                if !is_blind {
                    eprintln!("nvfp4 guard: the command is not guarded for now: {e}");
                }
                is_blind = true;
                continue;
            }
        };
        is_blind = false;
        if memory.command.max(memory.total) <= limit {
            over = None;
            continue;
        }
        let since = *over.get_or_insert_with(Instant::now);
        if since.elapsed().as_secs_f64() >= args.over_secs {
            kill(child)?;
            eprintln!(
                "nvfp4 guard: killed {}: pid_mem {:.2} GB, total_mem {:.2} GB, limit {:.2} GB, passed for {:.1} s",
                args.command[0].display(),
                memory.command as f64 / 1e9,
                memory.total as f64 / 1e9,
                args.limit_gb,
                since.elapsed().as_secs_f64()
            );
            return Ok(None);
        }
    }
}

/// Notes the next signal that would end this process, for the command.
fn forwarding(signalled: &Arc<AtomicI32>) -> leftover::OnSignal {
    let signalled = signalled.clone();
    leftover::on_signal(move |signal| signalled.store(signal, Ordering::Relaxed))
}

/// Ends the command and all that it has started.
fn kill(child: &mut Child) -> Result<()> {
    let mut known = process::tree(child.id());
    // A process that is about to start another one shows it at the second look.
    for _ in 0..2 {
        known.iter().for_each(|pid| process::signal(*pid, SIGKILL));
        let later = known.iter().flat_map(|pid| process::tree(*pid));
        known = later.collect();
    }
    child
        .wait()
        .map_err(|e| err!(Io, "waiting for the command: {e}"))?;
    Ok(())
}

/// Waits for a moment for the end of a child.
fn ended(child: &mut Child) -> Result<Option<ExitStatus>> {
    let status = child.try_wait();
    let status = status.map_err(|e| err!(Io, "waiting for the command: {e}"))?;
    if status.is_none() {
        std::thread::sleep(LOOK);
    }
    Ok(status)
}

/// GPU memory in use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    /// Bytes that the command's processes use.
    command: u64,
    /// Bytes in use on all GPUs. Where the driver does not know them, as for a GPU that shares the system's memory, the sum of all processes.
    total: u64,
}

/// Reads the memory by `nvidia-smi`, which every driver brings.
fn read_memory(pids: &[u32]) -> Result<Memory> {
    let of_processes = query("--query-compute-apps=pid,used_memory")?;
    let of_gpus = query("--query-gpu=memory.used")?;
    memory(&of_processes, &of_gpus, pids)
}

fn query(what: &str) -> Result<String> {
    let output = Command::new("nvidia-smi")
        .args([what, "--format=csv,noheader,nounits"])
        .output()
        .map_err(|e| {
            err!(
                DeviceUnavailable,
                "nvidia-smi, which says the memory of GPUs: {e}"
            )
        })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stdout);
        let said = said.lines().next().unwrap_or("nothing").to_owned();
        bail!(
            DeviceUnavailable,
            "nvidia-smi {what}: {}, it says: {said}",
            output.status
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads lines of `pid, MiB` and of `MiB`, in which what is not known stands in brackets.
fn memory(of_processes: &str, of_gpus: &str, pids: &[u32]) -> Result<Memory> {
    let bytes = |text: &str| -> Result<Option<u64>> {
        match text.trim() {
            unknown if unknown.starts_with('[') => Ok(None),
            text => match text.parse::<u64>() {
                Ok(mib) => Ok(Some(mib << 20)),
                Err(_) => bail!(
                    DeviceUnavailable,
                    "nvidia-smi says {text:?} in the place of MiB"
                ),
            },
        }
    };
    let (mut command, mut all) = (0, 0);
    for line in of_processes.lines().filter(|line| !line.trim().is_empty()) {
        let Some((pid, used)) = line.split_once(',') else {
            bail!(
                DeviceUnavailable,
                "nvidia-smi says {line:?} in the place of a process and its memory"
            );
        };
        let used = bytes(used)?.unwrap_or(0);
        all += used;
        if pid.trim().parse().is_ok_and(|pid| pids.contains(&pid)) {
            command += used;
        }
    }
    let gpus = of_gpus.lines().filter(|line| !line.trim().is_empty());
    let known = gpus.map(bytes).collect::<Result<Option<Vec<_>>>>()?;
    let total = known.map_or(all, |known| known.iter().sum());
    Ok(Memory { command, total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_that_of_the_processes_and_of_all_gpus() {
        let both = memory("17, 100\n18, 50\n19, 7\n", "4000\n300\n", &[17, 19]).unwrap();
        let (command, total) = (107 << 20, 4300 << 20);
        assert_eq!(both, Memory { command, total });
        // A GPU that shares the system's memory.
        let spark = memory("17, 100\n18, 50\n", "[N/A]\n", &[18]).unwrap();
        let (command, total) = (50 << 20, 150 << 20);
        assert_eq!(spark, Memory { command, total });
        let none = memory("", "[Not Supported]\n", &[]).unwrap();
        assert_eq!((none.command, none.total), (0, 0));
        assert_eq!(memory("17, [N/A]\n", "5\n", &[17]).unwrap().total, 5 << 20);
        for (processes, gpus) in [("17", "5"), ("17, much", "5"), ("", "much")] {
            assert!(memory(processes, gpus, &[]).is_err());
        }
    }
}
