//! Files that belong to one model: on disk, or given by the host under their names, in memory or behind a reader. Knows no format.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::error::{Error, bail, err};
use super::file::{self, Temporary};
use super::{Result, directory};

/// The content of a file that the host gives. Threads read it at the same time.
pub trait FileContent: Send + Sync {
    /// Bytes of the file.
    fn size(&self) -> u64;

    /// The whole content, if it is in memory.
    fn in_memory(&self) -> Option<&[u8]>;

    /// Copies the bytes from `at` on to `out`. Fails unless it fills `out`. Callers stay within `size`.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<()>;
}

impl FileContent for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn in_memory(&self) -> Option<&[u8]> {
        Some(self)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        copy_from(self, at, out)
    }
}

/// The content of a file that is not in its place yet.
pub struct NewContent {
    file: File,
    size: u64,
}

impl NewContent {
    /// The content that `file` has now.
    pub fn of(file: &Temporary) -> Result<Self> {
        Ok(NewContent {
            file: file.opened()?,
            size: file.metadata()?.len(),
        })
    }
}

impl FileContent for NewContent {
    fn size(&self) -> u64 {
        self.size
    }

    fn in_memory(&self) -> Option<&[u8]> {
        None
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file
            .read_exact_at(out, at)
            .map_err(|e| Error::io("reading a new file", e))
    }
}

/// Copies the part of `content` that begins at `at` to `out`.
pub fn copy_from(content: &[u8], at: u64, out: &mut [u8]) -> Result<()> {
    let part = usize::try_from(at).ok().and_then(|at| content.get(at..));
    match part.and_then(|part| part.get(..out.len())) {
        Some(part) => out.copy_from_slice(part),
        None => bail!(
            CorruptFile,
            "{} bytes at offset {at} are not there; it has {}",
            out.len(),
            content.len()
        ),
    }
    Ok(())
}

/// Files of one model by their names in its directory. Cloning shares them; the last clone drops their contents.
#[derive(Clone)]
pub struct GivenFiles(Arc<BTreeMap<String, Arc<dyn FileContent>>>);

impl fmt::Debug for GivenFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl GivenFiles {
    /// Fails if there are no files, if two have the same name, and if a name is not a relative path below a directory, written without `.`
    /// and `..`.
    pub fn new(files: impl IntoIterator<Item = (String, Arc<dyn FileContent>)>) -> Result<Self> {
        let mut named = BTreeMap::new();
        for (name, content) in files {
            let mut parts = Path::new(&name).components();
            let plain = parts.all(|part| matches!(part, Component::Normal(_)));
            let parts: PathBuf = Path::new(&name).components().collect();
            if name.is_empty() || !plain || parts.as_os_str() != name.as_str() {
                bail!(
                    InvalidArgument,
                    "'{name}' is not the name of a file in a model's directory, such as config.json"
                );
            }
            match named.entry(name) {
                Entry::Vacant(place) => place.insert(content),
                Entry::Occupied(place) => {
                    bail!(InvalidArgument, "{} is given twice", place.key())
                }
            };
        }
        if named.is_empty() {
            bail!(
                InvalidArgument,
                "no files are given; give those of a model's directory"
            );
        }
        Ok(GivenFiles(Arc::new(named)))
    }

    /// The content of the file `name`.
    pub fn get(&self, name: &Path) -> Option<&Arc<dyn FileContent>> {
        self.0.get(name.to_str()?)
    }
}

/// Where the files of a model are. Paths on disk are those of the system; given files have their names as paths, and the empty path is
/// their directory.
#[derive(Clone, Debug)]
pub enum Files {
    /// On disk.
    Disk,
    /// Given by the host.
    Given(GivenFiles),
}

impl Files {
    /// The content of the file at `path`, if there is one.
    pub fn read(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        match self {
            Files::Disk => match file::read(path) {
                Ok(content) => {
                    check_content(&path.display().to_string(), &content)?;
                    Ok(Some(content))
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(e) => Err(failed(path, e)),
            },
            Files::Given(files) => {
                let read = |content: &Arc<dyn FileContent>| whole(path, &**content);
                files.get(path).map(read).transpose()
            }
        }
    }

    /// Whether there is a file at `path`; fails if something else is.
    pub fn exists(&self, path: &Path) -> Result<bool> {
        match self {
            Files::Disk => file::exists(path).map_err(|e| failed(path, e)),
            Files::Given(files) => Ok(files.get(path).is_some()),
        }
    }

    /// The first of `paths` at which there is no file.
    pub fn missing<'p>(&self, paths: &'p [PathBuf]) -> Result<Option<&'p PathBuf>> {
        for path in paths {
            if !self.exists(path)? {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// The names and paths of the files in `directory`, sorted. Those of given files may be names in folders below.
    pub fn entries(&self, directory: &Path) -> Result<Vec<(String, PathBuf)>> {
        match self {
            Files::Disk => {
                let mut entries = directory::entries(directory)?;
                // The hub's cache contains links to files.
                entries.retain(|(_, path)| path.is_file());
                Ok(entries)
            }
            Files::Given(files) => {
                let entry = |name: &String| (name.clone(), PathBuf::from(name));
                Ok(files.0.keys().map(entry).collect())
            }
        }
    }

    /// The directory that holds `file`.
    pub fn directory_of<'a>(&self, file: &'a Path) -> &'a Path {
        match (self, file.parent()) {
            (Files::Given(_), _) => Path::new(""),
            (Files::Disk, Some(parent)) if !parent.as_os_str().is_empty() => parent,
            (Files::Disk, _) => Path::new("."),
        }
    }

