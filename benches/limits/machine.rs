//! What cannot be said in safe Rust: a loop of scalar additions, and threads that stay on one processor.

use std::time::Instant;

/// Scalar additions in a nanosecond, in a few microseconds of them that wait for nothing but the core: a thread that
/// shares the core's ports shows at once. Not known on other architectures.
#[cfg(target_arch = "x86_64")]
pub fn adds_per_ns() -> Option<f64> {
    const ROUNDS: usize = 5_000;
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
    Some((8 * ROUNDS) as f64 / started.elapsed().as_nanos().max(1) as f64)
}

#[cfg(not(target_arch = "x86_64"))]
pub fn adds_per_ns() -> Option<f64> {
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
