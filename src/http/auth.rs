//! API keys: `Authorization: Bearer KEY`, and `X-API-Key: KEY` as Anthropic's clients send it.

use crate::error::HttpError;
use crate::limits::{Limiter, Rates};
use actix_web::dev::Payload;
use actix_web::http::header::{AUTHORIZATION, HeaderMap, HeaderName};
use actix_web::{FromRequest, HttpRequest};
use pagetide_actors::messages::Caller;
use pagetide_api::openapi::PathAccess;
use pagetide_base::error::ApiError;
use pagetide_config::{ApiKeyConfig, CacheIsolation, Config, ServerConfig};
use pagetide_engine::bill::Tenant;
use pagetide_metrics::tenants;
use std::future::{Ready, ready};
use std::sync::{Arc, PoisonError, RwLock};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// The purpose that salts are derived for, so that they cannot be used for anything else.
const SALT_CONTEXT: &str = "Pagetide: salt of an API key's prefix cache";
/// The same for labels.
const LABEL_CONTEXT: &str = "Pagetide: label of an API key's metrics";
/// The same for the files and batches of a key.
const OWNER_CONTEXT: &str = "Pagetide: owner of an API key's files and batches";
/// Enough to tell some dozens of keys apart, and too few to find a key among many.
const LABEL_DIGITS: usize = 8;

/// The keys as they are now; all clones say the same.
#[derive(Clone)]
pub struct Keys(Arc<RwLock<Arc<AllKeys>>>);

/// Which clients may do what.
pub struct AllKeys {
    pub clients: ApiKeys,
    pub operators: OperatorKeys,
}

impl AllKeys {
    /// Whom a path answers while these are the keys.
    pub fn access(&self, access: PathAccess) -> PathAccess {
        match access {
            PathAccess::Key | PathAccess::KeyOrAdmin if self.clients.is_empty() => PathAccess::Open,
            PathAccess::Watcher if self.operators.is_open_to_watchers() => PathAccess::Open,
            other => other,
        }
    }
}

impl Keys {
    pub fn new(config: &Config) -> Self {
        let keys = AllKeys { clients: ApiKeys::new(config), operators: OperatorKeys::new(&config.server) };
        Self(Arc::new(RwLock::new(Arc::new(keys))))
    }

    pub fn get(&self) -> Arc<AllKeys> {
        // Nothing panics while the lock is held, and a panic would leave nothing half done.
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the keys by those of `config`. Requests that were let in go on.
    pub fn renew(&self, config: &Config) {
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let clients = keys.clients.renewed(config);
        *keys = Arc::new(AllKeys { clients, operators: OperatorKeys::new(&config.server) });
    }
}

type KeyHash = [u8; blake3::OUT_LEN];

/// The keys a client may show. Only their hashes are kept; hashes are compared, all of them and in constant time, so
/// that the time says nothing about how much of a key was right.
pub struct ApiKeys {
    keys: Vec<ApiKey>,
    /// The number of tenants so far.
    num_tenants: u32,
    /// The limits of all requests together.
    all: Arc<Limiter>,
}

struct ApiKey {
    hash: KeyHash,
    caller: Caller,
    keyed: Keyed,
}

/// What is known about the client of a key besides its tenant.
#[derive(Clone, Debug, Default)]
pub struct Keyed {
    /// The client's name in logs, which is never the key. `None`: the client has no name.
    pub name: Option<Arc<str>>,
    pub tenant: Tenant,
    /// Who its files and batches belong to: the same after a restart. Empty without a key.
    pub owner: Arc<str>,
    /// The limits of its requests: its own, if it has a key, and those of all clients together.
    pub limiters: Vec<Arc<Limiter>>,
}

impl ApiKeys {
    /// No keys: every request is let in, and belongs to no tenant.
    fn new(config: &Config) -> Self {
        let all = Arc::new(Limiter::of_all(Rates::of_all(&config.limits)));
        Self { keys: Vec::new(), num_tenants: 0, all }.renewed(config)
    }

