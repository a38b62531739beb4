//! Fetching one blob: by several connections, with retries, into a partial file that a later pull can resume, and checked
//! against its digest while it is fetched.

use std::collections::VecDeque;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use NVFP4::base::error::err;
use NVFP4::base::file::Temporary;
use NVFP4::base::{Error, Result};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use url::Url;

use super::client::{self, Answer, Client, Method, Subject};
use super::failure::{Failure, Patience, Tried};
use super::listing::Digest;
use super::meter::Meter;
use super::partial::Partial;

/// The most connections; more bring no gain with the hub and would burden it.
const MOST_CONNECTIONS: usize = 8;

/// Interval at which fetched bytes are flushed to disk.
const FLUSHED: Duration = Duration::from_secs(1);

/// Bytes read and then written at a time; they fit in a core's cache.
const PIECE: usize = 256 << 10;

/// Bytes that are read back from the file at a time.
const READ_BACK: usize = 1 << 20;

/// Longest time that fetched bytes wait before they are written to the file.
const SHOWN: Duration = Duration::from_millis(100);

/// The parts of a pull that a transfer uses.
pub(super) struct Context<'a> {
    pub(super) client: &'a Client,
    pub(super) patience: &'a Patience,
    pub(super) meter: &'a Meter,
    pub(super) timeout: Duration,
}

impl Context<'_> {
    /// Retries until an attempt succeeds or patience runs out.
    pub(super) fn patiently<T>(&self, mut attempt: impl FnMut() -> Tried<T>) -> Result<T> {
        loop {
            match attempt() {
                Ok(value) => {
                    self.patience.hear();
                    return Ok(value);
                }
                Err(failure) => std::thread::sleep(self.pause_after(failure)?),
            }
        }
    }

    /// How long to wait after a failure; reports a long wait.
    fn pause_after(&self, failure: Failure) -> Result<Duration> {
        let (pause, reason) = self.patience.after(failure)?;
        self.meter.waits(pause, &reason);
        Ok(pause)
    }
}

/// A blob to fetch.
pub(super) struct Source<'a> {
    /// Its address at the hub, which may redirect.
    pub(super) url: Url,
    pub(super) subject: Subject<'a>,
    /// Its expected digest, if it is known.
    pub(super) digest: Option<Digest>,
}

struct Transfer<'a> {
    context: &'a Context<'a>,
    source: &'a Source<'a>,
    partial: &'a Partial,
    /// Segments not taken by a connection yet, in order.
    left: Mutex<VecDeque<usize>>,
    /// The redirect target; requested again only after it has expired.
    direct: Mutex<Option<Url>>,
    /// Number of connections currently allowed: one until the server has sent a range.
    connections: AtomicUsize,
    /// Called by the first response, which decides whether there are several connections.
    several: Once,
    /// Held by the connection that fetches the whole file from a server without range requests.
    whole: Mutex<()>,
    /// The failure that ended the transfer.
    failed: Mutex<Option<Error>>,
    stopped: AtomicBool,
    /// Notified when a worker leaves.
    workers: Mutex<usize>,
    left_one: Condvar,
}

