//! A separate process in which the grammar of a client is compiled first.
//!
//! A grammar is a program for llguidance's compiler. A malicious one can overflow the stack, which cannot be caught, or
//! take any amount of time and memory. So each new grammar is compiled in a helper process with limits. The server
//! compiles it only if that succeeds, because the same input takes the same path there. The helper is this program,
//! started with the command [`COMMAND`]. It knows the model's vocabulary and nothing else about the server.

mod helper;
mod protocol;

pub use helper::run;

pub use super::request::GrammarLimits;
use super::request::GrammarRequest;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use protocol::{CompileJob, CompileVerdict, Reply, Words, encode, receive, send};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// The hidden command that runs the helper.
pub const COMMAND: &str = "grammar-helper";

/// Interval for checking whether the client still waits.
const LOOK_EVERY: Duration = Duration::from_millis(20);

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the path of the `pagetide` program, so that helpers can be started. Without it, grammars are compiled only in
/// this process, which is safe only if their authors are trusted. Calling it again does nothing.
pub fn use_program(program: impl Into<PathBuf>) {
    PROGRAM.get_or_init(|| program.into());
}

/// Helpers for one vocabulary.
pub struct Sandbox {
    program: PathBuf,
    limits: GrammarLimits,
    /// The first message to a helper: the vocabulary.
    greeting: Vec<u8>,
    idle: Mutex<Vec<Helper>>,
}

impl Sandbox {
    /// `None` if [`use_program`] has not been called. `words` are the bytes of each token. `ends` are the end tokens;
    /// the first one ends a complete output.
    pub fn new(limits: GrammarLimits, words: Vec<Vec<u8>>, ends: Vec<u32>) -> Option<Self> {
        let program = PROGRAM.get()?.clone();
        let greeting = encode(&Words { words, ends }).expect("a vocabulary of gigabytes would not have been loaded");
        Some(Self { program, limits, greeting, idle: Mutex::default() })
    }