    /// Other keys. A key that stays is the same tenant and keeps what it has used. A new key is a new tenant: running
    /// requests count for the key that they came with.
    fn renewed(&self, config: &Config) -> Self {
        self.all.set(Rates::of_all(&config.limits));
        let mut num_tenants = self.num_tenants;
        let is_apart = config.server.cache_isolation == CacheIsolation::PerKey;
        let mut key = |key: &ApiKeyConfig| {
            let hash = hash(key.key.as_bytes());
            let known = self.keys.iter().find(|known| known.hash == hash);
            let tenant = known.map(|known| known.caller.tenant).unwrap_or_else(|| {
                num_tenants += 1;
                tenants::register(Tenant(num_tenants), &name_of(key));
                Tenant(num_tenants)
            });
            // Derived from the key itself, so that it stays the same whatever other keys come and go.
            let salt = || blake3::Hash::from(blake3::derive_key(SALT_CONTEXT, key.key.as_bytes())).to_hex();
            let caller = Caller { tenant, salt: is_apart.then(|| salt().as_str().into()) };
            let rates = Rates::of_key(key, config);
            let own = known.map(|known| known.keyed.limiters[0].clone());
            let own = own.unwrap_or_else(|| Arc::new(Limiter::of_key(rates)));
            own.set(rates);
            let name = name_of(key);
            let owner = blake3::Hash::from(blake3::derive_key(OWNER_CONTEXT, key.key.as_bytes())).to_hex();
            let owner = owner.as_str().into();
            let keyed = Keyed { name: Some(name.into()), tenant, owner, limiters: vec![own, self.all.clone()] };
            ApiKey { hash, caller, keyed }
        };
        let keys = config.server.api_keys.iter().map(&mut key).collect();
        Self { keys, num_tenants, all: self.all.clone() }
    }

    /// The client that asks; `None`: it may not. If both headers have a key, `Authorization` is used.
    pub fn who(&self, headers: &HeaderMap) -> Option<(Caller, Keyed)> {
        if self.is_empty() {
            return Some((Caller::default(), Keyed { limiters: vec![self.all.clone()], ..Keyed::default() }));
        }
        let mut places = sent_keys(headers).map(|key| key.map_or(0, |key| self.place(key))).into_iter();
        let place = places.find(|place| *place > 0)?;
        let key = &self.keys[place as usize - 1];
        Some((key.caller.clone(), key.keyed.clone()))
    }

    /// The client whose files and batches have this owner; `None`: its key is none of these.
    pub fn of_owner(&self, owner: &str) -> Option<(Caller, Keyed)> {
        if self.is_empty() {
            return self.who(&HeaderMap::new()).filter(|(_, keyed)| *keyed.owner == *owner);
        }
        let key = self.keys.iter().find(|key| *key.keyed.owner == *owner)?;
        Some((key.caller.clone(), key.keyed.clone()))
    }

    /// No key is asked for.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The number of this key, from 1 on; 0: it is none of them.
    fn place(&self, key: &[u8]) -> u32 {
        let hash = hash(key);
        let placed = self.keys.iter().zip(1..);
        placed.fold(0, |found, (known, place)| u32::conditional_select(&found, &place, known.hash.ct_eq(&hash)))
    }
}

/// The operator's keys; kept and compared like the others.
pub struct OperatorKeys {
    /// Changes settings.
    admin: Option<KeyHash>,
    /// Reads what the server tells about all requests.
    metrics: Option<KeyHash>,
    /// Clients have keys: what the server tells about all requests is not public.
    has_clients: bool,
}

impl OperatorKeys {
    fn new(config: &ServerConfig) -> Self {
        let of = |key: &str| (!key.is_empty()).then(|| hash(key.as_bytes()));
        Self {
            admin: of(&config.admin_key),
            metrics: of(&config.metrics_key),
            has_clients: !config.api_keys.is_empty(),
        }
    }

    /// Whether a client with these headers may change settings. An error is 403 if no client may, and 401 if another
    /// may.
    pub fn check_admin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(known) = &self.admin else { return Err(ApiError::admin_closed()) };
        if is_sent(headers, &[known]) { Ok(()) } else { Err(ApiError::not_admin()) }
    }

    /// Whether a client with these headers may do what slows all requests down. Every client may if no keys are set.
    pub fn check_operator(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let is_open = self.admin.is_none() && self.metrics.is_none() && !self.has_clients;
        if is_open { Ok(()) } else { self.check_admin(headers) }
    }

    fn is_open_to_watchers(&self) -> bool {
        self.metrics.is_none() && !self.has_clients
    }

