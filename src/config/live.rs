//! Which settings can change while the server runs (`SIGHUP`, `POST /admin/config`), and why the others cannot.

use super::settings::Setting;

/// Keys of settings that can change while the server runs.
pub const LIVE: &[&str] = &[
    "server.api_keys",
    "server.admin_key",
    "server.metrics_key",
    "server.cache_isolation",
    "server.accept_any_model",
    "server.schema_objects",
    "server.force_include_usage",
    "server.return_tokens_as_token_ids",
    "server.include_kv_usage",
    "server.pause_comments",
    "server.slots",
    "server.verbose",
    "server.thinking",
    "server.default_seed",
    "server.request_id_headers",
    "server.max_requests",
    "server.max_share_per_key",
    "server.retry_after_s",
    "server.drain_delay_s",
    "server.drain_timeout_s",
    "server.max_body_bytes",
    "server.body_timeout_s",
    "server.request_timeout_s",
    "server.max_unread_mib",
    "server.max_logprobs",
    "server.max_answer_logprobs",
    "server.max_sessions",
    "server.max_session_tokens",
    "server.session_timeout_s",
    "server.trust_request_chat_template",
    "limits.requests_per_minute",
    "limits.tokens_per_minute",
    "limits.key_requests_per_minute",
    "limits.key_tokens_per_minute",
    "limits.key_max_requests",
    "limits.key_max_connections",
    "cache.max_share_per_key",
    "swap.space_gib",
    "swap.high_watermark",
    "swap.max_tail_blocks",
    "swap.max_share_per_key",
    "scheduler.max_num_seqs",
    "scheduler.max_num_batched_tokens",
    "scheduler.inter_token_target_ms",
    "scheduler.preemption_mode",
    "scheduler.policy",
    "scheduler.admission",
    "scheduler.watermark",
    "scheduler.non_preemptible_share",
    "log.level",
    "log.slow_request_s",
    "console.enabled",
    "console.max_rate_hz",
    "console.max_watchers",
];

/// Why other settings cannot change, by key or by section.
const REASONS: &[(&str, &str)] = &[
    ("server.host", "the address is bound at startup"),
    ("server.port", "the address is bound at startup"),
    ("server.served_model_name", "clients know the model by this name"),
    ("server.unix_socket", "the socket is bound at startup"),
    ("server.root_path", "the HTTP threads receive it at startup"),
    ("server.surfaces", "the HTTP threads receive it at startup"),
    ("server.dialect", "the HTTP threads receive it at startup"),
    ("server.slot_folder", "the folder is opened at startup"),
    ("server.model_tags", "clients know the model by them"),
    ("server.cors_allowed_origins", "the HTTP threads receive it at startup"),
    ("server.cors_allow_credentials", "the HTTP threads receive it at startup"),
    ("server.header_timeout_s", "the HTTP threads receive it at startup"),
    ("server.write_timeout_s", "the sockets receive it at startup"),
    ("server.keep_alive_s", "the HTTP threads receive it at startup"),
    ("server.tls_cert", "whether the port uses TLS is decided at startup; SIGHUP reads the file itself again"),
    ("server.tls_key", "whether the port uses TLS is decided at startup; SIGHUP reads the file itself again"),
    ("server.admin_listen", "the address is bound at startup"),
    ("limits.max_connections", "the HTTP threads receive it at startup"),
    ("limits.max_body_values", "the HTTP threads receive it at startup"),
    ("limits.max_parsing_bytes", "the HTTP threads receive it at startup"),
    ("server.debug_endpoints", "the admin key alone must not be enough to enable them"),
    ("server.workers", "the HTTP threads start at startup"),
    ("model", "the model is loaded at startup"),
    ("device", "the device is opened at startup"),
    ("cache", "the KV cache on the device is created at startup"),
    ("swap.max_space_gib", "its memory or address space is reserved at startup"),
    ("scheduler.key_turns", "the order of waiting requests is chosen at startup"),
    ("scheduler.overlap", "the kind of scheduler loop is chosen at startup"),
    ("intake", "its threads start at startup"),
    ("batches", "the folder is opened at startup"),
    ("log.format", "the log is opened at startup"),
    ("tracing", "the exporter starts at startup"),
    ("recorder", "the recorder is created at startup"),
    ("metrics", "metrics are enabled at startup, for the whole process"),
];

/// Whether a setting can change while the server runs.
pub fn is_live(key: &str) -> bool {
    LIVE.contains(&key)
}

/// Why a setting cannot change while the server runs; `None` if it can.
pub fn needs_restart(setting: &Setting) -> Option<&'static str> {
    if is_live(setting.key) {
        return None;
    }
    let is_of = |name: &str| name == setting.key || name == setting.section();
    let reason = REASONS.iter().find(|(name, _)| is_of(name));
    Some(reason.map(|(_, why)| *why).expect("a test checks that each setting is live or has a reason"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{SETTINGS, find};

    #[test]
    fn every_setting_can_change_or_has_a_reason() {
        for setting in SETTINGS {
            let reasons = REASONS.iter().filter(|(name, _)| *name == setting.key || *name == setting.section());
            assert_eq!(is_live(setting.key), needs_restart(setting).is_none(), "{}", setting.key);
            let most = if is_live(setting.key) { usize::from(setting.section() == "cache") } else { 1 };
            assert!(reasons.count() <= most, "{} has two reasons, or one although it can change", setting.key);
        }
        assert!(LIVE.iter().all(|key| find(key).is_some()), "a key in LIVE is not a setting");
        let is_something = |name: &str| SETTINGS.iter().any(|setting| setting.key == name || setting.section() == name);
        assert!(REASONS.iter().all(|(name, _)| is_something(name)), "a reason names neither a setting nor a section");
    }
}
