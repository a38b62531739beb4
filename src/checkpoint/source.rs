//! The bytes of one opened file, mapped or owned, and a cursor that reads headers out of them without ever passing the end.
//! Knows nothing of any format.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{Mmap, UncheckedAdvice};

use crate::base::Result;
use crate::base::error::{Error, bail, err};

enum Data {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

/// The whole content of a file, read as slices.
pub(super) struct Source {
    name: String,
    data: Data,
}

/// Where bytes lie: which of a checkpoint's sources, and from where to where in it. Only ever made within the bounds.
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
    /// Maps `path`. The file must not shrink while it is open: the system ends a process that reads a page past the end.
    pub(super) fn map(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|e| Error::io(format_args!("opening {name}"), e))?;
        let info = file
            .metadata()
            .map_err(|e| Error::io(format_args!("opening {name}"), e))?;
        if !info.is_file() {
            bail!(InvalidArgument, "{name} is not a regular file");
        }
        if info.len() == 0 {
            bail!(CorruptFile, "{name} is empty");
        }
        // SAFETY: the mapping is read-only and private to this value. A file that another process rewrites in place could
        // change under it; every value read is then still a plain byte, and lengths were copied out when they were checked.
        let map = unsafe { Mmap::map(&file) }
            .map_err(|e| Error::io(format_args!("mapping {name}"), e))?;
        Ok(Source {
            name,
            data: Data::Mapped(map),
        })
    }

    /// Wraps bytes that are already in memory.
    pub(super) fn owned(name: &str, bytes: Vec<u8>) -> Result<Self> {
        if bytes.is_empty() {
            bail!(CorruptFile, "{name} is empty");
        }
        Ok(Source {
            name: name.to_owned(),
            data: Data::Owned(bytes),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Mapped(map) => map,
            Data::Owned(bytes) => bytes,
        }
    }

    /// Lets the system drop `range` from this process's resident memory; it is read from the file again when touched.
    pub(super) fn release(&self, range: Range<usize>) {
        let Data::Mapped(map) = &self.data else {
            return;
        };
        let page = page_size();
        let start = range.start / page * page;
        let end = if range.end >= map.len() {
            map.len()
        } else {
            range.end / page * page
        };
        if start < end {
            // SAFETY: the mapping is a read-only view of a file, so a dropped page comes back with the same bytes.
            // A refusal costs memory, nothing else, so it is not an error.
            let _ = unsafe {
                map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start)
            };
        }
    }
}

fn page_size() -> usize {
    static PAGE: AtomicUsize = AtomicUsize::new(0);
    match PAGE.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: sysconf only reads a number.
            let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) })
                .unwrap_or(4096)
                .max(1);
            PAGE.store(page, Ordering::Relaxed);
            page
        }
        page => page,
    }
}

/// Reads little-endian header fields in order. Every read checks what is left; errors name the field and the byte offset.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(source: &'a Source) -> Self {
        Cursor {
            bytes: source.bytes(),
            position: 0,
        }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `len` bytes as `what`.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8]> {
        let left = self.left();
        match usize::try_from(len) {
            Ok(n) if n <= left => {
                let start = self.position;
                self.position += n;
                Ok(&self.bytes[start..start + n])
            }
            _ => bail!(
                CorruptFile,
                "{what} takes {len} bytes at offset {}, but {left} are left",
                self.position
            ),
        }
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
    pub(super) fn text(&mut self, len: u64, what: &str) -> Result<&'a str> {
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
        let source = Source::owned("t", bytes.to_vec())?;
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
        let source = Source::owned("t", vec![1, 2, 3]).unwrap();
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
}