    /// The name of `directory` for messages.
    pub fn shown<'a>(&self, directory: &'a Path) -> impl fmt::Display + use<'a> {
        match self {
            Files::Disk => directory.display(),
            Files::Given(_) => Path::new("the model of the given files").display(),
        }
    }
}

/// The beginning of the files that Git leaves in place of large ones.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// Bytes of a file that [`check_content`] looks at.
pub const POINTER_BYTES: usize = POINTER.len();

/// Refuses a file that begins as a pointer of Git LFS does, which a clone without Git LFS has in place of the file.
pub fn check_content(name: &str, start: &[u8]) -> Result<()> {
    if start.starts_with(POINTER) {
        bail!(
            CorruptFile,
            "{name} is not the file itself but a pointer of Git LFS to it; `git lfs pull` in its folder fetches it, or `nvfp4 pull ORG/NAME` the model"
        );
    }
    Ok(())
}

fn failed(path: &Path, error: std::io::Error) -> Error {
    Error::io(format_args!("reading {}", path.display()), error)
}

/// All bytes of the file `name`.
fn whole(name: &Path, content: &dyn FileContent) -> Result<Vec<u8>> {
    let (name, size) = (name.display(), content.size());
    let refused = || err!(OutOfMemory, "{name}: its {size} bytes do not fit in memory");
    let len = usize::try_from(size).map_err(|_| refused())?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| refused())?;
    bytes.resize(len, 0);
    let read = content.read(0, &mut bytes);
    read.map_err(|e| e.within(format_args!("reading {len} bytes at offset 0 of {name}")))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    fn given(names: &[&str]) -> Result<GivenFiles> {
        let file = |name: &&str| {
            let content: Arc<dyn FileContent> = Arc::new(name.as_bytes().to_vec());
            ((*name).to_owned(), content)
        };
        GivenFiles::new(names.iter().map(file))
    }

    #[test]
    fn names_are_those_of_a_directory() {
        for bad in ["", "/a", "./a", "../a", "a/../b", "a//b", "a/", "."] {
            expect_kind(given(&[bad]), ErrorKind::InvalidArgument, "is not the name");
        }
        expect_kind(
            given(&["a", "a"]),
            ErrorKind::InvalidArgument,
            "a is given twice",
        );
        expect_kind(given(&[]), ErrorKind::InvalidArgument, "no files are given");
    }

    #[test]
    fn given_files_are_found_by_their_names() {
        let files = Files::Given(given(&["b/c.json", "a.json"]).unwrap());
        let directory = files.directory_of(Path::new("a.json"));
        let read = |name: &str| files.read(&directory.join(name)).unwrap();
        assert_eq!(read("b/c.json").unwrap(), b"b/c.json");
        assert_eq!(read("c.json"), None);
        assert!(files.exists(Path::new("a.json")).unwrap());
        assert!(!files.exists(Path::new("b")).unwrap());
        let names: Vec<String> = files
            .entries(directory)
            .unwrap()
            .into_iter()
            .map(|e| e.0)
            .collect();
        assert_eq!(names, ["a.json", "b/c.json"]);
    }

    #[test]
    fn reads_stay_within_the_content() {
        let mut out = [0; 2];
        copy_from(&[1, 2, 3], 1, &mut out).unwrap();
        assert_eq!(out, [2, 3]);
        for at in [2, 4, u64::MAX] {
            expect_kind(
                copy_from(&[1, 2, 3], at, &mut out),
                ErrorKind::CorruptFile,
                "2 bytes at offset",
            );
        }
    }

    /// A size that no memory has.
    struct Endless;

    impl FileContent for Endless {
        fn size(&self) -> u64 {
            u64::MAX
        }

        fn in_memory(&self) -> Option<&[u8]> {
            None
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
            panic!("it is read without memory for it")
        }
    }

    #[test]
    fn a_file_larger_than_memory_is_refused() {
        let content: Arc<dyn FileContent> = Arc::new(Endless);
        let files = GivenFiles::new([("config.json".to_owned(), content)]).unwrap();
        let read = Files::Given(files).read(Path::new("config.json"));
        expect_kind(
            read,
            ErrorKind::OutOfMemory,
            "config.json: its 18446744073709551615 bytes",
        );
    }
}
