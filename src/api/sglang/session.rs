//! Sessions: the server keeps the tokens of a conversation, and a request sends only what is new. Their KV is what the
//! prefix cache has of it, as with any other prompt.
//!
//! The requests of a session are a tree. Each goes on from another one's prompt and output, or begins anew. A streaming
//! session has only its last request.

use crate::body::ids::MixedPart;
use crate::body::{FieldProblems, ParsedBody, body_fields, read_value};
use crate::id::random_hex;
use crate::model_info::ModelInfo;
use crate::prompt::Prompt;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_config::ServerConfig;
use pagetide_engine::bill::Tenant;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Characters of a session's id.
const MAX_ID: usize = 256;
/// What a request of a session takes beside its tokens, in tokens.
const REQUEST_TOKENS: usize = 64;

body_fields! {
    pub struct OpenFields {
        /// SGLang's guess of how long the conversation becomes. Without effect: see server.max_session_tokens.
        capacity_of_str_len: Option<i64>,
        /// The session's id, of at most 256 characters. Default: a random one.
        #[schema(min_length = 1, max_length = 256)]
        session_id: Option<String>,
        /// Each request goes on from the last one that has ended. Otherwise requests say by their rid which one they go
        /// on from.
        #[schema(default = false)]
        streaming: Option<bool>,
        /// Seconds without a request after which the session is closed; at most server.session_timeout_s, the default.
        #[schema(exclusive_minimum = 0)]
        timeout: Option<f64>,
    }
}

body_fields! {
    pub struct CloseFields {
        /// The session's id.
        session_id: Option<String>,
    }
}

body_fields! {
    /// Which session a request belongs to, and which of its requests it goes on from.
    pub(super) struct SessionFields {
        /// The session's id.
        id: Option<String>,
        /// The request to go on from, by its id in the answer. Default: none, or the last one of a streaming session.
        rid: Option<String>,
        /// Goes on behind this many tokens of that request's prompt and output; 0: behind all.
        #[schema(minimum = 0)]
        offset: Option<i64>,
        /// Forgets all requests that go on from that request; without rid all requests of the session. Not in streaming
        /// sessions.
        replace: Option<bool>,
        /// Goes on from that request's prompt alone. Not in streaming sessions.
        drop_previous_output: Option<bool>,
    }
}

/// What `/open_session` asks for.
#[derive(Debug)]
pub struct OpenSession {
    id: String,
    streaming: bool,
    timeout: Option<Duration>,
}

pub fn parse_open(
    ParsedBody { body, problems }: ParsedBody<OpenFields>,
    _: &ModelInfo,
) -> Result<OpenSession, ApiError> {
    checked(&problems)?;
    let id = body.session_id.unwrap_or_else(random_hex);
    let length = id.chars().count();
    if !(1..=MAX_ID).contains(&length) {
        let message = format!("session_id must have 1 to {MAX_ID} characters, got {length}");
        return Err(ApiError::invalid("session_id", message));
    }
    let seconds = |seconds: f64| {
        let timeout = Duration::try_from_secs_f64(seconds).ok().filter(|timeout| !timeout.is_zero());
        timeout.ok_or_else(|| {
            ApiError::invalid("timeout", format!("timeout must be a number of seconds above 0, got {seconds}"))
        })
    };
    let timeout = body.timeout.map(seconds).transpose()?;
    Ok(OpenSession { id, streaming: body.streaming.unwrap_or(false), timeout })
}

/// The id of the session to close.
pub fn parse_close(ParsedBody { body, problems }: ParsedBody<CloseFields>, _: &ModelInfo) -> Result<String, ApiError> {
    checked(&problems)?;
    body.session_id.ok_or_else(|| ApiError::invalid("session_id", "session_id is required"))
}

fn checked(problems: &FieldProblems) -> Result<(), ApiError> {
    problems.check_object()?;
    problems.check()
}

/// Where in a session a request stands.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionPlace {
    id: String,
    rid: Option<String>,
    /// `None`: behind all tokens.
    offset: Option<usize>,
    replace: bool,
    drop_previous_output: bool,
}

