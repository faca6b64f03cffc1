//! API keys: `Authorization: Bearer KEY`, and `X-API-Key: KEY` as Anthropic's clients send it.

use actix_web::http::header::{AUTHORIZATION, HeaderMap, HeaderName};
use subtle::{Choice, ConstantTimeEq};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The keys a client may show. Only their hashes are kept; hashes are compared, all of them and in constant time, so
/// that the time says nothing about how much of a key was right.
pub struct ApiKeys {
    hashes: Vec<[u8; blake3::OUT_LEN]>,
}

impl ApiKeys {
    /// No keys: every request is let in.
    pub fn new(keys: &[String]) -> Self {
        Self { hashes: keys.iter().map(|key| *blake3::hash(key.as_bytes()).as_bytes()).collect() }
    }

    pub fn admits(&self, headers: &HeaderMap) -> bool {
        if self.hashes.is_empty() {
            return true;
        }
        let bearer = headers.get(AUTHORIZATION).and_then(|value| bearer_key(value.as_bytes()));
        let plain = headers.get(X_API_KEY).map(|value| value.as_bytes().trim_ascii());
        let keys = bearer.into_iter().chain(plain);
        keys.fold(Choice::from(0), |any, key| any | self.knows(key)).into()
    }

    fn knows(&self, key: &[u8]) -> Choice {
        let hash = blake3::hash(key);
        let matches = self.hashes.iter().map(|known| known.ct_eq(hash.as_bytes()));
        matches.fold(Choice::from(0), |any, matches| any | matches)
    }
}

/// The key of `Bearer KEY`; the scheme's case does not matter.
fn bearer_key(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::http::header::HeaderValue;

    fn admits(keys: &[&str], header: Option<&'static str>) -> bool {
        admits_headers(keys, header.map(|value| (AUTHORIZATION, value)).as_slice())
    }

    fn admits_headers(keys: &[&str], sent: &[(HeaderName, &'static str)]) -> bool {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut headers = HeaderMap::new();
        for (name, value) in sent {
            headers.insert(name.clone(), HeaderValue::from_static(value));
        }
        ApiKeys::new(&keys).admits(&headers)
    }

    #[test]
    fn only_a_whole_key_is_admitted() {
        assert!(admits(&["a-key", "b-key"], Some("Bearer b-key")));
        assert!(admits(&["a-key"], Some("bearer  a-key ")));
        for header in ["Bearer a-ke", "Bearer a-keyy", "Bearer ", "Bearer", "a-key", "Basic a-key", ""] {
            assert!(!admits(&["a-key"], Some(header)), "{header}");
        }
        assert!(!admits(&["a-key"], None));
    }

    #[test]
    fn a_key_may_come_in_either_header() {
        assert!(admits_headers(&["a-key", "b-key"], &[(X_API_KEY, "b-key")]));
        for header in ["a-ke", "a-keyy", "Bearer a-key", ""] {
            assert!(!admits_headers(&["a-key"], &[(X_API_KEY, header)]), "{header}");
        }
        // Some clients send a placeholder in the one and the key in the other.
        assert!(admits_headers(&["a-key"], &[(X_API_KEY, "a-key"), (AUTHORIZATION, "Bearer none")]));
        assert!(admits_headers(&["a-key"], &[(X_API_KEY, "none"), (AUTHORIZATION, "Bearer a-key")]));
        assert!(!admits_headers(&["a-key"], &[(X_API_KEY, "none"), (AUTHORIZATION, "Bearer none")]));
    }

    #[test]
    fn without_keys_everyone_is_admitted() {
        assert!(admits(&[], None));
        assert!(admits(&[], Some("Bearer anything")));
    }
}
