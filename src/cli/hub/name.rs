//! Names of models on the hub, as people write and paste them.

use std::fmt;
use std::path::{Component, Path};

use NVFP4::base::Result;
use NVFP4::base::error::err;
use url::Url;

use super::settings;

/// A model on the hub: `ORG/NAME`, with `@REVISION` and `:PART` where given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Name {
    /// `ORG/NAME`.
    pub(super) repo: String,
    /// A branch, a tag, or a commit or the beginning of one, where given.
    given_revision: Option<String>,
    /// A part of the repository: a file, a folder, or a quantization as in `Q4_K_M`.
    pub(super) part: Option<String>,
}

/// The default revision.
const DEFAULT_REVISION: &str = "main";

/// Hosts of the hub's pages.
const HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];

impl Name {
    /// Reads `ORG/NAME[@REVISION][:PART]`, the same after `hf.co/` or `hf://`, or the address of a page of the hub or of
    /// `endpoint`; `None` if `text` cannot be a model's name.
    pub(in crate::cli) fn parse(text: &str, endpoint: &Url) -> Option<Name> {
        let text = text.trim();
        if text.starts_with("http://") || text.starts_with("https://") {
            return Name::from_page(&Url::parse(text).ok()?, endpoint);
        }
        let rest = match text.strip_prefix("hf://") {
            Some(rest) => rest.strip_prefix("models/").unwrap_or(rest),
            None => match text.split_once('/') {
                Some((host, _)) if HOSTS.contains(&host) => {
                    return Name::from_page(
                        &Url::parse(&format!("https://{text}")).ok()?,
                        endpoint,
                    );
                }
                _ => text,
            },
        };
        let (rest, part) = split(rest, ':');
        let (repo, revision) = split(rest, '@');
        let (org, name) = repo.split_once('/')?;
        Name::of(org, name, revision, part)
    }

    /// Parses a name like [`Name::parse`]. Fails if `text` is not a model's name.
    pub(in crate::cli) fn parse_or_explain(text: &str) -> Result<Name> {
        Name::parse(text, &settings::endpoint()?).ok_or_else(|| {
            err!(
                InvalidArgument,
                "'{text}' is no model of the hub; one is named ORG/NAME, as in Qwen/Qwen3-0.6B"
            )
        })
    }

    /// The model that a page is about: `/ORG/NAME`, or a file or folder of it by `/ORG/NAME/blob|resolve|raw|tree/REVISION/PATH`.
    fn from_page(page: &Url, endpoint: &Url) -> Option<Name> {
        let host = page.host_str()?;
        if !HOSTS.contains(&host) && endpoint.host_str() != Some(host) {
            return None;
        }
        let segments: Vec<String> = page
            .path_segments()?
            .map(decoded)
            .collect::<Option<Vec<_>>>()?;
        let segments: Vec<&str> = segments
            .iter()
            .map(String::as_str)
            .filter(|s| !s.is_empty())
            .collect();
        match segments[..] {
            [org, name] => {
                let (name, part) = split(name, ':');
                let (name, revision) = split(name, '@');
                Name::of(org, name, revision, part)
            }
            [
                org,
                name,
                "blob" | "resolve" | "raw" | "tree",
                revision,
                ref path @ ..,
            ] => {
                let part = path.join("/");
                let part = (!part.is_empty()).then_some(part.as_str());
                Name::of(org, name, Some(revision), part)
            }
            _ => None,
        }
    }

