//! What cannot be said in safe Rust: loops of scalar instructions, and threads that stay on one processor.

#[cfg(target_arch = "x86_64")]
use std::time::Instant;

/// What a core does in a few microseconds.
#[derive(Clone, Copy)]
pub struct Probe {
    /// Scalar additions in a nanosecond, four chains of them: they wait for nothing but the core, so that a thread that
    /// shares its ports shows at once.
    pub adds_per_ns: f64,
    /// Cycles in a nanosecond, by a chain of multiplications of three cycles each, which nobody else slows down.
    pub ghz: f64,
}

impl Probe {
    /// What is left of the core to this thread, whatever its clock is.
    pub fn adds_per_cycle(self) -> f64 {
        self.adds_per_ns / self.ghz
    }
}

/// Not known on other architectures.
#[cfg(target_arch = "x86_64")]
pub fn probe() -> Option<Probe> {
    const ROUNDS: usize = 2_000;
    let started = Instant::now();
    // SAFETY: registers only.
    unsafe {
        std::arch::asm!(
            "2:",
            "add {a}, 1",
            "add {b}, 1",
            "add {c}, 1",
            "add {d}, 1",
            "add {a}, 1",
            "add {b}, 1",
            "add {c}, 1",
            "add {d}, 1",
            "dec {rounds}",
            "jnz 2b",
            a = inout(reg) 0u64 => _,
            b = inout(reg) 0u64 => _,
            c = inout(reg) 0u64 => _,
            d = inout(reg) 0u64 => _,
            rounds = inout(reg) ROUNDS => _,
            options(nomem, nostack),
        );
    }
    let added = Instant::now();
    // SAFETY: as above.
    unsafe {
        std::arch::asm!(
            "2:",
            "imul {a}, {a}",
            "dec {rounds}",
            "jnz 2b",
            a = inout(reg) 3u64 => _,
            rounds = inout(reg) ROUNDS => _,
            options(nomem, nostack),
        );
    }
    let ns = |time: std::time::Duration| time.as_nanos().max(1) as f64;
    Some(Probe {
        adds_per_ns: (8 * ROUNDS) as f64 / ns(added - started),
        ghz: (3 * ROUNDS) as f64 / ns(added.elapsed()),
    })
}

#[cfg(not(target_arch = "x86_64"))]
pub fn probe() -> Option<Probe> {
    None
}

/// The processors that this process may use.
#[cfg(target_os = "linux")]
pub fn processors() -> Vec<usize> {
    // SAFETY: a set of processors is plain bits, and the call fills one of the size it is told.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&set), &mut set);
        set
    };
    // SAFETY: the numbers are within the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// Keeps the calling thread on one processor. Where the system refuses, the thread may move.
#[cfg(target_os = "linux")]
pub fn stay_on(processor: usize) {
    // SAFETY: as above.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

#[cfg(not(target_os = "linux"))]
pub fn processors() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub fn stay_on(_: usize) {}
