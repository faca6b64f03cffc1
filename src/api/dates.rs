//! Times as APIs write them that do not count seconds.

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A Unix time in seconds.
pub fn rfc3339(unix_time_s: u64) -> String {
    let time = i64::try_from(unix_time_s).ok().and_then(|time| OffsetDateTime::from_unix_timestamp(time).ok());
    time.and_then(|time| time.format(&Rfc3339).ok()).unwrap_or_default()
}

pub fn rfc3339_now() -> String {
    OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default()
}