    /// Checks that `request` compiles within the limits. Blocks until a helper has tried it, `budget` is used up, or
    /// the client has disconnected.
    ///
    /// # Errors
    /// 400 if the grammar is wrong or needs too much, 500 if no helper can be started.
    pub fn check(&self, request: &GrammarRequest, budget: &Budget) -> Result<(), ApiError> {
        let param = &request.param;
        let too_complex = |why: String| ApiError::too_complex(param, format!("{param} is too complex: {why}"));
        let job = CompileJob::new(request, self.limits).map_err(|error| ApiError::engine(error.to_string()))?;
        loop {
            let known = self.idle().pop();
            let is_fresh = known.is_none();
            let helper = known.map_or_else(|| Helper::start(&self.program, &self.greeting), Ok);
            let mut helper = helper.map_err(|error| {
                let message = format!("structured output needs a separate process, and none could be started: {error}");
                ApiError::engine(message)
            })?;
            let verdict = match helper.ask(&job, budget) {
                Ok(Some(Reply { verdict, is_last })) => {
                    if !is_last {
                        self.idle().push(helper);
                    }
                    verdict
                }
                Ok(None) => {
                    let why = budget.look().err().map_or_else(String::new, |why| why.to_string());
                    return Err(too_complex(why));
                }
                // An earlier grammar may have damaged this helper.
                Err(_) if !is_fresh => continue,
                Err(error) => {
                    tracing::debug!("a grammar ended the process that compiled it: {error}");
                    return Err(too_complex("the process that compiled it did not survive".into()));
                }
            };
            return match verdict {
                CompileVerdict::Compiled => Ok(()),
                CompileVerdict::Refused { param, message } => Err(ApiError::invalid(param, message)),
                CompileVerdict::Panicked => Err(too_complex("it cannot be compiled".into())),
                // Earlier grammars may have left memory in this helper.
                CompileVerdict::TooMuchMemory if !is_fresh => continue,
                CompileVerdict::TooMuchMemory => {
                    let most = self.limits.memory_bytes >> 20;
                    Err(too_complex(format!(
                        "compiling it takes more than {most} MiB, this server's limit (intake.grammar_memory_mib)"
                    )))
                }
                CompileVerdict::TooMuchTime => {
                    let most = self.limits.cpu.as_secs_f64();
                    Err(too_complex(format!(
                        "compiling it takes more than {most} s of processor time, this server's limit \
                         (intake.grammar_cpu_s)"
                    )))
                }
            };
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Helper>> {
        // The vector is consistent even if a thread has panicked.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// A helper process. It is killed on drop.
struct Helper {
    child: Child,
    stream: UnixStream,
}

impl Helper {
    fn start(program: &PathBuf, greeting: &[u8]) -> io::Result<Self> {
        let (stream, theirs) = UnixStream::pair()?;
        let child = Command::new(program)
            // The name in process lists, whatever the path is.
            .arg0("pagetide")
            .arg(COMMAND)
            // The helper needs no environment, which may contain keys.
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C in a terminal must only reach the server.
            .process_group(0)
            .spawn()?;
        let mut helper = Self { child, stream };
        helper.stream.set_write_timeout(Some(Duration::from_secs(60)))?;
        helper.stream.set_read_timeout(Some(LOOK_EVERY))?;
        helper.stream.write_all(greeting)?;
        Ok(helper)
    }

    /// `None` if the client no longer waits; the helper cannot be used again then. An error means that the helper has
    /// died.
    fn ask(&mut self, job: &CompileJob, budget: &Budget) -> io::Result<Option<Reply>> {
        send(&mut self.stream, job)?;
        let mut first = [0];
        loop {
            match self.stream.read(&mut first) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => break,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if budget.look().is_err() {
                return Ok(None);
            }
        }
        // The rest follows at once, because an answer is written as a whole.
        self.stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let reply = receive(&mut first.chain(&self.stream))?;
        self.stream.set_read_timeout(Some(LOOK_EVERY))?;
        reply.map(Some).ok_or_else(|| ErrorKind::UnexpectedEof.into())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::GrammarSpec;
    use pagetide_base::budget::Cancelled;

    const LIMITS: GrammarLimits =
        GrammarLimits { cpu: Duration::from_secs(2), memory_bytes: 1 << 28, work_per_token: None };

    fn sandbox(program: &str) -> Sandbox {
        let greeting = encode(&Words { words: vec![b"a".to_vec()], ends: vec![0] }).unwrap();
        Sandbox { program: program.into(), limits: LIMITS, greeting, idle: Mutex::default() }
    }

    fn check(sandbox: &Sandbox, budget: &Budget) -> ApiError {
        sandbox
            .check(&GrammarRequest::new(GrammarSpec::Regex("a".into()), "structured_outputs.regex"), budget)
            .unwrap_err()
    }

    #[test]
    fn no_helper_is_an_error_of_the_server() {
        let error = check(&sandbox("/nowhere/pagetide"), &Budget::steps(1));
        assert_eq!(error.status, 500, "{error}");
        assert!(error.message.contains("none could be started"), "{error}");
    }

    /// Programs that are not helpers: one exits at once, one never answers.
    #[test]
    fn a_helper_that_dies_or_hangs_refuses_the_grammar() {
        let error = check(&sandbox("/bin/false"), &Budget::steps(1));
        // One that ends before it has the vocabulary was never a helper. It may be as quick as that, or not.
        match error.status {
            500 => assert!(error.message.contains("none could be started"), "{error}"),
            _ => {
                assert_eq!((error.status, error.code), (400, Some("too_complex")), "{error}");
                assert!(error.message.contains("did not survive"), "{error}");
            }
        }
        let hangs = sandbox("/usr/bin/yes");
        let error = check(&hangs, &Budget::time(Duration::from_millis(100), Cancelled::default()));
        assert!(error.message.contains("intake.job_timeout_s"), "{error}");
        let gone = Cancelled::default();
        gone.set();
        let error = check(&hangs, &Budget::time(Duration::from_secs(3600), gone));
        assert!(error.message.contains("the client has gone"), "{error}");
        assert!(hangs.idle().is_empty(), "what hangs is not used again");
    }
}
