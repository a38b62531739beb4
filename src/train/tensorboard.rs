//! TensorBoard event files with scalars: TFRecord frames around protobuf messages `Event` (tensorflow/core/util/event.proto).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::base::Result;
use crate::base::error::Error;
use crate::base::file;
use crate::base::host_name;

const FOLDER: &str = "tensorboard";
/// Version string in the first event of a file.
const VERSION: &str = "brain.Event:2";
/// CRC-32C polynomial, bits reversed.
const CASTAGNOLI: u32 = 0x82F6_3B78;
/// TFRecord's mask constant for checksums.
const MASK: u32 = 0xa282_ead8;

// Fields of `Event`.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
/// `SessionLog.status`, and its value START: later steps of earlier files are void from this step on.
const STATUS: u32 = 1;
const START: u64 = 1;
// Fields of `Summary`, and of the `Summary.Value` in it.
const VALUE: u32 = 1;
const TAG: u32 = 1;
const SIMPLE_VALUE: u32 = 2;

// Wire types.
const VARINT: u32 = 0;
const FIXED_64: u32 = 1;
const BYTES: u32 = 2;
const FIXED_32: u32 = 5;

/// The event file of a run, or of its part since it was resumed.
pub(super) struct EventFile {
    file: File,
    path: PathBuf,
}

impl EventFile {
    /// Creates a file in the folder `tensorboard` of `directory`. `resumed` is the step after which the run continues; later steps in
    /// earlier files become void.
    pub(super) fn create(directory: &Path, resumed: Option<u64>) -> Result<EventFile> {
        let folder = directory.join(FOLDER);
        std::fs::create_dir_all(&folder)
            .map_err(|e| Error::io(format_args!("making {}", folder.display()), e))?;
        let seconds = now() as u64;
        let (host, process) = (host_name(), std::process::id());
        let mut number = 0;
        let (file, path) = loop {
            let name = format!("events.out.tfevents.{seconds:010}.{host}.{process}.{number}");
            let path = folder.join(name);
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => break (file, path),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => {
                    return Err(Error::io(format_args!("creating {}", path.display()), e));
                }
            }
        };
        let mut events = EventFile { file, path };
        let mut version = Message::event(0);
        version.bytes(FILE_VERSION, VERSION.as_bytes());
        events.write(&version)?;
        if let Some(step) = resumed {
            let mut log = Message::default();
            log.varint(STATUS, START);
            let mut event = Message::event(step + 1);
            event.bytes(SESSION_LOG, &log.0);
            events.write(&event)?;
        }
        Ok(events)
    }

    /// Adds named values of a step.
    pub(super) fn add(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        let mut summary = Message::default();
        for (tag, value) in values {
            let mut scalar = Message::default();
            scalar.bytes(TAG, tag.as_bytes());
            scalar.float(SIMPLE_VALUE, *value as f32);
            summary.bytes(VALUE, &scalar.0);
        }
        let mut event = Message::event(step);
        event.bytes(SUMMARY, &summary.0);
        self.write(&event)
    }

    /// Writes an event. A partly written record is removed, so that those after it can be read.
    fn write(&mut self, event: &Message) -> Result<()> {
        let failed = |e| Error::io(format_args!("writing {}", self.path.display()), e);
        let before = self.file.metadata().map_err(failed)?.len();
        let record = record(&event.0);
        file::within_limit(|| self.file.write_all(&record)).map_err(|e| {
            // The first failure is the one to report.
            let _ = self.file.set_len(before);
            failed(e)
        })
    }
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |d| d.as_secs_f64())
}

/// A TFRecord: length and content, each with its masked checksum.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(content.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked(&length).to_le_bytes());
    record.extend_from_slice(content);
    record.extend_from_slice(&masked(content).to_le_bytes());
    record
}

fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(MASK)
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (CASTAGNOLI & (crc & 1).wrapping_neg())
        })
    })
}

/// A protobuf message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn event(step: u64) -> Message {
        let mut event = Message::default();
        event.key(WALL_TIME, FIXED_64);
        event.0.extend_from_slice(&now().to_le_bytes());
        event.varint(STEP, step);
        event
    }

    fn raw(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u32, wire: u32) {
        self.raw(u64::from(field << 3 | wire));
    }

    fn varint(&mut self, field: u32, value: u64) {
        self.key(field, VARINT);
        self.raw(value);
    }

    fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.key(field, BYTES);
        self.raw(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn float(&mut self, field: u32, value: f32) {
        self.key(field, FIXED_32);
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32C, and a record as TensorFlow's own writer frames it.
    #[test]
    fn records_are_framed_as_tensorboard_reads_them() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        let record = record(b"abc");
        assert_eq!(record.len(), 8 + 4 + 3 + 4);
        assert_eq!(record[..8], 3u64.to_le_bytes());
        assert_eq!(record[8..12], masked(&3u64.to_le_bytes()).to_le_bytes());
        assert_eq!(&record[12..15], b"abc");
        // Event { step: 300, summary { value { tag: "a", simple_value: 1.5 } } }, as serialized by TensorBoard's own messages.
        let mut scalar = Message::default();
        scalar.bytes(TAG, b"a");
        scalar.float(SIMPLE_VALUE, 1.5);
        let mut summary = Message::default();
        summary.bytes(VALUE, &scalar.0);
        let mut event = Message::default();
        event.varint(STEP, 300);
        event.bytes(SUMMARY, &summary.0);
        let wanted = b"\x10\xac\x02\x2a\x0a\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x3f";
        assert_eq!(event.0, wanted);
    }
}
