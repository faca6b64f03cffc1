//! Drives the steps: carries the scheduler's questions to the pools, its plans to the executor, and the results to the
//! requests' owners.

mod clients;
mod copies;
mod failure;
mod flushing;
mod keeping;
mod keyframes;
mod labels;
mod pausing;
mod recording;
mod reporting;
mod submitted;
mod telling;
mod tuning;
mod watching;

use crate::block_allocator::BlockAllocator;
use crate::executor::{ModelExecutor, Restart};
use crate::messages::{Arrive, Cancel, Execute, FindHeld, Reserve, Serve, StopSample};
use crate::pause::Pause;
use crate::snapshot::{MoveLog, WatchTotals};
use crate::stop::stop_system;
use crate::swap_pool::SwapPool;
use crate::workers::Workers;
use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, MailboxError, WrapFuture};
use clients::{Client, News};
use pagetide_base::ids::RequestId;
use pagetide_config::{OnFailure, RecorderConfig};
use pagetide_engine::bill::KvBill;
use pagetide_engine::plan::StepOutput;
use pagetide_engine::scheduler::{CommitReport, EngineRequest, NextStep, PlannedStep, Scheduler};
use pagetide_metrics::{self as metrics, Outcome, StepMetrics, tenants};
use pagetide_recorder::Recorder;
use recording::SchedulerRecording;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};
use submitted::{SubmittedStep, report_step};

/// How often the watchdog looks within the time that a step may take.
const LOOKS_PER_TIMEOUT: u32 = 10;
/// The watchdog looks at least this often.
const MAX_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The actor's options, besides the scheduler's configuration.
#[derive(Clone, Debug)]
pub struct SchedulerActorSettings {
    pub block_size: usize,
    pub block_bytes: usize,
    pub on_failure: OnFailure,
    /// A step that takes longer has hung.
    pub step_timeout: Option<Duration>,
    pub restart: Restart,
    pub recorder: RecorderConfig,
}

pub struct SchedulerActor {
    /// `None` only while a step is planned, when the actor handles no message.
    scheduler: Option<Box<Scheduler>>,
    allocator: Addr<BlockAllocator>,
    swap_pool: Addr<SwapPool>,
    executor: Addr<ModelExecutor>,
    /// Threads that compute, while the device works, which tokens the constraints of a step's sequences allow.
    workers: Workers,
    settings: SchedulerActorSettings,
    clients: HashMap<RequestId, Client>,
    news: Option<News>,
    /// The steps at the executor behind the oldest one, in order. The answer of the oldest is being awaited.
    behind: VecDeque<SubmittedStep>,
    /// Since when the oldest step has been awaited.
    oldest_since: Option<Instant>,
    /// The number of failures of the executor.
    failures: u64,
    /// There was nothing to do when the last step ended.
    idle: bool,
    /// No step is planned while there are requests.
    is_paused: bool,
    /// The executor has been asked to tell when copies end.
    awaits_copies: bool,
    /// Its last report said that other copies were still in progress.
    is_copying: bool,
    /// The scheduler's time starts here.
    started: Instant,
    /// WatchTotals for the console.
    totals: WatchTotals,
    moves: MoveLog,
    recording: SchedulerRecording,
}

impl SchedulerActor {
    pub fn new(
        mut scheduler: Scheduler,
        allocator: Addr<BlockAllocator>,
        swap_pool: Addr<SwapPool>,
        executor: Addr<ModelExecutor>,
        workers: Workers,
        recorder: Option<Recorder>,
        settings: SchedulerActorSettings,
    ) -> Self {
        if recorder.is_some() {
            scheduler.summarise_plans();
        }
        Self {
            recording: SchedulerRecording::new(recorder, settings.recorder.clone()),
            scheduler: Some(Box::new(scheduler)),
            allocator,
            swap_pool,
            executor,
            workers,
            settings,
            clients: HashMap::new(),
            news: None,
            behind: VecDeque::new(),
            oldest_since: None,
            failures: 0,
            idle: true,
            is_paused: false,
            awaits_copies: false,
            is_copying: false,
            started: Instant::now(),
            totals: WatchTotals::default(),
            moves: MoveLog::default(),
        }
    }

