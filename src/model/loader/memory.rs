//! The memory of this machine or container.

use crate::options::LoadOptions;
use pagetide_base::error::StartError;
use sysinfo::System;

/// The memory for KV blocks on the CPU, and a description of it. For [`pool_sizes`](super::sizes::pool_sizes).
pub(super) fn available_memory_budget(options: &LoadOptions) -> impl FnOnce() -> Result<(usize, String), StartError> {
    let share = options.memory_fraction.cpu;
    move || Ok(((available_memory() as f64 * share) as usize, format!("{share} of the available memory")))
}

/// Default maximum size of the swap pool in bytes. Memory that is never used costs nothing.
pub(super) fn spare_swap_bytes() -> usize {
    available_memory() as usize / 2
}

/// Fails if this machine or container could not hold a model of `needed` bytes even if nothing else were running.
/// Memory that other programs use now may be free later, so it is not counted.
pub(super) fn check_memory(needed: u128) -> Result<(), StartError> {
    let mut system = System::new();
    system.refresh_memory();
    let machine = system.total_memory().saturating_add(system.total_swap());
    let total = system
        .cgroup_limits()
        .map_or(machine, |limits| machine.min(limits.total_memory.saturating_add(limits.free_swap)));
    if needed <= u128::from(total) {
        return Ok(());
    }
    let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
    Err(StartError::new(format!(
        "the model needs {:.1} GiB for weights and workspace, and this machine has {:.1} GiB of memory: use a smaller \
         model or a smaller --dtype, or lower --max-num-batched-tokens or --max-model-len",
        gib(needed),
        gib(total.into())
    )))
}

/// Bytes that this process can still allocate, limited by the machine and by the container.
fn available_memory() -> u64 {
    let mut system = System::new();
    system.refresh_memory();
    let machine = system.available_memory();
    system.cgroup_limits().map_or(machine, |limits| machine.min(limits.free_memory))
}
