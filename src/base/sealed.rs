//! Files of the library's own that hold state: a magic number, a version, a JSON header, content, and a checksum of all that; numbers are
//! little-endian. Each appears complete or not at all. The same bytes may be in memory instead. Written and read with the progress and the
//! cancellation of the thread's [`call`].

use std::fs::File;
use std::hash::Hasher;
use std::io::{BufReader, Read};
use std::path::Path;

use twox_hash::XxHash3_64;

use super::error::{bail, err};
use super::file::Temporary;
use super::{Error, Result, call, memory};

/// Bytes of magic number, version and the header's length.
const FRONT: u64 = 16;
const CHECKSUM: u64 = 8;

/// One kind of file.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// The first bytes.
    pub magic: [u8; 8],
    /// The only version that is read and written.
    pub version: u32,
    /// Such a file, with its article: "a session file".
    pub name: &'static str,
    /// Advice for a file of an older version.
    pub older: &'static str,
    /// Advice for a file of a newer version.
    pub newer: &'static str,
}

/// The bytes of a file with a header of `header` bytes and `content` bytes after it.
pub fn size(header: usize, content: u64) -> u64 {
    (FRONT + CHECKSUM + header as u64).saturating_add(content)
}

/// The place of what is written.
enum Target<'a> {
    File(Box<Temporary>),
    Memory(&'a mut [u8]),
}

/// Writes a file, or the same bytes to memory. Dropped before [`Writer::finish`], it leaves no file.
pub struct Writer<'a> {
    target: Target<'a>,
    at: u64,
    sum: XxHash3_64,
}

impl<'a> Writer<'a> {
    /// Begins the file at `path` with its header. `content` is the number of bytes that are expected after it, for which room is reserved.
    pub fn create(path: &Path, format: &Format, header: &[u8], content: u64) -> Result<Self> {
        let file = Temporary::create(path, size(header.len(), content))?;
        Self::in_file(file, format, header, content)
    }

    /// As [`Writer::create`], in a file that has room for [`size`] bytes.
    pub fn in_file(file: Temporary, format: &Format, header: &[u8], content: u64) -> Result<Self> {
        Self::begin(Target::File(Box::new(file)), format, header, content)
    }

    /// Begins in memory, which must have room for [`size`] bytes.
    pub fn in_memory(
        bytes: &'a mut [u8],
        format: &Format,
        header: &[u8],
        content: u64,
    ) -> Result<Self> {
        Self::begin(Target::Memory(bytes), format, header, content)
    }

    fn begin(target: Target<'a>, format: &Format, header: &[u8], content: u64) -> Result<Self> {
        let length = u32::try_from(header.len()).map_err(|_| {
            err!(
                InvalidArgument,
                "{} has a header of 4 GB at most, and this one would take {} bytes",
                format.name,
                header.len()
            )
        })?;
        call::expect(size(header.len(), content));
        let mut writer = Writer {
            target,
            at: 0,
            sum: XxHash3_64::new(),
        };
        writer.write(&format.magic)?;
        writer.write(&format.version.to_le_bytes())?;
        writer.write(&length.to_le_bytes())?;
        writer.write(header)?;
        Ok(writer)
    }

    /// The number of bytes written so far, which is the place of the next one.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.target {
            Target::File(file) => file.write_at(bytes, self.at)?,
            Target::Memory(room) => {
                let (at, all) = (self.at as usize, room.len());
                let Some(place) = room.get_mut(at..at + bytes.len()) else {
                    bail!(Internal, "{} bytes at {at} of {all}", bytes.len());
                };
                place.copy_from_slice(bytes);
            }
        }
        self.sum.write(bytes);
        self.at += bytes.len() as u64;
        call::add(bytes.len() as u64);
        call::check()
    }

    /// Appends numbers.
    pub fn words(&mut self, mut numbers: impl Iterator<Item = u32>) -> Result<()> {
        let mut bytes = [0; 4096];
        loop {
            let mut len = 0;
            for (place, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&mut numbers) {
                *place = number.to_le_bytes();
                len += 4;
            }
            if len == 0 {
                return Ok(());
            }
            self.write(&bytes[..len])?;
        }
    }

    /// Appends the checksum, and puts a file in its place.
    pub fn finish(self) -> Result<()> {
        self.complete()?.map_or(Ok(()), Temporary::commit)
    }

    /// Appends the checksum. Returns the file, synced and not in its place yet, unless the bytes are in memory.
    pub fn complete(mut self) -> Result<Option<Temporary>> {
        let sum = self.sum.finish();
        self.write(&sum.to_le_bytes())?;
        match self.target {
            Target::File(file) => {
                file.cut(self.at)?;
                file.sync()?;
                Ok(Some(*file))
            }
            Target::Memory(_) => Ok(None),
        }
    }
}

