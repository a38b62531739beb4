//! A pull, in order: list the repository, choose the files of the model, fetch what is missing, and record that it is
//! complete.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use NVFP4::base::error::{bail, err};
use NVFP4::base::file::{free_space, stage};
use NVFP4::base::{Error, ErrorKind, Result, env};
use sha1::{Digest as _, Sha1};
use url::Url;

use super::super::output;
use super::cache::{self, Repository};
use super::client::{Client, Method, Subject};
use super::failure::Failure;
use super::listing::{Digest, Entry, Listing};
use super::local::{Pulled, find, partly};
use super::meter::Meter;
use super::name::Name;
use super::partial::Partial;
use super::select::{select, shards};
use super::settings;
use super::transfer::{Context, Source, fetch, fetch_unsized, hexadecimal};

/// Files up to this size are fetched several at a time; larger ones one after the other, each by several connections.
const SMALL: u64 = 4 << 20;

/// The number of small files fetched at a time.
const SMALL_AT_ONCE: usize = 4;

/// Fetches what is not in the cache yet. Gives up when the hub has been silent for `timeout`, and for one more try.
pub(in crate::cli) fn pull(name: &Name, timeout: Duration) -> Result<Pulled> {
    let repository = Repository::new(&settings::cache()?, &name.repo);
    if let Some(variable) = env::hf_offline() {
        return find(&repository, name).ok_or_else(|| {
            let there = partly(&repository, name);
            err!(NotFound, "{there}, and {variable} forbids asking the hub")
        });
    }
    let client = Client::new(timeout)?;
    let meter = Meter::new(&name.to_string());
    let pull = Pull {
        name,
        repository,
        context: Context {
            client: &client,
            patience: &client.patience,
            meter: &meter,
            timeout,
        },
    };
    let result = pull.run();
    meter.finish();
    result
}

/// The result of listing a repository.
enum Asked {
    Listing(Listing),
    /// The hub could not be reached.
    Unreachable(Error),
}

/// The pull of one model.
struct Pull<'a> {
    name: &'a Name,
    repository: Repository,
    context: Context<'a>,
}

