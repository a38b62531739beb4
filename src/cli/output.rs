//! What subcommands share when they print: standard output that may be closed, JSON, sizes, and progress bars on standard
//! error.

use std::fmt;
use std::io::Write;

use NVFP4::base::error::err;
use NVFP4::base::{Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Writes `text` to standard output at once.
pub(super) fn print(text: impl fmt::Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|e| Error::io("writing to standard output", e))
}

/// Writes a line to standard output.
pub(super) fn line(text: impl fmt::Display) -> Result<()> {
    print(format_args!("{text}\n"))
}

/// Writes `value` as JSON on one line.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| err!(Internal, "writing JSON: {e}"))?;
    line(text)
}

/// A bar that counts bytes. It shows only on a terminal.
pub(super) fn byte_bar(label: impl Into<String>, total: u64) -> ProgressBar {
    let style =
        "{msg} [{elapsed_precise}] [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})";
    bar(label, total, style)
}

/// A bar that counts things.
pub(super) fn count_bar(label: impl Into<String>, total: u64) -> ProgressBar {
    bar(
        label,
        total,
        "{msg} [{elapsed_precise}] [{wide_bar}] {pos}/{len} ({eta})",
    )
}

fn bar(label: impl Into<String>, total: u64, style: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total)
        .with_style(style)
        .with_message(label.into())
}

/// `bytes` for people.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    if unit == "B" {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {unit}")
    }
}
