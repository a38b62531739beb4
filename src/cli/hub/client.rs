//! HTTP requests to the hub and to its redirect targets: addresses, the token, redirects, proxies, certificates, and the
//! meaning of error responses. Knows nothing of caches or models.

use std::io::Read;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use NVFP4::base::error::err;
use NVFP4::base::{Result, env};
use rustls::pki_types::CertificateDer;
use ureq::config::Config;
use ureq::http::{HeaderMap, Response};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{
    ConnectProxyConnector, Connector, SocksConnector, TcpConnector,
};
use ureq::{Agent, Body};
use url::Url;

use super::certificate::Tls;
use super::failure::{Failure, Patience, Tried};
use super::settings::{self, Token};

const USER_AGENT: &str = concat!("nvfp4/", env!("CARGO_PKG_VERSION"));

const MOST_REDIRECTS: usize = 8;

/// Maximum bytes of a list of files; more than a repository of a hundred thousand files needs.
const LONGEST_LIST: u64 = 256 << 20;

/// The longest time that connecting may take.
const LONGEST_CONNECT: Duration = Duration::from_secs(15);

/// Maximum bytes of an error response that are read for its message.
const LONGEST_WORDS: u64 = 64 << 10;

/// A client of one hub.
pub(super) struct Client {
    direct: Agent,
    http_proxy: Option<Agent>,
    https_proxy: Option<Agent>,
    endpoint: Url,
    token: Option<Token>,
    pub(super) patience: Patience,
}

/// A request without a body.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Method {
    Get,
    Head,
}

/// A successful response with an unread body.
pub(super) struct Answer {
    pub(super) status: u16,
    headers: HeaderMap,
    /// Headers of the hub's own responses before redirects: those of other hosts describe their own storage.
    of_hub: HeaderMap,
    /// The host that sent the final response.
    pub(super) url: Url,
    body: Body,
}

/// The subject of a request, for messages.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    /// `ORG/NAME`.
    pub(super) repo: &'a str,
    pub(super) revision: &'a str,
    /// "asking for the list of files", "fetching model.safetensors".
    pub(super) action: &'a str,
}

impl Client {
    /// A client of the hub that the environment names. Makes no request. The hub may be silent for `timeout`.
    pub(super) fn new(timeout: Duration) -> Result<Client> {
        let direct = agent(None)?;
        let proxied = |scheme| -> Result<Option<Agent>> {
            settings::proxy(scheme)?
                .map(|proxy| agent(Some(proxy)))
                .transpose()
        };
        Ok(Client {
            direct,
            http_proxy: proxied("http")?,
            https_proxy: proxied("https")?,
            endpoint: settings::endpoint()?,
            token: settings::token()?,
            patience: Patience::new(timeout),
        })
    }

