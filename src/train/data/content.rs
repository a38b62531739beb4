//! Reads a data file, and expands it if its name says that it is compressed.

use std::fs;
use std::hash::Hasher;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use serde::{Deserialize, Serialize, Serializer};
use twox_hash::XxHash3_64;

use super::options::Compression;
use crate::base::error::{bail, err};
use crate::base::memory::{self, Claim, Tag, make_room};
use crate::base::size::readable;
use crate::base::{Error, ErrorKind, Result, call, host_memory, panics};

/// Bytes expanded at a time.
const CHUNK: usize = 256 << 10;
/// The largest window of a zstd frame: the default of `zstd -d`.
const ZSTD_WINDOW: u64 = 128 << 20;
/// The first bytes of gzip and zstd files.
const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// A file that has been read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    /// Its path. In JSON, bytes that are not UTF-8 are U+FFFD.
    #[serde(serialize_with = "as_text")]
    pub path: PathBuf,
    /// Its size, as compressed.
    pub bytes: u64,
    /// XXH3 of its bytes, in hexadecimal.
    pub checksum: String,
}

/// Serializes a path as JSON text. Bytes that are not UTF-8 become U+FFFD.
pub(in crate::train) fn as_text<S: Serializer>(
    path: &impl AsRef<Path>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&path.as_ref().display())
}

/// The content of a file, with its share of the memory budget.
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    _claim: Option<Claim>,
}

/// Reads a file.
pub(super) fn read(path: &Path) -> Result<(DataFile, Content)> {
    let bytes =
        fs::read(path).map_err(|e| Error::io(format_args!("reading {}", path.display()), e))?;
    let mut sum = XxHash3_64::new();
    sum.write(&bytes);
    let file = DataFile {
        path: path.to_owned(),
        bytes: bytes.len() as u64,
        checksum: format!("{:016x}", sum.finish()),
    };
    let compression = Compression::of(path);
    if compression == Compression::None || bytes.is_empty() {
        refuse_compressed(path, &bytes)?;
        let content = Content {
            bytes,
            _claim: None,
        };
        return Ok((file, content));
    }
    let expanded = match compression {
        Compression::Zstd => expand(&bytes, "zstd", ZSTD, Frames::new(&bytes), room()),
        _ => expand(&bytes, "gzip", GZIP, MultiGzDecoder::new(&*bytes), room()),
    };
    let bytes = expanded.map_err(|e| e.within(path.display()))?;
    let claim = Claim::new(Tag::Scratch, bytes.len()).map_err(|e| e.within(path.display()))?;
    let content = Content {
        bytes,
        _claim: Some(claim),
    };
    Ok((file, content))
}

/// Refuses a compressed file whose name does not say so.
fn refuse_compressed(path: &Path, bytes: &[u8]) -> Result<()> {
    for (magic, name, ending) in [(GZIP, "gzip", "gz"), (ZSTD, "zstd", "zst")] {
        if bytes.starts_with(magic) {
            bail!(
                InvalidArgument,
                "{}: it begins as {name} does, and its name does not say so; name it {0}.{ending}",
                path.display()
            );
        }
    }
    Ok(())
}

/// Memory available for an expanded file, the error kind if it does not suffice, and its description.
fn room() -> (u64, ErrorKind, String) {
    let budget = memory::budget().map(|budget| {
        let left = budget.saturating_sub(memory::total().current);
        let what = format!("what the memory budget of {} leaves", readable(budget));
        (left, ErrorKind::OverBudget, what)
    });
    let host = host_memory::read().map(|host| {
        let free = readable(host.available);
        let what = format!("half of the {free} of memory that is free");
        (host.available / 2, ErrorKind::OutOfMemory, what)
    });
    let rooms = budget.into_iter().chain(host);
    let all = (u64::MAX, ErrorKind::OutOfMemory, String::new());
    rooms.min_by_key(|room| room.0).unwrap_or(all)
}

/// Expands a compressed file within the available memory; otherwise fails with the error from [`room`].
fn expand(
    packed: &[u8],
    name: &str,
    magic: &[u8],
    mut source: impl Read,
    (most, kind, of_what): (u64, ErrorKind, String),
) -> Result<Vec<u8>> {
    // A skippable zstd frame has its own magic number.
    let begins = packed.starts_with(magic) || (magic == ZSTD && Frames::is_skipped(packed));
    if !begins {
        bail!(
            CorruptFile,
            "its name says {name}, and it does not begin as {name} does"
        );
    }
    let expanded = panics::caught(|| {
        let mut out = Vec::new();
        let mut chunk = vec![0; CHUNK];
        loop {
            call::check()?;
            let read = source.read(&mut chunk).map_err(|e| {
                err!(
                    CorruptFile,
                    "it is no whole {name} file: {e}, after {} bytes were expanded from {}",
                    out.len(),
                    packed.len()
                )
            })?;
            if read == 0 {
                return Ok(out);
            }
            if out.len() as u64 + read as u64 > most {
                return Err(Error::new(
                    kind,
                    format_args!(
                        "its {} expand to more than {}, which is {of_what}; split the file, or run where more memory is free",
                        readable(packed.len() as u64),
                        readable(most)
                    ),
                ));
            }
            make_room(&mut out, read)?;
            out.extend_from_slice(&chunk[..read]);
        }
    });
    expanded.unwrap_or_else(|panic| bail!(CorruptFile, "it is no whole {name} file: {panic}"))
}

