use std::process::ExitCode;

// Requests allocate and free many small strings on several threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    pagetide::cli::run()
}
