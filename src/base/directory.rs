//! Creates a directory that appears whole or not at all. Its files are written out of sight and get their names at the end; a directory to
//! be replaced stays unchanged until then, and is exchanged at once.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::Result;
use super::error::{Error, bail};
use super::file::{Temporary, folder_of, nearest, sync_folder};
use super::leftover::Leftover;

/// Upper limit of names that a message lists.
const LISTED: usize = 6;

/// The names in `directory`, sorted.
pub fn names(directory: &Path) -> Result<Vec<String>> {
    Ok(entries(directory)?
        .into_iter()
        .map(|(name, _)| name)
        .collect())
}

/// The names and paths in `directory`, sorted. Bytes of names that are not UTF-8 become U+FFFD.
pub fn entries(directory: &Path) -> Result<Vec<(String, PathBuf)>> {
    let listing = |e| Error::io(format_args!("listing {}", directory.display()), e);
    let mut entries = fs::read_dir(directory)
        .map_err(listing)?
        .map(|item| item.map(|i| (i.file_name().to_string_lossy().into_owned(), i.path())))
        .collect::<io::Result<Vec<_>>>()
        .map_err(listing)?;
    entries.sort();
    Ok(entries)
}

/// Fails unless a file or directory can be created at `place`: tries an unnamed file in the nearest existing folder above it.
pub fn check_writable(place: &Path) -> Result<()> {
    let folder = match place.is_dir() {
        true => place,
        false => nearest(folder_of(place)),
    };
    if !folder.is_dir() {
        bail!(
            InvalidArgument,
            "{} cannot be made: {} is not a directory",
            place.display(),
            folder.display()
        );
    }
    Temporary::create_in(folder, place, 0).map(drop)
}

/// A directory under construction. Dropping it or its files without committing removes everything.
pub struct NewDirectory {
    /// Final path. If something exists there, without symbolic links.
    place: PathBuf,
    /// Existing folder, on the same file system, that holds the files until the commit.
    home: PathBuf,
    there: There,
    /// Repeated at the commit: fails unless the old directory may be replaced.
    check: Option<fn(&Path) -> Result<()>>,
}

/// State of the final path.
#[derive(PartialEq)]
enum There {
    Nothing,
    /// An empty directory. It is filled in place, because it may be a mount point or somebody's working directory.
    Empty,
    /// A directory to replace.
    Old,
}

impl NewDirectory {
    /// Starts a directory at `path`, which must not exist or must be empty. Missing parent folders are created at the commit.
    pub fn create(path: &Path) -> Result<Self> {
        let new = Self::at(path)?;
        if new.there == There::Old {
            refuse(&new.place)?;
        }
        Ok(new)
    }

    /// As [`NewDirectory::create`], but replaces an existing directory at `path`, with everything in it, unless `check` refuses that.
    pub fn replace(path: &Path, check: fn(&Path) -> Result<()>) -> Result<Self> {
        let mut new = Self::at(path)?;
        if new.there == There::Old {
            check(&new.place)?;
            new.check = Some(check);
            // Removing a nonempty directory fails, and the error shows whether it could be renamed: not if it is a mount point, nor in a
            // folder of another user. It is better to know that now than after hours of work.
            match fs::remove_dir(&new.place) {
                Ok(()) => new.there = There::Nothing,
                Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => {}
                Err(e) => {
                    return Err(Error::io(
                        format_args!(
                            "{} cannot be replaced as a whole; remove what is in it",
                            path.display()
                        ),
                        e,
                    ));
                }
            }
        }
        Ok(new)
    }

    fn at(path: &Path) -> Result<Self> {
        if fs::symlink_metadata(path).is_err() {
            if path.file_name().is_none() {
                bail!(
                    InvalidArgument,
                    "'{}' is not a place for a directory",
                    path.display()
                );
            }
            return Ok(NewDirectory {
                place: path.to_owned(),
                home: nearest(path).to_owned(),
                there: There::Nothing,
                check: None,
            });
        }
        if !path.is_dir() {
            bail!(InvalidArgument, "{} is not a directory", path.display());
        }
        let place = fs::canonicalize(path)
            .map_err(|e| Error::io(format_args!("finding {}", path.display()), e))?;
        let (home, there) = match names(&place)?.is_empty() {
            true => (place.clone(), There::Empty),
            false => (folder_of(&place).to_owned(), There::Old),
        };
        Ok(NewDirectory {
            place,
            home,
            there,
            check: None,
        })
    }

