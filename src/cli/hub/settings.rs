//! Settings of the hub from the environment: its address, token, proxy and cache folder.

use std::path::PathBuf;

use NVFP4::base::error::{bail, err};
use NVFP4::base::{Error, Result, env};
use url::Url;

/// The default of `HF_ENDPOINT`.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// An access token, and where it was found. It has no `Debug`, so that no message shows it by accident.
pub(super) struct Token {
    pub(super) secret: String,
    /// A variable, or a file.
    pub(super) origin: String,
}

/// The hub's address, without a slash at the end.
pub(in crate::cli) fn endpoint() -> Result<Url> {
    let Some(text) = env::hf_endpoint() else {
        return parse(DEFAULT_ENDPOINT);
    };
    parse(text.trim_end_matches('/'))
}

fn parse(text: &str) -> Result<Url> {
    let wrong = |reason: &dyn std::fmt::Display| {
        err!(
            InvalidArgument,
            "HF_ENDPOINT is '{text}': {reason}; it takes an address as in {DEFAULT_ENDPOINT}"
        )
    };
    let url = Url::parse(text).map_err(|e| wrong(&e))?;
    if !["http", "https"].contains(&url.scheme()) || url.host_str().is_none() {
        return Err(wrong(&"neither http nor https"));
    }
    Ok(url)
}

/// The token to send to the hub, if there is one.
pub(super) fn token() -> Result<Option<Token>> {
    let found = match env::hf_token() {
        Some((secret, variable)) => Some((secret, variable.to_owned())),
        None => match env::hf_token_path() {
            Some(path) => match std::fs::read_to_string(&path) {
                Ok(text) => Some((text.trim().to_owned(), path.display().to_string())),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
                Err(e) => {
                    return Err(Error::io(
                        format_args!("reading the token in {}", path.display()),
                        e,
                    ));
                }
            },
            None => None,
        },
    };
    let Some((secret, origin)) = found.filter(|(secret, _)| !secret.is_empty()) else {
        return Ok(None);
    };
    if !secret.bytes().all(|b| b.is_ascii_graphic()) {
        bail!(
            InvalidArgument,
            "the token in {origin} holds blanks or characters that no token has"
        );
    }
    Ok(Some(Token { secret, origin }))
}

/// The folder of the cache.
pub(in crate::cli) fn cache() -> Result<PathBuf> {
    env::hf_hub_cache().ok_or_else(|| {
        err!(
            NotFound,
            "there is no home folder to keep models in; HF_HOME or HF_HUB_CACHE names one"
        )
    })
}

/// The proxy through which `url` is reached, if any.
pub(super) fn proxy(scheme: &str) -> Result<Option<ureq::Proxy>> {
    let Some(address) = env::proxy(scheme) else {
        return Ok(None);
    };
    let address = match address.contains("://") {
        true => address,
        false => format!("http://{address}"),
    };
    match ureq::Proxy::new(&address) {
        Ok(proxy) => Ok(Some(proxy)),
        // The address may hold a password, so it is not shown.
        Err(_) => bail!(
            InvalidArgument,
            "{scheme}_proxy (or all_proxy) is no proxy's address, which would be as in http://proxy.example:3128"
        ),
    }
}

/// Whether `host` is reached without a proxy: `no_proxy` names it, or a domain that it is in, or `*`.
pub(super) fn needs_no_proxy(host: &str, exceptions: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    exceptions.split(',').map(str::trim).any(|exception| {
        let domain = exception
            .trim_start_matches(['*', '.'])
            .trim_matches(['[', ']']);
        let at = host.len().checked_sub(domain.len());
        exception == "*"
            || !domain.is_empty()
                && at.is_some_and(|at| {
                    host.is_char_boundary(at)
                        && host[at..].eq_ignore_ascii_case(domain)
                        && (at == 0 || host.as_bytes()[at - 1] == b'.')
                })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_without_a_proxy() {
        let list = "localhost, 127.0.0.1 ,.example.com,*.internal,::1";
        for host in [
            "localhost",
            "127.0.0.1",
            "example.com",
            "Hub.Example.com",
            "a.b.internal",
            "[::1]",
        ] {
            assert!(needs_no_proxy(host, list), "{host}");
        }
        for host in [
            "huggingface.co",
            "notexample.com",
            "1127.0.0.1",
            "internal.net",
        ] {
            assert!(!needs_no_proxy(host, list), "{host}");
        }
        assert!(needs_no_proxy("anything", "*"));
        assert!(!needs_no_proxy("anything", ""));
        assert!(!needs_no_proxy("anything", "a,,*.b"));
    }

    #[test]
    fn addresses_of_hubs() {
        assert_eq!(
            parse("https://hub.example").unwrap().as_str(),
            "https://hub.example/"
        );
        for bad in ["hub.example", "ftp://hub.example", "http://", "file:///x"] {
            let message = parse(bad).unwrap_err().message().to_owned();
            assert!(message.contains(&format!("'{bad}'")), "{message}");
        }
    }
}