    fn of(org: &str, name: &str, revision: Option<&str>, part: Option<&str>) -> Option<Name> {
        let word = |w: &str| {
            !w.is_empty()
                && !w.starts_with('.')
                && w.chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let part = part.map(|p| p.trim_end_matches('/'));
        let inside = revision.is_none_or(is_inside) && part.is_none_or(is_inside);
        (word(org) && word(name) && inside).then(|| Name {
            repo: format!("{org}/{name}"),
            given_revision: revision.map(str::to_owned),
            part: part.map(str::to_owned),
        })
    }

    /// The revision, or the default one.
    pub(super) fn revision(&self) -> &str {
        self.given_revision.as_deref().unwrap_or(DEFAULT_REVISION)
    }

    /// Whether it names the whole repository, not a revision or a part of it.
    pub(super) fn is_whole(&self) -> bool {
        self.given_revision.is_none() && self.part.is_none()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        if self.revision() != DEFAULT_REVISION {
            write!(f, "@{}", self.revision())?;
        }
        match &self.part {
            Some(part) => write!(f, ":{part}"),
            None => Ok(()),
        }
    }
}

/// Whether `name` is a relative path that stays inside the directory that it is joined to.
pub(super) fn is_inside(name: &str) -> bool {
    !name.is_empty()
        && !name.contains(['\\', '\0'])
        && Path::new(name)
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
}

/// The text before a mark, and the text after it if there is one.
fn split(text: &str, mark: char) -> (&str, Option<&str>) {
    match text.split_once(mark) {
        Some((before, behind)) => (before, Some(behind)),
        None => (text, None),
    }
}

/// A segment of an address with `%XX` decoded.
fn decoded(segment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.as_bytes();
    while let [first, after @ ..] = rest {
        match (first, after) {
            (b'%', [high, low, after @ ..]) => {
                let digit = |d: u8| (d as char).to_digit(16);
                bytes.push((digit(*high)? * 16 + digit(*low)?) as u8);
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<(String, String, Option<String>)> {
        let endpoint = Url::parse("http://mirror.example:8080/hub").unwrap();
        Name::parse(text, &endpoint).map(|n| (n.repo.clone(), n.revision().to_owned(), n.part))
    }

    #[test]
    fn names_as_they_are_written_and_pasted() {
        let is = |text: &str, repo: &str, revision: &str, part: Option<&str>| {
            let expected = (
                repo.to_owned(),
                revision.to_owned(),
                part.map(str::to_owned),
            );
            assert_eq!(parse(text), Some(expected), "{text}");
        };
        let q = "Qwen/Qwen3-0.6B";
        is(q, q, "main", None);
        is("a/b@v1:c/d.gguf", "a/b", "v1", Some("c/d.gguf"));
        is("a/b@refs/pr/1", "a/b", "refs/pr/1", None);
        is("a/b:Q4_0", "a/b", "main", Some("Q4_0"));
        is("a/b:sub/folder/", "a/b", "main", Some("sub/folder"));
        is("hf.co/Qwen/Qwen3-0.6B", q, "main", None);
        is("hf.co/a/b:Q4_K_M", "a/b", "main", Some("Q4_K_M"));
        is("huggingface.co/a/b/", "a/b", "main", None);
        is("hf://a/b@v1", "a/b", "v1", None);
        is("hf://models/a/b", "a/b", "main", None);
        is("https://huggingface.co/Qwen/Qwen3-0.6B", q, "main", None);
        is(" https://hf.co/a/b?library=x#files\n", "a/b", "main", None);
        is("https://huggingface.co/a/b/tree/main", "a/b", "main", None);
        is(
            "https://huggingface.co/a/b/tree/v2/sub",
            "a/b",
            "v2",
            Some("sub"),
        );
        is(
            "https://huggingface.co/a/b/blob/main/x%20y/z%C3%BC.gguf",
            "a/b",
            "main",
            Some("x y/zü.gguf"),
        );
        is(
            "https://huggingface.co/a/b/resolve/main/m.gguf?download=true",
            "a/b",
            "main",
            Some("m.gguf"),
        );
        is("http://mirror.example:8080/a/b", "a/b", "main", None);
    }

    #[test]
    fn text_that_is_not_a_name() {
        for bad in [
            "",
            "a",
            "/a/b",
            "a/b/c",
            "./a",
            "../a",
            "a/",
            "a/..",
            "a/b:../c",
            "a/b:/etc/x",
            "a b/c",
            "a/b@../x",
            "a/b:",
            "a/b@",
            "a/b:x\\..\\y",
            "https://example.com/a/b",
            "https://huggingface.co/a",
            "https://huggingface.co/datasets/a/b",
            "https://huggingface.co/a/b/discussions/1",
            "https://huggingface.co/a/b/blob/main/%2e%2e/%2e%2e/x",
            "https://huggingface.co/%ff/b",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn names_print_as_they_are_written() {
        let endpoint = Url::parse("https://huggingface.co").unwrap();
        for text in ["a/b", "a/b@v1", "a/b:Q4_0", "a/b@v1:c/d.gguf"] {
            assert_eq!(Name::parse(text, &endpoint).unwrap().to_string(), text);
        }
    }
}
