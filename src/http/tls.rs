//! TLS with certificates that are read again while the server runs.

use pagetide_base::error::StartError;
use pagetide_config::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::sync::{Arc, PoisonError, RwLock};

/// The server's current certificate. All clones share it.
#[derive(Clone, Debug)]
pub struct Certificate(Arc<RwLock<Arc<CertifiedKey>>>);

impl Certificate {
    /// `None` where none is configured.
    pub fn read(config: &ServerConfig) -> Result<Option<Self>, StartError> {
        if config.tls_cert.is_empty() {
            return Ok(None);
        }
        let key = read(&config.tls_cert, &config.tls_key).map_err(StartError::new)?;
        Ok(Some(Self(Arc::new(RwLock::new(Arc::new(key))))))
    }

    /// Reads the files again. Open connections keep the certificate that they have. An error changes nothing.
    pub fn renew(&self, config: &ServerConfig) {
        match read(&config.tls_cert, &config.tls_key) {
            Ok(key) => {
                let key = Arc::new(key);
                let before =
                    std::mem::replace(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner), key.clone());
                if before.cert != key.cert {
                    tracing::info!("{}: there is another certificate, for new connections", config.tls_cert);
                }
            }
            Err(why) => tracing::error!("the certificate stays as it is: {why}"),
        }
    }

    /// TLS 1.2 and 1.3 with this certificate.
    pub fn server_config(&self) -> Result<rustls::ServerConfig, StartError> {
        let builder = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| StartError::new(format!("cannot start TLS: {error}")))?;
        Ok(builder.with_no_client_auth().with_cert_resolver(Arc::new(self.clone())))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

fn read(cert: &str, key: &str) -> Result<CertifiedKey, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect);
    let chain = chain.map_err(|error| format!("server.tls_cert: {cert}: {error}"))?;
    if chain.is_empty() {
        return Err(format!("server.tls_cert: {cert}: there is no certificate in it"));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| format!("server.tls_key: {key}: {error}"))?;
    // This also fails if the certificate and the key do not belong together.
    CertifiedKey::from_der(chain, private, &ring::default_provider())
        .map_err(|error| format!("server.tls_cert {cert} and server.tls_key {key}: {error}"))
}