impl SessionPlace {
    /// The field `session_params`.
    pub(super) fn parse(given: Map<String, Value>) -> Result<Self, ApiError> {
        let below = |error: ApiError| match error.param.clone() {
            None => error,
            Some(param) => ApiError {
                message: error.message.replacen(&param, &format!("session_params.{param}"), 1),
                param: Some(format!("session_params.{param}")),
                ..error
            },
        };
        let ParsedBody { body, problems } = read_value::<SessionFields>(&Value::Object(given))?;
        problems.check().map_err(below)?;
        let id = body.id.ok_or_else(|| ApiError::invalid("session_params.id", "session_params.id is required"))?;
        let offset = usize::try_from(body.offset.unwrap_or(0)).map_err(|_| {
            let message = format!("session_params.offset must be at least 0, got {}", body.offset.unwrap_or(0));
            ApiError::invalid("session_params.offset", message)
        })?;
        Ok(Self {
            id,
            rid: body.rid,
            offset: Some(offset).filter(|offset| *offset > 0),
            replace: body.replace.unwrap_or(false),
            drop_previous_output: body.drop_previous_output.unwrap_or(false),
        })
    }
}

/// The sessions of all clients. Clones are of the same sessions.
#[derive(Clone, Debug, Default)]
pub struct Sessions(Arc<Mutex<OpenSessions>>);

#[derive(Debug, Default)]
struct OpenSessions {
    sessions: HashMap<(Tenant, String), Session>,
    /// The sessions that were ever opened.
    num_opened: u64,
    /// Of all sessions, with [`REQUEST_TOKENS`] for each request.
    num_tokens: usize,
}

#[derive(Debug)]
struct Session {
    /// No two sessions have the same, also where one is opened again.
    serial: u64,
    streaming: bool,
    timeout: Duration,
    last_used: Instant,
    /// Requests under way.
    num_under_way: usize,
    /// By their ids.
    requests: HashMap<String, SessionRequest>,
}

/// A request of a session that has ended.
#[derive(Debug, Default)]
struct SessionRequest {
    /// The request that it went on from, and how many of that one's tokens it has.
    parent: Option<(String, usize)>,
    /// Its own tokens behind those, of prompt and output.
    own: Vec<TokenId>,
    /// Tokens of its whole prompt.
    num_prompt: usize,
}

impl SessionRequest {
    fn num_tokens(&self) -> usize {
        self.own.len() + REQUEST_TOKENS
    }

    /// Of prompt and output.
    fn len(&self) -> usize {
        self.parent.as_ref().map_or(0, |(_, kept)| *kept) + self.own.len()
    }
}

