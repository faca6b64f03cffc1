//! The engine's reports in the terms of metrics, which know no engine.

use pagetide_engine::arbiter::Choice;
use pagetide_engine::bill::{Holding, QuotaTier};
use pagetide_engine::scheduler::TailExcess;
use pagetide_metrics::tenants::TenantHeld;
use pagetide_metrics::{ArbiterChoice, QuotaOf, TailReason};

pub fn arbiter_choice(choice: Choice) -> ArbiterChoice {
    match choice {
        Choice::Swap => ArbiterChoice::Swap,
        Choice::SwapFull => ArbiterChoice::SwapFull,
        Choice::Recompute => ArbiterChoice::Recompute,
    }
}

pub fn tail_reason(excess: TailExcess) -> TailReason {
    match excess {
        TailExcess::Filled => TailReason::Filled,
        TailExcess::Unforeseen => TailReason::Unforeseen,
        TailExcess::QueueFull => TailReason::QueueFull,
        TailExcess::NoRoom => TailReason::NoRoom,
        TailExcess::Off => TailReason::Off,
    }
}

pub fn quota_of(tier: QuotaTier) -> QuotaOf {
    match tier {
        QuotaTier::Device => QuotaOf::Device,
        QuotaTier::Swap => QuotaOf::Swap,
    }
}

pub fn held(holding: &Holding) -> TenantHeld {
    TenantHeld { sequences: holding.sequences, blocks: holding.blocks }
}
