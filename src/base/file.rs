//! File access. Reads only regular files, because others may block forever or never end. Writes files that appear whole or not at all:
//! unnamed, or under a temporary name beside their place, then synced and moved into place.

use std::ffi::CString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use super::Result;
use super::error::{Error, NotAFile, bail};
use super::leftover::Leftover;
use super::threads;

/// The longest chain of links that is followed, as on Linux.
const MOST_LINKS: usize = 40;
/// Bytes copied at a time.
const PIECE: usize = 1 << 20;

/// Fails unless this is a regular file.
fn regular(there: &Metadata) -> io::Result<()> {
    let kind = there.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a FIFO or pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, NotAFile(what)))
}

/// Opens a regular file for reading. Refuses anything else at once: opening a FIFO waits for its writer, and a device may have no end.
pub fn open(path: &Path) -> io::Result<File> {
    // Opening some devices has side effects, so the path is examined first.
    regular(&fs::metadata(path)?)?;
    // A FIFO may have replaced the file meanwhile; without this flag, opening it would wait.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

/// The content of a regular file, opened as by [`open`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = open(path)?;
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(content)
}

/// The UTF-8 content of a regular file, opened as by [`open`].
pub fn read_to_string(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Whether a regular file exists at `path`; fails if something else does.
pub fn exists(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(there) => regular(&there).map(|()| true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Calls `write`, which may reach the process's limit on file sizes. The system then sends SIGXFSZ, which by default ends the process; here
/// only the error is returned.
pub fn within_limit<T>(write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let is_pending = || {
        let mut pending = MaybeUninit::uninit();
        // SAFETY: the call fills the set before it is examined.
        unsafe {
            libc::sigpending(pending.as_mut_ptr());
            libc::sigismember(pending.as_ptr(), libc::SIGXFSZ) == 1
        }
    };
    let mut limit = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: the sets are in this frame and filled before use. The thread's own set is restored, also after a panic.
    unsafe {
        libc::sigemptyset(limit.as_mut_ptr());
        libc::sigaddset(limit.as_mut_ptr(), libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, limit.as_ptr(), before.as_mut_ptr());
        let was_pending = is_pending();
        let result = catch_unwind(AssertUnwindSafe(write));
        let is_beyond = matches!(&result, Ok(Err(e)) if e.raw_os_error() == Some(libc::EFBIG));
        if is_beyond && !was_pending && is_pending() {
            let mut signal = 0;
            libc::sigwait(limit.as_ptr(), &mut signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// `path`, or its nearest existing ancestor.
pub(super) fn nearest(path: &Path) -> &Path {
    path.ancestors()
        .find(|p| p.exists())
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Makes the folder of a file at `path`, in a folder that exists, unless it exists itself.
pub fn make_folder_of(path: &Path) -> Result<()> {
    let folder = folder_of(path);
    match fs::create_dir(folder) {
        Err(e) if !folder.is_dir() => {
            Err(Error::io(format_args!("making {}", folder.display()), e))
        }
        _ => Ok(()),
    }
}

/// Free bytes of the file system at `path`, or at its nearest existing ancestor.
pub fn free_space(path: &Path) -> Result<u64> {
    let failed = |e| Error::io(format_args!("asking for the room at {}", path.display()), e);
    let name = c_path(nearest(path)).map_err(failed)?;
    let mut info = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `name` ends with a zero byte, and `info` has room for what the call writes.
    uninterrupted(|| unsafe { libc::statvfs(name.as_ptr(), info.as_mut_ptr()) }).map_err(failed)?;
    // SAFETY: the call has succeeded, so it has filled `info`.
    let info = unsafe { info.assume_init() };
    #[allow(clippy::useless_conversion)] // The fields are narrower on other systems.
    Ok(u64::from(info.f_bavail).saturating_mul(u64::from(info.f_frsize)))
}

/// Makes a system call that returns 0 on success, with signals blocked so that none interrupts it. Some calls start over when interrupted,
/// so retrying might never end.
fn uninterrupted(call: impl FnOnce() -> libc::c_int) -> io::Result<()> {
    threads::without_signals(|| match call() {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    })
}

/// A file that is not in its place yet. Dropping it without a commit removes it. On systems with unnamed files, the end of the process
/// removes it too.
pub struct Temporary {
    file: File,
    /// Temporary name; `None` for an unnamed file.
    name: Option<Leftover>,
    place: PathBuf,
    /// Metadata of the file that it replaces.
    old: Option<Metadata>,
}

impl Temporary {
    /// Creates the temporary file for `place` with `len` bytes of space reserved, so that a full disk is noticed before the work rather
    /// than after it. A regular file at `place` will be replaced; the new file gets its mode, and its owner if the system allows it. Of a
    /// link, the target is replaced. Anything else is refused.
    pub fn create(place: &Path, len: u64) -> Result<Self> {
        let (place, old) = replaced(place)?;
        Self::create_for(folder_of(&place), &place, old, len)
    }

    /// As [`Temporary::create`], for a `place` in a folder that will be created on the file system of `folder`.
    pub(super) fn create_in(folder: &Path, place: &Path, len: u64) -> Result<Self> {
        Self::create_for(folder, place, None, len)
    }

    fn create_for(folder: &Path, place: &Path, old: Option<Metadata>, len: u64) -> Result<Self> {
        let (file, name) = match nameless(folder) {
            Some(file) => (file, None),
            // Also reached if the folder accepts no files at all; that is then the error.
            None => named(folder, place)
                .map(|(file, name)| (file, Some(name)))
                .map_err(|e| Error::io(format_args!("creating {}", place.display()), e))?,
        };
        let new = Temporary {
            file,
            name,
            place: place.to_owned(),
            old,
        };
        // Set before the file has content that others might read.
        new.take_over(&new.file)
            .map_err(|e| new.failed("setting the mode of", e))?;
        new.reserve(len)?;
        Ok(new)
    }

    /// The error of an action on this file, named by its final path.
    fn failed(&self, action: &str, error: io::Error) -> Error {
        Error::io(format_args!("{action} {}", self.place.display()), error)
    }

    fn reserve(&self, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        #[cfg(target_os = "linux")]
        {
            let Ok(wanted) = i64::try_from(len) else {
                bail!(
                    InvalidArgument,
                    "{} would take {len} bytes",
                    self.place.display()
                );
            };
            let file = self.file.as_raw_fd();
            // SAFETY: the descriptor is open for as long as `self.file`; the call takes no pointers.
            let reserve = || unsafe { libc::fallocate(file, 0, 0, wanted) };
            let reserved = within_limit(|| uninterrupted(reserve));
            let Err(error) = reserved else {
                return Ok(());
            };
            // File systems that cannot reserve space say so; there a full disk shows up only when it is full.
            if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
                return Err(self.failed("reserving space for", error));
            }
        }
        within_limit(|| self.file.set_len(len)).map_err(|e| self.failed("reserving space for", e))
    }

    /// Writes `bytes` at `offset`.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        within_limit(|| self.file.write_all_at(bytes, offset))
            .map_err(|e| self.failed("writing", e))
    }

    /// Writes the complete content.
    pub fn filled(self, content: &[u8]) -> Result<Self> {
        self.write_at(content, 0)?;
        self.sync()?;
        Ok(self)
    }

    /// Gives back the reserved space past the first `len` bytes.
    pub fn cut(&self, len: u64) -> Result<()> {
        within_limit(|| self.file.set_len(len)).map_err(|e| self.failed("cutting", e))
    }

    /// Waits until the content is on disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| self.failed("syncing", e))
    }

    /// Its metadata, of which the size and the time of the last write stay when it is moved into place.
    pub fn metadata(&self) -> Result<Metadata> {
        self.file
            .metadata()
            .map_err(|e| self.failed("looking at", e))
    }

    /// Another handle to the file, for reading it before it is in place.
    pub(super) fn opened(&self) -> Result<File> {
        self.file.try_clone().map_err(|e| self.failed("opening", e))
    }

    /// Moves the file into place. It must have been synced.
    pub fn commit(self) -> Result<()> {
        self.put(&self.place)
    }

    /// Moves the file to `place` in the same folder instead, for names derived from the content.
    pub fn commit_to(mut self, place: &Path) -> Result<()> {
        self.place = place.to_owned();
        self.commit()
    }

    /// Moves the file to where it belongs in `made`, which will become `directory`, the one that its place is in. Makes the folder between
    /// them, if its place has one.
    pub(super) fn commit_into(self, made: &Path, directory: &Path) -> Result<()> {
        let within = self.place.strip_prefix(directory);
        let name = Path::new(self.place.file_name().unwrap_or_default());
        let path = made.join(within.unwrap_or(name));
        make_folder_of(&path)?;
        self.put(&path)
    }

    /// Makes the folder of its place, unless that exists.
    pub(super) fn make_folder(&self) -> Result<()> {
        make_folder_of(&self.place)
    }

    /// Gives the still empty `file` the mode and the owner of the file that it replaces.
    fn take_over(&self, file: &File) -> io::Result<()> {
        let Some(old) = &self.old else {
            return Ok(());
        };
        let new = file.metadata()?;
        let owned = |user, group| std::os::unix::fs::fchown(file, user, group).is_ok();
        let is_same = (new.uid(), new.gid()) == (old.uid(), old.gid());
        let keeps_group =
            is_same || owned(Some(old.uid()), Some(old.gid())) || owned(None, Some(old.gid()));
        // Without setuid and setgid bits, as after a write in place.
        let mut mode = old.mode() & 0o777;
        if !keeps_group {
            // A different group gets no more rights than others have.
            mode &= 0o707 | (mode & 0o007) << 3;
        }
        // Some file systems have one mode for all files, and refuse to change it.
        if file.metadata()?.mode() & 0o777 == mode {
            return Ok(());
        }
        file.set_permissions(fs::Permissions::from_mode(mode))
    }

    /// Copies an unnamed file to `path`.
    fn copy_to(&self, folder: &Path, path: &Path) -> io::Result<()> {
        let (copy, name) = named(folder, path)?;
        self.take_over(&copy)?;
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        loop {
            match self.file.read_at(&mut piece, at) {
                Ok(0) => break,
                Ok(n) => {
                    within_limit(|| copy.write_all_at(&piece[..n], at))?;
                    at += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        copy.set_modified(self.file.metadata()?.modified()?)?;
        copy.sync_all()?;
        fs::rename(name.path(), path)
    }

    fn put(&self, path: &Path) -> Result<()> {
        let folder = folder_of(path);
        let put = match &self.name {
            Some(name) => fs::rename(name.path(), path),
            None => match link(&self.file, path) {
                // A link cannot replace a file; renaming can.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    Leftover::make(folder, path, |other| link(&self.file, other))
                        .and_then(|((), other)| fs::rename(other.path(), path))
                }
                // A sandbox or the file system forbids links.
                Err(e) if is_refused(&e) => self.copy_to(folder, path),
                linked => linked,
            },
        };
        put.map_err(|e| self.failed("renaming to", e))?;
        sync_folder(folder)
    }
}

/// The path that is written for `place` after following links, and the metadata of an existing file.
fn replaced(place: &Path) -> Result<(PathBuf, Option<Metadata>)> {
    let finding = |e| Error::io(format_args!("finding {}", place.display()), e);
    if place.file_name().is_none() || place.is_dir() {
        bail!(
            InvalidArgument,
            "{} is not a place for a file",
            place.display()
        );
    }
    match fs::metadata(place) {
        Ok(old) => {
            if regular(&old).is_err() {
                bail!(
                    InvalidArgument,
                    "{} is a device, a pipe or a socket, which no file replaces; name a file",
                    place.display()
                );
            }
            let real = match place.is_symlink() {
                true => fs::canonicalize(place).map_err(finding)?,
                false => place.to_owned(),
            };
            Ok((real, Some(old)))
        }
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            let mut real = place.to_owned();
            for _ in 0..MOST_LINKS {
                match fs::read_link(&real) {
                    Ok(to) => real = folder_of(&real).join(to),
                    Err(_) => break,
                }
            }
            Ok((real, None))
        }
        Err(e) => Err(finding(e)),
    }
}

/// Creates a file in `folder` under a temporary name derived from `place`.
fn named(folder: &Path, place: &Path) -> io::Result<(File, Leftover)> {
    Leftover::make(folder, place, |path| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
    })
}

/// Whether naming an unnamed file is impossible, rather than failing for lack of space.
fn is_refused(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::EPERM
                | libc::EACCES
                | libc::ENOSYS
                | libc::EOPNOTSUPP
                | libc::EINVAL
                | libc::EXDEV
                | libc::EMLINK
                | libc::ENOENT
        )
    )
}

/// Creates an unnamed file in `folder`, which disappears with the process. `None` if the system has no unnamed files, or cannot name them
/// later.
#[cfg(target_os = "linux")]
fn nameless(folder: &Path) -> Option<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .open(folder)
        .ok()?;
    entrance(&file).exists().then_some(file)
}

/// Other systems have no unnamed files.
#[cfg(not(target_os = "linux"))]
fn nameless(_: &Path) -> Option<File> {
    None
}

/// The path of an open file under `/proc`, which must be mounted.
fn entrance(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Gives an unnamed file the name `path`, which must be free.
fn link(file: &File, path: &Path) -> io::Result<()> {
    let (from, to) = (c_path(&entrance(file))?, c_path(path)?);
    // SAFETY: both names end with a zero byte and live through the call.
    let linked = unsafe {
        libc::linkat(
            libc::AT_FDCWD,
            from.as_ptr(),
            libc::AT_FDCWD,
            to.as_ptr(),
            libc::AT_SYMLINK_FOLLOW,
        )
    };
    match linked {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub(super) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
}

/// The folder of `place`.
pub(crate) fn folder_of(place: &Path) -> &Path {
    match place.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Waits until the names in `folder` are on disk.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|d| d.sync_all())
        .map_err(|e| Error::io(format_args!("syncing {}", folder.display()), e))
}

/// Writes a small file completely, without moving it into place.
pub fn stage(place: &Path, content: &[u8]) -> Result<Temporary> {
    Temporary::create(place, 0)?.filled(content)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// The child process of the test below.
    #[test]
    #[ignore = "run by signals_do_not_end_a_reservation"]
    fn reserve_under_signals() {
        extern "C" fn ignore(_: libc::c_int) {}
        // On a file system in memory the reservation takes time, and starts over when interrupted.
        let place = PathBuf::from(format!("/dev/shm/nvfp4-file-{}", std::process::id()));
        let interval = libc::timeval {
            tv_sec: 0,
            tv_usec: 100,
        };
        let timer = libc::itimerval {
            it_interval: interval,
            it_value: interval,
        };
        // SAFETY: the handler does nothing and has no flags, and the timer belongs to this process.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
            libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut());
        }
        for _ in 0..20 {
            drop(Temporary::create(&place, 16 << 20).unwrap());
            free_space(&place).unwrap();
        }
    }

    #[test]
    fn signals_do_not_end_a_reservation() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact"])
            .arg("base::file::tests::reserve_under_signals")
            .output()
            .unwrap();
        let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
        assert!(output.status.success() && ran, "{output:?}");
    }
}
