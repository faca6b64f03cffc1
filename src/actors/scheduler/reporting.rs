//! What the scheduler's reports say, as metrics, totals and log lines.

use super::{SchedulerActor, labels};
use pagetide_api::event::Event;
use pagetide_engine::arbiter::Decision;
use pagetide_engine::scheduler::{Admission, Forecast, PlanReport, PlanStats};
use pagetide_metrics::{self as metrics, Preemption, tenants};
use std::time::Instant;

fn report_decision(decision: &Decision) {
    metrics::arbiter_decided(labels::arbiter_choice(decision.choice));
    tracing::debug!(
        request = %decision.request,
        choice = ?decision.choice,
        tokens = decision.num_tokens,
        swap_s = decision.swap_s,
        swap_full_s = decision.swap_full_s,
        recompute_s = decision.recompute_s,
        "a sequence is preempted"
    );
}

impl SchedulerActor {
    pub(super) fn report_plan(&mut self, report: PlanReport) {
        let max_tail_blocks = self.scheduler().config().max_tail_blocks;
        report.decisions.iter().for_each(report_decision);
        for copies in &report.preemption_copies {
            let excess = copies.excess(max_tail_blocks).map(labels::tail_reason);
            metrics::preemption_copies(copies.num_blocks, excess);
        }
        metrics::set_max_tail_blocks(max_tail_blocks);
        self.report_stats(&report.stats);
        report.admissions.iter().for_each(|admission| self.report_admission(admission));
        for (tenant, tier) in report.quota_refusals {
            tenants::quota_refused(tenant, labels::quota_of(tier));
        }
        let now = Instant::now();
        for (request, delivery) in report.pauses {
            match &mut self.news {
                // After the deliveries of the step before.
                Some(news) => news.deliveries.push((request, delivery)),
                None => self.deliver(request, delivery, now),
            }
        }
        let Forecast { prompt_limit, decodes_s, prompt_token_s, output_tokens, horizon, .. } = report.forecast;
        metrics::forecast(prompt_limit, decodes_s, prompt_token_s);
        metrics::expected_output(output_tokens, horizon);
        // Samples that share a partly filled block each count its empty slots.
        metrics::kv_waste(report.empty_slots, report.used_blocks * self.settings.block_size);
    }

    fn report_stats(&mut self, stats: &PlanStats) {
        self.totals.add_plan(stats);
        let block_bytes = self.settings.block_bytes;
        metrics::swapped_out(stats.blocks_out, stats.blocks_out * block_bytes);
        metrics::swapped_in(stats.blocks_in, stats.blocks_in * block_bytes);
        for (kind, count) in
            [(Preemption::Swap, stats.preempted_swap), (Preemption::Recompute, stats.preempted_recompute)]
        {
            (0..count).for_each(|_| metrics::preempted(kind));
        }
    }

    fn report_admission(&mut self, admission: &Admission) {
        let Admission { request, prompt_tokens, cached_tokens, swapped_tokens } = *admission;
        metrics::prompt_tokens(prompt_tokens, cached_tokens);
        self.totals.prompt_tokens += prompt_tokens as u64;
        self.totals.cached_tokens += cached_tokens as u64;
        metrics::prefix_cache(prompt_tokens, cached_tokens, swapped_tokens);
        if let Some(client) = self.clients.get_mut(&request) {
            let queued = client.arrived.elapsed();
            client.queued = Some(queued);
            metrics::queue_time(queued);
            client.tenant.iter().for_each(|tenant| tenant.prompt_tokens(prompt_tokens));
            if let Some(observer) = &client.observer {
                observer.started(request);
            }
            client.cached_tokens = cached_tokens;
            if client.hears_progress {
                let cached = cached_tokens as u32;
                // A closed channel means that the client has gone.
                let _ = client.events.send(Event::Prefilled { cached_tokens: cached, computed: cached });
            }
        }
    }

    pub(super) fn report_population(&mut self) {
        let population = self.scheduler().population();
        metrics::set_requests(population.waiting, population.running, population.swapped);
        if tenants::any() {
            let holdings = self.scheduler().holdings();
            tenants::set_held(holdings.iter().map(|(tenant, holding)| (*tenant, labels::held(holding))));
        }
    }
}
