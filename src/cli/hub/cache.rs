//! The cache of models fetched from the hub, in the layout of Python's huggingface_hub, so that each can use what the other
//! has fetched:
//!
//! ```text
//! models--ORG--NAME/blobs/HASH                 contents, once each, however many commits have them
//! models--ORG--NAME/snapshots/COMMIT/PATH      links to them
//! models--ORG--NAME/refs/REVISION              the commit of a branch or a tag
//! models--ORG--NAME/trees/COMMIT.json          what the repository holds at a commit
//! models--ORG--NAME/.no_exist/COMMIT/PATH      an empty file: asked for, and not there
//! .locks/models--ORG--NAME/HASH.lock           held by who fetches that content
//! ```
//!
//! A file in `blobs` is complete and never changes. Makes no requests.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use NVFP4::base::error::err;
use NVFP4::base::file;
use NVFP4::base::{Error, Result};

use super::listing::Listing;

/// The prefix of a model's folder before `ORG--NAME`.
const PREFIX: &str = "models--";

/// The shortest abbreviation of a commit.
const SHORTEST_COMMIT: usize = 7;

/// One repository in the cache.
pub(super) struct Repository {
    root: PathBuf,
    /// `models--ORG--NAME`.
    folder: String,
}

/// A lock for fetching one blob, released on drop.
pub(super) struct Lock {
    /// `None` if the file system does not support locks.
    _file: Option<File>,
}

impl Repository {
    /// The repository `repo` (`ORG/NAME`) in the cache at `root`. Creates nothing yet.
    pub(super) fn new(root: &Path, repo: &str) -> Repository {
        Repository {
            root: root.to_owned(),
            folder: format!("{PREFIX}{}", repo.replace('/', "--")),
        }
    }

    /// All repositories of models in the cache at `root`, by name: `ORG/NAME`.
    pub(super) fn all(root: &Path) -> Result<Vec<(String, Repository)>> {
        let mut all: Vec<(String, Repository)> = entries(root)?
            .into_iter()
            .filter_map(|path| {
                let folder = path.file_name()?.to_str()?.to_owned();
                let name = folder.strip_prefix(PREFIX)?.replacen("--", "/", 1);
                let root = root.to_owned();
                path.is_dir().then_some((name, Repository { root, folder }))
            })
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(all)
    }

    pub(super) fn path(&self) -> PathBuf {
        self.root.join(&self.folder)
    }