impl Pull<'_> {
    fn run(&self) -> Result<Pulled> {
        let (repo, revision) = (&self.name.repo, self.name.revision());
        let listing = match self.list()? {
            Asked::Listing(listing) => listing,
            Asked::Unreachable(error) => {
                let Some(pulled) = find(&self.repository, self.name) else {
                    let there = partly(&self.repository, self.name);
                    return Err(Error::new(
                        error.kind(),
                        format_args!("{error}, and {there}"),
                    ));
                };
                self.context
                    .meter
                    .note(format_args!("{error}; taking {} from the cache", self.name));
                return Ok(pulled);
            }
        };
        let names = listing.files.keys().map(String::as_str).collect();
        let mut selection = select(repo, &names, self.name.part.as_deref())?;
        if let Some(index) = &selection.index {
            self.fetch_all(&listing, &BTreeSet::from([index.clone()]))?;
            let path = self.repository.snapshot(&listing.commit).join(index);
            let content = std::fs::read(&path)
                .map_err(|e| Error::io(format_args!("reading {}", path.display()), e))?;
            let shards = shards(repo, index, &content)?;
            if let Some(missing) = shards.iter().find(|s| !listing.files.contains_key(*s)) {
                bail!(
                    NotFound,
                    "{index} of {repo} names {missing}, which the repository does not hold"
                );
            }
            selection.files.extend(shards);
        }
        let fetched = self.fetch_all(&listing, &selection.files)?;
        let noted = self
            .repository
            .keep_listing(&listing)
            // The branch points to this commit only now that it is complete.
            .and_then(|()| self.repository.keep_ref(revision, &listing.commit));
        if fetched > 0 {
            noted?;
        }
        // Otherwise the cache may be read-only.
        let mut bytes = 0;
        for file in &selection.files {
            let path = self.repository.snapshot(&listing.commit).join(file);
            bytes += path
                .metadata()
                .map_err(|e| Error::io(format_args!("reading {}", path.display()), e))?
                .len();
        }
        Ok(Pulled {
            path: self.repository.opened(&listing.commit, &selection.opens),
            commit: listing.commit,
            bytes,
            fetched,
        })
    }

    fn subject<'s>(&'s self, revision: &'s str, action: &'s str) -> Subject<'s> {
        Subject {
            repo: &self.name.repo,
            revision,
            action,
        }
    }

    /// Lists the repository, with retries.
    fn list(&self) -> Result<Asked> {
        let Context {
            client,
            patience,
            timeout,
            ..
        } = &self.context;
        let (repo, revision) = (&self.name.repo, self.name.revision());
        let mut url = client.address(
            ["api", "models"]
                .into_iter()
                .chain(repo.split('/'))
                .chain(["revision", revision]),
        );
        url.set_query(Some("blobs=true"));
        let subject = self.subject(revision, "asking for the list of files");
        let answer = self.context.patiently(|| {
            let answer = client
                .open(&url, Method::Get, None, subject)
                .and_then(|answer| answer.bytes(*timeout));
            match answer {
                // A hub that answers, even with a refusal, can be reached.
                Err(Failure::Final(error)) => Ok(Err(error)),
                answer => answer.map(Ok),
            }
        });
        match answer {
            Ok(answer) => {
                patience.renew(Instant::now());
                Listing::from_answer(repo, &answer?).map(Asked::Listing)
            }
            Err(error) => Ok(Asked::Unreachable(error)),
        }
    }

    /// Fetches those of `files` that are missing. Returns the number of bytes fetched.
    fn fetch_all(&self, listing: &Listing, files: &BTreeSet<String>) -> Result<u64> {
        let mut missing = Vec::new();
        for file in files {
            let entry = listing.files.get(file).cloned().unwrap_or_default();
            if self.is_there(&listing.commit, file, &entry) {
                continue;
            }
            missing.push((file.as_str(), self.complete(listing, file, entry)?));
        }
        if missing.is_empty() {
            return Ok(0);
        }
        let found: u64 = missing.iter().map(|(_, wanted)| wanted.found).sum();
        let total: u64 = missing.iter().filter_map(|(_, wanted)| wanted.size).sum();
        let room = free_space(self.repository.root())?;
        if total - found.min(total) > room {
            bail!(
                Io,
                "{}: {} are to come, and {} has room for {}; HF_HUB_CACHE names another folder",
                self.name,
                output::size(total - found),
                self.repository.root().display(),
                output::size(room)
            );
        }
        self.context.meter.start(total, found);
        let (small, large): (Vec<_>, Vec<_>) = missing
            .iter()
            .partition(|(_, wanted)| wanted.size.is_none_or(|size| size <= SMALL));
        let fetched = self.fetch_small(listing, &small)?;
        large.iter().try_fold(fetched, |fetched, (file, wanted)| {
            Ok(fetched + self.fetch_one(listing, file, wanted)?)
        })
    }

    /// Fetches small files, several at a time.
    fn fetch_small(&self, listing: &Listing, files: &[&(&str, Wanted)]) -> Result<u64> {
        let left = Mutex::new(files.iter());
        let next = || left.lock().ok()?.next();
        let work = || {
            let mut fetched = 0;
            while let Some((file, wanted)) = next() {
                fetched += self.fetch_one(listing, file, wanted)?;
            }
            Ok(fetched)
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..files.len().min(SMALL_AT_ONCE))
                .map(|_| scope.spawn(work))
                .collect();
            workers
                .into_iter()
                .try_fold(0, |sum, worker| match worker.join() {
                    Ok(fetched) => Ok(sum + fetched?),
                    Err(panic) => std::panic::resume_unwind(panic),
                })
        })
    }

    /// Whether `file` is in the cache, with the size in the hub's list.
    fn is_there(&self, commit: &str, file: &str, entry: &Entry) -> bool {
        self.repository
            .file(commit, file)
            .and_then(|path| path.metadata().ok())
            .is_some_and(|there| entry.size.is_none_or(|size| size == there.len()))
    }

    fn address(&self, commit: &str, file: &str) -> Url {
        let segments = self.name.repo.split('/').chain(["resolve", commit]);
        self.context.client.address(segments.chain(file.split('/')))
    }

    /// Completes the properties needed to fetch a file. The hub's list has them; otherwise asks the mirror for them.
    fn complete(&self, listing: &Listing, file: &str, entry: Entry) -> Result<Wanted> {
        let mut wanted = Wanted {
            blob: entry.blob().map(str::to_owned),
            size: entry.size,
            found: 0,
        };
        if wanted.blob.is_none() || wanted.size.is_none() {
            let action = format!("asking for {file}");
            let subject = self.subject(self.name.revision(), &action);
            let url = self.address(&listing.commit, file);
            let Context { client, .. } = self.context;
            let answer = self
                .context
                .patiently(|| client.open(&url, Method::Head, None, subject))?;
            let etag = answer
                .header_of_hub("x-linked-etag")
                .or_else(|| answer.header_of_hub("etag"))
                .map(|etag| etag.trim_start_matches("W/").trim_matches('"'))
                .filter(|etag| is_plain(etag));
            let size = answer
                .header_of_hub("x-linked-size")
                .and_then(|size| size.parse().ok())
                .or_else(|| answer.length().filter(|_| answer.encoding().is_none()));
            wanted.blob = wanted.blob.or(etag.map(str::to_owned));
            wanted.size = wanted.size.or(size);
        }
        if let Some(size) = wanted.size {
            let blob = self.repository.blob(&wanted.id(&listing.commit, file));
            wanted.found = Partial::found_at(&blob, size);
        }
        Ok(wanted)
    }

    /// Fetches one file, unless another program just has. Returns the number of bytes fetched.
    fn fetch_one(&self, listing: &Listing, file: &str, wanted: &Wanted) -> Result<u64> {
        let commit = &listing.commit;
        let id = wanted.id(commit, file);
        let place = self.repository.blob(&id);
        let is_whole = || {
            wanted.blob.is_some()
                && place
                    .metadata()
                    .is_ok_and(|there| wanted.size.is_none_or(|size| size == there.len()))
        };
        let mut lock = None;
        if !is_whole() {
            lock = Some(self.repository.lock(&id, || {
                self.context.meter.note(format_args!(
                    "waiting: another program fetches {file} of {}",
                    self.name.repo
                ));
            })?);
        }
        let (blob, fetched) = match is_whole() {
            true => {
                self.context
                    .meter
                    .add(wanted.size.unwrap_or(0) - wanted.found);
                (id, 0)
            }
            false => {
                let action = format!("fetching {file}");
                let source = Source {
                    url: self.address(commit, file),
                    subject: self.subject(commit, &action),
                    digest: wanted.blob.as_deref().and_then(Digest::of_name),
                };
                self.bring(wanted, &place, &source).map_err(|e| {
                    // Errors of the transfer name the file already.
                    match e.message().contains(&action) {
                        true => e,
                        false => e.within(format_args!("{}: {action}", self.name.repo)),
                    }
                })?
            }
        };
        self.repository.link(commit, file, &blob)?;
        drop(lock);
        Ok(fetched)
    }

    /// Fetches a blob to `place`, or to the path of its own name if that becomes known only now. Returns the name and the
    /// number of bytes fetched.
    fn bring(&self, wanted: &Wanted, place: &Path, source: &Source<'_>) -> Result<(String, u64)> {
        cache::make_parent(place)?;
        let name = |digest: String| wanted.blob.clone().unwrap_or(digest);
        match wanted.size {
            Some(0) => {
                let blob = name(EMPTY.to_owned());
                stage(&self.repository.blob(&blob), b"")?.commit()?;
                Ok((blob, 0))
            }
            Some(size) => {
                let (partial, digest) = self.fetch_sized(source, place, size, wanted.found)?;
                let blob = name(digest);
                let fetched = size - partial.found();
                partial.finish(&self.repository.blob(&blob))?;
                Ok((blob, fetched))
            }
            None => {
                let (content, digest, size) = fetch_unsized(&self.context, source, place)?;
                let blob = name(digest);
                content.commit_to(&self.repository.blob(&blob))?;
                Ok((blob, size))
            }
        }
    }

    /// Fetches a blob of known size, resuming what an earlier pull has left, of which `counted` bytes are on the meter.
    fn fetch_sized(
        &self,
        source: &Source<'_>,
        place: &Path,
        size: u64,
        counted: u64,
    ) -> Result<(Partial, String)> {
        let meter = self.context.meter;
        let partial = Partial::open(place, size)?;
        // Another program may have fetched some of it since.
        meter.add(partial.found().saturating_sub(counted));
        let error = match fetch(&self.context, source, &partial) {
            Ok(digest) => return Ok((partial, digest)),
            Err(error) if error.kind() == ErrorKind::CorruptFile => error,
            Err(error) => return Err(error),
        };
        let resumed = partial.found() > 0;
        partial.discard()?;
        if !resumed {
            return Err(err!(
                CorruptFile,
                "{error}; it was thrown away, so pull again"
            ));
        }
        // Data of an earlier pull may have been lost in a power failure.
        meter.note(format_args!("{error}; fetching all of it anew"));
        meter.take_back(size);
        let partial = Partial::open(place, size)?;
        match fetch(&self.context, source, &partial) {
            Ok(digest) => Ok((partial, digest)),
            Err(error) if error.kind() == ErrorKind::CorruptFile => {
                partial.discard()?;
                Err(err!(
                    CorruptFile,
                    "{error}; it was thrown away, so pull again"
                ))
            }
            Err(error) => Err(error),
        }
    }
}

/// The properties needed to fetch a file.
struct Wanted {
    /// The name of its blob in the cache, if it is known.
    blob: Option<String>,
    size: Option<u64>,
    /// Bytes that an earlier pull has left.
    found: u64,
}

impl Wanted {
    /// The name under which the blob of `file` is fetched: its own, or a unique one.
    fn id(&self, commit: &str, file: &str) -> String {
        self.blob.clone().unwrap_or_else(|| {
            let place = Sha1::digest(format!("{commit}/{file}"));
            format!("unnamed-{}", hexadecimal(&place))
        })
    }
}

/// Git's hash of an empty file.
const EMPTY: &str = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391";

/// Whether an ETag can be a file's name.
fn is_plain(etag: &str) -> bool {
    (1..=128).contains(&etag.len())
        && !etag.starts_with('.')
        && etag
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}