    /// An address of the hub: `segments` after the endpoint's own path, each encoded.
    pub(super) fn address<'a>(&self, segments: impl IntoIterator<Item = &'a str>) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    /// Sends a request and follows redirects. `range` is the first and the last requested byte. The token is sent only to the hub.
    pub(super) fn open(
        &self,
        url: &Url,
        method: Method,
        range: Option<(u64, u64)>,
        subject: Subject<'_>,
    ) -> Tried<Answer> {
        let mut url = url.clone();
        let mut of_hub = HeaderMap::new();
        for _ in 0..=MOST_REDIRECTS {
            let response = self.send(&url, method, range)?;
            let status = response.status().as_u16();
            let (parts, body) = response.into_parts();
            if url.origin() == self.endpoint.origin() {
                of_hub.extend(parts.headers.clone());
            }
            let mut answer = Answer {
                status,
                headers: parts.headers,
                of_hub,
                url,
                body,
            };
            let target = match status {
                301 | 302 | 303 | 307 | 308 => answer.header("location").map(str::to_owned),
                200..=299 => return Ok(answer),
                _ => return Err(self.refusal(answer, subject)),
            };
            let Some(target) = target else {
                return Err(self.refusal(answer, subject));
            };
            // A connection can be reused after its response was read to the end.
            let _ = answer.words();
            url = redirected(&answer.url, &target)?;
            of_hub = answer.of_hub;
        }
        Err(Failure::Final(err!(
            Io,
            "{}: {}: more than {MOST_REDIRECTS} redirects",
            subject.repo,
            subject.action
        )))
    }

    fn send(&self, url: &Url, method: Method, range: Option<(u64, u64)>) -> Tried<Response<Body>> {
        let agent = self.agent(url);
        let wait = self.patience.wait(Instant::now());
        let connect = wait.min(LONGEST_CONNECT);
        let mut request = match method {
            Method::Get => agent.get(url.as_str()),
            Method::Head => agent.head(url.as_str()),
        }
        .config()
        .timeout_resolve(Some(connect))
        .timeout_connect(Some(connect))
        .timeout_recv_response(Some(wait))
        .timeout_per_read(Some(wait))
        .build();
        if let Some((first, last)) = range {
            request = request.header("Range", format!("bytes={first}-{last}"));
        }
        if let Some(token) = &self.token
            && url.origin() == self.endpoint.origin()
        {
            request = request.header("Authorization", format!("Bearer {}", token.secret));
        }
        request.call().map_err(|e| {
            broken(
                url.host_str().unwrap_or_default(),
                &e,
                self.patience.timeout(),
            )
        })
    }

    fn agent(&self, url: &Url) -> &Agent {
        let proxied = match url.scheme() {
            "https" => &self.https_proxy,
            _ => &self.http_proxy,
        };
        let host = url.host_str().unwrap_or_default();
        match proxied {
            Some(agent)
                if !env::proxy_exceptions().is_some_and(|e| settings::needs_no_proxy(host, &e)) =>
            {
                agent
            }
            _ => &self.direct,
        }
    }

    /// Converts a response other than success or a redirect to a failure.
    fn refusal(&self, mut answer: Answer, subject: Subject<'_>) -> Failure {
        let Subject {
            repo,
            revision,
            action,
        } = subject;
        let status = answer.status;
        let wait = answer.wait();
        let code = answer.header("x-error-code").unwrap_or_default().to_owned();
        let host = answer.url.host_str().unwrap_or_default().to_owned();
        let is_hub = answer.url.origin() == self.endpoint.origin();
        let words = answer.words();
        let said = match words.is_empty() {
            true => String::new(),
            false => format!(": {words}"),
        };
        if matches!(status, 408 | 425 | 429 | 500..600) {
            let reason = format!("{repo}: {action}: {host} answers {status}{said}");
            return Failure::Refused { reason, wait };
        }
        if !is_hub {
            return Failure::Final(err!(Io, "{repo}: {action}: {host} answers {status}{said}"));
        }
        let place = format!("{}/{repo}", self.endpoint.as_str().trim_end_matches('/'));
        Failure::Final(match (code.as_str(), status, &self.token) {
            ("GatedRepo", _, None) => err!(
                Io,
                "{repo} is gated: ask for access at {place}, then set HF_TOKEN to a token of your account; no token was found"
            ),
            ("GatedRepo", _, Some(token)) => err!(
                Io,
                "{repo} is gated, and the account of the token in {} has no access; ask for it at {place}{said}",
                token.origin
            ),
            (_, 401, Some(token)) if code != "RepoNotFound" => err!(
                Io,
                "{repo}: {action}: the hub does not know the token in {}; it may have expired{said}",
                token.origin
            ),
            ("RevisionNotFound", ..) => err!(NotFound, "{repo} has no revision '{revision}'"),
            ("EntryNotFound", ..) => {
                err!(
                    NotFound,
                    "{repo} ({revision}): {action}: the hub has no such file"
                )
            }
            ("RepoNotFound", _, None) | (_, 401, None) => err!(
                NotFound,
                "the hub has no model {repo}, or shows it to some alone; no token was found (HF_TOKEN)"
            ),
            ("RepoNotFound", _, Some(token)) => err!(
                NotFound,
                "the hub has no model {repo} that the token in {} may see",
                token.origin
            ),
            (_, 404 | 410, _) => err!(
                NotFound,
                "{repo} ({revision}): {action}: {host} has no such model, file or revision"
            ),
            _ => err!(Io, "{repo}: {action}: {host} answers {status}{said}"),
        })
    }
}

impl Answer {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok().map(str::trim)
    }

    /// A header of the hub's own responses.
    pub(super) fn header_of_hub(&self, name: &str) -> Option<&str> {
        self.of_hub.get(name)?.to_str().ok().map(str::trim)
    }

    /// The body's length, from its header.
    pub(super) fn length(&self) -> Option<u64> {
        self.header("content-length")?.parse().ok()
    }

    /// The encoding of the body, if it has one.
    pub(super) fn encoding(&self) -> Option<&str> {
        self.header("content-encoding")
            .filter(|e| !e.is_empty() && !e.eq_ignore_ascii_case("identity"))
    }

    /// The decoded body. The client asks for uncompressed responses, but a proxy may compress them all the same.
    pub(super) fn into_reader(self) -> Tried<Box<dyn Read>> {
        let encoding = self.encoding().map(str::to_ascii_lowercase);
        let host = self.url.host_str().unwrap_or_default().to_owned();
        let plain = self.body.into_with_config().limit(u64::MAX).reader();
        match encoding.as_deref() {
            None => Ok(Box::new(plain)),
            Some("gzip" | "x-gzip") => Ok(Box::new(flate2::read::MultiGzDecoder::new(plain))),
            Some(other) => Err(Failure::Final(err!(
                Unsupported,
                "{host} sends its answer encoded as '{other}', though it was asked for a plain one"
            ))),
        }
    }

    /// The whole body of a short response.
    pub(super) fn bytes(self, patience: Duration) -> Tried<Vec<u8>> {
        let host = self.url.host_str().unwrap_or_default().to_owned();
        let mut bytes = Vec::new();
        self.into_reader()?
            .take(LONGEST_LIST)
            .read_to_end(&mut bytes)
            .map_err(|e| cut(&host, e, patience))?;
        Ok(bytes)
    }

    /// The wait that the server asks for, in seconds: `Retry-After`, or the rest of the window in `RateLimit`.
    fn wait(&self) -> Option<Duration> {
        let seconds = match self.header("retry-after") {
            Some(text) => text.parse().ok(),
            None => self
                .header("ratelimit")
                .filter(|limit| limit.contains("r=0"))
                .and_then(|limit| limit.split("t=").nth(1))
                .and_then(|rest| {
                    rest.split(|c: char| !c.is_ascii_digit())
                        .next()?
                        .parse()
                        .ok()
                }),
        };
        seconds.map(Duration::from_secs)
    }

    /// The server's message for people, as one short line: from a header, JSON, or plain text.
    fn words(&mut self) -> String {
        let mut body = Vec::new();
        let mut reader = self.body.as_reader().take(LONGEST_WORDS);
        // A message that is cut off is still a message.
        let _ = reader.read_to_end(&mut body);
        let kind = self.header("content-type").unwrap_or_default();
        let words = match self.header("x-error-message") {
            Some(message) => message.to_owned(),
            None if kind.starts_with("application/json") => {
                let json: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
                json["error"].as_str().unwrap_or_default().to_owned()
            }
            None if kind.starts_with("text/plain") => String::from_utf8_lossy(&body).into_owned(),
            None => String::new(),
        };
        let words: Vec<&str> = words.split_whitespace().collect();
        words.join(" ").chars().take(300).collect()
    }
}

