//! Where the hub and its cache are, as `huggingface_hub` for Python finds them: from the environment.

use std::path::{Path, PathBuf};

/// The address of the hub, the cache on this machine, and the access token.
#[derive(Clone, PartialEq)]
pub struct HubAccess {
    /// `https://huggingface.co`, without a slash at its end.
    pub endpoint: String,
    /// Holds a folder `models--OWNER--NAME` for each model.
    pub cache: PathBuf,
    pub token: Option<String>,
    /// The hub is not to be asked.
    pub offline: bool,
}

/// The token stays out of messages.
impl std::fmt::Debug for HubAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {}", self.endpoint, self.cache.display())
    }
}

impl HubAccess {
    pub fn from_env() -> Self {
        Self::new(|name| std::env::var(name).ok())
    }

    fn new(variable: impl Fn(&str) -> Option<String>) -> Self {
        let get = |names: &[&str]| names.iter().find_map(|name| variable(name)).filter(|value| !value.is_empty());
        let is_on = |names: &[&str]| {
            let value = get(names).unwrap_or_default().to_uppercase();
            ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
        };
        let user = get(&["HOME"]).map(PathBuf::from).or_else(std::env::home_dir).unwrap_or_default();
        let path = |value: String| match value.strip_prefix("~/") {
            Some(rest) => user.join(rest),
            None => PathBuf::from(value),
        };
        let caches = get(&["XDG_CACHE_HOME"]).map_or_else(|| user.join(".cache"), path);
        let home = get(&["HF_HOME"]).map_or_else(|| caches.join("huggingface"), path);
        let token = || {
            let file = get(&["HF_TOKEN_PATH"]).map_or_else(|| home.join("token"), path);
            get(&["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]).or_else(|| read_token(&file))
        };
        let endpoint = get(&["HF_ENDPOINT"]).unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            endpoint: endpoint.trim_end_matches('/').into(),
            cache: get(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]).map_or_else(|| home.join("hub"), path),
            token: if is_on(&["HF_HUB_DISABLE_IMPLICIT_TOKEN"]) { None } else { token().and_then(clean) },
            offline: is_on(&["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]),
        }
    }
}

/// `hf auth login` writes it.
fn read_token(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).ok()
}

/// Line ends come along when a token is copied.
fn clean(token: String) -> Option<String> {
    let token = token.replace(['\r', '\n'], "");
    let token = token.trim();
    if token.is_empty() { None } else { Some(token.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(variables: &[(&str, &str)]) -> HubAccess {
        let set = |name: &str| variables.iter().find(|(set, _)| *set == name);
        HubAccess::new(|name| set(name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn the_cache_is_where_python_has_it() {
        for (variables, cache) in [
            (&[("HOME", "/u")] as &[_], "/u/.cache/huggingface/hub"),
            (&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")], "/h/hub"),
            (&[("HOME", "/u"), ("HF_HOME", "~/h")], "/u/h/hub"),
            (&[("HOME", "/u"), ("HF_HOME", "")], "/u/.cache/huggingface/hub"),
            (&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
            (&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HUB_CACHE", "/c")], "/c"),
        ] {
            assert_eq!(access(variables).cache, PathBuf::from(cache), "{variables:?}");
        }
    }

    #[test]
    fn the_token_is_the_variable_s_or_the_file_s() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "from file\n").unwrap();
        let home = ("HF_HOME", folder.path().to_str().unwrap());
        let token = |variables: &[(&str, &str)]| access(variables).token;
        assert_eq!(token(&[home]).as_deref(), Some("from file"));
        assert_eq!(token(&[home, ("HF_TOKEN", " a\n")]).as_deref(), Some("a"));
        assert_eq!(token(&[home, ("HF_TOKEN_PATH", "/no/such/file")]), None);
        assert_eq!(token(&[home, ("HF_TOKEN", "a"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert!(!format!("{:?}", access(&[("HF_TOKEN", "secret")])).contains("secret"));
    }

    #[test]
    fn the_hub_can_be_another_or_none() {
        assert_eq!(access(&[]).endpoint, "https://huggingface.co");
        assert_eq!(access(&[("HF_ENDPOINT", "http://mirror:8080/")]).endpoint, "http://mirror:8080");
        for (value, offline) in [("1", true), ("true", true), ("on", true), ("0", false), ("", false)] {
            assert_eq!(access(&[("HF_HUB_OFFLINE", value)]).offline, offline, "{value}");
        }
    }
}