    /// Whether a client with these headers may see the number and the lengths of all requests. Every client may if no
    /// keys are set.
    pub fn check_watcher(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_open_to_watchers() {
            return Ok(());
        }
        let known: Vec<&KeyHash> = self.metrics.iter().chain(&self.admin).collect();
        if known.is_empty() {
            return Err(ApiError::metrics_closed());
        }
        if is_sent(headers, &known) { Ok(()) } else { Err(ApiError::not_watcher()) }
    }
}

/// Whether the client sends one of these keys. All are compared, in constant time.
fn is_sent(headers: &HeaderMap, known: &[&KeyHash]) -> bool {
    let sent = sent_keys(headers).into_iter().flatten().map(hash);
    let is_known = |sent: KeyHash| known.iter().fold(Choice::from(0), |found, known| found | known.ct_eq(&sent));
    bool::from(sent.fold(Choice::from(0), |found, sent| found | is_known(sent)))
}

/// The client may see what the server tells about all requests: their number, their lengths, their keys. Handlers ask
/// for this value, so that no spelling of a path leads around the check.
pub struct Watcher;

impl FromRequest for Watcher {
    type Error = HttpError;
    type Future = Ready<Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let keys: &Keys = request.app_data().expect("every app is made with keys");
        ready(keys.get().operators.check_watcher(request.headers()).map(|()| Self).map_err(HttpError::from))
    }
}

/// Whether the client has the admin key.
pub fn is_admin(request: &HttpRequest) -> bool {
    let keys: &Keys = request.app_data().expect("every app is made with keys");
    keys.get().operators.check_admin(request.headers()).is_ok()
}

/// The client may do what slows all requests down, see [`OperatorKeys::check_operator`].
pub struct Operator;

impl FromRequest for Operator {
    type Error = HttpError;
    type Future = Ready<Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let keys: &Keys = request.app_data().expect("every app is made with keys");
        ready(keys.get().operators.check_operator(request.headers()).map(|()| Self).map_err(HttpError::from))
    }
}

/// How metrics, logs and traces name the holder of a key.
fn name_of(key: &ApiKeyConfig) -> String {
    key.name.clone().unwrap_or_else(|| tenant_label(&key.key))
}

/// A name for a key that has none: a fingerprint of the key, the same after a restart and in every server.
pub fn tenant_label(key: &str) -> String {
    let hash = blake3::Hash::from(blake3::derive_key(LABEL_CONTEXT, key.as_bytes())).to_hex();
    format!("key-{}", &hash[..LABEL_DIGITS])
}

fn hash(key: &[u8]) -> KeyHash {
    *blake3::hash(key).as_bytes()
}

/// The key as a bearer token, and in the header of its own.
fn sent_keys(headers: &HeaderMap) -> [Option<&[u8]>; 2] {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| bearer_key(value.as_bytes()));
    [bearer, headers.get(X_API_KEY).map(|value| value.as_bytes().trim_ascii())]
}

