//! The list of files of a repository at one commit: the hub's response, and its form in the cache of Python's
//! huggingface_hub.

use std::collections::BTreeMap;

use NVFP4::base::Result;
use NVFP4::base::error::{bail, err};
use serde_json::{Map, Value, json};

use super::name::is_inside;

/// The files of a repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listing {
    /// The commit: 40 hexadecimal digits on the hub; whatever a mirror calls it.
    pub(super) commit: String,
    /// By their path in the repository, without paths that lead out of it.
    pub(super) files: BTreeMap<String, Entry>,
}

/// The known properties of a file before it is fetched. Mirrors may provide none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) size: Option<u64>,
    /// Git's name for it: the SHA-1 of a header and the content, or of a pointer to large content.
    git: Option<String>,
    /// The SHA-256 of large content.
    sha256: Option<String>,
    /// The hash of large content in the hub's Xet storage, kept for Python.
    xet: Option<String>,
}

/// The expected digest of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Digest {
    Sha256(String),
    /// The SHA-1 of `blob LENGTH`, a zero byte and the content.
    Git(String),
}

impl Digest {
    /// The digest in the name of a blob, if it is one: names are ETags of the hub.
    pub(super) fn of_name(name: &str) -> Option<Digest> {
        let is_hex = name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match name.len() {
            64 if is_hex => Some(Digest::Sha256(name.to_owned())),
            40 if is_hex => Some(Digest::Git(name.to_owned())),
            _ => None,
        }
    }
}

impl Entry {
    /// The name of the blob in the cache, if the hub's list has it.
    pub(super) fn blob(&self) -> Option<&str> {
        self.sha256.as_deref().or(self.git.as_deref())
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

impl Listing {
    /// Parses the hub's response about `repo`.
    pub(super) fn from_answer(repo: &str, answer: &[u8]) -> Result<Listing> {
        let json: Value = serde_json::from_slice(answer)
            .map_err(|e| err!(Io, "{repo}: the hub's list of files is no JSON: {e}"))?;
        let (Some(commit), Some(siblings)) = (json["sha"].as_str(), json["siblings"].as_array())
        else {
            bail!(
                Io,
                "{repo}: the hub's answer names no commit ('sha') or no files ('siblings')"
            );
        };
        if !is_inside(commit) || commit.contains('/') {
            bail!(Io, "{repo}: the hub calls its commit '{commit}'");
        }
        let files = siblings
            .iter()
            .filter_map(|file| {
                let lfs = &file["lfs"];
                let entry = Entry {
                    size: lfs["size"].as_u64().or(file["size"].as_u64()),
                    git: text(&file["blobId"]),
                    sha256: text(&lfs["sha256"]),
                    xet: text(&file["xetHash"]),
                };
                Some((file["rfilename"].as_str()?, entry))
            })
            .filter(|(name, _)| is_inside(name))
            .map(|(name, entry)| (name.to_owned(), entry))
            .collect();
        Ok(Listing {
            commit: commit.to_owned(),
            files,
        })
    }

    /// Parses the list in the cache for `commit`; `None` if it is of another version or broken.
    pub(super) fn from_cache(commit: &str, content: &[u8]) -> Option<Listing> {
        let json: Value = serde_json::from_slice(content).ok()?;
        if json["format_version"] != 1 {
            return None;
        }
        let files = json["files"]
            .as_object()?
            .iter()
            .filter(|(name, _)| is_inside(name))
            .map(|(name, file)| {
                let entry = Entry {
                    size: file["size"].as_u64(),
                    git: text(&file["blob_id"]),
                    sha256: text(&file["lfs_sha256"]),
                    xet: text(&file["xet_hash"]),
                };
                (name.clone(), entry)
            })
            .collect();
        Some(Listing {
            commit: commit.to_owned(),
            files,
        })
    }

    /// The list for the cache; `None` if the hub's response lacks what other programs need to read it.
    pub(super) fn to_cache(&self) -> Option<Vec<u8>> {
        let mut files = Map::new();
        for (name, entry) in &self.files {
            let mut file = json!({"size": entry.size?, "blob_id": entry.git.as_ref()?});
            if let Some(sha256) = &entry.sha256 {
                file["lfs_sha256"] = json!(sha256);
                file["lfs_size"] = json!(entry.size);
            }
            if let Some(xet) = &entry.xet {
                file["xet_hash"] = json!(xet);
            }
            files.insert(name.clone(), file);
        }
        serde_json::to_vec_pretty(&json!({"format_version": 1, "files": files})).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &[u8] = br#"{"sha": "abc", "siblings": [
        {"rfilename": "config.json", "size": 7, "blobId": "1111111111111111111111111111111111111111"},
        {"rfilename": "m.safetensors", "size": 9, "blobId": "22", "lfs": {"sha256": "ff", "size": 9, "pointerSize": 134}},
        {"rfilename": "../evil", "size": 1, "blobId": "33"}, {"rfilename": "/etc/evil", "size": 1, "blobId": "33"}]}"#;

    #[test]
    fn lists_survive_the_cache() {
        let listing = Listing::from_answer("a/b", ANSWER).unwrap();
        assert_eq!(listing.files.len(), 2);
        assert_eq!(listing.files["m.safetensors"].blob(), Some("ff"));
        assert_eq!(
            Digest::of_name(listing.files["config.json"].blob().unwrap()),
            Some(Digest::Git("1".repeat(40)))
        );
        let kept = listing.to_cache().unwrap();
        assert_eq!(Listing::from_cache("abc", &kept), Some(listing));
        assert_eq!(Listing::from_cache("abc", b"{\"format_version\": 2}"), None);
        assert_eq!(Listing::from_cache("abc", b"{"), None);
    }

    #[test]
    fn mirrors_tell_names_alone() {
        let answer = br#"{"sha": "abc", "siblings": [{"rfilename": "config.json"}]}"#;
        let listing = Listing::from_answer("a/b", answer).unwrap();
        assert_eq!(listing.files["config.json"], Entry::default());
        assert_eq!(listing.to_cache(), None);
    }

    #[test]
    fn answers_that_are_none() {
        for bad in [
            &b"<html>"[..],
            b"{}",
            br#"{"sha": "abc"}"#,
            br#"{"sha": "../x", "siblings": []}"#,
        ] {
            let error = Listing::from_answer("a/b", bad).unwrap_err();
            assert!(error.message().starts_with("a/b: the hub"), "{error}");
        }
    }
}
