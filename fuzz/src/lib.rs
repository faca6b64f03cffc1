//! Runs the functions of `pagetide::fuzzing` under libFuzzer.

pub use libfuzzer_sys;
use pagetide::text::grammar::sandbox;
use std::panic;

/// Prepares the process for fuzzing.
///
/// Replaces libFuzzer's panic hook, which would end the process even at panics that Pagetide catches. As in a server,
/// grammars are first compiled in a process of their own. That process is this program too, started with another
/// command.
pub fn begin() {
    let mut args = std::env::args();
    if args.nth(1).as_deref() == Some(sandbox::COMMAND) {
        sandbox::run();
        std::process::exit(0);
    }
    sandbox::use_program(std::env::current_exe().expect("a running program has a path"));
    panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
}

/// Runs the target with this name.
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