    /// The root of the cache.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The commit that `revision` stands for, as far as the cache knows.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if let Ok(commit) = fs::read_to_string(self.path().join("refs").join(revision)) {
            return Some(commit.trim().to_owned());
        }
        let is_hex = revision.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_hex || revision.len() < SHORTEST_COMMIT {
            return None;
        }
        let mut found = self
            .commits()
            .ok()?
            .into_iter()
            .filter(|c| c.starts_with(revision));
        match (found.next(), found.next()) {
            (Some(commit), None) => Some(commit),
            _ => None,
        }
    }

    /// All commits with at least one file in the cache.
    pub(super) fn commits(&self) -> Result<Vec<String>> {
        let mut commits: Vec<String> = entries(&self.path().join("snapshots"))?
            .iter()
            .filter_map(|p| Some(p.file_name()?.to_str()?.to_owned()))
            .collect();
        commits.sort();
        Ok(commits)
    }

    /// Branches and tags, with their commits.
    pub(super) fn refs(&self) -> Result<Vec<(String, String)>> {
        let base = self.path().join("refs");
        let mut found = Vec::new();
        let mut folders = vec![base.clone()];
        while let Some(folder) = folders.pop() {
            for path in entries(&folder)? {
                if path.is_dir() {
                    folders.push(path);
                } else if let (Ok(name), Ok(commit)) =
                    (path.strip_prefix(&base), fs::read_to_string(&path))
                {
                    found.push((name.display().to_string(), commit.trim().to_owned()));
                }
            }
        }
        found.sort();
        Ok(found)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.path().join("snapshots").join(commit)
    }

    /// The path of a file or a folder in a snapshot, or of the snapshot if `part` is empty.
    pub(super) fn opened(&self, commit: &str, part: &str) -> PathBuf {
        match part {
            "" => self.snapshot(commit),
            _ => self.snapshot(commit).join(part),
        }
    }

    /// The path of `name`, if it is complete.
    pub(super) fn file(&self, commit: &str, name: &str) -> Option<PathBuf> {
        let path = self.snapshot(commit).join(name);
        path.is_file().then_some(path)
    }

    /// Whether another program has found that the repository does not have `name`.
    pub(super) fn is_known_to_miss(&self, commit: &str, name: &str) -> bool {
        self.path()
            .join(".no_exist")
            .join(commit)
            .join(name)
            .is_file()
    }

    pub(super) fn blob(&self, id: &str) -> PathBuf {
        self.path().join("blobs").join(id)
    }

    fn tree(&self, commit: &str) -> PathBuf {
        self.path().join("trees").join(format!("{commit}.json"))
    }

    /// The list of files at `commit`, if it is in the cache.
    pub(super) fn listing(&self, commit: &str) -> Option<Listing> {
        Listing::from_cache(commit, &fs::read(self.tree(commit)).ok()?)
    }

    /// Stores a list of files, so that it can be checked offline whether the model is complete.
    pub(super) fn keep_listing(&self, listing: &Listing) -> Result<()> {
        match listing.to_cache() {
            Some(content) if self.listing(&listing.commit).is_none() => {
                replace(&self.tree(&listing.commit), &content)
            }
            _ => Ok(()),
        }
    }

    /// Records that `revision` is `commit` now.
    pub(super) fn keep_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        replace(&self.path().join("refs").join(revision), commit.as_bytes())
    }

    /// Makes `name` of `commit` a link to the blob `id`, which must exist.
    pub(super) fn link(&self, commit: &str, name: &str, id: &str) -> Result<()> {
        let place = self.snapshot(commit).join(name);
        let failed = |e| Error::io(format_args!("linking {}", place.display()), e);
        make_parent(&place)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let link = || std::os::unix::fs::symlink(format!("{up}blobs/{id}"), &place);
        let made = match link() {
            // A dangling link is in the way; a complete file must not be touched.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !place.exists() => {
                fs::remove_file(&place).map_err(failed)?;
                link()
            }
            made => made,
        };
        match made {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // File systems without symbolic links.
            Err(_) => fs::hard_link(self.blob(id), &place)
                .or_else(|_| fs::copy(self.blob(id), &place).map(|_| ()))
                .map_err(failed),
        }
    }

    /// Removes the whole repository from the cache.
    pub(super) fn remove(&self) -> Result<()> {
        // Locks last: a program that begins to fetch meanwhile holds one that stays valid until then.
        remove_folder(&self.path())?;
        remove_folder(&self.locks())
    }

    /// Removes a commit and the references to it, but no blobs.
    pub(super) fn remove_commit(&self, commit: &str) -> Result<()> {
        remove_folder(&self.snapshot(commit))?;
        remove_folder(&self.path().join(".no_exist").join(commit))?;
        let refs = self.refs()?;
        let pointing = refs.iter().filter(|(_, c)| c == commit);
        let pointing = pointing.map(|(name, _)| self.path().join("refs").join(name));
        for path in pointing.chain([self.tree(commit)]) {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(Error::io(format_args!("removing {}", path.display()), e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes blobs to which no snapshot links. Incomplete ones stay: a pull may resume them.
    pub(super) fn remove_unused(&self) -> Result<()> {
        let mut used = BTreeSet::new();
        let mut folders = vec![self.path().join("snapshots")];
        while let Some(folder) = folders.pop() {
            for path in entries(&folder)? {
                match fs::read_link(&path) {
                    Ok(target) => used.extend(target.file_name().map(ToOwned::to_owned)),
                    Err(_) if path.is_dir() => folders.push(path),
                    Err(_) => {}
                }
            }
        }
        for path in entries(&self.path().join("blobs"))? {
            let is_used = path.file_name().is_some_and(|name| used.contains(name));
            if !is_used && path.extension().is_none() {
                fs::remove_file(&path)
                    .map_err(|e| Error::io(format_args!("removing {}", path.display()), e))?;
            }
        }
        Ok(())
    }

    /// Locks the blob `id` for fetching. If another program has the lock, calls `waits` once and waits.
    pub(super) fn lock(&self, id: &str, waits: impl FnOnce()) -> Result<Lock> {
        let mut waits = Some(waits);
        loop {
            let file = self.open_lock(id)?;
            let held = match file.try_lock() {
                Ok(()) => true,
                Err(TryLockError::WouldBlock) => {
                    if let Some(waits) = waits.take() {
                        waits();
                    }
                    file.lock().is_ok()
                }
                Err(TryLockError::Error(_)) => false,
            };
            // Python's lock removes its file when it is released: a lock on a removed file does not count.
            if !held || is_still_at(&file, &self.lock_path(id)) {
                return Ok(Lock {
                    _file: held.then_some(file),
                });
            }
        }
    }

    /// Whether any program is fetching from this repository now.
    pub(super) fn is_locked(&self) -> Result<bool> {
        let held = |path: &PathBuf| {
            File::open(path)
                .is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
        };
        Ok(entries(&self.locks())?.iter().any(held))
    }

    /// The folder of this repository's locks.
    fn locks(&self) -> PathBuf {
        self.root.join(".locks").join(&self.folder)
    }

    fn lock_path(&self, id: &str) -> PathBuf {
        self.locks().join(format!("{id}.lock"))
    }

    fn open_lock(&self, id: &str) -> Result<File> {
        let path = self.lock_path(id);
        make_parent(&path)?;
        File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|e| Error::io(format_args!("opening {}", path.display()), e))
    }
}

fn is_still_at(file: &File, path: &Path) -> bool {
    let number = |m: fs::Metadata| (m.dev(), m.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(file), Ok(there)) => number(file) == number(there),
        _ => false,
    }
}

fn remove_folder(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format_args!("removing {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// The entries of a folder; none if it does not exist.
pub(super) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::io(format_args!("listing {}", folder.display()), e);
    match fs::read_dir(folder) {
        Ok(items) => items
            .map(|item| item.map(|i| i.path()))
            .collect::<io::Result<_>>()
            .map_err(failed),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(failed(e)),
    }
}

pub(super) fn make_parent(path: &Path) -> Result<()> {
    let parent = path
        .parent()
        .ok_or_else(|| err!(Internal, "{} has no parent", path.display()))?;
    fs::create_dir_all(parent)
        .map_err(|e| Error::io(format_args!("making {}", parent.display()), e))
}

fn replace(path: &Path, content: &[u8]) -> Result<()> {
    make_parent(path)?;
    file::stage(path, content)?.commit()
}
