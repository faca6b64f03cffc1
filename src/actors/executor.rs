//! Owns the device. It works on a thread of its own, because starting a step and waiting for it block, which an actor
//! must not do.

use crate::messages::{AwaitCopies, Discard, Execute, Executed, ExecutorFailed, FailNextStep, ReadKv, WriteKv};
use crate::workers::STACK_BYTES;
use actix::{Actor, Context, Handler, ResponseFuture};
use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use pagetide_engine::plan::{CopyReport, MAX_STEPS_IN_FLIGHT, StepPlan};
use pagetide_model::step_runner::StepRunner;
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

type Answer = Result<Executed, ExecutorFailed>;
type CopiesAnswer = Result<CopyReport, ExecutorFailed>;
type ReadAnswer = Result<Vec<u8>, ExecutorFailed>;
type WriteAnswer = Result<(), ExecutorFailed>;

/// While a step runs, the thread spins for this long, looking for its end and for the next plan. Waking up from a
/// system wait takes longer than the host's part of a short step.
const SPIN: Duration = Duration::from_millis(1);
/// After that, it sleeps this long between two looks at the step. A new plan wakes it at once.
const PAUSE: Duration = Duration::from_micros(50);

/// The error of requests whose step was made to fail.
const FAILURE_ON_PURPOSE: &str = "a failure was asked for (POST /admin/debug/fail_step)";

/// Starts each plan as soon as it comes, up to [`MAX_STEPS_IN_FLIGHT`] at once.
pub struct ModelExecutor {
    /// Unbounded, because the scheduler sends no more plans than it may have in flight, and as many again after a
    /// failure.
    jobs: Sender<ExecutorJob>,
    restart: Restart,
}

/// What the watchdog knows about restarts.
#[derive(Clone, Debug)]
pub struct Restart {
    /// True from a failure until the scheduler has received it, which is after the executor has restarted.
    is_under_way: Arc<AtomicBool>,
    load_time: Duration,
}

impl Restart {
    /// How much longer than a step the executor may take now, because a restart can load the model again.
    pub fn allowance(&self) -> Duration {
        if self.is_under_way.load(Ordering::Acquire) { 2 * self.load_time } else { Duration::ZERO }
    }

    /// The scheduler has received the failure.
    pub fn end(&self) {
        self.is_under_way.store(false, Ordering::Release);
    }
}

/// An executor whose thread loads the model.
pub struct Loading<T> {
    jobs: Sender<ExecutorJob>,
    is_under_way: Arc<AtomicBool>,
    started: Instant,
    /// What `make` returned about the model, and when.
    loaded: Receiver<Result<(T, Instant), StartError>>,
}

impl<T> Loading<T> {
    /// Waits for the model.
    pub fn finish(self) -> Result<(ModelExecutor, T), StartError> {
        let died = |_| StartError::new("the executor thread died while loading the model; its panic is above");
        let (info, at) = self.loaded.recv().map_err(died)??;
        let restart = Restart { is_under_way: self.is_under_way, load_time: at - self.started };
        Ok((ModelExecutor { jobs: self.jobs, restart }, info))
    }
}

enum ExecutorJob {
    Step { plan: StepPlan, failures: u64, answer: oneshot::Sender<Answer> },
    AwaitCopies(oneshot::Sender<CopiesAnswer>),
    Read { places: Vec<KvPlace>, block_bytes: usize, failures: u64, answer: oneshot::Sender<ReadAnswer> },
    Write { blocks: Vec<BlockId>, content: Vec<u8>, failures: u64, answer: oneshot::Sender<WriteAnswer> },
    Discard(Vec<BlockId>),
    FailNextStep,
}

impl ModelExecutor {
    /// Starts the thread. `make` loads the model there and returns what the caller wants to know about it. The thread
    /// ends when the actor is dropped.
    pub fn start_loading<R, T, F>(make: F) -> Result<Loading<T>, StartError>
    where
        R: StepRunner,
        T: Send + 'static,
        F: FnOnce() -> Result<(R, T), StartError> + Send + 'static,
    {
        let started = Instant::now();
        let is_restarting: Arc<AtomicBool> = Arc::default();
        let is_under_way = is_restarting.clone();
        let (jobs, inbox) = unbounded();
        let (loaded, wait_loaded) = bounded(1);
        // It computes masks of grammars that the text threads have not computed in time.
        let builder = std::thread::Builder::new().name("pagetide-executor".into()).stack_size(STACK_BYTES);
        builder.spawn(move || match make() {
            Ok((runner, info)) => {
                if loaded.send(Ok((info, Instant::now()))).is_ok() {
                    StepsInFlight::new(runner, is_restarting).serve(&inbox);
                }
            }
            // If the send fails, the caller no longer waits.
            Err(error) => drop(loaded.send(Err(error))),
        })?;
        Ok(Loading { jobs, is_under_way, started, loaded: wait_loaded })
    }

