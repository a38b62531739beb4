//! Temporary names on disk that must not outlive their work: named temporary files on systems without unnamed ones, and directories under
//! construction. They disappear with the value that holds them, and on a terminating signal if the program asks for that. The library alone
//! handles no signals; those belong to its host.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::call::Cancel;
use super::error::{Error, Result};

/// Names to remove.
static NAMES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Called by the next signal, which then does not end the process.
static HANDLER: Mutex<Option<Handler>> = Mutex::new(None);

/// A function for the next of some signals.
struct Handler {
    signals: &'static [libc::c_int],
    then: Box<dyn FnOnce(libc::c_int) + Send>,
}

fn names() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or directory that is removed with this value, unless it has been renamed by then.
pub(super) struct Leftover {
    path: PathBuf,
}

impl Leftover {
    /// Calls `make` to create something under a unique name beside `place`: a dot, the name of `place`, and the process id. A terminating
    /// signal waits until `make` is done.
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
        // A failure here cannot be handled better; the error that led here is already being returned.
        let _ = remove(&self.path);
        names.remove(&self.path);
    }
}

/// The final name of `leftover`, if a process that has ended left it behind.
pub fn abandoned(leftover: &str) -> Option<&str> {
    let (name, number) = leftover
        .strip_prefix('.')?
        .strip_suffix(".partial")?
        .rsplit_once('.')?;
    let (process, attempt) = number.split_once('-')?;
    attempt.parse::<u32>().ok()?;
    let process: libc::pid_t = process.parse().ok().filter(|&p| p > 0)?;
    // SAFETY: signal 0 is not delivered; the call only checks whether the process exists.
    let is_there = unsafe { libc::kill(process, 0) } == 0
        || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH);
    (!is_there).then_some(name)
}

/// Removes a file or a directory with its contents; succeeds if nothing exists.
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

/// Lets SIGHUP, SIGINT and SIGTERM remove unfinished work and restore the terminal before they end the process. A program calls this before
/// it starts other threads. A signal that was ignored at the start stays ignored.
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

/// Lets only the next SIGINT set `cancel` instead of ending the process. For a program that has called [`remove_on_signals`].
pub fn cancel_on_interrupt(cancel: &Cancel) {
    let cancel = cancel.clone();
    *handler() = Some(Handler {
        signals: &[libc::SIGINT],
        then: Box::new(move |_| cancel.cancel()),
    });
}

/// Lets only the next SIGHUP, SIGINT or SIGTERM call `then` with its number, on the thread that waits for signals, instead of ending the
/// process, until the result is dropped. For a program that has called [`remove_on_signals`].
pub fn on_signal(then: impl FnOnce(i32) + Send + 'static) -> OnSignal {
    *handler() = Some(Handler {
        signals: &[libc::SIGHUP, libc::SIGINT, libc::SIGTERM],
        then: Box::new(then),
    });
    OnSignal(())
}

/// Dropping this restores the normal effect of signals.
#[must_use]
pub struct OnSignal(());

impl Drop for OnSignal {
    fn drop(&mut self) {
        *handler() = None;
    }
}

/// The name of a signal handled by [`on_signal`].
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

/// The settings of standard input's terminal, if it is one.
fn terminal() -> Option<libc::termios> {
    let mut settings = MaybeUninit::uninit();
    // SAFETY: the call fills what it is given, or fails.
    unsafe {
        let got = libc::tcgetattr(libc::STDIN_FILENO, settings.as_mut_ptr());
        (got == 0).then(|| settings.assume_init())
    }
}

/// Restores settings of the terminal, which a line editor changes.
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

/// Waits for one of the blocked signals, and ends the process as the signal would have.
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
    // Held until the process has ended, so that nothing new is created meanwhile.
    let names = names();
    for name in names.iter() {
        let _ = remove(name);
    }
    if let Some(settings) = terminal {
        restore(settings);
    }
    // SAFETY: the set lives through the call. The default action of each of these signals ends the process. A line editor may have
    // installed a handler in its place.
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
