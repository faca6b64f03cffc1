//! Drives the steps: carries the policy's demands to the pools, its plans to the executor, and the results to the
//! requests' owners.

mod clients;
mod copies;
mod failure;
mod recording;
mod tuning;
mod watching;

use crate::actors::block_allocator::BlockAllocator;
use crate::actors::executor::{ModelExecutor, Restart};
use crate::actors::messages::{Arrive, Cancel, Execute, Executed, FindHeld, Reserve, Serve, StopSample};
use crate::actors::pause::Pause;
use crate::actors::runtime::stop_system;
use crate::actors::swap_pool::SwapPool;
use crate::actors::watch::{MoveLog, Totals};
use crate::actors::workers::Workers;
use crate::config::{OnFailure, RecorderConfig};
use crate::engine::allocation::{Demand, SwapGrant};
use crate::engine::bill::KvBill;
use crate::engine::plan::{Delivery, StepOutput, StepPlan};
use crate::engine::scheduler::{Arrival, Forecast, Scheduler};
use crate::ids::RequestId;
use crate::metrics::{self, Outcome, Preemption, StepMetrics, tenants};
use crate::recorder::{PlanSummary, Recorder};
use actix::dev::Request;
use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, MailboxError, WrapFuture};
use clients::{Client, News};
use recording::Recording;
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::time::{Duration, Instant};

/// The watchdog looks this many times in the time that a step may take, but not more often than ...
const LOOKS_PER_TIMEOUT: u32 = 10;
/// ... and not less often than this.
const MAX_LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What the actor has to know beside the policy's own settings.
#[derive(Clone, Debug)]
pub struct Settings {
    pub block_size: usize,
    pub block_bytes: usize,
    pub on_failure: OnFailure,
    /// A step that takes longer has hung.
    pub step_timeout: Option<Duration>,
    pub restart: Restart,
    pub recorder: RecorderConfig,
}

pub struct SchedulerActor {
    /// Out only while a step is planned, when the actor handles no message.
    policy: Option<Box<Scheduler>>,
    allocator: Addr<BlockAllocator>,
    swap_pool: Addr<SwapPool>,
    executor: Addr<ModelExecutor>,
    /// Compute, while the device works, which tokens the constraints of a step's sequences allow.
    workers: Workers,
    settings: Settings,
    clients: HashMap<RequestId, Client>,
    news: Option<News>,
    /// The executor's steps behind the oldest, whose answer is awaited, in order.
    behind: VecDeque<Step>,
    /// Since when the oldest step has been waited for.
    oldest_since: Option<Instant>,
    /// Of the executor.
    failures: u64,
    /// There was nothing to do when the last step had ended.
    idle: bool,
    /// The executor has been asked to tell when copies end.
    awaits_copies: bool,
    /// When it told last, others were on their way.
    is_copying: bool,
    /// The policy's time begins then.
    started: Instant,
    /// For who watches, like the copies.
    totals: Totals,
    moves: MoveLog,
    recording: Recording,
}

/// A planned step on its way, and what the metrics want to know of it.
struct Planned {
    plan: StepPlan,
    used_blocks: usize,
    schedule: Duration,
    /// In the policy's time.
    now: f64,
    /// Where it is recorded.
    summary: Option<Box<PlanSummary>>,
}

/// A step at the executor.
struct Step {
    metrics: StepMetrics,
    forecast: Forecast,
    /// It is the first after a time without work.
    after_idle: bool,
    answer: Pin<Box<Request<ModelExecutor, Execute>>>,
}

impl SchedulerActor {
    pub fn new(
        policy: Scheduler,
        allocator: Addr<BlockAllocator>,
        swap_pool: Addr<SwapPool>,
        executor: Addr<ModelExecutor>,
        workers: Workers,
        recorder: Option<Recorder>,
        settings: Settings,
    ) -> Self {
        Self {
            recording: Recording::new(recorder, settings.recorder.clone()),
            policy: Some(Box::new(policy)),
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
            awaits_copies: false,
            is_copying: false,
            started: Instant::now(),
            totals: Totals::default(),
            moves: MoveLog::default(),
        }
    }

    fn policy(&mut self) -> &mut Scheduler {
        self.policy.as_mut().expect("no message is handled while a step is planned")
    }

    /// Plans a step if there is something to do and the policy lets a plan be made now.
    fn wake(&mut self, ctx: &mut Context<Self>) {
        let started = Instant::now();
        let since_start = (started - self.started).as_secs_f64();
        self.policy().set_time(since_start);
        if self.policy().has_work() {
            match self.policy().demand() {
                Some(demand) => return self.plan(demand, started, ctx),
                None => self.recording.hear(|recorder| recorder.no_demand(since_start)),
            }
        } else if self.is_copying && self.policy().num_in_flight() == 0 {
            // No step will tell of their end.
            self.await_copies(ctx);
        }
        self.note_state(ctx);
    }

