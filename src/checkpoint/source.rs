//! Reads bytes at positions of a file that was opened or that the host gives, and has a cursor for headers that never passes the end. Nothing
//! is mapped: a file truncated by another process is an error here, not a crash. Knows no format.

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::base::error::{Error, bail, err};
use crate::base::files::{FileContent, Files, POINTER_BYTES, check_content};
use crate::base::{Result, file};

enum Data {
    File {
        file: File,
        /// Time of the last write, if the system provides it.
        modified: Option<SystemTime>,
    },
    Given(Arc<dyn FileContent>),
}

/// The content of a file.
pub(super) struct Source {
    name: String,
    /// `None` for a file that the host gives.
    path: Option<PathBuf>,
    len: usize,
    data: Data,
}

/// A range of bytes in one of a checkpoint's sources. Always within bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) source: usize,
    pub(super) range: Range<usize>,
}

impl Span {
    pub(super) fn len(&self) -> usize {
        self.range.len()
    }
}

impl Source {
    /// Opens `path` of `files`, and keeps it open.
    pub(super) fn open(files: &Files, path: &Path) -> Result<Self> {
        let source = match files {
            Files::Disk => Self::open_on_disk(path)?,
            Files::Given(given) => match given.get(path) {
                Some(content) => Self::given(&path.display().to_string(), content.clone())?,
                None => bail!(NotFound, "{} is not among the given files", path.display()),
            },
        };
        let mut start = [0; POINTER_BYTES];
        let start = &mut start[..source.len().min(POINTER_BYTES)];
        source.read(0, start)?;
        check_content(source.name(), start)?;
        Ok(source)
    }

    /// Opens a file on disk. Reads fail once it is written to.
    fn open_on_disk(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let opening = |e| Error::io(format_args!("opening {name}"), e);
        let file = file::open(path).map_err(opening)?;
        let info = file.metadata().map_err(opening)?;
        if info.len() == 0 {
            bail!(CorruptFile, "{name} is empty");
        }
        let len = addressable(&name, info.len())?;
        let modified = info.modified().ok();
        Ok(Source {
            name,
            path: Some(path.to_owned()),
            len,
            data: Data::File { file, modified },
        })
    }

    /// The file `name` that the host gives.
    pub(super) fn given(name: &str, content: Arc<dyn FileContent>) -> Result<Self> {
        if content.size() == 0 {
            bail!(CorruptFile, "{name} is empty");
        }
        Ok(Source {
            name: name.to_owned(),
            path: None,
            len: addressable(name, content.size())?,
            data: Data::Given(content),
        })
    }

