//! Encrypted connections whose server may show a certificate that the user trusts by itself: one that signed itself, or whose issuer
//! nobody trusts. Browsers, curl and OpenSSL take such a certificate where it is among the trusted ones; webpki refuses it where it
//! says that it is an authority, as those do that `openssl req -x509` makes.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::sync::Arc;

use NVFP4::base::error::err;
use NVFP4::base::{Error, Result};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    ALL_VERSIONS, CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct,
    RootCertStore, SignatureScheme, StreamOwned,
};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport,
    TransportAdapter,
};

/// DER's tags, as they occur in certificates.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const TIME: u8 = 0x18;
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
/// DER's numbers of the extension with a certificate's names, and of the common name of its subject.
const SUBJECT_NAMES: &[u8] = &[0x55, 0x1d, 0x11];
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// Speaks TLS on connections that need it.
#[derive(Debug)]
pub(super) struct Tls(Arc<ClientConfig>);

impl Tls {
    /// With these trusted certificates.
    pub(super) fn new(trusted: &[CertificateDer<'static>]) -> Result<Tls> {
        let failed = |e: &dyn fmt::Display| -> Error { err!(Io, "trusted certificates: {e}") };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted.iter().cloned());
        let chains = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .build()
            .map_err(|e| failed(&e))?;
        let verifier = Verifier {
            chains,
            trusted: trusted.to_vec(),
        };
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(ALL_VERSIONS)
            .map_err(|e| failed(&e))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        Ok(Tls(Arc::new(config)))
    }
}

impl<In: Transport> Connector<In> for Tls {
    type Out = Either<In, TlsTransport>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> std::result::Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else {
            return Ok(None);
        };
        if !details.needs_tls() || transport.is_tls() {
            return Ok(Some(Either::A(transport)));
        }
        let host = details.uri.host().unwrap_or_default();
        let name = ServerName::try_from(host.trim_matches(['[', ']']))
            .map_err(|_| ureq::Error::Tls("the host's name is none"))?
            .to_owned();
        let mut connection = ClientConnection::new(self.0.clone(), name)?;
        let boxed: Box<dyn Transport> = Box::new(transport);
        let mut socket = TransportAdapter::new(boxed, details.current_time.clone());
        socket.set_timeout(details.timeout);
        connection.complete_io(&mut socket)?;
        Ok(Some(Either::B(TlsTransport {
            buffers: LazyBuffers::new(
                details.config.input_buffer_size(),
                details.config.output_buffer_size(),
            ),
            stream: StreamOwned::new(connection, socket),
        })))
    }
}

/// An encrypted connection.
pub(super) struct TlsTransport {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter>,
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlsTransport({:?})", self.stream.sock.inner())
    }
}

impl Transport for TlsTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(
        &mut self,
        amount: usize,
        timeout: NextTimeout,
    ) -> std::result::Result<(), ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        self.stream.write_all(&self.buffers.output()[..amount])?;
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> std::result::Result<bool, ureq::Error> {
        self.stream.sock.set_timeout(timeout);
        let amount = self.stream.read(self.buffers.input_append_buf())?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}

