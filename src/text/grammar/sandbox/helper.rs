//! The helper process: compiles grammars, and exits if one takes too much.

use super::protocol::{CompileJob, CompileVerdict, Reply, Words, receive, send};
use crate::grammar::engine::GrammarEngine;
use crate::grammar::vocabulary::Vocabulary;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Three quarters of the stack of the server's threads, so that a grammar that compiles here also compiles there.
const STACK_BYTES: usize = crate::grammar::STACK_BYTES / 4 * 3;
/// Interval for measuring time and memory.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Serves the socket on standard input until the other side closes it.
pub fn run() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Probably a user has run the command by hand.
            eprintln!("pagetide: the grammar helper is started by 'pagetide serve', not by hand: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    let mut stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    no_core_dumps();
    let Some(words) = receive::<Words>(&mut stream)? else { return Ok(()) };
    let (jobs, from_here) = mpsc::channel();
    let (to_here, verdicts) = mpsc::channel();
    let compile = move || compile_all(words, &from_here, &to_here);
    std::thread::Builder::new().stack_size(STACK_BYTES).spawn(compile)?;
    // The vocabulary has now been read.
    let engine_gone = || io::Error::other("the compiler's thread has ended");
    verdicts.recv().map_err(|_| engine_gone())?;
    let at_start = used()?;
    while let Some(job) = receive::<CompileJob>(&mut stream)? {
        let (cpu, memory_bytes) = (job.cpu(), job.memory_bytes);
        let begin = used()?;
        jobs.send(job).map_err(|_| engine_gone())?;
        let verdict = loop {
            match verdicts.recv_timeout(LOOK_EVERY) {
                Ok(verdict) => break verdict,
                Err(RecvTimeoutError::Disconnected) => return Err(engine_gone()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = used()?;
            let is_too_large = now.resident_bytes.saturating_sub(at_start.resident_bytes) > memory_bytes;
            if is_too_large || now.cpu.saturating_sub(begin.cpu) > cpu {
                let verdict = if is_too_large { CompileVerdict::TooMuchMemory } else { CompileVerdict::TooMuchTime };
                send(&mut stream, &Reply { verdict, is_last: true })?;
                // The compiler cannot be stopped otherwise.
                std::process::exit(0);
            }
        };
        // Memory that one job has left behind counts for the next one.
        let left = used()?.resident_bytes.saturating_sub(at_start.resident_bytes);
        let is_last = left > memory_bytes / 4;
        send(&mut stream, &Reply { verdict, is_last })?;
        if is_last {
            std::process::exit(0);
        }
    }
    Ok(())
}

/// The thread of the compiler. Its first verdict says that it is ready.
fn compile_all(words: Words, jobs: &Receiver<CompileJob>, verdicts: &Sender<CompileVerdict>) {
    let engine = GrammarEngine::new(Vocabulary::of_words(words.words, words.ends));
    if verdicts.send(CompileVerdict::Compiled).is_err() {
        return;
    }
    for job in jobs {
        let compiled = catch_unwind(AssertUnwindSafe(|| compile(&engine, &job)));
        if verdicts.send(compiled.unwrap_or(CompileVerdict::Panicked)).is_err() {
            return;
        }
    }
}

fn compile(engine: &Result<GrammarEngine, String>, job: &CompileJob) -> CompileVerdict {
    let request = match job.request() {
        Ok(request) => request,
        Err(error) => return CompileVerdict::Refused { param: String::new(), message: error.to_string() },
    };
    let refused = |param: String, message: String| CompileVerdict::Refused { param, message };
    match engine {
        Ok(engine) => match engine.compile(&request) {
            Ok(_) => CompileVerdict::Compiled,
            Err(error) => refused(error.param.unwrap_or_default(), error.message),
        },
        Err(error) => refused(request.param.clone(), format!("{}: {error}", request.param)),
    }
}

/// The resources that this process has used so far.
struct Used {
    cpu: Duration,
    /// Now.
    resident_bytes: u64,
}

fn used() -> io::Result<Used> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call writes one `rusage` and nothing else. If it fails, the zeroed value is valid.
    let (failed, usage) = unsafe { (libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) != 0, usage.assume_init()) };
    if failed {
        return Err(io::Error::last_os_error());
    }
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, 1000 * time.tv_usec as u32);
    Ok(Used { cpu: time(usage.ru_utime) + time(usage.ru_stime), resident_bytes: resident_bytes(&usage)? })
}

/// The current memory. `ru_maxrss` on Linux begins with the peak of the parent process, the server with its model.
#[cfg(target_os = "linux")]
fn resident_bytes(_: &libc::rusage) -> io::Result<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    let pages = pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    let pages = pages.ok_or_else(|| io::Error::other("/proc/self/statm has another form"))?;
    // SAFETY: the call only returns a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Ok(pages * page_bytes as u64)
}

/// The peak memory in bytes.
#[cfg(not(target_os = "linux"))]
fn resident_bytes(usage: &libc::rusage) -> io::Result<u64> {
    Ok(usage.ru_maxrss as u64)
}

/// Disables core dumps, because this process is expected to overflow its stack.
fn no_core_dumps() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call only reads `none`. If it fails, core dumps stay enabled.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
}
