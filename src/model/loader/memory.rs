//! The memory of this machine or container.

use crate::options::LoadOptions;
use pagetide_base::error::StartError;
use sysinfo::System;

/// The memory for KV blocks on the CPU, and a description of it. For [`pool_sizes`](super::sizes::pool_sizes).
pub(super) fn available_memory_budget(options: &LoadOptions) -> impl FnOnce() -> Result<(usize, String), StartError> {
    let share = options.memory_fraction.cpu;
    move || Ok(((available_memory() as f64 * share) as usize, format!("{share} of the available memory")))
}

/// How large a swap pool is if the configuration does not say it, in bytes.
pub(super) struct SwapDefaults {
    /// Its size at the start, by the size of the device pool.
    pub bytes: fn(usize) -> usize,
    /// To how much it can grow later.
    pub spare_bytes: usize,
}

/// The default size of the swap pool of a CPU, in bytes.
pub const DEFAULT_SWAP_BYTES: usize = 1 << 30;
/// The largest default on a GPU: pinning takes up to 0.3 s a GiB, during which a start waits.
const MAX_PINNED_BYTES: usize = 16 << 30;

impl SwapDefaults {
    /// On the CPU. Memory that is never used costs nothing.
    pub fn of_cpu() -> Self {
        Self { bytes: |_| DEFAULT_SWAP_BYTES, spare_bytes: available_memory() as usize / 2 }
    }

    /// On a GPU, where all of it is pinned at the start: as much as the device pool, but at most a quarter of the
    /// memory that is available.
    pub fn of_gpu() -> Self {
        Self { bytes: |device_bytes| pinned_swap_bytes(device_bytes, available_memory() as usize), spare_bytes: 0 }
    }
}

fn pinned_swap_bytes(device_bytes: usize, available_bytes: usize) -> usize {
    device_bytes.min(available_bytes / 4).min(MAX_PINNED_BYTES)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_swap_pool_of_a_gpu_follows_from_both_memories() {
        const GIB: usize = 1 << 30;
        // An 8B model on an H200 in a large host, an H100 beside little memory, and the demo model.
        assert_eq!(pinned_swap_bytes(105 * GIB, 1500 * GIB), 16 * GIB);
        assert_eq!(pinned_swap_bytes(52 * GIB, 40 * GIB), 10 * GIB);
        assert_eq!(pinned_swap_bytes(GIB / 8, 40 * GIB), GIB / 8);
    }
}
