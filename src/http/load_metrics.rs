//! The server's load in a header of an answer, for load balancers that choose by it: ORCA (Open Request Cost
//! Aggregation), as vLLM reports it.

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use pagetide_actors::runtime::RuntimeHandle;
use serde_json::json;

/// The client asks for the report with this header: TEXT or JSON.
const FORMAT: &str = "endpoint-load-metrics-format";
const REPORT: HeaderName = HeaderName::from_static("endpoint-load-metrics");

/// How a report is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportFormat {
    Text,
    Json,
}

impl ReportFormat {
    /// The format that a request asks for, if any. Unknown formats are ignored.
    pub fn asked(headers: &HeaderMap) -> Option<Self> {
        match headers.get(FORMAT)?.to_str().ok()?.to_ascii_lowercase().as_str() {
            "text" => Some(ReportFormat::Text),
            "json" => Some(ReportFormat::Json),
            _ => None,
        }
    }

    fn write(self, metrics: [(&str, f64); 2]) -> String {
        match self {
            ReportFormat::Text => {
                let all = metrics.map(|(name, value)| format!("named_metrics.{name}={value:?}"));
                format!("TEXT {}", all.join(", "))
            }
            ReportFormat::Json => {
                let [(first, first_value), (second, second_value)] = metrics;
                format!("JSON {}", json!({"named_metrics": {first: first_value, second: second_value}}))
            }
        }
    }
}

/// Adds the report to the headers of an answer.
pub async fn add_report(format: ReportFormat, handle: &RuntimeHandle, headers: &mut HeaderMap) {
    // An engine that has stopped has no load.
    let Ok(snapshot) = handle.look(0).await else { return };
    let waiting = (snapshot.population.waiting + snapshot.population.swapped) as f64;
    let report =
        format.write([("kv_cache_usage_perc", snapshot.device.used_share()), ("num_requests_waiting", waiting)]);
    if let Ok(report) = HeaderValue::try_from(report) {
        headers.insert(REPORT, report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_have_vllms_form() {
        let metrics = [("kv_cache_usage_perc", 0.25), ("num_requests_waiting", 3.0)];
        assert_eq!(
            ReportFormat::Text.write(metrics),
            "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
        );
        assert_eq!(
            ReportFormat::Json.write(metrics),
            "JSON {\"named_metrics\":{\"kv_cache_usage_perc\":0.25,\"num_requests_waiting\":3.0}}"
        );
    }
}