    /// All its bytes, if they are in memory.
    fn in_memory(&self) -> Option<&[u8]> {
        match &self.data {
            Data::File { .. } => None,
            Data::Given(content) => content.in_memory(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Size in bytes when it was opened.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Copies the bytes from `at` on to `out`.
    pub(super) fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let range = at..at.saturating_add(out.len());
        let reading = |len| format!("reading {len} bytes at offset {at} of {}", self.name);
        let len = out.len();
        match &self.data {
            Data::Given(_) if range.end > self.len => Err(self.past_the_end(&range)),
            Data::Given(content) => content
                .read(at as u64, out)
                .map_err(|e| e.within(reading(len))),
            Data::File { file, .. } => {
                file.read_exact_at(out, at as u64)
                    .map_err(|e| match e.kind() {
                        ErrorKind::UnexpectedEof => self.past_the_end(&range),
                        _ => Error::io(reading(len), e),
                    })
            }
        }
    }

    fn past_the_end(&self, range: &Range<usize>) -> Error {
        err!(
            CorruptFile,
            "{}: {} bytes at offset {} are not there; it had {} bytes, and must have been cut off after it was opened",
            self.name,
            range.len(),
            range.start,
            self.len
        )
    }

    /// The bytes of `range`: directly from memory, or read into `staging`.
    pub(super) fn slice<'a>(
        &'a self,
        range: Range<usize>,
        staging: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        if let Some(bytes) = self.in_memory().and_then(|all| all.get(range.clone())) {
            return Ok(bytes);
        }
        if staging.len() < range.len() {
            staging
                .try_reserve_exact(range.len() - staging.len())
                .map_err(|e| {
                    err!(
                        OutOfMemory,
                        "{}: {} bytes at offset {}: {e}",
                        self.name,
                        range.len(),
                        range.start
                    )
                })?;
            staging.resize(range.len(), 0);
        }
        let staging = &mut staging[..range.len()];
        self.read(range.start, staging)?;
        Ok(staging)
    }

    /// Fails if the file was written to since it was opened: what was read from `at` on may be of other content, in whole or in part.
    pub(super) fn check_unchanged(&self, at: usize) -> Result<()> {
        let Data::File { file, modified } = &self.data else {
            return Ok(());
        };
        let same =
            |info: &Metadata| info.len() == self.len as u64 && info.modified().ok() == *modified;
        match file.metadata() {
            Ok(info) if same(&info) => Ok(()),
            Ok(_) => bail!(
                CorruptFile,
                "{}: what was read at offset {at} may be of another content, as the file was written to after it was opened; load it again",
                self.name
            ),
            Err(e) => Err(Error::io(
                format_args!("looking whether {} is unchanged", self.name),
                e,
            )),
        }
    }
}

/// The size of the file `name` as one in memory.
fn addressable(name: &str, size: u64) -> Result<usize> {
    usize::try_from(size).map_err(|_| {
        err!(
            Unsupported,
            "{name} has {size} bytes, more than this system has addresses for"
        )
    })
}

/// Bytes that a cursor reads ahead.
const WINDOW: usize = 16 << 10;

/// Reads little-endian header fields in order. Every read checks the remaining length; errors name the field and the byte offset.
pub(super) struct Cursor<'a> {
    source: &'a Source,
    position: usize,
    /// Bytes read ahead, and their offset.
    window: Vec<u8>,
    start: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(source: &'a Source) -> Self {
        Cursor {
            source,
            position: 0,
            window: Vec::new(),
            start: 0,
        }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn left(&self) -> usize {
        self.source.len() - self.position
    }

    /// Converts `len`, which must not exceed the remaining bytes. `what` names it in errors.
    pub(super) fn check(&self, len: u64, what: &str) -> Result<usize> {
        let left = self.left();
        match usize::try_from(len) {
            Ok(n) if n <= left => Ok(n),
            _ => bail!(
                CorruptFile,
                "{what} takes {len} bytes at offset {}, but {left} are left",
                self.position
            ),
        }
    }

    /// Skips the next `len` bytes, which `what` names in errors.
    pub(super) fn skip(&mut self, len: u64, what: &str) -> Result<()> {
        self.position += self.check(len, what)?;
        Ok(())
    }

    /// The next `len` bytes, which `what` names in errors.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&[u8]> {
        let from = self.position;
        let ahead = self.left().min(WINDOW);
        self.skip(len, what)?;
        let n = self.position - from;
        if let Some(bytes) = self.source.in_memory() {
            return Ok(&bytes[from..self.position]);
        }
        if from < self.start || self.position > self.start + self.window.len() {
            self.window.clear();
            self.start = from;
            self.source
                .slice(from..from + n.max(ahead), &mut self.window)?;
        }
        Ok(&self.window[from - self.start..][..n])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// An unsigned LEB128 number of at most 64 bits.
    pub(super) fn leb128(&mut self, what: &str) -> Result<u64> {
        let start = self.position;
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(err!(
            CorruptFile,
            "{what} at offset {start} is a LEB128 number of more than 64 bits"
        ))
    }

    /// `len` bytes of UTF-8.
    pub(super) fn text(&mut self, len: u64, what: &str) -> Result<&str> {
        let start = self.position;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes)
            .map_err(|e| err!(CorruptFile, "{what} at offset {start} is not UTF-8: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    fn leb(bytes: &[u8]) -> Result<u64> {
        let source = Source::given("t", Arc::new(bytes.to_vec()))?;
        Cursor::new(&source).leb128("number")
    }

    #[test]
    fn leb128_takes_64_bits_and_no_more() {
        assert_eq!(leb(&[0x00]).unwrap(), 0);
        assert_eq!(leb(&[0xe5, 0x8e, 0x26]).unwrap(), 624_485);
        let mut max = [0xff; 10];
        max[9] = 0x01;
        assert_eq!(leb(&max).unwrap(), u64::MAX);
        max[9] = 0x02;
        assert!(leb(&max).unwrap_err().message().contains("more than 64"));
        expect_kind(
            leb(&[0x80; 11]),
            ErrorKind::CorruptFile,
            "more than 64 bits",
        );
        assert!(leb(&[0x80]).unwrap_err().message().contains("0 are left"));
    }

    #[test]
    fn reads_never_pass_the_end() {
        let source = Source::given("t", Arc::new(vec![1, 2, 3])).unwrap();
        let mut cursor = Cursor::new(&source);
        expect_kind(
            cursor.u32("field"),
            ErrorKind::CorruptFile,
            "field takes 4 bytes at offset 0, but 3 are left",
        );
        expect_kind(
            cursor.take(u64::MAX, "payload"),
            ErrorKind::CorruptFile,
            "payload takes 18446744073709551615 bytes",
        );
        assert_eq!(cursor.take(3, "payload").unwrap(), [1, 2, 3]);
        assert_eq!(cursor.left(), 0);
        expect_kind(cursor.u8("field"), ErrorKind::CorruptFile, "but 0 are left");
    }

    #[test]
    fn a_file_is_read_ahead_as_memory_is() {
        let bytes: Vec<u8> = (0..5 * WINDOW).map(|i| (i * 31 / 7) as u8).collect();
        let name = format!("nvfp4-source-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, &bytes).unwrap();
        let file = Source::open(&Files::Disk, &path).unwrap();
        let owned = Source::given("t", Arc::new(bytes.clone())).unwrap();
        for step in [1, 7, 1000, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW] {
            let (mut file, mut owned) = (Cursor::new(&file), Cursor::new(&owned));
            while file.left() >= 2 * step {
                let at = file.position();
                let taken = file.take(step as u64, "field").unwrap();
                assert_eq!(taken, &bytes[at..at + step]);
                assert_eq!(taken, owned.take(step as u64, "field").unwrap());
                file.skip(step as u64 / 2, "payload").unwrap();
                owned.skip(step as u64 / 2, "payload").unwrap();
            }
            let more = file.left() as u64 + 1;
            let e = file.take(more, "field").unwrap_err();
            assert_eq!(
                e.message(),
                owned.take(more, "field").unwrap_err().message()
            );
        }
        std::fs::remove_file(&path).unwrap();
    }
}