/// The frames of a zstd file, in order.
struct Frames<'a> {
    rest: &'a [u8],
    decoder: FrameDecoder,
    /// Whether the decoder is within a frame.
    begun: bool,
}

impl<'a> Frames<'a> {
    fn new(packed: &'a [u8]) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(ZSTD_WINDOW);
        Frames {
            rest: packed,
            decoder,
            begun: false,
        }
    }

    /// Whether bytes begin with a skippable frame, which holds no content.
    fn is_skipped(packed: &[u8]) -> bool {
        packed.len() >= 4 && packed[0] & 0xf0 == 0x50 && packed[1..4] == [0x2a, 0x4d, 0x18]
    }

    /// Begins the next frame; false at the end of the file.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.rest.is_empty() {
            match self.decoder.reset(&mut self.rest) {
                Ok(()) => {
                    self.begun = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => match self.rest.get(length as usize..) {
                    Some(rest) => self.rest = rest,
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                },
                Err(e) => return Err(io::Error::other(e)),
            }
        }
        Ok(false)
    }

    /// Ends a frame, and verifies its checksum.
    fn end(&mut self) -> io::Result<()> {
        self.begun = false;
        let stored = self.decoder.get_checksum_from_data();
        match stored.is_none() || stored == self.decoder.get_calculated_checksum() {
            true => Ok(()),
            false => Err(io::Error::other("the checksum of a frame is another")),
        }
    }
}

impl Read for Frames<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.begun && !self.begin()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let blocks = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder
                    .decode_blocks(&mut self.rest, blocks)
                    .map_err(io::Error::other)?;
            }
            match self.decoder.read(to)? {
                0 => self.end()?,
                read => return Ok(read),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A line of JSON, as the zstd command compresses it with a checksum.
    const LINE: &[u8] = b"{\"text\": \"one\"}\n";
    const FRAME: [u8; 29] = [
        0x28, 0xb5, 0x2f, 0xfd, 0x24, 0x10, 0x81, 0x00, 0x00, 0x7b, 0x22, 0x74, 0x65, 0x78, 0x74,
        0x22, 0x3a, 0x20, 0x22, 0x6f, 0x6e, 0x65, 0x22, 0x7d, 0x0a, 0xda, 0x47, 0x0a, 0x1d,
    ];
    /// A skippable frame of two bytes.
    const SKIPPED: [u8; 10] = [0x5e, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 7, 7];

    fn any() -> (u64, ErrorKind, String) {
        (u64::MAX, ErrorKind::OutOfMemory, String::new())
    }

    fn zstd(packed: &[u8]) -> std::result::Result<Vec<u8>, String> {
        expand(packed, "zstd", ZSTD, Frames::new(packed), any()).map_err(|e| e.to_string())
    }

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn frames_of_zstd_follow_each_other() {
        assert_eq!(zstd(&FRAME).unwrap(), LINE);
        let many = [&SKIPPED[..], &FRAME, &SKIPPED, &FRAME].concat();
        assert_eq!(zstd(&many).unwrap(), [LINE, LINE].concat());
        for end in 5..FRAME.len() {
            let error = zstd(&FRAME[..end]).unwrap_err();
            assert!(
                error.contains("it is no whole zstd file: "),
                "{end}: {error}"
            );
        }
        let mut other = FRAME;
        other[20] ^= 1;
        assert!(
            zstd(&other)
                .unwrap_err()
                .contains("the checksum of a frame is another")
        );
        assert!(
            zstd(&SKIPPED[..9])
                .unwrap_err()
                .contains("no whole zstd file")
        );
        let error = zstd(LINE).unwrap_err();
        assert!(
            error.contains("its name says zstd, and it does not begin as zstd does"),
            "{error}"
        );
    }

    #[test]
    fn gzip_is_whole_or_refused() {
        let packed = [gzip(LINE), gzip(LINE)].concat();
        let read = |packed: &[u8]| {
            let found = expand(packed, "gzip", GZIP, MultiGzDecoder::new(packed), any());
            found.map_err(|e| e.to_string())
        };
        assert_eq!(read(&packed).unwrap(), [LINE, LINE].concat());
        let error = read(&packed[..packed.len() - 3]).unwrap_err();
        assert!(
            error.contains("it is no whole gzip file: ") && error.contains("were expanded from"),
            "{error}"
        );
    }

    #[test]
    fn what_expands_without_end_is_refused() {
        let packed = gzip(&vec![0; 8 << 20]);
        let room = (1 << 20, ErrorKind::OverBudget, "what is left".to_owned());
        let error = expand(&packed, "gzip", GZIP, MultiGzDecoder::new(&*packed), room).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OverBudget);
        let said = error.to_string();
        assert!(
            said.contains("expand to more than 1.0 MB, which is what is left"),
            "{said}"
        );
        let (most, _, of_what) = super::room();
        assert!(most > 0 && !of_what.is_empty());
    }
}