impl Session {
    /// The first `keep` tokens of a request's prompt and output.
    fn tokens(&self, rid: &str, keep: usize) -> Vec<TokenId> {
        let (mut parts, mut next, mut keep) = (Vec::new(), Some(rid), keep);
        while let Some(request) = next.and_then(|rid| self.requests.get(rid)) {
            let before = request.parent.as_ref().map_or(0, |(_, kept)| *kept);
            parts.push(&request.own[..keep.saturating_sub(before).min(request.own.len())]);
            keep = keep.min(before);
            next = request.parent.as_ref().map(|(rid, _)| rid.as_str());
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    /// Forgets all requests that went on from this one. Gives the tokens that they had.
    fn forget_children(&mut self, rid: &str) -> usize {
        let mut children: HashMap<String, Vec<String>> = HashMap::new();
        for (rid, request) in &self.requests {
            if let Some((parent, _)) = &request.parent {
                children.entry(parent.clone()).or_default().push(rid.clone());
            }
        }
        let (mut forgotten, mut num_tokens) = (children.remove(rid).unwrap_or_default(), 0);
        while let Some(rid) = forgotten.pop() {
            num_tokens += self.requests.remove(&rid).map_or(0, |request| request.num_tokens());
            forgotten.extend(children.remove(&rid).unwrap_or_default());
        }
        num_tokens
    }

    fn num_tokens(&self) -> usize {
        self.requests.values().map(SessionRequest::num_tokens).sum()
    }
}

impl Sessions {
    /// Opens a session and gives its id.
    pub fn open(
        &self,
        tenant: Tenant,
        asked: OpenSession,
        now: Instant,
        server: &ServerConfig,
    ) -> Result<String, ApiError> {
        let mut open = self.lock();
        open.close_idle(now);
        let key = (tenant, asked.id);
        if open.sessions.contains_key(&key) {
            let message = format!("session_id: a session with the id {:?} is open", key.1);
            return Err(ApiError::invalid("session_id", message));
        }
        if open.sessions.len() >= server.max_sessions {
            let message = format!("{} sessions are open (server.max_sessions); close some", open.sessions.len());
            return Err(ApiError::sessions_full(message));
        }
        let most = Duration::from_secs(server.session_timeout_s);
        open.num_opened += 1;
        let session = Session {
            serial: open.num_opened,
            streaming: asked.streaming,
            timeout: asked.timeout.map_or(most, |timeout| timeout.min(most)),
            last_used: now,
            num_under_way: 0,
            requests: HashMap::new(),
        };
        let id = key.1.clone();
        open.sessions.insert(key, session);
        Ok(id)
    }

    /// Closes a session. One that is not open is ignored: it may have been idle for too long. Requests under way go on.
    pub fn close(&self, tenant: Tenant, id: String) {
        self.lock().remove(&(tenant, id));
    }

    /// Begins a request. `rid`: its id.
    pub fn begin(
        &self,
        tenant: Tenant,
        place: SessionPlace,
        rid: &str,
        now: Instant,
        server: &ServerConfig,
    ) -> Result<SessionTurn, ApiError> {
        let mut open = self.lock();
        open.close_idle(now);
        let most = server.max_session_tokens;
        if open.num_tokens >= most {
            let message = format!("the open sessions hold {most} tokens (server.max_session_tokens); close some");
            return Err(ApiError::sessions_full(message));
        }
        let key = (tenant, place.id.clone());
        let OpenSessions { sessions, num_tokens, .. } = &mut *open;
        let Some(session) = sessions.get_mut(&key) else {
            let message = format!("session_params.id: no session with the id {:?} is open", place.id);
            return Err(ApiError::invalid("session_params.id", message));
        };
        let from = session.parent_of(&place)?;
        if session.requests.contains_key(rid) {
            return Err(ApiError::invalid("rid", format!("rid: the session has a request with the id {rid:?}")));
        }
        if place.replace {
            *num_tokens -= match &place.rid {
                Some(rid) => session.forget_children(rid),
                None => session.requests.drain().map(|(_, request)| request.num_tokens()).sum(),
            };
        }
        let before = from.as_ref().map_or_else(Vec::new, |(rid, kept)| session.tokens(rid, *kept));
        session.last_used = now;
        session.num_under_way += 1;
        let serial = session.serial;
        drop(open);
        let rid = rid.to_owned();
        Ok(SessionTurn { sessions: self.clone(), key, serial, rid, parent: from, before, is_kept: false })
    }

    fn lock(&self) -> MutexGuard<'_, OpenSessions> {
        // Nothing panics while the lock is held, but for bugs that leave a session with fewer requests.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// The request that a new one goes on from, and how many of its tokens the new one has.
    fn parent_of(&self, place: &SessionPlace) -> Result<Option<(String, usize)>, ApiError> {
        let refused = |field: &str, why: &str| {
            let param = format!("session_params.{field}");
            Err(ApiError::invalid(&param, format!("{param}: {why}")))
        };
        let parent = if self.streaming {
            for (field, is_given) in [
                ("replace", place.replace),
                ("drop_previous_output", place.drop_previous_output),
                ("offset", place.offset.is_some()),
            ] {
                if is_given {
                    return refused(field, "not available in a streaming session");
                }
            }
            if self.num_under_way > 0 {
                return refused("id", "another request of this streaming session is under way");
            }
            self.requests.keys().next()
        } else {
            place.rid.as_ref()
        };
        let Some(rid) = parent else { return Ok(None) };
        let Some(request) = self.requests.get(rid) else {
            return refused("rid", &format!("the session has no request with the id {rid:?} that has ended"));
        };
        let all = if place.drop_previous_output { request.num_prompt } else { request.len() };
        match place.offset {
            Some(offset) if offset > all => {
                refused("offset", &format!("must be at most {all}, the tokens to go on from, got {offset}"))
            }
            offset => Ok(Some((rid.clone(), offset.unwrap_or(all)))),
        }
    }
}

impl OpenSessions {
    fn close_idle(&mut self, now: Instant) {
        let is_idle = |session: &Session| {
            session.num_under_way == 0 && now.saturating_duration_since(session.last_used) > session.timeout
        };
        let idle = self.sessions.iter().filter(|(_, session)| is_idle(session)).map(|(key, _)| key.clone());
        for key in idle.collect::<Vec<_>>() {
            self.remove(&key);
        }
    }

    fn remove(&mut self, key: &(Tenant, String)) {
        if let Some(session) = self.sessions.remove(key) {
            self.num_tokens -= session.num_tokens();
        }
    }
}

/// A request of a session that is under way. It becomes a part of the session with [`SessionTurn::finish`], and is
/// forgotten if it is dropped before that.
#[derive(Debug)]
pub struct SessionTurn {
    sessions: Sessions,
    key: (Tenant, String),
    serial: u64,
    rid: String,
    parent: Option<(String, usize)>,
    /// The tokens that it goes on from.
    before: Vec<TokenId>,
    is_kept: bool,
}

impl SessionTurn {
    /// The prompt behind the tokens of the session. `bos`, the token that begins a text, is not repeated.
    pub fn behind(&mut self, prompt: Prompt, bos: Option<TokenId>) -> Prompt {
        let before = std::mem::take(&mut self.before);
        if before.is_empty() {
            return prompt;
        }
        match prompt {
            Prompt::Tokens(tokens) => {
                let has_bos = bos.is_some() && tokens.first().copied() == bos;
                Prompt::Tokens([&before, &tokens[usize::from(has_bos)..]].concat())
            }
            Prompt::Text { text, .. } => Prompt::Mixed(vec![MixedPart::Ids(before), MixedPart::Text(text)]),
            other => other,
        }
    }

    /// The request has ended. A streaming session stays as it was where it was aborted.
    pub fn finish(mut self, prompt: &[TokenId], output: &[TokenId], is_aborted: bool, now: Instant) {
        self.is_kept = true;
        let mut open = self.sessions.lock();
        let OpenSessions { sessions, num_tokens, .. } = &mut *open;
        let Some(session) = sessions.get_mut(&self.key).filter(|session| session.serial == self.serial) else { return };
        session.num_under_way = session.num_under_way.saturating_sub(1);
        session.last_used = now;
        if is_aborted && session.streaming {
            return;
        }
        let mut request = SessionRequest { num_prompt: prompt.len(), ..SessionRequest::default() };
        if session.streaming {
            *num_tokens -= session.requests.drain().map(|(_, last)| last.num_tokens()).sum::<usize>();
        } else {
            // Where the parent has been forgotten meanwhile, all tokens are its own.
            request.parent = self.parent.take().filter(|(rid, _)| session.requests.contains_key(rid));
        }
        let before = request.parent.as_ref().map_or(0, |(_, kept)| *kept);
        request.own = prompt[before.min(prompt.len())..].iter().chain(output).copied().collect();
        *num_tokens += request.num_tokens();
        if let Some(same) = session.requests.insert(std::mem::take(&mut self.rid), request) {
            *num_tokens -= same.num_tokens();
        }
    }
}

impl Drop for SessionTurn {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let mut open = self.sessions.lock();
        if let Some(session) = open.sessions.get_mut(&self.key).filter(|session| session.serial == self.serial) {
            session.num_under_way = session.num_under_way.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TENANT: Tenant = Tenant(1);

    struct World {
        sessions: Sessions,
        server: ServerConfig,
        now: Instant,
    }

    impl World {
        /// With a session `s`.
        fn with(streaming: bool) -> Self {
            let server = ServerConfig { max_sessions: 2, max_session_tokens: 1000, ..ServerConfig::default() };
            let world = Self { sessions: Sessions::default(), server, now: Instant::now() };
            world.open("s", streaming).unwrap();
            world
        }

        fn open(&self, id: &str, streaming: bool) -> Result<String, ApiError> {
            let asked = OpenSession { id: id.into(), streaming, timeout: None };
            self.sessions.open(TENANT, asked, self.now, &self.server)
        }

        /// The turn, and its whole prompt.
        fn begin(&self, rid: &str, params: Value, own: &[TokenId]) -> Result<(SessionTurn, Vec<TokenId>), ApiError> {
            let Value::Object(mut given) = params else { unreachable!("the tests give objects") };
            given.entry("id").or_insert("s".into());
            let place = SessionPlace::parse(given)?;
            let mut turn = self.sessions.begin(TENANT, place, rid, self.now, &self.server)?;
            let Prompt::Tokens(prompt) = turn.behind(own.to_vec().into(), Some(0)) else {
                unreachable!("ids stay ids")
            };
            Ok((turn, prompt))
        }

        /// A request that ends with `output`; gives its whole prompt.
        fn ask(&self, rid: &str, params: Value, own: &[TokenId], output: &[TokenId]) -> Vec<TokenId> {
            let (turn, prompt) = self.begin(rid, params, own).unwrap();
            turn.finish(&prompt, output, false, self.now);
            prompt
        }

        fn refused(&self, rid: &str, params: Value) -> String {
            self.begin(rid, params, &[1]).unwrap_err().param.unwrap_or_default()
        }

        fn num_tokens(&self) -> usize {
            let open = self.sessions.lock();
            let counted: usize = open.sessions.values().map(Session::num_tokens).sum();
            assert_eq!(open.num_tokens, counted);
            counted
        }
    }

    #[test]
    fn a_streaming_session_goes_on_from_its_last_request() {
        let world = World::with(true);
        assert_eq!(world.ask("a", json!({}), &[0, 1], &[2]), [0, 1, 2][..2]);
        // What the client says of rid does not matter, and the token that begins a text is there once.
        assert_eq!(world.ask("b", json!({"rid": "other"}), &[0, 3], &[4, 5]), [0, 1, 2, 3]);
        assert_eq!(world.num_tokens(), 6 + REQUEST_TOKENS);
        let (turn, _) = world.begin("c", json!({}), &[6]).unwrap();
        assert_eq!(world.refused("d", json!({})), "session_params.id", "one at a time");
        turn.finish(&[0, 1, 2, 3, 4, 5, 6], &[7], true, world.now);
        let (dropped, prompt) = world.begin("e", json!({}), &[8]).unwrap();
        assert_eq!(prompt, [0, 1, 2, 3, 4, 5, 8], "an aborted request leaves nothing");
        drop(dropped);
        for field in ["replace", "drop_previous_output"] {
            assert_eq!(world.refused("f", json!({field: true})), format!("session_params.{field}"));
        }
        assert_eq!(world.refused("f", json!({"offset": 1})), "session_params.offset");
        assert_eq!(world.ask("f", json!({}), &[9], &[]), [0, 1, 2, 3, 4, 5, 9]);
    }

    #[test]
    fn requests_of_other_sessions_are_a_tree() {
        let world = World::with(false);
        world.ask("a", json!({}), &[1, 2], &[3]);
        assert_eq!(world.ask("b", json!({}), &[9], &[]), [9], "without rid it begins anew");
        assert_eq!(world.ask("c", json!({"rid": "a"}), &[4], &[5, 6]), [1, 2, 3, 4]);
        assert_eq!(world.ask("d", json!({"rid": "c", "offset": 2}), &[7], &[8]), [1, 2, 7]);
        assert_eq!(world.ask("e", json!({"rid": "c", "drop_previous_output": true}), &[7], &[]), [1, 2, 3, 4, 7]);
        assert_eq!(world.ask("f", json!({"rid": "d"}), &[5], &[]), [1, 2, 7, 8, 5]);
        assert_eq!(world.ask("g", json!({"rid": "f", "offset": 1}), &[6], &[]), [1, 6]);
        assert_eq!(world.refused("h", json!({"rid": "d", "offset": 5})), "session_params.offset");
        assert_eq!(world.refused("h", json!({"rid": "x"})), "session_params.rid");
        assert_eq!(world.refused("c", json!({"rid": "a"})), "rid");
        // c, and what went on from it, is forgotten.
        assert_eq!(world.ask("h", json!({"rid": "a", "replace": true}), &[4], &[]), [1, 2, 3, 4]);
        for forgotten in ["c", "d", "e", "f", "g"] {
            assert_eq!(world.refused("i", json!({"rid": forgotten})), "session_params.rid");
        }
        assert_eq!(world.num_tokens(), 3 + 1 + 1 + 3 * REQUEST_TOKENS);
        let (turn, _) = world.begin("i", json!({"rid": "h"}), &[5]).unwrap();
        assert_eq!(world.refused("j", json!({"rid": "i"})), "session_params.rid", "it has not ended");
        world.ask("k", json!({"replace": true}), &[1], &[]);
        turn.finish(&[1, 2, 3, 4, 5], &[6], true, world.now);
        assert_eq!(world.ask("l", json!({"rid": "i"}), &[7], &[]), [1, 2, 3, 4, 5, 6, 7], "its parent is forgotten");
        world.num_tokens();
    }

    #[test]
    fn sessions_and_their_tokens_are_bounded() {
        let mut world = World::with(false);
        assert_eq!(world.open("s", false).unwrap_err().param.as_deref(), Some("session_id"));
        world.open("t", true).unwrap();
        assert_eq!(world.open("u", true).unwrap_err().status, 429);
        world.ask("a", json!({}), &[1; 1000], &[]);
        assert_eq!(world.begin("b", json!({"id": "t"}), &[1]).unwrap_err().status, 429);
        world.sessions.close(TENANT, "s".into());
        assert_eq!(world.num_tokens(), 0);
        assert_eq!(world.refused("a", json!({})), "session_params.id");
        // Another client's sessions are others.
        world.sessions.close(Tenant(2), "t".into());
        let (turn, prompt) = world.begin("b", json!({"id": "t"}), &[1]).unwrap();
        world.now += Duration::from_secs(world.server.session_timeout_s + 1);
        world.open("u", true).unwrap();
        turn.finish(&prompt, &[], false, world.now);
        world.now += Duration::from_secs(world.server.session_timeout_s + 1);
        assert_eq!(world.refused("c", json!({"id": "t"})), "session_params.id", "it was idle");
        assert_eq!((world.num_tokens(), world.sessions.lock().sessions.len()), (0, 0));
    }

    #[test]
    fn what_comes_of_a_closed_session_goes_nowhere() {
        let world = World::with(true);
        let (turn, prompt) = world.begin("a", json!({}), &[1]).unwrap();
        world.sessions.close(TENANT, "s".into());
        world.open("s", true).unwrap();
        turn.finish(&prompt, &[2], false, world.now);
        assert_eq!((world.num_tokens(), world.ask("b", json!({}), &[3], &[])), (0, vec![3]));
    }

    #[test]
    fn wrong_fields_are_refused_by_their_paths() {
        let parse = |given: Value| SessionPlace::parse(given.as_object().unwrap().clone()).unwrap_err();
        assert_eq!(parse(json!({})).param.as_deref(), Some("session_params.id"));
        assert_eq!(parse(json!({"id": "a", "offset": -1})).param.as_deref(), Some("session_params.offset"));
        let error = parse(json!({"id": 5}));
        assert_eq!(error.param.as_deref(), Some("session_params.id"));
        assert!(error.message.starts_with("session_params.id must be"), "{error}");
    }
}