    /// [`SchedulerActor::wake`] once the messages that are there have been handled. Not from within their handlers: what
    /// is waited for there does not keep an answer from being handled in between, unlike here.
    fn wake_soon(&self, ctx: &mut Context<Self>) {
        ctx.spawn(actix::fut::ready(()).map(|(), this: &mut Self, ctx| this.wake(ctx)));
    }

    /// The first half of a step: over in microseconds, and nothing else is handled meanwhile. While the executor
    /// works, requests come and go.
    fn plan(&mut self, mut demand: Demand, started: Instant, ctx: &mut Context<Self>) {
        let mut policy = self.policy.take().expect("no message is handled while a step is planned");
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let now = (started - self.started).as_secs_f64();
        let is_recorded = self.recording.recorder.is_some();
        let planning = async move {
            let finds = policy.finds(&demand);
            if !finds.is_empty() {
                policy.found(&mut demand, swap_pool.send(FindHeld(finds)).await?);
            }
            let grant = allocator.send(Serve(demand)).await?;
            let used_blocks = grant.stats.used;
            let mut summary = is_recorded.then(|| Box::new(PlanSummary::new(&grant)));
            let swap_demand = policy.reserve(&grant);
            let swap_grant = match swap_demand.is_empty() {
                true => SwapGrant::default(),
                false => swap_pool.send(Reserve(swap_demand)).await?,
            };
            if let Some(summary) = &mut summary {
                summary.add_swap(&swap_grant);
            }
            let plan = policy.plan(grant, swap_grant);
            if let Some(summary) = &mut summary {
                summary.add_plan(&plan, policy.decisions());
            }
            Ok((policy, Planned { plan, used_blocks, schedule: started.elapsed(), now, summary }))
        };
        ctx.wait(planning.into_actor(self).map(|planned: Result<_, MailboxError>, this, ctx| match planned {
            Ok((policy, mut planned)) => {
                this.policy = Some(policy);
                this.recording.planned(planned.now, &mut planned);
                this.execute(planned, ctx);
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }

    fn execute(&mut self, planned: Planned, ctx: &mut Context<Self>) {
        let Planned { plan, used_blocks, schedule, .. } = planned;
        self.report_plan(used_blocks);
        self.moves.add(&plan);
        if plan.is_empty() {
            // Blocks went back, no more; what is in flight has to end before there is something else to do.
            self.report_population();
            if self.policy().num_in_flight() == 0 {
                match self.policy().waits_for_copies() {
                    true => self.await_copies(ctx),
                    false => self.wake(ctx),
                }
            }
            return;
        }
        let metrics =
            StepMetrics { sequences: plan.batch.len(), tokens: plan.num_tokens(), schedule, ..Default::default() };
        for next in plan.batch.iter().filter_map(|seq| seq.sample.as_ref()?.next.clone()) {
            self.workers.spawn(move || {
                next.get();
            });
        }
        let after_idle = std::mem::take(&mut self.idle);
        let answer = Box::pin(self.executor.send(Execute { plan, failures: self.failures }));
        let forecast = self.policy().forecast();
        self.behind.push_back(Step { metrics, forecast, after_idle, answer });
        if self.oldest_since.is_none() {
            self.await_oldest(ctx);
        }
        self.wake(ctx);
    }

    /// Waits for the answer of the oldest step, if there is one. Only one answer is awaited at a time, so that
    /// commits come in the order of the plans.
    fn await_oldest(&mut self, ctx: &mut Context<Self>) {
        self.oldest_since = None;
        let Some(Step { mut metrics, forecast, after_idle, answer }) = self.behind.pop_front() else { return };
        self.oldest_since = Some(Instant::now());
        ctx.spawn(answer.into_actor(self).map(move |answer, this, ctx| match answer {
            Ok(Ok(Executed { output, gap })) => {
                metrics.execute = Duration::from_secs_f64(output.timing.forward_s + output.timing.swap_s);
                metrics.sample = Duration::from_secs_f64(output.timing.sample_s);
                metrics.gap = Some(gap).filter(|_| !after_idle);
                metrics::step(&metrics);
                tracing::debug!(
                    sequences = metrics.sequences,
                    tokens = metrics.tokens,
                    seconds = (metrics.execute + metrics.sample).as_secs_f64(),
                    ?forecast,
                    "a step has ended"
                );
                this.await_oldest(ctx);
                this.commit(output);
                this.wake(ctx);
                this.tell_soon(ctx);
            }
            Ok(Err(failure)) => this.fail(&failure, ctx),
            Err(_) => stop_system("the executor's actor is gone"),
        }));
    }

    fn report_decisions(&mut self) {
        for decision in self.policy().take_decisions() {
            metrics::arbiter_decided(decision.choice);
            tracing::debug!(
                request = %decision.request,
                choice = ?decision.choice,
                tokens = decision.num_tokens,
                swap_s = decision.swap_s,
                swap_full_s = decision.swap_full_s,
                recompute_s = decision.recompute_s,
                "a sequence yields"
            );
        }
    }

    fn report_preemptions(&mut self) {
        let max_tail_blocks = self.policy().config().max_tail_blocks;
        for copies in self.policy().take_preemption_copies() {
            metrics::preemption_copies(copies, max_tail_blocks);
        }
        metrics::set_max_tail_blocks(max_tail_blocks);
    }

    fn commit(&mut self, output: StepOutput) {
        self.report_copies(&output.copies);
        self.tell();
        let results = self.recording.recorder.as_mut().map(|recorder| recorder.results(&output));
        let policy = self.policy.as_mut().expect("no message is handled while a step is planned");
        let deliveries = policy.commit(output);
        if let (Some(recorder), Some(results)) = (&mut self.recording.recorder, results) {
            recorder.commit(results, policy.take_searched(), &deliveries);
        }
        let ends = |(request, delivery): &(RequestId, Delivery)| {
            matches!(delivery, Delivery::Finished { .. }) && !policy.has_request(*request)
        };
        let ended = deliveries.iter().filter(|told| ends(told)).map(|(request, _)| *request).collect();
        self.news = Some(News { deliveries, ended, at: Instant::now() });
        let stats = self.policy().take_stats();
        self.totals.add_step(&stats);
        let block_bytes = self.settings.block_bytes;
        metrics::recomputed_tokens(stats.recomputed_tokens);
        metrics::swapped_out(stats.blocks_out, stats.blocks_out * block_bytes);
        metrics::swapped_in(stats.blocks_in, stats.blocks_in * block_bytes);
        for (kind, count) in
            [(Preemption::Swap, stats.preempted_swap), (Preemption::Recompute, stats.preempted_recompute)]
        {
            (0..count).for_each(|_| metrics::preempted(kind));
        }
        self.idle = self.policy().num_requests() == 0;
        self.recording.report();
        self.report_population();
    }

    fn report_plan(&mut self, used_blocks: usize) {
        self.report_decisions();
        self.report_preemptions();
        for admission in self.policy().take_admissions() {
            metrics::prompt_tokens(admission.prompt_tokens, admission.cached_tokens);
            self.totals.prompt_tokens += admission.prompt_tokens as u64;
            self.totals.cached_tokens += admission.cached_tokens as u64;
            metrics::prefix_cache(admission.prompt_tokens, admission.cached_tokens, admission.swapped_tokens);
            if let Some(client) = self.clients.get_mut(&admission.request) {
                let queued = client.arrived.elapsed();
                client.queued = Some(queued);
                metrics::queue_time(queued);
                client.tenant.iter().for_each(|tenant| tenant.prompt_tokens(admission.prompt_tokens));
                if let Some(observer) = &client.observer {
                    observer.started(admission.request);
                }
            }
        }
        for (tenant, tier) in self.policy().take_quota_refusals() {
            tenants::quota_refused(tenant, tier);
        }
        let now = Instant::now();
        for (request, delivery) in self.policy().take_pauses() {
            match &mut self.news {
                // Behind what the step before has said.
                Some(news) => news.deliveries.push((request, delivery)),
                None => self.deliver(request, delivery, now),
            }
        }
        let forecast = self.policy().forecast();
        metrics::forecast(forecast.prompt_limit, forecast.decodes_s, forecast.prompt_token_s);
        metrics::expectation(forecast.output_tokens, forecast.horizon);
        // Samples that share a partly filled block count it once each.
        let empty_slots = self.policy().empty_slots();
        metrics::kv_waste(empty_slots, used_blocks * self.settings.block_size);
    }

    fn report_population(&mut self) {
        let population = self.policy().population();
        metrics::set_requests(population.waiting, population.running, population.swapped);
        if tenants::any() {
            tenants::set_holdings(&self.policy().holdings());
        }
    }
}

/// The actor panicked: its requests' streams close, and the engine must not go on without it.
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
        let Arrival { id, n, tenant, .. } = arrival;
        let client = Client {
            events,
            tenant: tenants::of(tenant),
            arrived,
            queued: None,
            first_token: None,
            prompt_tokens: arrival.prompt.len(),
            max_tokens: arrival.params.max_tokens as usize,
            generated: vec![0; n as usize],
            last_token: vec![None; n as usize],
            ended_by_length: false,
            bill: KvBill::default(),
            pauses: vec![Pause::default(); n as usize],
            observer,
            _place: place,
        };
        self.clients.insert(id, client);
        self.recording.hear(|recorder| recorder.arrive(&arrival));
        self.policy().arrive(arrival);
        self.report_population();
        self.wake_soon(ctx);
    }
}

impl Handler<Cancel> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, Cancel(request): Cancel, ctx: &mut Self::Context) {
        self.tell();
        self.recording.hear(|recorder| recorder.cancel(request));
        self.policy().cancel(request);
        self.close(request, Outcome::Cancelled);
        self.wake_soon(ctx);
    }
}

impl Handler<StopSample> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, StopSample(request, sample): StopSample, ctx: &mut Self::Context) {
        self.tell();
        self.recording.hear(|recorder| recorder.stop_sample(request, sample));
        self.policy().stop_sample(request, sample);
        if !self.policy().has_request(request) {
            self.close(request, Outcome::Stop);
        }
        self.wake_soon(ctx);
    }
}
