//! Owns the device, on a thread of its own: the forward pass blocks, an actor must not.

use crate::actors::messages::{Execute, ExecutorFailed};
use crate::engine::plan::{StepOutput, StepPlan, StepRunner};
use crate::error::StartError;
use actix::{Actor, Context, Handler, ResponseFuture};
use crossbeam::channel::{Receiver, Sender, bounded};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokio::sync::oneshot;

type Answer = Result<StepOutput, ExecutorFailed>;

/// One step under way at most: the channel to the thread has one place.
pub struct ModelExecutor {
    steps: Sender<(StepPlan, oneshot::Sender<Answer>)>,
}

impl ModelExecutor {
    /// Starts the thread; `make` loads the model there and also says what the caller wants to know of it. The thread
    /// ends when the actor is dropped.
    pub fn start<R, T, F>(make: F) -> Result<(Self, T), StartError>
    where
        R: StepRunner,
        T: Send + 'static,
        F: FnOnce() -> Result<(R, T), StartError> + Send + 'static,
    {
        let (steps, inbox) = bounded(1);
        let (loaded, wait_loaded) = bounded(1);
        std::thread::Builder::new().name("pagetide-executor".into()).spawn(move || match make() {
            Ok((runner, info)) => {
                if loaded.send(Ok(info)).is_ok() {
                    serve(runner, &inbox);
                }
            }
            // Nobody waits any more where the send fails.
            Err(error) => drop(loaded.send(Err(error))),
        })?;
        match wait_loaded.recv() {
            Ok(loaded) => Ok((Self { steps }, loaded?)),
            Err(_) => Err(StartError::new("the executor thread died while loading the model; its panic is above")),
        }
    }
}

fn serve(mut runner: impl StepRunner, inbox: &Receiver<(StepPlan, oneshot::Sender<Answer>)>) {
    for (plan, answer) in inbox {
        let run = || {
            runner.submit(&plan);
            runner.finish()
        };
        let result = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
            let mut message = panic_message(panic.as_ref());
            // What the panic left half done is thrown away here, which makes the assertion of unwind safety true.
            match catch_unwind(AssertUnwindSafe(|| runner.reset())) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => message = format!("{message}; then the restart failed: {error}"),
                Err(panic) => {
                    message = format!("{message}; then the restart failed: {}", panic_message(panic.as_ref()))
                }
            }
            ExecutorFailed(message)
        });
        // The plan shares tables with the scheduler, which writes them next: let go of it before answering.
        drop(plan);
        if answer.send(result).is_err() {
            return; // the scheduler is gone
        }
    }
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

    fn handle(&mut self, Execute(plan): Execute, _: &mut Self::Context) -> Self::Result {
        let (answer, wait_answer) = oneshot::channel();
        let sent = self.steps.try_send((plan, answer));
        Box::pin(async move {
            let gone = || ExecutorFailed("the executor thread is gone".into());
            sent.map_err(|_| gone())?;
            wait_answer.await.map_err(|_| gone())?
        })
    }
}