fn agent(proxy: Option<ureq::Proxy>) -> Result<Agent> {
    let config = Config::builder()
        .user_agent(USER_AGENT)
        // The hub's servers ignore ranges for clients that accept compressed responses.
        .accept_encoding("identity")
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(proxy)
        .tls_config(TlsConfig::builder().root_certs(RootCerts::WebPki).build())
        .build();
    if TRUSTED.is_empty() {
        // Falls back to Mozilla's list of authorities.
        return Ok(config.into());
    }
    let connector = <SocksConnector as Connector<()>>::chain(
        SocksConnector::default(),
        ConnectProxyConnector::default(),
    )
    .chain(TcpConnector::default())
    .chain(Tls::new(&TRUSTED)?);
    Ok(Agent::with_parts(
        config,
        connector,
        DefaultResolver::default(),
    ))
}

/// The certificates that the system trusts, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
static TRUSTED: LazyLock<Vec<CertificateDer<'static>>> =
    LazyLock::new(|| rustls_native_certs::load_native_certs().certs);

fn redirected(from: &Url, to: &str) -> Result<Url> {
    let wrong = |reason: &str| {
        err!(
            Io,
            "{} redirects to '{to}', {reason}",
            from.host_str().unwrap_or_default()
        )
    };
    let url = from.join(to).map_err(|e| wrong(&e.to_string()))?;
    match url.scheme() {
        "https" => Ok(url),
        "http" if from.scheme() == "http" => Ok(url),
        "http" => Err(wrong("which is not encrypted")),
        _ => Err(wrong("which is no address on the web")),
    }
}

/// The failure if `host` did not respond.
fn broken(host: &str, error: &ureq::Error, patience: Duration) -> Failure {
    let silent = |reason: String, waited| Failure::Silent { reason, waited };
    match error {
        ureq::Error::Timeout(_) => silent(
            format!("{host} did not answer within {} s", patience.as_secs_f32()),
            true,
        ),
        ureq::Error::HostNotFound => silent(format!("{host} cannot be found"), false),
        ureq::Error::ConnectionFailed => silent(format!("{host} takes no connection"), false),
        ureq::Error::Rustls(e) => refused_certificate(host, &e.to_string()),
        // Verifying certificates reports through the input and output of the connection.
        ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::InvalidData => {
            refused_certificate(host, &e.to_string())
        }
        ureq::Error::Io(e) => silent(format!("{host}: {e}"), false),
        ureq::Error::ConnectProxyFailed(said) => {
            Failure::Final(err!(Io, "the proxy does not connect to {host}: {said}"))
        }
        other => Failure::Final(err!(Io, "{host}: {other}")),
    }
}

fn refused_certificate(host: &str, reason: &str) -> Failure {
    Failure::Final(err!(
        Io,
        "{host}: no encrypted connection: {reason}; SSL_CERT_FILE names a file of certificates to trust, such as a company's own"
    ))
}

/// The failure if a response of `host` broke off.
pub(super) fn cut(host: &str, error: std::io::Error, patience: Duration) -> Failure {
    let is_timeout = error.kind() == std::io::ErrorKind::TimedOut
        || matches!(
            error.get_ref().and_then(|e| e.downcast_ref()),
            Some(ureq::Error::Timeout(_))
        );
    let reason = match is_timeout {
        true => format!("{host} sent nothing for {} s", patience.as_secs_f32()),
        false => format!("the answer of {host} broke off: {error}"),
    };
    match is_timeout {
        true => Failure::Stalled { reason },
        false => Failure::Broken { reason },
    }
}
