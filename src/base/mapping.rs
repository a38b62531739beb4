//! A file mapped read-only into memory. Processes that map the same file share its pages; the system reads a page when it is first used, and
//! may drop it and read it again.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;

use super::error::{Error, Result, bail, err};
use super::{file, memory};

/// The whole content of a file, mapped read-only and shared. Counted by [`memory::mapped`].
///
/// The file must not be changed while it is mapped. Its bytes change with it, and touching a page beyond the end of a file that was truncated
/// ends the process by SIGBUS. A file that is replaced by renaming, as [`Temporary`](file::Temporary) does, stays as it was mapped.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is only read, and lives until this is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the regular file at `path`. Reads nothing of it. An empty file is refused.
    pub fn open(path: &Path) -> Result<Mapping> {
        let failed = |e| Error::io(format_args!("mapping {}", path.display()), e);
        let file = file::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        if size == 0 {
            bail!(CorruptFile, "{} is empty", path.display());
        }
        let len = isize::try_from(size)
            .map_err(|_| err!(Unsupported, "{} has {size} bytes", path.display()))?
            .unsigned_abs();
        // SAFETY: a new mapping at an address of the system's choice, of a file that is open during the call.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| err!(Internal, "{} was mapped at no address", path.display()))?;
        memory::count_mapped(len as u64);
        Ok(Mapping { start, len })
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` are mapped and readable until this is dropped. That nobody changes the file is stated above.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this range was mapped by `open`, and nothing borrows it any longer.
        unsafe { libc::munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
        memory::uncount_mapped(self.len as u64);
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping[{}]", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn a_mapping_is_the_content_that_the_file_had() {
        let name = format!("nvfp4-mapping-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let content: Vec<u8> = (0..100_000).map(|i| (i * 7 / 3) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let before = memory::mapped().current;
        let mapping = Mapping::open(&path).unwrap();
        assert_eq!(memory::mapped().current - before, content.len() as u64);
        let new = file::Temporary::create(&path, 0).unwrap();
        new.filled(b"other").unwrap().commit().unwrap();
        assert_eq!(mapping[..], content);
        drop(mapping);
        assert_eq!(memory::mapped().current, before);
        std::fs::write(&path, b"").unwrap();
        expect_kind(Mapping::open(&path), ErrorKind::CorruptFile, "is empty");
        std::fs::remove_file(&path).unwrap();
        expect_kind(Mapping::open(&path), ErrorKind::NotFound, "mapping");
        let folder = Mapping::open(&std::env::temp_dir());
        expect_kind(folder, ErrorKind::InvalidArgument, "a directory");
    }
}
