//! Recorded metrics, as Prometheus reads them.

use pagetide::engine::scheduler::{Foresight, TailCopies, TailExcess};
use pagetide::ids::Tenant;
use pagetide::metrics::tenants::TenantHeld;
use pagetide::metrics::*;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The value of a series on the page.
fn value(page: &str, series: &str) -> f64 {
    let line = page.lines().find(|line| line.rsplit_once(' ').is_some_and(|(name, _)| name == series));
    let line = line.unwrap_or_else(|| panic!("no series {series} in\n{page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn ended(outcome: Outcome, seconds: u64) -> EndedRequest {
    EndedRequest { outcome, e2e: Duration::from_secs(seconds), tenant: tenants::of(Tenant(7)), ..Default::default() }
}

/// A single test, because the metrics of a process are global.
#[test]
fn recorded_values_are_on_the_page() {
    request_ended(&ended(Outcome::Stop, 1)); // before install: nothing happens
    install();
    tenants::register(Tenant(7), "key-7");
    let page = render().unwrap();
    for metric in METRICS {
        // Only these have labels that are not known beforehand.
        if !["pagetide_http_requests_total", "pagetide_build_info", "pagetide_weights_bytes"].contains(&metric.name) {
            assert!(page.contains(&format!("# HELP {} ", metric.name)), "{}", metric.name);
            assert!(page.contains(&format!("# TYPE {} {}\n", metric.name, metric.kind.name())), "{}", metric.name);
        }
    }
    assert_eq!(value(&page, "pagetide_requests_total{outcome=\"stop\"}"), 0.0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((now - value(&page, "process_start_time_seconds")).abs() < 60.0);

    request_ended(&ended(Outcome::Stop, 1));
    request_ended(&ended(Outcome::Failed, 3));
    request_rejected(Rejection::Draining, Tenant(7));
    preempted(Preemption::Recompute);
    let left = |num_blocks, foresight| TailCopies { num_blocks, foresight };
    assert_eq!(left(3, Foresight::Foreseen { num_filled: 0 }).excess(4), None);
    preemption_copies(3, None);
    assert_eq!(left(20, Foresight::Unforeseen).excess(4), Some(TailExcess::Unforeseen));
    preemption_copies(20, Some(TailReason::Unforeseen));
    set_max_tail_blocks(4);
    set_requests(3, 2, 1);
    let tenant = tenants::of(Tenant(7)).unwrap();
    assert!(tenants::of(Tenant::default()).is_none(), "nobody's requests have no label");
    tenant.prompt_tokens(5);
    tenant.generated_token();
    tenants::quota_refused(Tenant(7), QuotaOf::Swap);
    let held = TenantHeld { sequences: [1, 2, 3], blocks: [4, 5] };
    tenants::set_held([(Tenant(7), held), (Tenant::default(), held)].into_iter());
    prompt_tokens(10, 4);
    set_device_blocks(5, 6, 7);
    forecast(300, 0.02, 0.0005);
    expected_output(200, 64);
    kv_waste(3, 12);
    swapped_out(2, 4096);
    prefix_cache(40, 32, 16);
    arbiter_decided(ArbiterChoice::SwapFull);
    copies(0.001, 0.002, 7);
    set_swap_blocks(1, 2, 3, 4);
    config_changed(false);
    first_token(Duration::from_millis(30));
    http_request("/v1/models", 200);
    build_info("demo", "cpu", "bfloat16");
    weights_bytes("Q4_K", 4096);
    let execute = Duration::from_millis(20);
    let gap = Some(Duration::from_micros(500));
    step(&StepMetrics { sequences: 2, tokens: 40, execute, gap, ..Default::default() });
    step(&StepMetrics::default());

    let page = render().unwrap();
    for (series, expected) in [
        ("pagetide_weights_bytes{format=\"Q4_K\"}", 4096.0),
        ("pagetide_requests_total{outcome=\"stop\"}", 1.0),
        ("pagetide_requests_total{outcome=\"failed\"}", 1.0),
        ("pagetide_e2e_seconds_sum", 4.0),
        ("pagetide_rejected_total{reason=\"draining\"}", 1.0),
        ("pagetide_preemptions_total{mode=\"recompute\"}", 1.0),
        ("pagetide_preemptions_total{mode=\"swap\"}", 0.0),
        ("pagetide_preemption_blocks_sum", 23.0),
        ("pagetide_preemption_blocks_bucket{le=\"5\"}", 1.0),
        ("pagetide_max_tail_blocks", 4.0),
        ("pagetide_preemptions_over_tail_total{reason=\"unforeseen\"}", 1.0),
        ("pagetide_preemptions_over_tail_total{reason=\"filled\"}", 0.0),
        ("pagetide_tenant_requests_total{tenant=\"key-7\",outcome=\"failed\"}", 1.0),
        ("pagetide_tenant_rejected_total{tenant=\"key-7\",reason=\"draining\"}", 1.0),
        ("pagetide_tenant_tokens_total{tenant=\"key-7\",kind=\"prompt\"}", 5.0),
        ("pagetide_tenant_tokens_total{tenant=\"key-7\",kind=\"generated\"}", 1.0),
        ("pagetide_tenant_requests{tenant=\"key-7\",state=\"swapped\"}", 3.0),
        ("pagetide_tenant_blocks{tenant=\"key-7\",tier=\"device\"}", 4.0),
        ("pagetide_tenant_quota_total{tenant=\"key-7\",tier=\"swap\"}", 1.0),
        ("pagetide_tenant_quota_total{tenant=\"key-7\",tier=\"device\"}", 0.0),
        ("pagetide_requests{state=\"waiting\"}", 3.0),
        ("pagetide_requests{state=\"swapped\"}", 1.0),
        ("pagetide_prompt_tokens_total", 10.0),
        ("pagetide_cached_tokens_total", 4.0),
        ("pagetide_device_blocks{state=\"cached\"}", 6.0),
        ("pagetide_prompt_limit_tokens", 300.0),
        ("pagetide_expected_seconds{of=\"decodes\"}", 0.02),
        ("pagetide_expected_seconds{of=\"prompt_token\"}", 0.0005),
        ("pagetide_expected_output_tokens", 200.0),
        ("pagetide_admission_horizon_tokens", 64.0),
        ("pagetide_kv_waste_ratio", 0.25),
        ("pagetide_kv_empty_slot_steps_total", 3.0),
        ("pagetide_kv_slot_steps_total", 12.0),
        ("pagetide_swap_out_bytes_total", 4096.0),
        ("pagetide_swap_in_bytes_total", 0.0),
        ("pagetide_prefix_cache_hits_total{tier=\"device\"}", 16.0),
        ("pagetide_prefix_cache_hits_total{tier=\"cpu\"}", 16.0),
        ("pagetide_arbiter_decisions_total{choice=\"swap_full\"}", 1.0),
        ("pagetide_copy_seconds{direction=\"in\"}", 0.002),
        ("pagetide_copy_queue_blocks", 7.0),
        ("pagetide_swap_blocks{state=\"draining\"}", 4.0),
        ("pagetide_config_changes_total{result=\"applied\"}", 0.0),
        ("pagetide_config_changes_total{result=\"refused\"}", 1.0),
        ("pagetide_time_to_first_token_seconds_bucket{le=\"0.025\"}", 0.0),
        ("pagetide_time_to_first_token_seconds_bucket{le=\"0.05\"}", 1.0),
        ("pagetide_http_requests_total{path=\"/v1/models\",status=\"200\"}", 1.0),
        ("pagetide_step_seconds_sum{phase=\"execute\"}", 0.02),
        ("pagetide_step_tokens_sum", 40.0),
        ("pagetide_step_gap_seconds_sum", 0.0005),
        ("pagetide_step_gap_seconds_count", 1.0),
    ] {
        assert_eq!(value(&page, series), expected, "{series}");
    }
    assert!(page.contains("model=\"demo\""));
    tenants::set_held(std::iter::empty());
    assert_eq!(value(&render().unwrap(), "pagetide_tenant_blocks{tenant=\"key-7\",tier=\"device\"}"), 0.0);
    kv_waste(0, 0);
    assert_eq!(value(&render().unwrap(), "pagetide_kv_waste_ratio"), 0.0);
}