/// Accepts what a chain leads from to a trusted certificate, and trusted certificates themselves.
#[derive(Debug)]
struct Verifier {
    chains: Arc<WebPkiServerVerifier>,
    trusted: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let chained = self.chains.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        if chained.is_err() && self.trusted.iter().any(|t| t[..] == end_entity[..]) {
            verify_trusted(end_entity, server_name, now)?;
            return Ok(ServerCertVerified::assertion());
        }
        chained
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.chains
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.chains
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

/// Checks the dates and the name of a trusted certificate. One without any other name is its subject's common name's, as for curl.
fn verify_trusted(
    certificate: &CertificateDer<'_>,
    host: &ServerName<'_>,
    now: UnixTime,
) -> std::result::Result<(), rustls::Error> {
    let Some(facts) = Facts::of(certificate) else {
        return Err(CertificateError::BadEncoding.into());
    };
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    if now < facts.first {
        return Err(CertificateError::NotValidYet.into());
    }
    if now > facts.last {
        return Err(CertificateError::Expired.into());
    }
    let named = verify_server_name(&ParsedCertificate::try_from(certificate)?, host);
    match facts.common_name {
        Some(name) if named.is_err() && !facts.is_named && fits(&name, &host.to_str()) => Ok(()),
        _ => named,
    }
}

/// Whether a certificate's name, which may begin with `*.` for any one label, is that of the host.
fn fits(name: &str, host: &str) -> bool {
    match (name.strip_prefix("*."), host.split_once('.')) {
        (Some(domain), Some((_, rest))) => {
            domain.contains('.')
                && host.parse::<std::net::IpAddr>().is_err()
                && domain.eq_ignore_ascii_case(rest)
        }
        _ => name.eq_ignore_ascii_case(host),
    }
}

/// Facts about a certificate that webpki does not give.
#[derive(Debug, PartialEq)]
struct Facts {
    /// The seconds since 1970 from which, and until which, it is valid.
    first: i64,
    last: i64,
    common_name: Option<String>,
    /// Whether it has the extension that names hosts.
    is_named: bool,
}

impl Facts {
    fn of(certificate: &[u8]) -> Option<Facts> {
        let mut fields = Der(Der(Der(certificate).tagged(SEQUENCE)?).tagged(SEQUENCE)?);
        if fields.0.first() == Some(&VERSION) {
            fields.next()?;
        }
        // The serial number, the algorithm and the issuer.
        for _ in 0..3 {
            fields.next()?;
        }
        let mut validity = Der(fields.tagged(SEQUENCE)?);
        let (first, last) = (seconds(validity.next()?)?, seconds(validity.next()?)?);
        let mut common_name = None;
        let mut subject = Der(fields.tagged(SEQUENCE)?);
        while let Some((SET, set)) = subject.next() {
            let mut attribute = Der(Der(set).tagged(SEQUENCE)?);
            if attribute.tagged(OBJECT)? == COMMON_NAME {
                let (_, text) = attribute.next()?;
                common_name = String::from_utf8(text.to_vec()).ok();
            }
        }
        let mut is_named = false;
        while let Some((tag, content)) = fields.next() {
            if tag != EXTENSIONS {
                continue;
            }
            let mut extensions = Der(Der(content).tagged(SEQUENCE)?);
            while let Some((SEQUENCE, extension)) = extensions.next() {
                is_named |= Der(extension).tagged(OBJECT)? == SUBJECT_NAMES;
            }
        }
        Some(Facts {
            first,
            last,
            common_name,
            is_named,
        })
    }
}

/// Elements of DER, one after the other.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The next one's tag and content.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&length, mut rest) = rest.split_first()?;
        let mut bytes = usize::from(length);
        if length >= 0x80 {
            let (digits, after) = rest.split_at_checked(usize::from(length & 0x7f))?;
            if digits.len() > 4 {
                return None;
            }
            bytes = digits.iter().fold(0, |sum, &d| sum << 8 | usize::from(d));
            rest = after;
        }
        let (content, rest) = rest.split_at_checked(bytes)?;
        self.0 = rest;
        Some((tag, content))
    }

    /// The next one's content, if it has this tag.
    fn tagged(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next().filter(|(t, _)| *t == tag).map(|(_, c)| c)
    }
}

/// The seconds since 1970 of a time, `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`.
fn seconds((tag, text): (u8, &[u8])) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let digits = if tag == UTC_TIME { 2 } else { 4 };
    if !matches!(tag, UTC_TIME | TIME)
        || text.len() != digits + 10
        || !text.bytes().all(|b| b.is_ascii_digit())
    {
        return None;
    }
    let (year, rest) = text.split_at(digits);
    let part = |at: usize| rest[at..at + 2].parse::<i64>().ok();
    let year: i64 = match (tag, year.parse().ok()?) {
        (UTC_TIME, year @ 50..) => 1900 + year,
        (UTC_TIME, year) => 2000 + year,
        (_, year) => year,
    };
    let (month, day) = (part(0)?, part(2)?);
    // Years that begin in March have their leap day at the end.
    let (y, m) = match month {
        1 | 2 => (year - 1, month + 9),
        _ => (year, month - 3),
    };
    let days =
        365 * y + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) + (153 * m + 2) / 5 + day
            - 1
            - 719_468;
    Some(86_400 * days + 3600 * part(4)? + 60 * part(6)? + part(8)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        let utc = |text: &str| seconds((UTC_TIME, text.as_bytes()));
        let time = |text: &str| seconds((TIME, text.as_bytes()));
        assert_eq!(utc("700101000000Z"), Some(0));
        assert_eq!(utc("240229120001Z"), Some(1_709_208_001));
        assert_eq!(utc("491231235959Z"), Some(2_524_607_999));
        assert_eq!(utc("500101000000Z"), Some(-631_152_000));
        assert_eq!(time("20500101000000Z"), Some(2_524_608_000));
        assert_eq!(time("99991231235959Z"), Some(253_402_300_799));
        for wrong in ["", "Z", "2402291200Z", "24022912000xZ", "240229120001"] {
            assert_eq!(utc(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn names_of_hosts() {
        assert!(fits("Hub.Example", "hub.example") && fits("127.0.0.1", "127.0.0.1"));
        assert!(fits("*.hub.example", "a.hub.example"));
        for (name, host) in [
            ("*.hub.example", "hub.example"),
            ("*.hub.example", "a.b.hub.example"),
            ("*.example", "hub.example"),
            ("*.0.0.1", "127.0.0.1"),
            ("hub.example", "hub.example.org"),
        ] {
            assert!(!fits(name, host), "{name} {host}");
        }
    }

    #[test]
    fn what_is_no_certificate_has_no_facts() {
        for bytes in [
            &[][..],
            &[0x30],
            &[0x30, 0x85, 1, 1, 1, 1, 1],
            &[0x30, 3, 0x30, 1, 2],
        ] {
            assert_eq!(Facts::of(bytes), None);
        }
        let mut der = Der(&[OBJECT, 0x81, 2, 7, 8, 0x05, 0]);
        assert_eq!(der.next(), Some((OBJECT, &[7, 8][..])));
        assert_eq!(der.next(), Some((0x05, &[][..])));
        assert_eq!(der.next(), None);
    }
}
