//! The limit of open files (`ulimit -n`).

use pagetide_base::error::StartError;

/// Files for the standard streams, the threads of the engine, the listeners, and the model.
const OF_PROGRAM: u64 = 64;
/// Files of an HTTP thread, for events, signals and wake-ups.
const OF_THREAD: u64 = 8;

/// Raises the limit of open files as far as the system permits. Shells often allow 1024 while the system allows many
/// more, and each connection takes two files. Fails if the limit stays too low for a program with so many HTTP threads,
/// because their runtimes would panic.
pub fn ensure(http_threads: usize) -> Result<(), StartError> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes to `limit`, and nothing else.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        tracing::debug!("cannot read the limit of open files: {}", std::io::Error::last_os_error());
        return Ok(());
    }
    let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // SAFETY: the call reads `raised`, and nothing else.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } == 0 {
        limit = raised;
    } else {
        tracing::debug!("cannot raise the limit of open files: {}", std::io::Error::last_os_error());
    }
    // `rlim_t` is not u64 everywhere.
    #[allow(clippy::useless_conversion)]
    let most = u64::from(limit.rlim_cur);
    let num_open = num_open().unwrap_or(0);
    let needed = num_open + OF_PROGRAM + OF_THREAD * http_threads as u64;
    if most >= needed {
        return Ok(());
    }
    Err(StartError::new(format!(
        "the limit of open files (ulimit -n) is {most}, but {needed} are needed, of which {num_open} are already \
         open; each connection takes two more"
    )))
}

/// `None` if the system does not say.
fn num_open() -> Option<u64> {
    let open = std::fs::read_dir("/proc/self/fd").ok()?;
    // One of the entries is the folder itself.
    Some((open.count() as u64).saturating_sub(1))
}
