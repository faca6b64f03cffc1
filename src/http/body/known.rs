//! Which fields of bodies are read.

use crate::http::anthropic::request::UNSUPPORTED;
use crate::http::openai::unsupported::REFUSED;
use crate::http::responses::request::STORED;
use crate::http::routes::PATHS;
use std::collections::HashSet;
use std::sync::LazyLock;

/// All fields that the API's description has, of whatever endpoint, and those that are refused by name.
static KNOWN: LazyLock<HashSet<String>> = LazyLock::new(|| {
    let described = PATHS.iter().flat_map(|path| (path.describe)().body_fields());
    let refused = [REFUSED, STORED, UNSUPPORTED].into_iter().flatten().map(|(name, _)| (*name).to_owned());
    described.chain(refused).collect()
});

/// Makes the list, so that no request waits for it.
pub fn prepare() {
    LazyLock::force(&KNOWN);
}

/// Whether a field of a body is read by any endpoint.
pub fn is_known(name: &str) -> bool {
    KNOWN.contains(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Words in quotes in the code that reads bodies, where `body` or one of its like is asked for a field.
    fn asked_for(folder: &Path, found: &mut HashSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                asked_for(&path, found);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            for asking in ["body.get(\"", "copy(body, \"", "given_field(body, \"", "(client, \""] {
                let words = code.split(asking).skip(1).filter_map(|rest| rest.split('"').next());
                found.extend(words.map(str::to_owned));
            }
        }
    }

    #[test]
    fn every_field_that_is_read_is_known() {
        let mut found = HashSet::new();
        for folder in ["openai", "responses", "anthropic"] {
            asked_for(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http").join(folder), &mut found);
        }
        assert!(found.len() >= 4, "the code asks in other words now: {found:?}");
        let same = crate::http::translate::SAME_IN_CHAT.iter().map(|name| (*name).to_owned());
        for name in found.into_iter().chain(same) {
            assert!(is_known(&name), "{name} is read, but the API's description does not have it");
        }
        for name in ["prompt", "input", "tokens", "messages", "functions", "conversation", "mcp_servers", "guided_json"]
        {
            assert!(is_known(name), "{name}");
        }
        assert!(!is_known("anything_else"));
    }
}
