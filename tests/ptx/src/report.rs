//! Counters of a launch for people: a table, and bars of issue slots and bytes beside a device's roofline.

use crate::counters::{Counters, InstructionCounts};
use crate::source::SourceLines;
use crate::table::Unit;
use std::fmt::Write;

/// Peak rates of a device, from its data sheet.
#[derive(Clone, Copy, Debug)]
pub struct RooflineDevice {
    pub name: &'static str,
    pub num_sms: f64,
    /// Boost clock, in cycles a second.
    pub clock: f64,
    /// Bytes a second of global memory.
    pub memory_bandwidth: f64,
    /// Dense operations a second of the tensor cores on 16-bit floats.
    pub tensor_rate: f64,
}

/// The devices that a report can compare with.
pub const DEVICES: [RooflineDevice; 3] = [
    RooflineDevice { name: "a100", num_sms: 108.0, clock: 1.41e9, memory_bandwidth: 2.039e12, tensor_rate: 312e12 },
    RooflineDevice { name: "h100", num_sms: 132.0, clock: 1.83e9, memory_bandwidth: 3.35e12, tensor_rate: 989e12 },
    RooflineDevice { name: "h200", num_sms: 132.0, clock: 1.83e9, memory_bandwidth: 4.8e12, tensor_rate: 989e12 },
];

/// Warp schedulers of a multiprocessor, each with an issue slot a cycle.
const SCHEDULERS: f64 = 4.0;
/// Passes of shared memory a cycle of a multiprocessor.
const SHARED_PASSES: f64 = 1.0;
const SECTOR_BYTES: f64 = 32.0;
const BAR_WIDTH: f64 = 40.0;

fn bar(share: f64) -> String {
    "#".repeat((share.clamp(0.0, 1.0) * BAR_WIDTH).round() as usize)
}

/// A table of what the launch did, by unit.
pub fn table(counters: &Counters) -> String {
    let total = counters.total();
    let mut text = format!(
        "{}: grid {:?}, block {:?}\n\n{:<14} {:>14} {:>16} {:>7}\n",
        counters.kernel, counters.launch.grid, counters.launch.block, "unit", "issue slots", "thread instr.", "share"
    );
    for unit in Unit::ALL {
        let counts = counters.of_unit(unit);
        if counts.warps > 0 {
            let share = counts.warps as f64 / total.warps.max(1) as f64;
            let _ = writeln!(
                text,
                "{:<14} {:>14} {:>16} {:>6.1}% {}",
                unit.name(),
                counts.warps,
                counts.threads,
                100.0 * share,
                bar(share)
            );
        }
    }
    let per_request = |amount: u64| amount as f64 / total.requests.max(1) as f64;
    let _ = writeln!(
        text,
        "\nglobal memory: {} bytes in {} requests, {:.1} sectors a request, {:.0}% of the sectors' bytes asked for",
        total.global_bytes,
        total.requests,
        per_request(total.sectors),
        100.0 * total.global_bytes as f64 / (total.sectors as f64 * SECTOR_BYTES).max(1.0)
    );
    let conflicts = total.shared_passes - total.ideal_shared_passes;
    let _ = writeln!(
        text,
        "shared memory: {} bytes in {} passes, {conflicts} of them by bank conflicts",
        total.shared_bytes, total.shared_passes
    );
    let _ = writeln!(text, "tensor cores: {} operations", total.tensor_operations);
    text
}

/// The least time in seconds that each resource of a whole device needs for some counts.
#[derive(Clone, Copy, Debug)]
pub struct RooflineTimes {
    pub issue: f64,
    pub memory: f64,
    pub shared: f64,
    pub tensor: f64,
}

impl RooflineTimes {
    pub fn of(counts: &InstructionCounts, device: &RooflineDevice) -> Self {
        let cycles = device.num_sms * device.clock;
        Self {
            issue: counts.warps as f64 / (cycles * SCHEDULERS),
            memory: counts.sectors as f64 * SECTOR_BYTES / device.memory_bandwidth,
            shared: counts.shared_passes as f64 / (cycles * SHARED_PASSES),
            tensor: counts.tensor_operations as f64 / device.tensor_rate,
        }
    }
}

/// The least time that each resource of a device needs for the counts. The longest is the bound.
pub fn roofline(counters: &Counters, device: &RooflineDevice) -> String {
    let RooflineTimes { issue, memory, shared, tensor } = RooflineTimes::of(&counters.total(), device);
    let times =
        [("issue slots", issue), ("global memory", memory), ("shared memory", shared), ("tensor cores", tensor)];
    let longest = times.iter().map(|(_, time)| *time).fold(f64::MIN_POSITIVE, f64::max);
    let mut text = format!("least time on a whole {}, in microseconds:\n", device.name);
    for (name, time) in times {
        let _ = writeln!(text, "{name:<14} {:>12.3} {}", time * 1e6, bar(time / longest));
    }
    text
}

/// The source lines with the most issue slots.
pub fn hot_lines(counters: &Counters, lines: &SourceLines, count: usize) -> String {
    let mut by_line = std::collections::BTreeMap::<String, (u64, u64)>::new();
    for (_, source, counts) in counters.by_instruction() {
        let name = lines.innermost(source).map_or("?".to_string(), |(file, line)| format!("{file}:{line}"));
        let sums = by_line.entry(name).or_default();
        sums.0 += counts.warps;
        sums.1 += counts.shared_passes - counts.ideal_shared_passes;
    }
    let mut all: Vec<_> = by_line.into_iter().collect();
    all.sort_by_key(|(_, (slots, _))| std::cmp::Reverse(*slots));
    let mut text = format!("{:<50} {:>12} {:>14}\n", "source line", "issue slots", "bank conflicts");
    for (name, (slots, conflicts)) in all.into_iter().take(count) {
        let _ = writeln!(text, "{name:<50} {slots:>12} {conflicts:>14}");
    }
    text
}
