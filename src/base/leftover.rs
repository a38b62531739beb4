//! Names on disk that stand for something unfinished and must not outlive it: temporary files where the system knows none
//! without a name, and directories that are being put together. They go away with the value that holds them; a program may
//! have them removed when a signal ends it, too. The library alone handles no signals: those are its host's.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::call::Cancel;
use super::error::{Error, Result};

/// The names that are to go.
static NAMES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Called by the next signal instead of ending the process.
static HANDLER: Mutex<Option<Handler>> = Mutex::new(None);

/// A function for the first of some signals.
struct Handler {
    signals: &'static [libc::c_int],
    then: Box<dyn FnOnce(libc::c_int) + Send>,
}

fn names() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or directory that goes away with this value, unless it has another name by then.
pub(super) struct Leftover {
    path: PathBuf,
}

impl Leftover {
    /// Has `make` put something at a name beside `place` that nobody else has: `place` after a dot, with this process's number.
    /// A signal that is to end the process waits until `make` is done.
    pub(super) fn make<T>(
        folder: &Path,
        place: &Path,
        make: impl Fn(&Path) -> io::Result<T>,
    ) -> io::Result<(T, Leftover)> {
        let name = place.file_name().unwrap_or_default().display();
        let mut attempt = 0;
        loop {
            let path = folder.join(format!(".{name}.{}-{attempt}.partial", std::process::id()));
            let mut names = names();
            match make(&path) {
                Ok(made) => {
                    names.insert(path.clone());
                    return Ok((made, Leftover { path }));
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && attempt < 1000 => {
                    attempt += 1;
                }
                Err(e) => return Err(e),
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it now, and reports a failure.
    pub(super) fn remove(self) -> Result<()> {
        remove(&self.path)
            .map_err(|e| Error::io(format_args!("removing {}", self.path.display()), e))
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        let mut names = names();
        // Nothing better can be done with a failure here; the error that led here is already on its way.
        let _ = remove(&self.path);
        names.remove(&self.path);
    }
}

/// The name that `leftover` stands for, if it is one of a process that has ended without removing it.
pub fn abandoned(leftover: &str) -> Option<&str> {
    let (name, number) = leftover
        .strip_prefix('.')?
        .strip_suffix(".partial")?
        .rsplit_once('.')?;
    let (process, attempt) = number.split_once('-')?;
    attempt.parse::<u32>().ok()?;
    let process: libc::pid_t = process.parse().ok().filter(|&p| p > 0)?;
    // SAFETY: signal 0 reaches nobody; the call only says whether there is such a process.
    let is_there = unsafe { libc::kill(process, 0) } == 0
        || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH);
    (!is_there).then_some(name)
}

/// Removes a file or a directory with all that is in it; nothing may be there.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Makes SIGHUP, SIGINT and SIGTERM remove what is unfinished and restore the terminal before they end the process. A program
/// calls it before it starts other threads. A signal that the process was started to ignore stays ignored.
pub fn remove_on_signals() -> Result<()> {
    let mut signals = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the calls are given a set to fill, and then the set that was filled.
    let signals = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed();
            libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            if action.assume_init().sa_sigaction == libc::SIG_DFL {
                libc::sigaddset(signals.as_mut_ptr(), signal);
            }
        }
        signals.assume_init()
    };
    // SAFETY: the set lives through the call.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut()) };
    if blocked != 0 {
        let error = io::Error::from_raw_os_error(blocked);
        return Err(Error::io("blocking signals", error));
    }
    let terminal = terminal();
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || end_cleanly(&signals, terminal.as_ref()))
        .map_err(|e| Error::io("starting the thread that waits for signals", e))?;
    Ok(())
}

/// Has the next SIGINT set `cancel` instead of ending the process, and only the next one. For a program that has called
/// [`remove_on_signals`].
pub fn cancel_on_interrupt(cancel: &Cancel) {
    let cancel = cancel.clone();
    *handler() = Some(Handler {
        signals: &[libc::SIGINT],
        then: Box::new(move |_| cancel.cancel()),
    });
}

/// Has the next SIGHUP, SIGINT or SIGTERM call `then` with its number instead of ending the process, on the thread that waits for signals,
/// and only the next one, until the result is dropped. For a program that has called [`remove_on_signals`].
pub fn on_signal(then: impl FnOnce(i32) + Send + 'static) -> OnSignal {
    *handler() = Some(Handler {
        signals: &[libc::SIGHUP, libc::SIGINT, libc::SIGTERM],
        then: Box::new(then),
    });
    OnSignal(())
}

/// Signals end the process again once this is dropped.
#[must_use]
pub struct OnSignal(());

impl Drop for OnSignal {
    fn drop(&mut self) {
        *handler() = None;
    }
}

/// The name of a signal that [`on_signal`] takes.
pub fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        _ => "SIGTERM",
    }
}

fn handler() -> MutexGuard<'static, Option<Handler>> {
    HANDLER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The settings of the terminal that standard input is, if it is one.
fn terminal() -> Option<libc::termios> {
    let mut settings = MaybeUninit::uninit();
    // SAFETY: the call fills what it is given, or fails.
    unsafe {
        let got = libc::tcgetattr(libc::STDIN_FILENO, settings.as_mut_ptr());
        (got == 0).then(|| settings.assume_init())
    }
}

/// Gives the terminal the settings that it had, which a line editor changes.
fn restore(settings: &libc::termios) {
    let mut signal = MaybeUninit::uninit();
    // SAFETY: the set is made here, and the settings are those of a terminal. A process in the background would be stopped.
    unsafe {
        libc::sigemptyset(signal.as_mut_ptr());
        libc::sigaddset(signal.as_mut_ptr(), libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, signal.as_ptr(), std::ptr::null_mut());
        libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, settings);
    }
}

/// Waits for one of the signals, which are blocked, and ends the process as it would have.
fn end_cleanly(signals: &libc::sigset_t, terminal: Option<&libc::termios>) {
    let mut signal = 0;
    loop {
        // SAFETY: the set and the number live through the call, which fails only for a set that is none.
        unsafe { libc::sigwait(signals, &mut signal) };
        let taken = handler().take_if(|handler| handler.signals.contains(&signal));
        match taken {
            Some(handler) => (handler.then)(signal),
            None => break,
        }
    }
    // Held until the process has ended: nothing new is made meanwhile.
    let names = names();
    for name in names.iter() {
        let _ = remove(name);
    }
    if let Some(settings) = terminal {
        restore(settings);
    }
    // SAFETY: the set lives through the call; the default action of each of these signals ends the process. What reads lines from a
    // terminal may have put a handler in its place.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, signals, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_of_processes_that_are_gone_are_known() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let gone = child.id();
        let name = format!(".step-00000007.{gone}-0.partial");
        assert_eq!(abandoned(&name), Some("step-00000007"));
        let own = format!(".step-00000007.{}-0.partial", std::process::id());
        for other in [
            &own,
            "step-00000007",
            ".step-00000007",
            ".notes.partial",
            ".a.0-0.partial",
            ".a.-1-0.partial",
        ] {
            assert_eq!(abandoned(other), None, "{other}");
        }
    }
}
