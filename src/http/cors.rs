//! Which web pages may use the server from a browser.

use actix_cors::Cors;
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{ACCESS_CONTROL_REQUEST_METHOD, HeaderValue, ORIGIN, VARY};
use actix_web::middleware::{Condition, Next};
use actix_web::{Error, HttpResponse};
use pagetide_config::{LOCALHOST, ServerConfig};
use std::sync::Arc;

/// Seconds for which a browser remembers the answer.
const MAX_AGE_S: usize = 600;

/// Without origins in the configuration there are no headers: browsers then keep the pages of other origins out.
/// Requests are never refused for their origin: other programs than browsers can set it to anything.
pub fn cors(config: &ServerConfig) -> Condition<Cors> {
    let mut cors = Cors::default()
        .allowed_methods(["GET", "HEAD", "POST", "DELETE"])
        .allow_any_header()
        .expose_headers(["x-request-id", "retry-after"])
        .block_on_origin_mismatch(false)
        .max_age(MAX_AGE_S);
    let origins = config.cors_allowed_origins.clone();
    cors = match origins.iter().any(|origin| origin == "*") {
        true => cors.allow_any_origin(),
        false => cors.allowed_origin_fn(move |origin, _| allows(&origins, origin)),
    };
    if config.cors_allow_credentials {
        cors = cors.supports_credentials();
    }
    Condition::new(!config.cors_allowed_origins.is_empty(), cors)
}

/// Answers the question of a browser whether a page of an origin that is not allowed may ask: without headers, which
/// says no. It needs no key.
pub async fn deny_quietly(
    origins: Arc<[String]>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    let headers = request.headers();
    let is_preflight = request.method() == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let origin = headers.get(ORIGIN).filter(|_| is_preflight && !origins.is_empty());
    if origin.is_some_and(|origin| !allows(&origins, origin)) {
        return Ok(request.into_response(HttpResponse::Ok().insert_header((VARY, "Origin")).finish()));
    }
    Ok(next.call(request).await?.map_into_boxed_body())
}

/// Whether pages of this origin may ask.
fn allows(origins: &[String], origin: &HeaderValue) -> bool {
    origin.to_str().is_ok_and(|origin| {
        origins.iter().any(|known| match known.as_str() {
            "*" => true,
            LOCALHOST => is_local(origin),
            known => known == origin,
        })
    })
}

/// Whether a page with this origin is from the client's own machine.
fn is_local(origin: &str) -> bool {
    let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    let Some(rest) = rest else { return false };
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    let is_after_host = |rest: &str| rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
    ["localhost", "127.0.0.1", "[::1]"].iter().filter_map(|host| rest.strip_prefix(host)).any(is_after_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_origins_of_the_own_machine_are_local() {
        for origin in ["http://localhost", "https://localhost:8080", "http://127.0.0.1:3000", "http://[::1]"] {
            assert!(is_local(origin), "{origin}");
        }
        for origin in [
            "null",
            "localhost",
            "file://localhost",
            "http://localhost.evil.example",
            "http://notlocalhost",
            "http://localhost:",
            "http://localhost:x",
            "http://127.0.0.10",
            "http://a.example/localhost",
        ] {
            assert!(!is_local(origin), "{origin}");
        }
    }
}