/// Fetches the missing parts of `partial`, and checks the whole file. Returns its digest: the expected one, or a SHA-256.
pub(super) fn fetch(
    context: &Context<'_>,
    source: &Source<'_>,
    partial: &Partial,
) -> Result<String> {
    let left: VecDeque<usize> = (0..partial.segments())
        .filter(|&s| {
            let (from, to) = partial.missing(s);
            from < to
        })
        .collect();
    let most = left.len().min(MOST_CONNECTIONS);
    let transfer = Transfer {
        context,
        source,
        partial,
        left: Mutex::new(left),
        direct: Mutex::new(None),
        connections: AtomicUsize::new(1),
        several: Once::new(),
        whole: Mutex::new(()),
        failed: Mutex::new(None),
        stopped: AtomicBool::new(false),
        workers: Mutex::new(0),
        left_one: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let check = scope.spawn(|| transfer.check());
        for worker in 0..most {
            *lock(&transfer.workers) += 1;
            let transfer = &transfer;
            scope.spawn(move || transfer.work(worker));
        }
        transfer.flush();
        if let Some(error) = lock(&transfer.failed).take() {
            transfer.stop();
            return Err(error);
        }
        match check.join() {
            Ok(digest) => digest,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Transfer<'_> {
    fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    /// Flushes arriving data to disk until all workers have left, so that little is left to flush at the end.
    fn flush(&self) {
        while self.some_work_for(FLUSHED) {
            self.partial.flush();
        }
    }

    /// Waits for the given time; returns `false` as soon as all workers have left.
    fn some_work_for(&self, time: Duration) -> bool {
        let (workers, _) = self
            .left_one
            .wait_timeout_while(lock(&self.workers), time, |workers| *workers > 0)
            .unwrap_or_else(PoisonError::into_inner);
        *workers > 0
    }

    /// Takes segments until none remains.
    fn work(&self, worker: usize) {
        while let Some(segment) = self.take(worker) {
            if let Err(error) = self.segment(segment) {
                // The first error is the cause; others follow from it.
                lock(&self.failed).get_or_insert(error);
                self.stop();
            }
        }
        *lock(&self.workers) -= 1;
        self.left_one.notify_all();
    }

    /// The next segment for a worker, once another connection is allowed.
    fn take(&self, worker: usize) -> Option<usize> {
        loop {
            if self.is_stopped() || lock(&self.left).is_empty() {
                return None;
            }
            if worker < self.connections.load(Relaxed) {
                return lock(&self.left).pop_front();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Fetches the rest of a segment, with retries.
    fn segment(&self, segment: usize) -> Result<()> {
        loop {
            let (from, to) = self.partial.missing(segment);
            if from >= to || self.is_stopped() {
                return Ok(());
            }
            if let Err(failure) = self.attempt(from, to) {
                if matches!(failure, Failure::Refused { .. }) {
                    self.ask_for_less();
                }
                self.sleep(self.context.pause_after(failure)?);
            }
        }
    }

    /// Reduces the number of connections, because a server that refuses may have too many.
    fn ask_for_less(&self) {
        self.several.call_once(|| {});
        let connections = self.connections.load(Relaxed);
        self.connections.store((connections / 2).max(1), Relaxed);
    }

    /// Waits, but not beyond the end of the transfer.
    fn sleep(&self, pause: Duration) {
        let end = Instant::now() + pause;
        while !self.is_stopped() {
            match end.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => {
                    std::thread::sleep(left.min(Duration::from_millis(50)));
                }
                _ => return,
            }
        }
    }

    /// Requests the bytes `from..to` once.
    fn attempt(&self, from: u64, to: u64) -> Tried<()> {
        let answer = self.open((from, to - 1))?;
        match answer.status {
            206 if answer.encoding().is_none() => {
                self.check_range(&answer, from, to)?;
                self.several
                    .call_once(|| self.connections.store(MOST_CONNECTIONS, Relaxed));
                self.receive(answer, from, to)
            }
            // Ranges of a compressed response are not ranges of the content.
            206 => Err(Failure::Final(err!(
                Io,
                "{}: {} sends parts of a compressed form; a proxy that leaves answers as they are is needed",
                self.name(),
                self.host(&answer)
            ))),
            _ => self.take_whole(answer),
        }
    }

    /// Sends a request to the last redirect target; if that refuses, asks the hub again.
    fn open(&self, range: (u64, u64)) -> Tried<Answer> {
        let Context { client, .. } = self.context;
        let subject = self.source.subject;
        let direct = lock(&self.direct).clone();
        if let Some(url) = &direct {
            match client.open(url, Method::Get, Some(range), subject) {
                // The addresses of redirects expire.
                Err(Failure::Final(_)) => *lock(&self.direct) = None,
                result => return result,
            }
        }
        let answer = client.open(&self.source.url, Method::Get, Some(range), subject)?;
        *lock(&self.direct) = Some(answer.url.clone());
        Ok(answer)
    }

    fn name(&self) -> String {
        format!(
            "{}: {}",
            self.source.subject.repo, self.source.subject.action
        )
    }

    fn host(&self, answer: &Answer) -> String {
        answer.url.host_str().unwrap_or_default().to_owned()
    }

    /// Checks that the response has the requested range, of a file of the announced size.
    fn check_range(&self, answer: &Answer, from: u64, to: u64) -> Tried<()> {
        let size = self.partial.size();
        let expected = format!("bytes {from}-{}/{size}", to - 1);
        let fits = match answer.header("content-range") {
            Some(range) => range.eq_ignore_ascii_case(&expected),
            None => answer.length() == Some(to - from),
        };
        if fits {
            return Ok(());
        }
        let got = match answer.header("content-range") {
            Some(range) => format!("'{range}'"),
            None => "a part that it does not name".to_owned(),
        };
        Err(Failure::Final(err!(
            Io,
            "{}: {} sends {got} where '{expected}' was asked for",
            self.name(),
            self.host(answer)
        )))
    }

    /// Fetches the whole file from a server without range requests. Only one connection fetches; the others wait for its end.
    fn take_whole(&self, answer: Answer) -> Tried<()> {
        self.several.call_once(|| {});
        self.connections.store(1, Relaxed);
        let Ok(_only) = self.whole.try_lock() else {
            drop(answer);
            drop(lock(&self.whole));
            return Ok(());
        };
        let size = self.partial.size();
        if answer.encoding().is_none() && answer.length().is_some_and(|l| l != size) {
            return Err(Failure::Final(err!(
                Io,
                "{}: {} announces {} bytes, but the hub's list {size}",
                self.name(),
                self.host(&answer),
                answer.length().unwrap_or_default()
            )));
        }
        self.receive(answer, 0, size)
    }

    /// Writes the response to `from..to`.
    fn receive(&self, answer: Answer, from: u64, to: u64) -> Tried<()> {
        let host = self.host(&answer);
        let mut reader = answer.into_reader()?;
        let mut piece = vec![0; PIECE];
        let mut at = from;
        while at < to && !self.is_stopped() {
            let wanted = piece.len().min((to - at) as usize);
            let (n, came, end) = fill(&mut reader, &mut piece[..wanted]);
            // Fetched bytes are kept, even if the rest fails.
            let new = self
                .partial
                .write(&piece[..n], at)
                .map_err(|e| Error::io(self.name(), e))?;
            at += n as u64;
            if n > 0 {
                self.context.meter.add(new);
                // A byte that arrives twice is not progress.
                if new > 0 {
                    self.context.patience.renew(came);
                }
            }
            match end {
                Ok(()) if n > 0 => {}
                Ok(()) => {
                    let (came, all) = (at - from, to - from);
                    let reason = format!("the answer of {host} ended after {came} of {all} bytes");
                    return Err(Failure::Broken { reason });
                }
                Err(e) => return Err(client::cut(&host, e, self.context.timeout)),
            }
        }
        // Reading to the end allows the connection to be reused.
        match reader.read(&mut piece[..1]) {
            Ok(1..) if !self.is_stopped() => Err(Failure::Final(err!(
                Io,
                "{}: {host} sends more than the {} bytes asked for",
                self.name(),
                to - from
            ))),
            _ => Ok(()),
        }
    }

    /// Hashes the file in order while it is fetched, and compares the digest at the end.
    fn check(&self) -> Result<String> {
        let size = self.partial.size();
        let (expected, kind, actual) = match &self.source.digest {
            None => return self.hash(Sha256::new()),
            Some(Digest::Sha256(expected)) => (expected, "SHA-256", self.hash(Sha256::new())?),
            Some(Digest::Git(expected)) => {
                let hash = Sha1::new_with_prefix(format!("blob {size}\0"));
                (expected, "Git SHA-1", self.hash(hash)?)
            }
        };
        if self.is_stopped() || actual == *expected {
            return Ok(actual);
        }
        Err(err!(
            CorruptFile,
            "{}: what came has the {kind} {actual}, and the hub names {expected}",
            self.name()
        ))
    }

    /// Hashes the contiguous beginning of the file, read back while it is in the system's cache.
    fn hash<H: sha2::Digest>(&self, mut hash: H) -> Result<String> {
        let size = self.partial.size();
        let mut read = Vec::new();
        let mut at = 0;
        while at < size && !self.is_stopped() {
            let ready = self.partial.prefix().min(at + READ_BACK as u64);
            if ready < size && ready - at < READ_BACK as u64 {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            read.resize((ready - at) as usize, 0);
            self.partial
                .read(&mut read, at)
                .map_err(|e| Error::io(format_args!("{}: reading it back", self.name()), e))?;
            hash.update(&read);
            at = ready;
        }
        Ok(hexadecimal(&hash.finalize()))
    }
}

/// Reads until `piece` is full, the end, or an error. In any case returns the number of bytes read and the time of the last one.
fn fill(reader: &mut impl Read, piece: &mut [u8]) -> (usize, Instant, std::io::Result<()>) {
    let mut filled = 0;
    let start = Instant::now();
    let mut came = start;
    while filled < piece.len() {
        match reader.read(&mut piece[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) => return (filled, came, Err(e)),
        }
        came = Instant::now();
        // On a slow connection a piece takes long; its bytes are shown and kept before it is full.
        if came - start > SHOWN {
            break;
        }
    }
    (filled, came, Ok(()))
}

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Fetches a file of unknown size, which cannot be resumed, as a temporary file for `place`. Also returns its SHA-256 and its size.
pub(super) fn fetch_unsized(
    context: &Context<'_>,
    source: &Source<'_>,
    place: &Path,
) -> Result<(Temporary, String, u64)> {
    let mut furthest = 0;
    let (file, hash, size) = context.patiently(|| {
        let answer = context
            .client
            .open(&source.url, Method::Get, None, source.subject)?;
        let host = answer.url.host_str().unwrap_or_default().to_owned();
        let mut reader = answer.into_reader()?;
        let file = Temporary::create(place, 0)?;
        let mut hash = Sha256::new();
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        loop {
            let n = reader
                .read(&mut piece)
                .map_err(|e| client::cut(&host, e, context.timeout))?;
            if n == 0 {
                break;
            }
            file.write_at(&piece[..n], at)?;
            hash.update(&piece[..n]);
            at += n as u64;
            if at > furthest {
                furthest = at;
                context.patience.renew(Instant::now());
            }
            context.meter.add(n as u64);
        }
        file.sync()?;
        Ok((file, hash, at))
    })?;
    Ok((file, hexadecimal(&hash.finalize()), size))
}
