//! A partially fetched file, several segments of which are fetched at a time, and which a later program can resume: a table
//! after the content says how much of each segment is there. It has a name of its own until it is complete and the table is
//! cut off.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use NVFP4::base::file::within_limit;
use NVFP4::base::{Error, Result};

/// The bytes of one request. Small enough that several connections share a file of some hundred megabytes, and large enough
/// that the time between two requests is negligible.
pub(super) const SEGMENT: u64 = 32 << 20;

/// The header of the table: a table with another segment size or format is ignored.
const MAGIC: &[u8; 16] = b"nvfp4-partial-32";

/// The suffix of a partial file's name.
pub(super) const EXTENSION: &str = "nvfp4-partial";

/// A partial file of known size.
pub(super) struct Partial {
    file: File,
    path: PathBuf,
    size: u64,
    /// Bytes of each segment that have been fetched, from its beginning.
    there: Vec<AtomicU64>,
    /// Bytes that had been fetched when it was opened.
    found: u64,
}

impl Partial {
    /// Opens the partial file for `place`, of `size` bytes, and resumes one that an earlier pull has left.
    pub(super) fn open(place: &Path, size: u64) -> Result<Partial> {
        let path = place.with_added_extension(EXTENSION);
        let failed = |e| Error::io(format_args!("opening {}", path.display()), e);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        let mut partial = Partial {
            file,
            path: path.clone(),
            size,
            there: Vec::new(),
            found: 0,
        };
        let table = read_table(&partial.file, size).map_err(failed)?;
        let is_new = table.is_none();
        partial.there = table
            .unwrap_or_else(|| vec![0; size.div_ceil(SEGMENT) as usize])
            .into_iter()
            .map(AtomicU64::new)
            .collect();
        if is_new {
            partial.write_table().map_err(failed)?;
        }
        partial.found = partial.len();
        Ok(partial)
    }

    /// Bytes that an earlier pull has left of the content at `place`.
    pub(super) fn found_at(place: &Path, size: u64) -> u64 {
        File::open(place.with_added_extension(EXTENSION))
            .and_then(|file| read_table(&file, size))
            .ok()
            .flatten()
            .map_or(0, |counts| counts.iter().sum())
    }