/// Reads a file, or the same bytes in memory, from its header to its checksum.
pub struct Reader<R = BufReader<File>> {
    input: R,
    size: u64,
    at: u64,
    sum: XxHash3_64,
}

impl Reader {
    /// Begins to read a file, with its header as JSON.
    pub fn open(file: File, format: &Format) -> Result<(Self, Vec<u8>)> {
        let size = file
            .metadata()
            .map_err(|e| Error::io("reading its size", e))?
            .len();
        Self::begin(BufReader::new(file), size, format)
    }

    /// As [`Reader::finish`]; returns the file.
    pub fn into_file(self) -> Result<File> {
        Ok(self.finish()?.into_inner())
    }
}

impl<'a> Reader<&'a [u8]> {
    /// Begins to read bytes in memory, with their header as JSON.
    pub fn of_memory(bytes: &'a [u8], format: &Format) -> Result<(Self, Vec<u8>)> {
        Self::begin(bytes, bytes.len() as u64, format)
    }
}

impl<R: Read> Reader<R> {
    fn begin(input: R, size: u64, format: &Format) -> Result<(Self, Vec<u8>)> {
        call::expect(size);
        let Format { name, version, .. } = *format;
        if size < FRONT + CHECKSUM {
            bail!(CorruptFile, "{size} bytes are too few for {name}");
        }
        let mut reader = Reader {
            input,
            size,
            at: 0,
            sum: XxHash3_64::new(),
        };
        if reader.array()? != format.magic {
            bail!(CorruptFile, "it is not {name}");
        }
        let found = u32::from_le_bytes(reader.array()?);
        if found != version {
            let advice = match found < version {
                true => format.older,
                false => format.newer,
            };
            bail!(
                Unsupported,
                "it is {name} of version {found}, and this library reads version {version}: {advice}"
            );
        }
        let length = u32::from_le_bytes(reader.array()?);
        if u64::from(length) > reader.left() {
            bail!(
                CorruptFile,
                "its header of {length} bytes does not fit in its {size} bytes"
            );
        }
        let header = reader.bytes(length as usize)?;
        Ok((reader, header))
    }

    /// Bytes of the whole file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The number of bytes read so far, which is the place of the next one.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes of content that are left.
    pub fn left(&self) -> u64 {
        (self.size - CHECKSUM).saturating_sub(self.at)
    }

    /// Fills `out` with the next bytes.
    pub fn read(&mut self, out: &mut [u8]) -> Result<()> {
        self.input
            .read_exact(out)
            .map_err(|e| Error::io("reading", e))?;
        self.sum.write(out);
        self.at += out.len() as u64;
        call::add(out.len() as u64);
        call::check()
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.read(&mut out)?;
        Ok(out)
    }

    /// The next `len` bytes, a number that must have been checked against the bytes that are left.
    pub fn bytes(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut out = memory::zeros(len)?;
        self.read(&mut out)?;
        Ok(out)
    }

    /// The next `len` numbers; like [`Reader::bytes`].
    pub fn words(&mut self, len: usize) -> Result<Vec<u32>> {
        let bytes = self.bytes(len * 4)?;
        let (words, _) = bytes.as_chunks::<4>();
        let mut out = memory::with_room(len)?;
        out.extend(words.iter().map(|w| u32::from_le_bytes(*w)));
        Ok(out)
    }

    /// Fails unless the checksum comes next, and is that of everything before it. Returns what it has read from.
    pub fn finish(mut self) -> Result<R> {
        let sum = self.sum.finish();
        if u64::from_le_bytes(self.array()?) != sum {
            bail!(
                CorruptFile,
                "its checksum is not that of its content; it is damaged"
            );
        }
        Ok(self.input)
    }
}