    fn scheduler(&mut self) -> &mut Scheduler {
        self.scheduler.as_mut().expect("no message is handled while a step is planned")
    }

    /// Plans a step if there is something to do and a plan can be made now.
    fn wake(&mut self, ctx: &mut Context<Self>) {
        // Without requests, a step only gives back what the last ones held.
        if self.is_paused && self.scheduler().num_requests() > 0 {
            return;
        }
        let started = Instant::now();
        let now = (started - self.started).as_secs_f64();
        match self.scheduler().next_step(now) {
            NextStep::Idle => {
                if self.is_copying && self.scheduler().num_in_flight() == 0 {
                    // No step will tell when the copies end.
                    self.await_copies(ctx);
                }
            }
            NextStep::AwaitResults => self.recording.hear(|recorder| recorder.awaits_results(now)),
            question => return self.plan(question, started, now, ctx),
        }
        self.note_state(ctx);
    }

    /// [`SchedulerActor::wake`] once the messages that are there have been handled. Message handlers call this and not
    /// `wake`: what is waited for within a handler does not keep other messages from being handled meanwhile.
    fn wake_soon(&self, ctx: &mut Context<Self>) {
        ctx.spawn(actix::fut::ready(()).map(|(), this: &mut Self, ctx| this.wake(ctx)));
    }