    /// Creates a file of the directory, with `len` bytes of space reserved. Its name may begin with that of a folder.
    pub fn file(&self, name: &str, len: u64) -> Result<Temporary> {
        Temporary::create_in(&self.home, &self.place.join(name), len)
    }

    /// Creates a small file of the directory, with its content.
    pub fn stage(&self, name: &str, content: &[u8]) -> Result<Temporary> {
        self.file(name, 0)?.filled(content)
    }

    /// Moves the directory into place with `files`, which were created for it and have been synced. In a directory that was empty, the
    /// files get their names one after the other.
    pub fn commit(self, files: Vec<Temporary>) -> Result<()> {
        match self.there {
            There::Nothing => {
                let made = self.assemble(files)?;
                self.put_in_place(|| {
                    fs::create_dir_all(folder_of(&self.place))?;
                    fs::rename(made.path(), &self.place)
                })
            }
            There::Empty => {
                if !names(&self.place)?.is_empty() {
                    refuse(&self.place)?;
                }
                files.into_iter().try_for_each(|file| {
                    file.make_folder()?;
                    file.commit()
                })
            }
            There::Old => {
                if let Some(check) = self.check {
                    check(&self.place)?;
                }
                let made = self.assemble(files)?;
                let old = fs::metadata(&self.place);
                let mut aside = None;
                self.put_in_place(|| {
                    let old = old?;
                    // Best effort: the system may not allow it.
                    let _ = std::os::unix::fs::chown(made.path(), Some(old.uid()), Some(old.gid()));
                    fs::set_permissions(made.path(), old.permissions())?;
                    match exchange(made.path(), &self.place) {
                        Err(e) if is_unknown(&e) => {
                            aside = Some(self.put_aside_for(made.path())?);
                            Ok(())
                        }
                        exchanged => exchanged,
                    }
                })?;
                // The old directory now has the temporary name of the new one, or a name of its own.
                aside.unwrap_or(made).remove()
            }
        }
    }

    /// Assembles the whole directory under a temporary name.
    fn assemble(&self, files: Vec<Temporary>) -> Result<Leftover> {
        let ((), made) = Leftover::make(&self.home, &self.place, |path| fs::create_dir(path))
            .map_err(|e| Error::io(format_args!("making {}", self.place.display()), e))?;
        for file in files {
            file.commit_into(made.path(), &self.place)?;
        }
        Ok(made)
    }

    /// Calls `put`, which moves the directory into place, and waits until the new name is on disk.
    fn put_in_place(&self, put: impl FnOnce() -> io::Result<()>) -> Result<()> {
        put().map_err(|e| Error::io(format_args!("renaming to {}", self.place.display()), e))?;
        sync_folder(folder_of(&self.place))
    }

    /// Renames the old directory and gives its name to `new`. If that fails, renames it back.
    fn put_aside_for(&self, new: &Path) -> io::Result<Leftover> {
        let ((), aside) = Leftover::make(&self.home, &self.place, |aside| {
            if fs::symlink_metadata(aside).is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            fs::rename(&self.place, aside)?;
            fs::rename(new, &self.place).inspect_err(|_| {
                // The first failure is the one to report.
                let _ = fs::rename(aside, &self.place);
            })
        })?;
        Ok(aside)
    }
}

/// Fails with the contents of a directory that is not empty.
fn refuse(directory: &Path) -> Result<()> {
    let names = names(directory)?;
    let (first, rest) = names.split_at(names.len().min(LISTED));
    let more = match rest.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    bail!(
        InvalidArgument,
        "{} is not empty, it holds {}{more}; name another directory, or have the model in it replaced as a whole (--force, or `replace` in the options)",
        directory.display(),
        first.join(", ")
    )
}

/// Whether the system or the file system does not support an operation.
fn is_unknown(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)
    )
}

/// Atomically exchanges the names of two directories.
#[cfg(target_os = "linux")]
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    let (a, b) = (super::file::c_path(a)?, super::file::c_path(b)?);
    // SAFETY: both names end with a zero byte and live through the call, whose other arguments are numbers. The call is made by number
    // because not every C library declares it.
    let exchanged = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            a.as_ptr(),
            libc::AT_FDCWD,
            b.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    match exchanged {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Unsupported on other systems.
#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}
