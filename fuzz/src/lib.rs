//! libFuzzer around the functions of `pagetide::fuzzing`.

pub use libfuzzer_sys;
use pagetide::text::grammar::sandbox;
use std::panic;

/// Lets panics that are caught be: libFuzzer's own hook ends the process at any. Grammars are compiled in a process of
/// their own first, as a server does it: this program, which then is no fuzzer.
pub fn begin() {
    let mut args = std::env::args();
    if args.nth(1).as_deref() == Some(sandbox::COMMAND) {
        sandbox::run();
        std::process::exit(0);
    }
    sandbox::use_program(std::env::current_exe().expect("a running program has a path"));
    panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
}

/// Calls a target by its name.
pub fn run(target: &str, data: &[u8]) {
    let Some(run) = pagetide::fuzzing::target(target) else {
        eprintln!("there is no target '{target}'");
        std::process::exit(2);
    };
    run(data);
}

#[macro_export]
macro_rules! fuzz {
    ($target:expr) => {
        $crate::libfuzzer_sys::fuzz_target!(init: $crate::begin(), |data: &[u8]| { $crate::run($target, data) });
    };
}
