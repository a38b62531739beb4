//! A file that appears whole or not at all: written under a temporary name beside its place, synced, then renamed.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::Result;
use super::error::{Error, bail};

/// Bytes that the file system has left at `path`, or at the nearest folder above that exists.
pub fn free_space(path: &Path) -> Result<u64> {
    let failed = |e| Error::io(format_args!("asking for the room at {}", path.display()), e);
    let there = path
        .ancestors()
        .find(|p| p.exists())
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let name = CString::new(there.as_os_str().as_bytes())
        .map_err(|e| failed(io::Error::new(io::ErrorKind::InvalidInput, e)))?;
    let mut info = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `name` ends with a zero byte, and `info` has room for what the call writes.
    if unsafe { libc::statvfs(name.as_ptr(), info.as_mut_ptr()) } != 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    // SAFETY: the call has succeeded, so it has filled `info`.
    let info = unsafe { info.assume_init() };
    #[allow(clippy::useless_conversion)] // The fields are narrower on other systems.
    Ok(u64::from(info.f_bavail).saturating_mul(u64::from(info.f_frsize)))
}

/// A file not yet in its place. Dropping it uncommitted removes it.
pub struct Temporary {
    file: File,
    temporary: PathBuf,
    place: PathBuf,
    /// Whether it is in its place or gone, so that nothing is left to remove.
    settled: bool,
}

impl Temporary {
    /// Creates the temporary file for `place` with `len` bytes of space reserved, so that a disk that is too small is found
    /// out before the work rather than after it.
    pub fn create(place: &Path, len: u64) -> Result<Self> {
        let Some(name) = place.file_name().filter(|_| !place.is_dir()) else {
            bail!(
                InvalidArgument,
                "{} is not a place for a file",
                place.display()
            );
        };
        let mut attempt = 0;
        loop {
            let temporary = place.with_file_name(format!(
                ".{}.{}-{attempt}.partial",
                name.display(),
                std::process::id()
            ));
            match OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&temporary)
            {
                Ok(file) => {
                    let new = Temporary {
                        file,
                        temporary,
                        place: place.to_owned(),
                        settled: false,
                    };
                    new.reserve(len)?;
                    return Ok(new);
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && attempt < 1000 => {
                    attempt += 1;
                }
                Err(e) => {
                    return Err(Error::io(
                        format_args!("creating {}", temporary.display()),
                        e,
                    ));
                }
            }
        }
    }

    /// The error of an action on this file, under the name it is to have.
    fn failed(&self, action: &str, error: io::Error) -> Error {
        Error::io(format_args!("{action} {}", self.place.display()), error)
    }

    fn reserve(&self, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        #[cfg(target_os = "linux")]
        {
            use std::os::fd::AsRawFd;
            let Ok(wanted) = i64::try_from(len) else {
                bail!(
                    InvalidArgument,
                    "{} would take {len} bytes",
                    self.place.display()
                );
            };
            // SAFETY: the descriptor is open for as long as `self.file`; the call takes no pointers.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, wanted) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            // File systems that cannot reserve say so; on those a full disk is found out when it is full.
            if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
                return Err(self.failed("reserving space for", error));
            }
        }
        self.file
            .set_len(len)
            .map_err(|e| self.failed("reserving space for", e))
    }

    /// Writes `bytes` at `offset`.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(|e| self.failed("writing", e))
    }

    /// Waits until what was written is on the disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| self.failed("syncing", e))
    }

    /// Puts the file in its place. It must have been synced.
    pub fn commit(&mut self) -> Result<()> {
        std::fs::rename(&self.temporary, &self.place).map_err(|e| self.failed("renaming to", e))?;
        self.settled = true;
        let directory = match self.place.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(directory)
            .and_then(|d| d.sync_all())
            .map_err(|e| self.failed("syncing the directory of", e))
    }

    /// Puts the file at `place`, in the same folder, instead of where it was to go: for names that come from the content.
    pub fn commit_to(&mut self, place: &Path) -> Result<()> {
        self.place = place.to_owned();
        self.commit()
    }

    /// Removes the file unless it is in its place.
    pub fn discard(&mut self) {
        if !std::mem::replace(&mut self.settled, true) {
            // Nothing better can be done with a failure here; the error that led here is already on its way.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        self.discard();
    }
}

/// Writes a small file in one go, but does not put it in its place yet.
pub fn stage(place: &Path, content: &[u8]) -> Result<Temporary> {
    let file = Temporary::create(place, 0)?;
    file.write_at(content, 0)?;
    file.sync()?;
    Ok(file)
}