    /// Asks the pools what the scheduler wants to know, until there is a plan. That takes microseconds, and no other
    /// message is handled meanwhile.
    fn plan(&mut self, question: NextStep, started: Instant, now: f64, ctx: &mut Context<Self>) {
        let mut scheduler = self.scheduler.take().expect("no message is handled while a step is planned");
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let planning = async move {
            let mut next = question;
            loop {
                next = match next {
                    NextStep::Find(finds) => scheduler.found(swap_pool.send(FindHeld(finds)).await?),
                    NextStep::Serve(demand) => scheduler.granted(allocator.send(Serve(demand)).await?),
                    NextStep::Reserve(demand) => scheduler.reserved(swap_pool.send(Reserve(demand)).await?),
                    NextStep::Execute(planned) => return Ok((scheduler, planned)),
                    NextStep::AwaitResults | NextStep::Idle => unreachable!("a question leads to a plan"),
                }
            }
        };
        ctx.wait(planning.into_actor(self).map(move |planned: Result<_, MailboxError>, this, ctx| match planned {
            Ok((scheduler, mut planned)) => {
                this.scheduler = Some(scheduler);
                this.recording.hear(|recorder| recorder.plan(now, &mut planned));
                this.execute(planned, started.elapsed(), ctx);
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }

    /// Hands a plan to the executor. `schedule`: how long it took to make. While the executor works, requests come and
    /// go, and the next step may be planned.
    fn execute(&mut self, planned: PlannedStep, schedule: Duration, ctx: &mut Context<Self>) {
        let PlannedStep { plan, report } = planned;
        let forecast = report.forecast;
        self.report_plan(report);
        self.moves.add(&plan);
        if plan.is_empty() {
            // Blocks were given back, and no more. What is in flight has to end before there is something else to do.
            self.report_population();
            if self.scheduler().num_in_flight() == 0 {
                match self.scheduler().waits_for_copies() {
                    true => self.await_copies(ctx),
                    false => self.wake(ctx),
                }
            }
            return;
        }
        let first_samples =
            plan.batch.iter().filter_map(|seq| seq.sample.as_ref().filter(|sample| sample.position == 0));
        let metrics = StepMetrics {
            sequences: plan.batch.len(),
            tokens: plan.num_tokens(),
            first_tokens: first_samples.map(|sample| sample.num_samples as usize).sum(),
            schedule,
            ..Default::default()
        };
        for next in plan.batch.iter().filter_map(|seq| seq.sample.as_ref()?.next.clone()) {
            self.workers.spawn(move || {
                next.get();
            });
        }
        let after_idle = std::mem::take(&mut self.idle);
        let answer = Box::pin(self.executor.send(Execute { plan, failures: self.failures }));
        self.behind.push_back(SubmittedStep { metrics, forecast, after_idle, answer });
        if self.oldest_since.is_none() {
            self.await_oldest(ctx);
        }
        self.wake(ctx);
    }

    /// Waits for the answer of the oldest step, if there is one. Only one answer is awaited at a time, so that commits
    /// are in the order of the plans.
    fn await_oldest(&mut self, ctx: &mut Context<Self>) {
        self.oldest_since = None;
        let Some(SubmittedStep { metrics, forecast, after_idle, answer }) = self.behind.pop_front() else { return };
        self.oldest_since = Some(Instant::now());
        ctx.spawn(answer.into_actor(self).map(move |answer, this, ctx| match answer {
            Ok(Ok(executed)) => {
                report_step(metrics, forecast, after_idle, &executed);
                this.await_oldest(ctx);
                this.commit(executed.output);
                this.wake(ctx);
                this.tell_soon(ctx);
            }
            Ok(Err(failure)) => this.fail(&failure, ctx),
            Err(_) => stop_system("the executor's actor is gone"),
        }));
    }

    /// Takes the results of the oldest step. Its requests' owners hear of them a little later:
    /// [`SchedulerActor::tell`].
    fn commit(&mut self, output: StepOutput) {
        self.report_copies(&output.copies);
        self.tell();
        let results = self.recording.recorder.as_mut().map(|recorder| recorder.results(&output));
        let mut report = self.scheduler().commit(output);
        if let (Some(recorder), Some(results)) = (&mut self.recording.recorder, results) {
            recorder.commit(results, &mut report);
        }
        let CommitReport { deliveries, ended, recomputed_tokens, prefilled, .. } = report;
        self.news = Some(News { prefilled, deliveries, ended, at: Instant::now() });
        metrics::recomputed_tokens(recomputed_tokens);
        self.totals.recomputed_tokens += recomputed_tokens as u64;
        self.idle = self.scheduler().num_requests() == 0;
        self.recording.report();
        self.report_population();
    }
}

/// Runs if the actor panicked. Its requests' streams close, and the engine must not go on.
impl Drop for SchedulerActor {
    fn drop(&mut self) {
        if std::thread::panicking() {
            stop_system("the scheduler panicked");
        }
    }
}

impl Actor for SchedulerActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(timeout) = self.settings.step_timeout {
            let interval = (timeout / LOOKS_PER_TIMEOUT).min(MAX_LOOK_INTERVAL);
            ctx.run_interval(interval, move |this, _| this.look_for_hung_step(timeout));
        }
    }
}

impl Handler<Arrive> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, arrive: Arrive, ctx: &mut Self::Context) {
        let Arrive { arrival, events, arrived, place, observer } = arrive;
        let EngineRequest { id, n, tenant, .. } = arrival;
        let client = Client {
            events,
            tenant: tenants::of(tenant),
            arrived,
            queued: None,
            first_token: None,
            prompt_tokens: arrival.prompt.len(),
            cached_tokens: 0,
            max_tokens: arrival.params.max_tokens as usize,
            generated: vec![0; n as usize],
            last_token: vec![None; n as usize],
            ended_by_length: false,
            bill: KvBill::default(),
            pauses: vec![Pause::default(); n as usize],
            hears_progress: arrival.reports_progress,
            observer,
            _place: place,
        };
        self.clients.insert(id, client);
        self.recording.hear(|recorder| recorder.arrive(&arrival));
        self.scheduler().arrive(arrival);
        self.report_population();
        self.wake_soon(ctx);
    }
}

impl Handler<Cancel> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, Cancel(request): Cancel, ctx: &mut Self::Context) {
        self.tell();
        self.recording.hear(|recorder| recorder.cancel(request));
        let has_ended = !self.scheduler().has_request(request);
        self.scheduler().cancel(request);
        self.close(request, Outcome::Cancelled);
        if !has_ended {
            // Perhaps no step follows that would report it.
            self.report_population();
        }
        self.wake_soon(ctx);
    }
}

impl Handler<StopSample> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, StopSample(request, sample): StopSample, ctx: &mut Self::Context) {
        self.tell();
        self.recording.hear(|recorder| recorder.stop_sample(request, sample));
        self.scheduler().stop_sample(request, sample);
        if !self.scheduler().has_request(request) {
            self.close(request, Outcome::Stop);
        }
        self.report_population();
        self.wake_soon(ctx);
    }
}
