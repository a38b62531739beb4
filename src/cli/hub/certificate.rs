//! TLS connections to servers with a certificate that the user trusts directly: self-signed, or from an untrusted issuer. Browsers, curl
//! and OpenSSL accept such a certificate if it is among the trusted ones; webpki refuses it if it is marked as an authority, as
//! `openssl req -x509` does.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::sync::Arc;

use NVFP4::base::error::err;
use NVFP4::base::{Error, Result};
use rustls::CertificateError::{
    Expired, ExpiredContext, NotValidForNameContext, NotValidYet, NotValidYetContext,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    ALL_VERSIONS, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore,
    SignatureScheme, StreamOwned,
};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport,
    TransportAdapter,
};

/// DER's tags, as they occur in certificates.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT: u8 = 0x06;
/// DER's number of the common name of a subject.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// Speaks TLS on connections that need it.
#[derive(Debug)]
pub(super) struct Tls(Arc<ClientConfig>);

impl Tls {
    /// A connector that trusts these certificates.
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

/// Accepts chains that lead to a trusted certificate, and trusted certificates themselves.
#[derive(Debug)]
struct Verifier {
    chains: Arc<WebPkiServerVerifier>,
    trusted: Vec<CertificateDer<'static>>,
}

impl Verifier {
    fn trusts(&self, certificate: &CertificateDer<'_>) -> bool {
        self.trusted.iter().any(|t| t[..] == certificate[..])
    }
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
        let error = match &chained {
            Err(rustls::Error::InvalidCertificate(error)) if self.trusts(end_entity) => error,
            _ => return chained,
        };
        match error {
            // webpki checks the dates of a certificate before anything else in it.
            Expired | ExpiredContext { .. } => Err(Expired.into()),
            NotValidYet | NotValidYetContext { .. } => Err(NotValidYet.into()),
            _ => verify_name(end_entity, server_name).map(|()| ServerCertVerified::assertion()),
        }
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

/// Checks that a trusted certificate is the host's. Its common name counts if it has no other name, as in curl.
fn verify_name(
    certificate: &CertificateDer<'_>,
    host: &ServerName<'_>,
) -> std::result::Result<(), rustls::Error> {
    let named = verify_server_name(&ParsedCertificate::try_from(certificate)?, host);
    let is_nameless = matches!(
        &named,
        Err(rustls::Error::InvalidCertificate(NotValidForNameContext { presented, .. })) if presented.is_empty()
    );
    match common_name(certificate).filter(|_| is_nameless) {
        Some(name) if fits(&name, &host.to_str()) => Ok(()),
        _ => named,
    }
}

/// Whether a certificate's name matches the host. A leading `*.` matches any one label.
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

/// The common name of a certificate's subject.
fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let mut parsed = RootCertStore::empty();
    parsed.add(certificate.clone().into_owned()).ok()?;
    let mut subject = Der(parsed.roots.first()?.subject.as_ref());
    let mut name = None;
    while let Some(set) = subject.tagged(SET) {
        let mut attribute = Der(Der(set).tagged(SEQUENCE)?);
        if attribute.tagged(OBJECT)? == COMMON_NAME {
            name = Some(attribute.next()?.1);
        }
    }
    String::from_utf8(name?.to_vec()).ok()
}

/// A sequence of DER elements.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// Tag and content of the next element.
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

    /// Content of the next element, if it has this tag.
    fn tagged(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next().filter(|(t, _)| *t == tag).map(|(_, c)| c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn what_is_no_certificate_has_no_name() {
        for bytes in [
            &[][..],
            &[0x30],
            &[0x30, 0x85, 1, 1, 1, 1, 1],
            &[0x30, 3, 0x30, 1, 2],
        ] {
            assert_eq!(common_name(&bytes.into()), None);
        }
        let mut der = Der(&[OBJECT, 0x81, 2, 7, 8, 0x05, 0]);
        assert_eq!(der.next(), Some((OBJECT, &[7, 8][..])));
        assert_eq!(der.next(), Some((0x05, &[][..])));
        assert_eq!(der.next(), None);
    }
}
