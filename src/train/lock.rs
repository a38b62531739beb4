//! Allows one run at a time in a directory, by a file lock that the system releases when the process ends in any way.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use crate::base::error::{Error, bail};
use crate::base::{Result, file, host_name};

/// The lock file. It stays when a run has ended: a lock on a removed file would keep nobody out.
pub const LOCK: &str = ".lock";

/// The right to run in a directory, until it is dropped.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Locks `directory`, and creates it if needed. If another process holds the lock, the error names it.
    pub fn take(directory: &Path) -> Result<RunLock> {
        fs::create_dir_all(directory)
            .map_err(|e| Error::io(format_args!("making {}", directory.display()), e))?;
        let path = path(directory);
        let failed = |e| Error::io(format_args!("locking {}", path.display()), e);
        // Opening anything but a regular file might block forever.
        file::exists(&path).map_err(failed)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // A holder that could not write its name is not named.
                let _ = file.take(256).read_to_string(&mut holder);
                let holder = match holder.trim() {
                    "" => "another process",
                    holder => holder,
                };
                bail!(
                    InvalidArgument,
                    "a run goes on in {}: {holder} holds {}; wait until it has ended, or name another --out",
                    directory.display(),
                    path.display()
                );
            }
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {
                tracing::warn!(
                    "{}: the file system has no locks; start no second run there",
                    directory.display()
                );
            }
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        let holder = format!("process {} on {}\n", std::process::id(), host_name());
        // Only for the message to others; a full disk must not prevent a run.
        let _ = file::within_limit(|| {
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(holder.as_bytes())
        });
        Ok(RunLock { _file: file })
    }

    /// Whether a run has ever been in `directory`, and may still be.
    pub fn is_in(directory: &Path) -> bool {
        path(directory).exists()
    }
}

fn path(directory: &Path) -> PathBuf {
    directory.join(LOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_is_refused_until_the_first_has_ended() {
        let directory = std::env::temp_dir().join(format!("nvfp4-lock-{}", std::process::id()));
        assert!(!RunLock::is_in(&directory));
        let lock = RunLock::take(&directory).unwrap();
        let said = RunLock::take(&directory).unwrap_err().to_string();
        assert!(
            said.contains(&format!("process {} on ", std::process::id())),
            "{said}"
        );
        drop(lock);
        RunLock::take(&directory).unwrap();
        fs::remove_dir_all(&directory).unwrap();
    }
}
