//! Output of subcommands: standard output that may be closed, JSON, sizes, and progress bars on standard error.

use std::fmt;
use std::io::Write;
use std::ops::ControlFlow;

use NVFP4::base::call::{Progress, Watch};
use NVFP4::base::error::err;
use NVFP4::base::{Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

pub(super) use NVFP4::base::size::readable as size;

/// Exit code of a shell for a command that SIGPIPE ended.
const PIPE_CLOSED: i32 = 141;

/// Writes `text` to standard output and flushes it. If the reader has closed the pipe, the command ends silently, as other
/// tools do.
pub(super) fn print(text: impl fmt::Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(PIPE_CLOSED),
        Err(e) => Err(Error::io("writing to standard output", e)),
    }
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
    let style = "{msg} [{elapsed_precise}] [{wide_bar}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} ({eta})";
    bar(label, total, style)
}

/// Calls `body`, whose progress in bytes a bar shows meanwhile.
pub(super) fn with_byte_bar<T>(label: &str, body: impl FnOnce() -> T) -> T {
    let bar = byte_bar(label, 0);
    let progress = |p: Progress| {
        bar.set_length(p.total);
        bar.set_position(p.done);
        ControlFlow::Continue(())
    };
    let watch = Watch {
        progress: Some(&progress),
        ..Watch::default()
    };
    let result = watch.during(body);
    bar.finish_and_clear();
    result
}

/// A bar that counts items.
pub(super) fn count_bar(label: impl Into<String>, total: u64) -> ProgressBar {
    bar(
        label,
        total,
        "{msg} [{elapsed_precise}] [{wide_bar}] {pos}/{len} ({eta})",
    )
}

/// A bar for a share of the work, without numbers.
pub(super) fn share_bar(label: impl Into<String>) -> ProgressBar {
    bar(
        label,
        0,
        "{msg} [{elapsed_precise}] [{wide_bar}] {percent} % ({eta} left)",
    )
}

fn bar(label: impl Into<String>, total: u64, style: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total)
        .with_style(style)
        .with_message(label.into())
}
