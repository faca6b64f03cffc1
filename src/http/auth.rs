//! API keys: `Authorization: Bearer KEY`, and `X-API-Key: KEY` as Anthropic's clients send it.

use crate::actors::messages::Caller;
use crate::config::CacheIsolation;
use crate::engine::bill::Tenant;
use actix_web::http::header::{AUTHORIZATION, HeaderMap, HeaderName};
use subtle::{ConditionallySelectable, ConstantTimeEq};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Names what salts are derived for, so that they are of no use anywhere else.
const SALT_CONTEXT: &str = "Pagetide: salt of an API key's prefix cache";

/// The keys a client may show. Only their hashes are kept; hashes are compared, all of them and in constant time, so
/// that the time says nothing about how much of a key was right.
pub struct ApiKeys {
    keys: Vec<ApiKey>,
}

struct ApiKey {
    hash: [u8; blake3::OUT_LEN],
    caller: Caller,
}

impl ApiKeys {
    /// No keys: every request is let in, and is nobody's.
    pub fn new(keys: &[String], isolation: CacheIsolation) -> Self {
        let key = |(key, number): (&String, u32)| {
            // Of the key itself: it stays the same whatever other keys come and go.
            let salt = || blake3::Hash::from(blake3::derive_key(SALT_CONTEXT, key.as_bytes())).to_hex();
            let is_apart = isolation == CacheIsolation::PerKey;
            let caller = Caller { tenant: Tenant(number), salt: is_apart.then(|| salt().as_str().into()) };
            ApiKey { hash: *blake3::hash(key.as_bytes()).as_bytes(), caller }
        };
        Self { keys: keys.iter().zip(1..).map(key).collect() }
    }

    /// Who asks; `None`: nobody who may. Where both headers have a key, the first goes before the other.
    pub fn caller(&self, headers: &HeaderMap) -> Option<Caller> {
        if self.keys.is_empty() {
            return Some(Caller::default());
        }
        let bearer = headers.get(AUTHORIZATION).and_then(|value| bearer_key(value.as_bytes()));
        let plain = headers.get(X_API_KEY).map(|value| value.as_bytes().trim_ascii());
        let mut numbers = [bearer, plain].map(|key| key.map_or(0, |key| self.number(key))).into_iter();
        let number = numbers.find(|number| *number > 0)?;
        Some(self.keys[number as usize - 1].caller.clone())
    }

    /// Which key this is, from 1 on; 0: none.
    fn number(&self, key: &[u8]) -> u32 {
        let hash = blake3::hash(key);
        let numbered = self.keys.iter().zip(1..);
        numbered.fold(0, |found, (known, number)| {
            u32::conditional_select(&found, &number, known.hash.ct_eq(hash.as_bytes()))
        })
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
        caller(keys, CacheIsolation::PerKey, sent).is_some()
    }

    fn caller(keys: &[&str], isolation: CacheIsolation, sent: &[(HeaderName, &'static str)]) -> Option<Caller> {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut headers = HeaderMap::new();
        for (name, value) in sent {
            headers.insert(name.clone(), HeaderValue::from_static(value));
        }
        ApiKeys::new(&keys, isolation).caller(&headers)
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
    fn a_key_is_a_tenant_with_a_salt_that_does_not_show_it() {
        let of = |keys: &[&str], isolation, sent| caller(keys, isolation, &[(X_API_KEY, sent)]).unwrap();
        let keys = ["a-key", "b-key"];
        let (a, b) = (of(&keys, CacheIsolation::PerKey, "a-key"), of(&keys, CacheIsolation::PerKey, "b-key"));
        assert_eq!((a.tenant, b.tenant), (Tenant(1), Tenant(2)));
        let (a_salt, b_salt) = (a.salt.unwrap(), b.salt.unwrap());
        assert_ne!(a_salt, b_salt);
        assert_eq!(a_salt.len(), b_salt.len());
        assert!(!a_salt.contains("a-key") && *a_salt != *blake3::hash(b"a-key").to_hex());
        // Another key in front of it is another tenant, and no way to its cache.
        let later = of(&["c-key", "b-key"], CacheIsolation::PerKey, "c-key");
        assert!(later.tenant == Tenant(1) && later.salt != Some(a_salt));
        assert_eq!(of(&["b-key"], CacheIsolation::PerKey, "b-key").salt, Some(b_salt));
        let shared = of(&keys, CacheIsolation::Shared, "b-key");
        assert_eq!(shared, Caller { tenant: Tenant(2), salt: None });
        let both = [(X_API_KEY, "a-key"), (AUTHORIZATION, "Bearer b-key")];
        assert_eq!(caller(&keys, CacheIsolation::Shared, &both).unwrap().tenant, Tenant(2));
    }

    #[test]
    fn a_clients_salt_divides_its_keys_cache_further() {
        let salted = |salt: Option<&str>, own: Option<&str>| {
            Caller { tenant: Tenant(1), salt: salt.map(Into::into) }.cache_salt(own.map(str::to_owned))
        };
        assert_eq!(salted(None, None), None);
        assert_eq!(salted(None, Some("own")).as_deref(), Some("own"));
        assert_eq!(salted(Some("key"), None).as_deref(), Some("key"));
        assert_eq!(salted(Some("key"), Some("own")).as_deref(), Some("keyown"));
    }

    #[test]
    fn without_keys_everyone_is_admitted() {
        assert!(admits(&[], None));
        assert!(admits(&[], Some("Bearer anything")));
    }
}
