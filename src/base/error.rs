//! Errors that reach a person: a client of the API ([`ApiError`]), or the user who starts the program ([`StartError`]).

use std::fmt;

/// An error in the shape of OpenAI's error object, with the HTTP status it travels under.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: u16,
    /// The problem, with the value given and the allowed range.
    pub message: String,
    /// The error object's `type`.
    pub kind: &'static str,
    /// The field at fault, as a path: `messages[0].content`.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// Seconds after which a retry makes sense (`Retry-After`).
    pub retry_after_s: Option<u64>,
    /// Of a prompt that is too long, where its length is known.
    pub context: Option<Box<ContextExcess>>,
    /// What is wrong with the value of `param`, where it is one of these.
    pub violation: Option<Violation>,
}

/// What a value is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    BelowMinimum,
    AboveMaximum,
    /// None of the words that its field has.
    UnknownWord,
}

/// A prompt that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextExcess {
    pub prompt_tokens: usize,
    /// The most tokens of prompt and output together.
    pub max_tokens: usize,
}

impl ApiError {
    fn new(status: u16, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, message, kind, param: None, code, retry_after_s: None, context: None, violation: None }
    }

    /// 400: a field has a wrong type or value.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(400, "invalid_request_error", None, message) }
    }

    /// 400: the body as a whole is wrong (not JSON, say).
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", None, message)
    }

    /// The same error, with what is wrong with the value.
    pub fn with_violation(self, violation: Violation) -> Self {
        Self { violation: Some(violation), ..self }
    }

    /// 400: prompt and output do not fit the model or the memory.
    pub fn context_length(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(400, "invalid_request_error", Some("context_length_exceeded"), message)
        }
    }

    /// The same error, with the lengths.
    pub fn with_context(self, prompt_tokens: usize, max_tokens: usize) -> Self {
        Self { context: Some(Box::new(ContextExcess { prompt_tokens, max_tokens })), ..self }
    }

    /// 400: a prompt's text is longer than `intake.max_prompt_bytes`.
    pub fn prompt_too_long(param: impl Into<String>, got_bytes: usize, max_bytes: usize) -> Self {
        let message = format!(
            "the prompt's text has {got_bytes} bytes; this server takes at most {max_bytes} (intake.max_prompt_bytes)"
        );
        Self::context_length(param, message)
    }

    /// 400: a batch has more prompts than the engine may hold at once. Not a 429: trying again would not help.
    pub fn too_many_prompts(param: &str, most: usize, got: usize) -> Self {
        let message =
            format!("a batch may have at most {most} {param}s on this server (server.max_requests), got {got}");
        Self::invalid(param, message)
    }

    /// 400: a field would cause more work than one request may.
    pub fn too_complex(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("too_complex"), ..Self::invalid(param, message) }
    }

    /// 400, mostly in a stream that has begun: what the client demands of the output cannot be kept up.
    pub fn constraint_failed(why: &str) -> Self {
        Self::bad_request(format!("the output cannot follow the constraint (structured output) any further: {why}"))
    }

    pub fn unauthorized() -> Self {
        Self::new(
            401,
            "authentication_error",
            Some("invalid_api_key"),
            "missing or wrong API key: send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'",
        )
    }

    /// 401 of the admin endpoints: they have a key of their own.
    pub fn not_admin() -> Self {
        let message = "missing or wrong admin key (server.admin_key): send it as 'Authorization: Bearer KEY' or \
                       'X-API-Key: KEY'; the keys of clients are not accepted here";
        Self::new(401, "authentication_error", Some("invalid_admin_key"), message)
    }

    /// 403: there is no admin key, so settings cannot be changed.
    pub fn admin_closed() -> Self {
        let message = "/admin is closed on this server: set server.admin_key to open it";
        Self::new(403, "permission_error", Some("admin_closed"), message)
    }

    /// 401 for data about all requests, which the keys of clients do not open.
    pub fn not_watcher() -> Self {
        let message = "missing or wrong key: this path requires server.metrics_key or server.admin_key as \
                       'Authorization: Bearer KEY' or 'X-API-Key: KEY'; the keys of clients are not accepted here";
        Self::new(401, "authentication_error", Some("invalid_metrics_key"), message)
    }

    /// 403: there is no key that opens data about all requests.
    pub fn metrics_closed() -> Self {
        let message = "/metrics and /console/events show the requests of all clients, so the keys of clients are \
                       not accepted here: set server.metrics_key to open them";
        Self::new(403, "permission_error", Some("metrics_closed"), message)
    }

    /// 403: not on this server.
    pub fn debug_closed() -> Self {
        let message = "server.debug_endpoints is false on this server, so steps cannot be made to fail";
        Self::new(403, "permission_error", Some("debug_closed"), message)
    }

    /// 400: requests use the prefix cache.
    pub fn cache_in_use() -> Self {
        let message = "requests run or wait, so the cache was not dropped; try again when they have ended, or with \
                       timeout=SECONDS";
        Self::bad_request(message)
    }

    /// 503: the engine generated no token in time.
    pub fn unhealthy(seconds: u64) -> Self {
        let message = format!("the engine generated no token within {seconds} s");
        Self::new(503, "service_unavailable", Some("unhealthy"), message)
    }

    /// 409: there is nothing to write.
    pub fn not_recording() -> Self {
        let message =
            "nothing is recorded on this server: recorder.minutes is 0, or recorder.max_mib is too small for it";
        Self::new(409, "invalid_request_error", Some("not_recording"), message)
    }

    /// 500: a recording could not be written.
    pub fn recording_failed(why: &str) -> Self {
        Self::new(500, "server_error", Some("recording_failed"), format!("the recording was not written: {why}"))
    }

    /// 400: settings that cannot be what was asked for, each with the reason. The first is the field at fault.
    pub fn invalid_settings(mut problems: Vec<(String, String)>) -> Self {
        if problems.is_empty() {
            return Self::bad_request("the settings are wrong");
        }
        let (key, mut message) = problems.remove(0);
        for (key, also) in problems {
            message += &format!("; {key}: {also}");
        }
        Self::invalid(key, message)
    }

    /// 400: a setting that cannot become this while the server runs.
    pub fn needs_restart(key: &str, why: String) -> Self {
        Self { code: Some("needs_restart"), ..Self::invalid(key, why) }
    }

    pub fn model_not_found(name: &str, served: &str) -> Self {
        Self {
            param: Some("model".into()),
            ..Self::new(
                404,
                "invalid_request_error",
                Some("model_not_found"),
                format!("the model '{name}' does not exist here; this server serves '{served}'"),
            )
        }
    }

    /// 404: responses are not kept.
    pub fn response_not_stored(id: &str) -> Self {
        let message = format!("no response '{id}' here: this server stores no responses");
        Self::new(404, "invalid_request_error", Some("response_not_found"), message)
    }

    /// 403: there is no folder for files and batches.
    pub fn batches_off() -> Self {
        let message = "this server keeps no files and batches: batches.folder is not set";
        Self::new(403, "permission_error", Some("batches_off"), message)
    }

    /// 404: no such file or batch of the client's key. `what`: file or batch.
    pub fn not_kept(what: &str, id: &str) -> Self {
        Self::new(404, "invalid_request_error", Some("not_found"), format!("there is no {what} '{id}'"))
    }

    /// 409: the batch has ended, or has not.
    pub fn wrong_batch_state(message: impl Into<String>) -> Self {
        Self::new(409, "invalid_request_error", Some("wrong_batch_state"), message)
    }

    /// 413: an uploaded file is longer than `batches.max_file_mib`.
    pub fn file_too_large(limit_mib: u64) -> Self {
        let message = format!("the file is longer than {limit_mib} MiB, this server's limit (batches.max_file_mib)");
        Self { param: Some("file".into()), ..Self::new(413, "invalid_request_error", Some("file_too_large"), message) }
    }

    /// 429: files or batches have to go before there is room. `setting`: the limit.
    pub fn batches_full(message: String, setting: &str) -> Self {
        let message = format!("{message} ({setting})");
        Self::new(429, "rate_limit_error", Some("storage_full"), message)
    }

    /// 500: the disk fails.
    pub fn storage_failed(why: &str) -> Self {
        Self::new(500, "server_error", Some("storage_failed"), format!("files cannot be read or written: {why}"))
    }

    /// 501: models are not added, changed or removed over HTTP.
    pub fn models_not_managed(path: &str) -> Self {
        let message = format!(
            "{path} is not served: this server serves the model that it was started with, and manages no others"
        );
        Self::new(501, "invalid_request_error", Some("not_managed"), message)
    }

    pub fn not_found(path: &str) -> Self {
        Self::new(404, "invalid_request_error", Some("not_found"), format!("no such path: {path}"))
    }

    /// 405: the path exists, for other methods.
    pub fn method_not_allowed(method: &str, allowed: &str) -> Self {
        Self::new(
            405,
            "invalid_request_error",
            Some("method_not_allowed"),
            format!("method {method} is not allowed here; use {allowed}"),
        )
    }

    /// 501: the path exists for clients of another server, and what it asks for cannot be done here.
    pub fn not_implemented(param: Option<&str>, message: impl Into<String>) -> Self {
        let param = param.map(str::to_owned);
        Self { param, ..Self::new(501, "invalid_request_error", Some("not_supported"), message) }
    }

    /// 503: every seat of a step is taken, and the client has asked to be told.
    pub fn no_slot(num_slots: usize) -> Self {
        let message = format!("no slot is free: {num_slots} sequences run, the maximum (scheduler.max_num_seqs)");
        Self { retry_after_s: Some(1), ..Self::new(503, "service_unavailable", Some("no_slot"), message) }
    }

    /// 406: the client takes no encoding that there is.
    pub fn not_acceptable() -> Self {
        let message = "Accept-Encoding allows no encoding of this server: allow gzip, deflate or identity";
        Self::new(406, "invalid_request_error", Some("not_acceptable"), message)
    }

    /// 413: the body is longer than `server.max_body_bytes`.
    pub fn body_too_large(limit_bytes: usize) -> Self {
        Self::new(
            413,
            "invalid_request_error",
            Some("body_too_large"),
            format!("the request body is longer than {limit_bytes} bytes, this server's limit (server.max_body_bytes)"),
        )
    }

    /// 400: it would take too much memory.
    pub fn too_many_values(most: usize) -> Self {
        Self::bad_request(format!(
            "the request body has too many JSON values: this server accepts up to limits.max_body_values = \
             {most}, token ids of prompts not counted"
        ))
    }

    /// 429: large bodies of others are being read.
    pub fn parsing_full(limit_bytes: usize) -> Self {
        Self {
            retry_after_s: Some(1),
            ..Self::new(
                429,
                "rate_limit_error",
                Some("parsing_full"),
                format!(
                    "too many large request bodies at once: with this one they would have more than {limit_bytes} \
                      bytes, this server's limit (limits.max_parsing_bytes); try again"
                ),
            )
        }
    }

    /// 415: the body is compressed in a way that is not known.
    pub fn unsupported_encoding(encoding: &str) -> Self {
        Self::new(
            415,
            "invalid_request_error",
            Some("unsupported_content_encoding"),
            format!("a body with Content-Encoding: {encoding} is not supported; use gzip, deflate, or none"),
        )
    }

    /// 429: the intake is full.
    pub fn overloaded(limit: usize, retry_after_s: u64) -> Self {
        Self {
            retry_after_s: Some(retry_after_s),
            ..Self::new(
                429,
                "rate_limit_error",
                Some("queue_full"),
                format!("the server already holds {limit} requests, its limit; try again in {retry_after_s} s"),
            )
        }
    }

    /// 429: one API key's requests have taken the places that they may have.
    pub fn key_overloaded(limit: usize, all: usize, retry_after_s: u64) -> Self {
        let message = format!(
            "this API key already has {limit} requests in the server, its part of {all} (server.max_share_per_key); try \
             again in {retry_after_s} s"
        );
        Self { retry_after_s: Some(retry_after_s), ..Self::new(429, "rate_limit_error", Some("queue_full"), message) }
    }

    /// 429: more than a limit lets in. Without `retry_after_s` it never is.
    pub fn rate_limited(message: String, retry_after_s: Option<u64>) -> Self {
        Self { retry_after_s, ..Self::new(429, "rate_limit_error", Some("rate_limit_exceeded"), message) }
    }

    /// 429: the open sessions take all that they may.
    pub fn sessions_full(message: String) -> Self {
        Self::new(429, "rate_limit_error", Some("sessions_full"), message)
    }

    /// 408: the body did not come in time.
    pub fn body_timeout(seconds: u64) -> Self {
        let message = format!("the request body did not arrive within {seconds} s (server.body_timeout_s)");
        Self::new(408, "invalid_request_error", Some("body_timeout"), message)
    }

    /// 504, or in a stream: the answer was not complete in time.
    pub fn timed_out(seconds: u64) -> Self {
        let message = format!("the answer was not complete within {seconds} s (server.request_timeout_s)");
        Self::new(504, "server_error", Some("request_timeout"), message)
    }

    /// 503, or in a stream: the server stops and waits no longer.
    pub fn cut_off(drain_timeout_s: u64) -> Self {
        let message = format!(
            "the server is shutting down, and this answer was not complete within {drain_timeout_s} s \
             (server.drain_timeout_s)"
        );
        Self { retry_after_s: Some(5), ..Self::new(503, "service_unavailable", Some("shut_down"), message) }
    }

    /// 429: the maximum number of watchers is reached.
    pub fn too_many_watchers(limit: usize) -> Self {
        Self {
            retry_after_s: Some(30),
            ..Self::new(
                429,
                "rate_limit_error",
                Some("too_many_watchers"),
                format!("{limit} clients already watch, the maximum (console.max_watchers); try again later"),
            )
        }
    }

    /// 503: the server is stopping.
    pub fn draining() -> Self {
        Self {
            retry_after_s: Some(5),
            ..Self::new(
                503,
                "service_unavailable",
                Some("draining"),
                "the server is shutting down and accepts no new requests",
            )
        }
    }

    /// 499: the client has disconnected, so it will not see this.
    pub fn abandoned() -> Self {
        Self::new(499, "server_error", Some("client_left"), "the client has gone")
    }

    /// 503: jobs that do not come back hold all threads that read requests.
    pub fn intake_stuck() -> Self {
        Self {
            retry_after_s: Some(5),
            ..Self::new(
                503,
                "service_unavailable",
                Some("intake_stuck"),
                "all threads that read requests (intake.tokenizer_threads) have been busy for more than 10 s",
            )
        }
    }

    /// 500: the engine failed under this request.
    pub fn engine(message: impl Into<String>) -> Self {
        Self::new(500, "server_error", Some("engine_failed"), message)
    }

    /// The message with the path of the field, for formats that have no field for the path.
    pub fn with_param(&self) -> String {
        match &self.param {
            Some(param) if !self.message.contains(param.as_str()) => self.to_string(),
            _ => self.message.clone(),
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.param {
            Some(param) => write!(f, "{param}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for ApiError {}

/// Why the program cannot start or a model cannot be loaded. The text is all the user sees, so it says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StartError(pub String);

impl StartError {
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl From<std::io::Error> for StartError {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}