/// The key of `Bearer KEY`; the scheme's case does not matter.
fn bearer_key(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Ticket;
    use actix_web::http::header::HeaderValue;

    fn admits(keys: &[&str], header: Option<&'static str>) -> bool {
        admits_headers(keys, header.map(|value| (AUTHORIZATION, value)).as_slice())
    }

    fn admits_headers(keys: &[&str], sent: &[(HeaderName, &'static str)]) -> bool {
        caller(keys, CacheIsolation::PerKey, sent).is_some()
    }

    fn caller(keys: &[&str], isolation: CacheIsolation, sent: &[(HeaderName, &'static str)]) -> Option<Caller> {
        let mut config = config(keys);
        config.server.cache_isolation = isolation;
        let mut headers = HeaderMap::new();
        for (name, value) in sent {
            headers.insert(name.clone(), HeaderValue::from_static(value));
        }
        ApiKeys::new(&config).who(&headers).map(|(caller, _)| caller)
    }

    fn config(keys: &[&str]) -> Config {
        let api_keys = keys.iter().copied().map(ApiKeyConfig::from).collect();
        Config { server: ServerConfig { api_keys, ..ServerConfig::default() }, ..Config::default() }
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
    fn a_label_does_not_show_its_key() {
        let label = tenant_label("a-key");
        assert!(label.starts_with("key-") && label.len() == 12 && label[4..].bytes().all(|b| b.is_ascii_hexdigit()));
        assert_ne!(label, tenant_label("b-key"));
        let (hash, salt) = (blake3::hash(b"a-key").to_hex(), blake3::derive_key(SALT_CONTEXT, b"a-key"));
        assert!(!hash.contains(&label[4..]) && !blake3::Hash::from(salt).to_hex().contains(&label[4..]));
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
    fn with_client_keys_data_on_all_requests_needs_an_operators_key() {
        let code = |api_keys: &[&str], admin_key: &str, metrics_key: &str, sent: Option<&'static str>| {
            let mut config = config(api_keys);
            (config.server.admin_key, config.server.metrics_key) = (admin_key.into(), metrics_key.into());
            let headers = HeaderMap::from_iter(sent.map(|key| (X_API_KEY, HeaderValue::from_static(key))));
            OperatorKeys::new(&config.server).check_watcher(&headers).err().and_then(|error| error.code)
        };
        for (admin_key, sent) in [("", None), ("the-admin", None), ("the-admin", Some("any"))] {
            assert_eq!(code(&[], admin_key, "", sent), None, "nobody asks for keys");
        }
        for sent in [None, Some("a"), Some("the-admin")] {
            assert_eq!(code(&["a"], "", "", sent), Some("metrics_closed"));
        }
        for (api_keys, admin_key, metrics_key) in [(&["a"][..], "the-admin", ""), (&["a"], "", "m"), (&[], "", "m")] {
            for sent in [None, Some("a"), Some("the-admi"), Some("")] {
                assert_eq!(code(api_keys, admin_key, metrics_key, sent), Some("invalid_metrics_key"), "{sent:?}");
            }
        }
        for sent in ["the-admin", "m"] {
            assert_eq!(code(&["a"], "the-admin", "m", Some(sent)), None, "{sent}");
        }
    }

    #[test]
    fn without_keys_everyone_is_admitted() {
        assert!(admits(&[], None));
        assert!(admits(&[], Some("Bearer anything")));
    }

    #[test]
    fn a_key_that_stays_is_the_same_tenant() {
        let keys = Keys::new(&config(&["a-key", "b-key"]));
        let caller = |sent: &'static str| {
            let headers = HeaderMap::from_iter([(X_API_KEY, HeaderValue::from_static(sent))]);
            keys.get().clients.who(&headers).map(|(caller, _)| caller)
        };
        let (a, b) = (caller("a-key").unwrap(), caller("b-key").unwrap());
        keys.renew(&config(&["c-key", "b-key"]));
        assert_eq!((caller("a-key"), caller("b-key")), (None, Some(b)));
        assert_eq!(caller("c-key").unwrap().tenant, Tenant(3), "what runs for the first counts for nobody else");
        keys.renew(&config(&["a-key"]));
        assert_eq!(caller("a-key").unwrap().salt, a.salt);
    }

    #[test]
    fn a_key_has_a_name_that_is_not_the_key_and_keeps_what_it_has_used_up() {
        let mut config = config(&["a-key", "b-key"]);
        config.server.api_keys[1].name = Some("bob".into());
        config.server.api_keys[1].requests_per_minute = Some(1);
        config.limits.key_requests_per_minute = 2;
        let keys = Keys::new(&config);
        let keyed = |sent: &'static str| {
            let headers = HeaderMap::from_iter([(X_API_KEY, HeaderValue::from_static(sent))]);
            keys.get().clients.who(&headers).unwrap().1
        };
        let enter = |sent| Ticket::enter(Tenant::default(), keyed(sent).limiters);
        assert_eq!(
            (keyed("a-key").name.as_deref(), keyed("b-key").name.as_deref()),
            (Some(tenant_label("a-key").as_str()), Some("bob"))
        );
        enter("b-key").unwrap();
        enter("b-key").unwrap_err();
        config.server.api_keys.reverse();
        config.server.api_keys[0].name = None;
        keys.renew(&config);
        assert_eq!(keyed("b-key").name.as_deref(), Some(tenant_label("b-key").as_str()));
        enter("b-key").unwrap_err();
        (0..2).for_each(|_| drop(enter("a-key").unwrap()));
        enter("a-key").unwrap_err();
    }
}
