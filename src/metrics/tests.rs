use super::*;

#[test]
fn names_follow_the_conventions() {
    for metric in METRICS {
        // One metric has a name that all programs share.
        let is_ours = metric.name.starts_with("pagetide_") || metric.name == "process_start_time_seconds";
        assert!(is_ours, "{}", metric.name);
        assert_eq!(metric.name.ends_with("_total"), metric.kind == MetricKind::Counter, "{}", metric.name);
        assert_eq!(metric.name.ends_with("_seconds"), metric.unit == "seconds", "{}", metric.name);
        assert_eq!(metric.buckets.is_empty(), metric.kind != MetricKind::Histogram, "{}", metric.name);
        assert!(metric.buckets.is_sorted_by(|a, b| a < b), "{}", metric.name);
    }
}
