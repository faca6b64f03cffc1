//! The description of the API (OpenAPI 3.1), at `/openapi.json` and behind the page at `/docs`.
//!
//! It has two sources: the tables of paths ([`crate::routes::paths_of`]), each entry with an [`Operation`], and the
//! structs that parse and write bodies, which derive `ToSchema`. So what is not described is not served, and a field
//! that is parsed is described by its struct.
//!
//! To add a field, give it a doc comment and its range and default (`#[schema(minimum = 0, default = 1)]`): see
//! [`pagetide_api::fields::sampling::SamplingFields`]. To add a path, add a line to its surface's table, with the
//! handler and a function that returns the `Operation`; its body's structs go to `Operation::fields`, one call each.

use crate::paths::ApiPath;
use pagetide_api::llama_cpp::describe::NativeError;
use pagetide_api::openai::error::ErrorAnswer;
use pagetide_api::openapi::{Operation, PathAccess, Tag};
use pagetide_api::vllm::error::VllmError;
use pagetide_config::Dialect;
use serde_json::{Map, Value, json};

/// The page that shows the document and tries requests; it loads nothing from elsewhere.
pub const PAGE: &str = include_str!("openapi/page.html");

/// The document of these paths, which are below `url`. `access`: whom a path answers with the keys that there are.
/// `dialect`: how errors are told where the paths leave it open.
pub fn document<'a>(
    all: impl IntoIterator<Item = &'a ApiPath>,
    url: &str,
    dialect: Dialect,
    access: impl Fn(PathAccess) -> PathAccess,
) -> Value {
    let mut schemas = Map::new();
    let mut paths = Map::new();
    for path in all {
        let operation = in_dialect(path.path, (path.describe)(), dialect);
        let described = operation.json(access(path.access), &mut schemas);
        let item = paths.entry(path.path).or_insert_with(|| json!({}));
        item[path.verb.method().as_str().to_lowercase()] = described;
    }
    schemas.sort_keys();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Pagetide",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": url}],
        "tags": Tag::ALL.map(|tag| json!({"name": tag.name(), "description": tag.about()})),
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of server.api_keys. If none are set, no key is needed.",
                },
                "metrics_key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "server.metrics_key. If neither it nor server.api_keys is set, no key is needed.",
                },
                "admin_key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "server.admin_key. If it is not set, these paths are closed.",
                },
            },
        },
    })
}

const ABOUT: &str = "An OpenAI-compatible API with vLLM's extensions. In a request's body null means \"not given\", \
and fields that are not named here are ignored. An error has OpenAI's shape, and `param` names the field at fault.";

/// As [`crate::routes::format_of`] has it.
fn in_dialect(path: &str, operation: Operation, dialect: Dialect) -> Operation {
    let is_openais = operation.tells_errors_as::<ErrorAnswer<'_>>();
    match dialect {
        Dialect::Vllm if is_openais || path == "/v2/embed" => operation.errors_as::<VllmError<'_>>(),
        Dialect::LlamaCpp if is_openais => operation.errors_as::<NativeError>(),
        _ => operation,
    }
}

#[cfg(test)]
mod peers;
#[cfg(test)]
mod tests;
