//! Which web pages may use the server from a browser.

use actix_cors::Cors;
use actix_web::middleware::Condition;
use pagetide_config::ServerConfig;

/// Seconds for which a browser remembers the answer.
const MAX_AGE_S: usize = 600;

/// Without origins in the configuration there are no headers: browsers then keep the pages of other origins out.
/// Requests are never refused for their origin: other programs than browsers can set it to anything.
pub fn cors(config: &ServerConfig) -> Condition<Cors> {
    let mut cors = Cors::default()
        .allowed_methods(["GET", "HEAD", "POST"])
        .allow_any_header()
        .expose_headers(["x-request-id", "retry-after"])
        .block_on_origin_mismatch(false)
        .max_age(MAX_AGE_S);
    for origin in &config.cors_allowed_origins {
        cors = if origin == "*" { cors.allow_any_origin() } else { cors.allowed_origin(origin) };
    }
    if config.cors_allow_credentials {
        cors = cors.supports_credentials();
    }
    Condition::new(!config.cors_allowed_origins.is_empty(), cors)
}