    pub fn restart(&self) -> Restart {
        self.restart.clone()
    }
}

/// The runner, and the steps that are not finished.
struct StepsInFlight<R> {
    runner: R,
    /// Oldest first: where to send each answer, and the gap before the step.
    in_flight: VecDeque<(oneshot::Sender<Answer>, Duration)>,
    /// Where to send the answer to [`AwaitCopies`], if one is awaited.
    awaits_copies: Option<oneshot::Sender<CopiesAnswer>>,
    last_done: Option<Instant>,
    /// Since when the end of the oldest step has been awaited.
    waiting_since: Instant,
    failures: u64,
    /// The next step is to fail, as a test.
    next_fails: bool,
    is_restarting: Arc<AtomicBool>,
}

impl<R: StepRunner> StepsInFlight<R> {
    fn new(runner: R, is_restarting: Arc<AtomicBool>) -> Self {
        let (in_flight, waiting_since) = (VecDeque::new(), Instant::now());
        Self {
            runner,
            in_flight,
            awaits_copies: None,
            last_done: None,
            waiting_since,
            failures: 0,
            next_fails: false,
            is_restarting,
        }
    }

    /// Serves jobs until the scheduler is gone.
    fn serve(mut self, inbox: &Receiver<ExecutorJob>) {
        loop {
            if self.finish_if_done() {
                continue;
            }
            self.tell_copies();
            let job = match self.in_flight.len() {
                0 if self.awaits_copies.is_none() => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                MAX_STEPS_IN_FLIGHT => {
                    self.finish(); // nothing else can happen before
                    continue;
                }
                _ if self.waiting_since.elapsed() < SPIN => inbox.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                }),
                _ => inbox.recv_timeout(PAUSE),
            };
            match job {
                Ok(ExecutorJob::Step { plan, failures, answer }) => self.submit(&plan, failures, answer),
                Ok(ExecutorJob::AwaitCopies(answer)) => {
                    self.awaits_copies = Some(answer);
                    self.waiting_since = Instant::now();
                }
                Ok(ExecutorJob::Read { places, block_bytes, failures, answer }) => {
                    drop(answer.send(self.read(&places, block_bytes, failures)));
                }
                Ok(ExecutorJob::Write { blocks, content, failures, answer }) => {
                    let written = self.check_failures(failures);
                    drop(
                        answer.send(written.and_then(|()| self.guard(|runner| runner.write_blocks(&blocks, &content)))),
                    );
                }
                Ok(ExecutorJob::Discard(blocks)) => drop(self.guard(|runner| runner.discard_swapped(&blocks))),
                Ok(ExecutorJob::FailNextStep) => self.next_fails = true,
                Err(RecvTimeoutError::Timeout) => std::thread::yield_now(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Answers the wait for copies, if some have ended or none is in progress.
    fn tell_copies(&mut self) {
        if self.awaits_copies.is_none() {
            return;
        }
        let report = self.guard(|runner| (runner.take_copies(), runner.is_copying()));
        if let Ok((report, is_copying)) = report
            && (!report.is_empty() || !is_copying)
            && let Some(answer) = self.awaits_copies.take()
        {
            drop(answer.send(Ok(report)));
        }
    }

    fn submit(&mut self, plan: &StepPlan, failures: u64, answer: oneshot::Sender<Answer>) {
        if self.awaits_copies.is_some()
            && let Ok(report) = self.guard(|runner| runner.take_copies())
            && let Some(answer) = self.awaits_copies.take()
        {
            drop(answer.send(Ok(report)));
        }
        if let Err(failure) = self.check_failures(failures) {
            drop(answer.send(Err(failure)));
            return;
        }
        let is_only = self.in_flight.is_empty();
        let gap = self.last_done.filter(|_| is_only).map_or(Duration::ZERO, |done| done.elapsed());
        self.in_flight.push_back((answer, gap));
        let fails = std::mem::take(&mut self.next_fails);
        // A failure is the answer of all steps in flight.
        drop(self.guard(|runner| {
            assert!(!fails, "{FAILURE_ON_PURPOSE}");
            runner.submit(plan);
        }));
        if is_only {
            self.waiting_since = Instant::now();
        }
    }

    /// Refuses what was planned before the last failure: the pools are empty since then.
    fn check_failures(&self, failures: u64) -> Result<(), ExecutorFailed> {
        let message = || "the plan was made before the executor failed".into();
        (failures == self.failures).then_some(()).ok_or_else(|| ExecutorFailed { message: message(), restarted: true })
    }

    /// The contents of blocks, up to the first that holds nothing.
    fn read(&mut self, places: &[KvPlace], block_bytes: usize, failures: u64) -> ReadAnswer {
        self.check_failures(failures)?;
        let mut content = vec![0; places.len() * block_bytes];
        let num_read = self.guard(|runner| runner.read_blocks(places, &mut content))?;
        content.truncate(num_read * block_bytes);
        Ok(content)
    }

    /// Answers for the oldest step if it is done.
    fn finish_if_done(&mut self) -> bool {
        let is_done = !self.in_flight.is_empty() && self.guard(|runner| runner.is_done()).unwrap_or(false);
        if is_done {
            self.finish();
        }
        is_done
    }

    /// Waits for the oldest step, and answers.
    fn finish(&mut self) {
        if let Ok(output) = self.guard(|runner| runner.finish()) {
            (self.last_done, self.waiting_since) = (Some(Instant::now()), Instant::now());
            let (answer, gap) = self.in_flight.pop_front().expect("a step that is done was in flight");
            // The send fails if the scheduler has just gone; the inbox shows that too.
            drop(answer.send(Ok(Executed { output, gap })));
        }
    }

    /// Returns the result of `call`. If it panics, all steps in flight fail and the runner starts over.
    fn guard<T>(&mut self, call: impl FnOnce(&mut R) -> T) -> Result<T, ExecutorFailed> {
        let runner = &mut self.runner;
        let panic = match catch_unwind(AssertUnwindSafe(|| call(runner))) {
            Ok(result) => return Ok(result),
            Err(panic) => panic,
        };
        self.failures += 1;
        self.last_done = None;
        let message = panic_message(panic.as_ref());
        self.is_restarting.store(true, Ordering::Release);
        // The reset discards all state that the panic left half done, so the assertion of unwind safety holds.
        let failure = match catch_unwind(AssertUnwindSafe(|| self.runner.reset())) {
            Ok(Ok(())) => ExecutorFailed { message, restarted: true },
            Ok(Err(error)) => not_restarted(&message, &error.to_string()),
            Err(panic) => not_restarted(&message, &panic_message(panic.as_ref())),
        };
        for (answer, _) in self.in_flight.drain(..) {
            drop(answer.send(Err(failure.clone())));
        }
        if let Some(answer) = self.awaits_copies.take() {
            drop(answer.send(Err(failure.clone())));
        }
        Err(failure)
    }
}

fn not_restarted(message: &str, why: &str) -> ExecutorFailed {
    ExecutorFailed { message: format!("{message}; then the restart failed: {why}"), restarted: false }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".into())
}

impl Actor for ModelExecutor {
    type Context = Context<Self>;
}

impl Handler<Execute> for ModelExecutor {
    type Result = ResponseFuture<Answer>;

    fn handle(&mut self, Execute { plan, failures }: Execute, _: &mut Self::Context) -> Self::Result {
        self.ask(|answer| ExecutorJob::Step { plan, failures, answer })
    }
}

impl Handler<AwaitCopies> for ModelExecutor {
    type Result = ResponseFuture<CopiesAnswer>;

    fn handle(&mut self, _: AwaitCopies, _: &mut Self::Context) -> Self::Result {
        self.ask(ExecutorJob::AwaitCopies)
    }
}

impl Handler<ReadKv> for ModelExecutor {
    type Result = ResponseFuture<ReadAnswer>;

    fn handle(&mut self, ReadKv { places, block_bytes, failures }: ReadKv, _: &mut Self::Context) -> Self::Result {
        self.ask(|answer| ExecutorJob::Read { places, block_bytes, failures, answer })
    }
}

impl Handler<WriteKv> for ModelExecutor {
    type Result = ResponseFuture<WriteAnswer>;

    fn handle(&mut self, WriteKv { blocks, content, failures }: WriteKv, _: &mut Self::Context) -> Self::Result {
        self.ask(|answer| ExecutorJob::Write { blocks, content, failures, answer })
    }
}

impl Handler<Discard> for ModelExecutor {
    type Result = ();

    fn handle(&mut self, Discard(blocks): Discard, _: &mut Self::Context) {
        // If the thread is gone, so is the pool.
        drop(self.jobs.send(ExecutorJob::Discard(blocks)));
    }
}

impl Handler<FailNextStep> for ModelExecutor {
    type Result = ();

    fn handle(&mut self, _: FailNextStep, _: &mut Self::Context) {
        // If the thread is gone there is no step that could fail, and the scheduler notices.
        drop(self.jobs.send(ExecutorJob::FailNextStep));
    }
}

impl ModelExecutor {
    fn ask<T: 'static>(
        &self,
        job: impl FnOnce(oneshot::Sender<Result<T, ExecutorFailed>>) -> ExecutorJob,
    ) -> ResponseFuture<Result<T, ExecutorFailed>> {
        let (answer, wait_answer) = oneshot::channel();
        let sent = self.jobs.send(job(answer));
        Box::pin(async move {
            let gone = || ExecutorFailed { message: "the executor thread is gone".into(), restarted: false };
            sent.map_err(|_| gone())?;
            wait_answer.await.map_err(|_| gone())?
        })
    }
}
