use std::process::ExitCode;

// Requests allocate and free many small strings on several threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The system calls this before `main`, and so before the first allocation.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: functions in this section get arguments that this one ignores. It uses nothing that `main` has to set up.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = pagetide::cli::check_address_space;

fn main() -> ExitCode {
    pagetide::cli::run()
}
