//! Which settings may change while the server runs (SIGHUP, `POST /admin/config`), and why the others may not.

use super::settings::Setting;

/// Keys that may change.
pub const LIVE: &[&str] = &[
    "server.api_keys",
    "server.admin_key",
    "server.metrics_key",
    "server.cache_isolation",
    "server.include_kv_usage",
    "server.pause_comments",
    "server.max_requests",
    "server.max_share_per_key",
    "server.retry_after_s",
    "server.drain_delay_s",
    "server.drain_timeout_s",
    "server.max_body_bytes",
    "server.body_timeout_s",
    "server.request_timeout_s",
    "server.max_unread_mib",
    "server.max_answer_logprobs",
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

/// Why others may not: of a key, or of a whole section.
const REASONS: &[(&str, &str)] = &[
    ("server.host", "the address is bound at the start"),
    ("server.port", "the address is bound at the start"),
    ("server.served_model_name", "clients know the model by it"),
    ("server.cors_allowed_origins", "the HTTP threads are given it at the start"),
    ("server.cors_allow_credentials", "the HTTP threads are given it at the start"),
    ("server.header_timeout_s", "the HTTP threads are given it at the start"),
    ("server.write_timeout_s", "the sockets are given it at the start"),
    ("server.keep_alive_s", "the HTTP threads are given it at the start"),
    ("server.tls_cert", "whether the port speaks TLS is decided at the start; the file itself is read again"),
    ("server.tls_key", "whether the port speaks TLS is decided at the start; the file itself is read again"),
    ("server.admin_listen", "the address is bound at the start"),
    ("limits.max_connections", "the HTTP threads are given it at the start"),
    ("limits.max_body_values", "the HTTP threads are given it at the start"),
    ("limits.max_parsing_bytes", "the HTTP threads are given it at the start"),
    ("server.debug_endpoints", "whoever has the admin key shall not open them alone"),
    ("server.workers", "the HTTP threads are started at the start"),
    ("model", "the model is loaded at the start"),
    ("device", "the device is opened and set up at the start"),
    ("cache", "the device's KV pool and its prefix cache are made at the start"),
    ("swap.max_space_gib", "the memory, or the address space, for it is taken at the start"),
    ("scheduler.key_turns", "the order in which requests wait is chosen at the start"),
    ("scheduler.overlap", "the kind of loop is chosen at the start"),
    ("intake", "the threads are started at the start"),
    ("log.format", "the log is opened at the start"),
    ("tracing", "the exporter is started at the start"),
    ("recorder", "the recorder is set up at the start"),
    ("metrics", "recording is switched on at the start, for the whole process"),
];

/// Whether a setting may change while the server runs.
pub fn is_live(key: &str) -> bool {
    LIVE.contains(&key)
}

/// Why a setting may not change while the server runs; `None`: it may.
pub fn needs_restart(setting: &Setting) -> Option<&'static str> {
    if is_live(setting.key) {
        return None;
    }
    let is_of = |name: &str| name == setting.key || name == setting.section();
    let reason = REASONS.iter().find(|(name, _)| is_of(name));
    Some(reason.map(|(_, why)| *why).expect("a test goes through all settings: each is live or has a reason"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::{SETTINGS, find};

    #[test]
    fn every_setting_may_change_or_has_a_reason() {
        for setting in SETTINGS {
            let reasons = REASONS.iter().filter(|(name, _)| *name == setting.key || *name == setting.section());
            assert_eq!(is_live(setting.key), needs_restart(setting).is_none(), "{}", setting.key);
            let most = if is_live(setting.key) { usize::from(setting.section() == "cache") } else { 1 };
            assert!(reasons.count() <= most, "{} has two reasons, or one although it may change", setting.key);
        }
        assert!(LIVE.iter().all(|key| find(key).is_some()), "a key in the table is no setting");
        let is_something = |name: &str| SETTINGS.iter().any(|setting| setting.key == name || setting.section() == name);
        assert!(REASONS.iter().all(|(name, _)| is_something(name)), "there is a reason for nothing");
    }
}
