//! A file mapped read-only into memory. Processes that map the same file share its pages; the system reads a page when it is first used, and
//! may drop it and read it again.

use std::fmt;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use super::error::{Error, Result, bail};
use super::{file, memory};

/// The whole content of a file, mapped read-only and shared. Counted by [`memory::mapped`].
///
/// The file must not be changed while it is mapped. Its bytes change with it, and touching a page beyond the end of a file that was truncated
/// ends the process by SIGBUS. A file that is replaced by renaming, as [`Temporary`](file::Temporary) does, stays as it was mapped.
pub struct Mapping(Mmap);

impl Mapping {
    /// Maps the regular file at `path`. Reads nothing of it. An empty file is refused.
    pub fn open(path: &Path) -> Result<Mapping> {
        let failed = |e| Error::io(format_args!("mapping {}", path.display()), e);
        let file = file::open(path).map_err(failed)?;
        // SAFETY: that nobody changes the file is stated above.
        let content = unsafe { Mmap::map(&file) }.map_err(failed)?;
        if content.is_empty() {
            bail!(CorruptFile, "{} is empty", path.display());
        }
        memory::count_mapped(content.len() as u64);
        Ok(Mapping(content))
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        memory::uncount_mapped(self.len() as u64);
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping[{}]", self.len())
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