    fn write_table(&self) -> io::Result<()> {
        let mut table = MAGIC.to_vec();
        for there in &self.there {
            table.extend(there.load(Relaxed).to_le_bytes());
        }
        self.file.set_len(0)?;
        within_limit(|| self.file.write_all_at(&table, self.size))
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that an earlier pull had left.
    pub(super) fn found(&self) -> u64 {
        self.found
    }

    pub(super) fn segments(&self) -> usize {
        self.there.len()
    }

    fn segment(&self, segment: usize) -> (u64, u64) {
        segment_of(self.size, segment)
    }

    /// The missing range of a segment: its first byte, and the one after its last.
    pub(super) fn missing(&self, segment: usize) -> (u64, u64) {
        let (start, length) = self.segment(segment);
        (start + self.there[segment].load(Relaxed), start + length)
    }

    /// Bytes that have been fetched.
    pub(super) fn len(&self) -> u64 {
        self.there.iter().map(|t| t.load(Relaxed)).sum()
    }

    /// Bytes that have been fetched from the beginning without a gap.
    pub(super) fn prefix(&self) -> u64 {
        let mut prefix = 0;
        for segment in 0..self.segments() {
            let there = self.there[segment].load(std::sync::atomic::Ordering::Acquire);
            prefix += there;
            if there < self.segment(segment).1 {
                break;
            }
        }
        prefix
    }

    /// Writes `bytes` at `offset` and records them, as far as they continue their segments. Returns how many are new. Only
    /// one thread at a time may write to a segment, unless all write the same.
    pub(super) fn write(&self, mut bytes: &[u8], mut offset: u64) -> io::Result<u64> {
        let mut new = 0;
        while !bytes.is_empty() {
            let segment = (offset / SEGMENT) as usize;
            let (start, length) = self.segment(segment);
            let (piece, rest) = bytes.split_at(bytes.len().min((start + length - offset) as usize));
            within_limit(|| self.file.write_all_at(piece, offset))?;
            offset += piece.len() as u64;
            bytes = rest;
            let end = offset - start;
            let before = self.there[segment].fetch_max(end, std::sync::atomic::Ordering::AcqRel);
            if end > before {
                new += end - before;
                let entry = self.size + (MAGIC.len() + 8 * segment) as u64;
                within_limit(|| self.file.write_all_at(&end.to_le_bytes(), entry))?;
            }
        }
        Ok(new)
    }

    /// Reads fetched bytes.
    pub(super) fn read(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    /// Flushes the fetched bytes to the disk.
    pub(super) fn flush(&self) {
        // A failure here is reported at the end, where it happens again.
        let _ = self.file.sync_data();
    }

    /// Moves the complete file to its place.
    pub(super) fn finish(self, place: &Path) -> Result<()> {
        let finish = || {
            self.file.set_len(self.size)?;
            self.file.sync_all()?;
            fs::rename(&self.path, place)
        };
        finish().map_err(|e| Error::io(format_args!("putting {} in its place", place.display()), e))
    }

    /// Discards all fetched bytes.
    pub(super) fn discard(self) -> Result<()> {
        fs::remove_file(&self.path)
            .map_err(|e| Error::io(format_args!("removing {}", self.path.display()), e))
    }
}

/// Where a segment of a file of `size` bytes begins, and its length.
fn segment_of(size: u64, segment: usize) -> (u64, u64) {
    let start = segment as u64 * SEGMENT;
    (start, SEGMENT.min(size - start))
}

/// The bytes fetched of each segment, from the table that an earlier pull has left, if there is one that fits.
fn read_table(file: &File, size: u64) -> io::Result<Option<Vec<u64>>> {
    // The length is checked first, before memory is allocated for a size from outside.
    let table_len = size
        .div_ceil(SEGMENT)
        .checked_mul(8)
        .and_then(|l| l.checked_add(MAGIC.len() as u64));
    let fits = table_len
        .and_then(|l| l.checked_add(size))
        .is_some_and(|len| file.metadata().is_ok_and(|there| there.len() == len));
    let Some(table_len) = table_len.filter(|_| fits) else {
        return Ok(None);
    };
    let mut table = vec![0; table_len as usize];
    file.read_exact_at(&mut table, size)?;
    let (magic, counts) = table.split_at(MAGIC.len());
    let counts: Vec<u64> = counts
        .as_chunks::<8>()
        .0
        .iter()
        .map(|c| u64::from_le_bytes(*c))
        .collect();
    let fits = |(s, &there): (usize, &u64)| there <= segment_of(size, s).1;
    let fits = magic == MAGIC && counts.iter().enumerate().all(fits);
    Ok(fits.then_some(counts))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path =
                std::env::temp_dir().join(format!("nvfp4-partial-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn fetched_bytes_are_found_again() {
        let scratch = Scratch::new("again");
        let place = scratch.0.join("content");
        let size = SEGMENT + 1000;
        let partial = Partial::open(&place, size).unwrap();
        assert_eq!(
            (partial.segments(), partial.len(), partial.found()),
            (2, 0, 0)
        );
        assert_eq!(partial.write(b"second", SEGMENT).unwrap(), 6);
        assert_eq!(partial.write(b"first", 0).unwrap(), 5);
        assert_eq!(partial.prefix(), 5);
        drop(partial);
        let partial = Partial::open(&place, size).unwrap();
        assert_eq!((partial.len(), partial.found()), (11, 11));
        assert_eq!(partial.missing(0), (5, SEGMENT));
        assert_eq!(partial.missing(1), (SEGMENT + 6, size));
        // A piece over the border between segments, of which some is there already.
        let piece = vec![7; 100];
        partial.write(&vec![1; SEGMENT as usize - 95], 5).unwrap();
        assert_eq!(partial.write(&piece, SEGMENT - 90).unwrap(), 90 + 4);
        assert_eq!(partial.prefix(), SEGMENT + 10);
        let mut read = [0; 2];
        partial.read(&mut read, SEGMENT - 91).unwrap();
        assert_eq!(read, [1, 7]);
        assert!(!place.exists());
        partial.finish(&place).unwrap();
        assert_eq!(fs::metadata(&place).unwrap().len(), size);
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1);
    }

    #[test]
    fn tables_that_do_not_fit_are_not_believed() {
        let scratch = Scratch::new("fit");
        let place = scratch.0.join("content");
        let path = place.with_added_extension(EXTENSION);
        let write = |size: u64| {
            let partial = Partial::open(&place, size).unwrap();
            partial.write(b"bytes", 0).unwrap();
        };
        // Another size.
        write(1000);
        assert_eq!(Partial::open(&place, 1001).unwrap().found(), 0);
        // More than a segment holds.
        write(1000);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&1001u64.to_le_bytes(), 1016).unwrap();
        assert_eq!(Partial::open(&place, 1000).unwrap().found(), 0);
        // No table.
        fs::write(&path, vec![1; 1024]).unwrap();
        assert_eq!(Partial::open(&place, 1000).unwrap().found(), 0);
    }
}
