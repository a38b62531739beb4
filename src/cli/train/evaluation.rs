//! The evaluation sets of `--eval`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use NVFP4::base::Result;
use NVFP4::base::error::bail;

use super::options::Args;

/// The name of the set of unnamed files, and of the rows that `--eval-share` sets aside.
pub(super) const UNNAMED: &str = "eval";

impl Args {
    /// The evaluation sets by name, in the order given, except that the set that decides for `--best` comes first.
    pub(super) fn evaluation_sets(&self) -> Result<Vec<(String, Vec<PathBuf>)>> {
        let mut sets: Vec<(String, Vec<PathBuf>)> = Vec::new();
        for value in &self.eval {
            let (name, file) = named(value);
            match sets.iter_mut().find(|(known, _)| known == name) {
                Some((_, files)) => files.push(file),
                None => sets.push((name.to_owned(), vec![file])),
            }
        }
        if let Some(best) = self.best.as_ref().filter(|best| !best.is_empty()) {
            let names = || sets.iter().map(|(name, _)| name.as_str());
            match names().position(|name| name == best) {
                Some(i) => sets[..=i].rotate_right(1),
                None if self.eval_share.is_some() && best == UNNAMED => {}
                None => bail!(
                    InvalidArgument,
                    "--best {best}: there is no evaluation set of this name; there are {}",
                    match sets.is_empty() {
                        true => UNNAMED.to_owned(),
                        false => names().collect::<Vec<_>>().join(", "),
                    }
                ),
            }
        }
        Ok(sets)
    }
}

/// The set and the file of a value: `NAME=FILE`, unless a file with that whole name exists.
fn named(value: &OsStr) -> (&str, PathBuf) {
    let bytes = value.as_bytes();
    let split = bytes.iter().position(|&b| b == b'=');
    let is_name = |name: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !name.is_empty() && name.chars().all(plain)
    };
    let name = split.and_then(|at| std::str::from_utf8(&bytes[..at]).ok());
    match name.filter(is_name).filter(|_| !Path::new(value).exists()) {
        Some(name) => (name, OsStr::from_bytes(&bytes[name.len() + 1..]).into()),
        None => (UNNAMED, value.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sets_stand_before_their_files() {
        let of = |value: &'static str| named(OsStr::new(value));
        assert_eq!(of("a.tsv"), (UNNAMED, PathBuf::from("a.tsv")));
        assert_eq!(of("law=a=b.tsv"), ("law", PathBuf::from("a=b.tsv")));
        assert_eq!(of("./x=y"), ("eval", PathBuf::from("./x=y")).to_owned());
        assert_eq!(of("=y"), (UNNAMED, PathBuf::from("=y")));
    }
}
