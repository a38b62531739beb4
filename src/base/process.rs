//! Other processes: those that one has started, and signals for them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The process `root` and those that it has started, directly or not, as far as they run. Empty where there is no `/proc`.
pub fn tree(root: u32) -> Vec<u32> {
    let mut children = BTreeMap::<u32, Vec<u32>>::new();
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found = Vec::new();
    for pid in numbers {
        if let Some(parent) = parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
        if pid == root {
            found.push(root);
        }
    }
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(children.remove(&pid).into_iter().flatten());
        next += 1;
    }
    found
}

/// The process that started another one; `None` for one that has ended.
fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may have spaces and parentheses in it. A Z is a process that has ended.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    fields.next()?.parse().ok().filter(|_| state != "Z")
}

/// Lets a command start with no signal blocked, whatever this process blocks.
pub fn unblock_signals(command: &mut Command) -> &mut Command {
    let unblock = || {
        // SAFETY: fills and uses a set of this frame.
        unsafe {
            let mut none = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        }
        Ok(())
    };
    // SAFETY: the closure makes only calls that are allowed between fork and exec, and takes no memory.
    unsafe { command.pre_exec(unblock) }
}

/// Sends a signal to a process, which may have ended.
pub fn signal(pid: u32, signal: i32) {
    if let Ok(pid @ 2..) = libc::pid_t::try_from(pid) {
        // SAFETY: the call takes numbers.
        unsafe { libc::kill(pid, signal) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    #[test]
    fn a_tree_has_grandchildren_and_ends_with_its_signals() {
        let mut shell = Command::new("sh")
            .args(["-c", "sh -c 'sleep 100 & echo $!; wait' & wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(shell.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let sleep: u32 = line.trim().parse().unwrap();
        let found = tree(shell.id());
        assert_eq!((found.len(), found[0]), (3, shell.id()));
        assert!(found.contains(&sleep));
        assert!(tree(std::process::id()).contains(&sleep));
        found.iter().for_each(|pid| signal(*pid, libc::SIGKILL));
        shell.wait().unwrap();
        assert!(tree(shell.id()).is_empty());
    }
}
