//! Checks of text values: what a text setting accepts beyond its type.

pub(super) fn any_text(_: &str) -> Result<(), String> {
    Ok(())
}

pub(super) fn not_empty(text: &str) -> Result<(), String> {
    if text.is_empty() { Err("must not be empty".into()) } else { Ok(()) }
}

pub(super) fn socket_address(text: &str) -> Result<(), String> {
    match text.is_empty() || text.parse::<std::net::SocketAddr>().is_ok() {
        true => Ok(()),
        false => Err(format!("'{text}' is not an address with a port, as in 127.0.0.1:9000 or [::1]:9000")),
    }
}

pub(super) fn root_path(text: &str) -> Result<(), String> {
    let is_segment = |part: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        !part.is_empty() && part != "." && part != ".." && part.bytes().all(is_plain)
    };
    match text.strip_prefix('/') {
        Some(parts) if parts.split('/').all(is_segment) => Ok(()),
        _ if text.is_empty() => Ok(()),
        _ => Err(format!("'{text}' is not a path such as /llm or /models/llm, without a / at its end")),
    }
}

pub(super) fn http_url(text: &str) -> Result<(), String> {
    let is_one = reqwest::Url::parse(text).is_ok_and(|url| ["http", "https"].contains(&url.scheme()) && url.has_host());
    match text.is_empty() || is_one {
        true => Ok(()),
        false => Err(format!("'{text}' is not an http:// or https:// URL")),
    }
}

pub(super) fn revision(text: &str) -> Result<(), String> {
    if pagetide_model::hub::is_revision(text) {
        Ok(())
    } else {
        Err("must be the name of a branch, tag or commit".into())
    }
}

pub(super) fn log_filter(text: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    for directive in text.split(',').map(str::trim) {
        // The parser would take a misspelt level for a module's name, and silence everything else.
        let is_filter = directive.contains(['=', ':', '[']);
        if !is_filter && !LEVELS.contains(&directive.to_lowercase().as_str()) {
            return Err(format!("'{directive}' is neither one of {} nor a filter MODULE=LEVEL", LEVELS.join(", ")));
        }
    }
    let filter = tracing_subscriber::EnvFilter::builder().parse(text);
    filter.map(drop).map_err(|error| format!("'{text}' is not a log filter: {error}"))
}
