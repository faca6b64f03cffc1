//! Drives the steps: carries the policy's demands to the pools, its plans to the executor, and the results to the
//! requests' owners.

use crate::actors::block_allocator::BlockAllocator;
use crate::actors::executor::ModelExecutor;
use crate::actors::messages::{Arrive, Cancel, Event, Execute, ExecutorFailed, Reserve, Reset, Serve, StopSample};
use crate::actors::runtime::stop_system;
use crate::actors::swap_pool::SwapPool;
use crate::engine::allocation::SwapGrant;
use crate::engine::plan::{Delivery, StepOutput, StepPlan};
use crate::engine::policy::{Arrival, Scheduler};
use crate::error::ApiError;
use crate::ids::RequestId;
use crate::metrics::{self, Outcome, Preemption, StepMetrics};
use crate::sampling::params::FinishReason;
use actix::{Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, MailboxError, WrapFuture};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

pub struct SchedulerActor {
    /// Out only while a step is planned, when the actor handles no message.
    policy: Option<Box<Scheduler>>,
    allocator: Addr<BlockAllocator>,
    swap_pool: Addr<SwapPool>,
    executor: Addr<ModelExecutor>,
    clients: HashMap<RequestId, Client>,
    /// From the demand to the commit: one step is in flight.
    stepping: bool,
    block_bytes: usize,
    block_size: usize,
}

/// Who waits for a request.
struct Client {
    events: mpsc::UnboundedSender<Event>,
    arrived: Instant,
    /// Of each sample.
    last_token: Vec<Option<Instant>>,
    ended_by_length: bool,
    /// The request's place at the intake, given back when it ends.
    _permit: OwnedSemaphorePermit,
}

/// A planned step on its way, and what the metrics want to know of it.
struct Planned {
    plan: StepPlan,
    used_blocks: usize,
    schedule: Duration,
}

impl SchedulerActor {
    pub fn new(
        policy: Scheduler,
        allocator: Addr<BlockAllocator>,
        swap_pool: Addr<SwapPool>,
        executor: Addr<ModelExecutor>,
        block_size: usize,
        block_bytes: usize,
    ) -> Self {
        Self {
            policy: Some(Box::new(policy)),
            allocator,
            swap_pool,
            executor,
            clients: HashMap::new(),
            stepping: false,
            block_bytes,
            block_size,
        }
    }

    fn policy(&mut self) -> &mut Scheduler {
        self.policy.as_mut().expect("no message is handled while a step is planned")
    }

    /// Starts a step unless one is in flight or there is nothing to do.
    fn wake(&mut self, ctx: &mut Context<Self>) {
        if !self.stepping && self.policy().has_work() {
            self.step(ctx);
        }
    }

    /// One step. The first half is over in microseconds and nothing else is handled meanwhile; while the executor
    /// works, requests come and go.
    fn step(&mut self, ctx: &mut Context<Self>) {
        self.stepping = true;
        let mut policy = self.policy.take().expect("no message is handled while a step is planned");
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let planning = async move {
            let started = Instant::now();
            let demand = policy.demand();
            let grant = allocator.send(Serve(demand)).await?;
            let used_blocks = grant.stats.used;
            let swap_demand = policy.reserve(&grant);
            let swap_grant = match swap_demand.is_empty() {
                true => SwapGrant::default(),
                false => swap_pool.send(Reserve(swap_demand)).await?,
            };
            let plan = policy.plan(grant, swap_grant);
            Ok((policy, Planned { plan, used_blocks, schedule: started.elapsed() }))
        };
        ctx.wait(planning.into_actor(self).map(|planned: Result<_, MailboxError>, this, ctx| match planned {
            Ok((policy, planned)) => {
                this.policy = Some(policy);
                this.execute(planned, ctx);
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }

    fn execute(&mut self, planned: Planned, ctx: &mut Context<Self>) {
        let Planned { plan, used_blocks, schedule } = planned;
        self.report_plan(&plan, used_blocks);
        if plan.is_empty() {
            return self.commit(StepOutput::default(), ctx);
        }
        let mut step =
            StepMetrics { sequences: plan.batch.len(), tokens: plan.num_tokens(), schedule, ..Default::default() };
        let execute = self.executor.send(Execute(plan)).into_actor(self);
        ctx.spawn(execute.map(move |output, this, ctx| match output {
            Ok(Ok(output)) => {
                step.execute = Duration::from_secs_f64(output.timing.forward_s + output.timing.swap_s);
                step.sample = Duration::from_secs_f64(output.timing.sample_s);
                metrics::step(&step);
                this.commit(output, ctx);
            }
            Ok(Err(failure)) => this.fail(&failure, ctx),
            Err(_) => stop_system("the executor's actor is gone"),
        }));
    }

    fn commit(&mut self, output: StepOutput, ctx: &mut Context<Self>) {
        let deliveries = self.policy().commit(output);
        let now = Instant::now();
        let mut ended = Vec::new();
        for (request, delivery) in deliveries {
            if matches!(delivery, Delivery::Finished { .. }) && !self.policy().has_request(request) {
                ended.push(request);
            }
            self.deliver(request, delivery, now);
        }
        for request in ended {
            let by_length = self.clients.get(&request).is_some_and(|client| client.ended_by_length);
            self.close(request, if by_length { Outcome::Length } else { Outcome::Stop });
        }
        let stats = self.policy().take_stats();
        metrics::recomputed_tokens(stats.recomputed_tokens);
        metrics::swapped_out(stats.blocks_out, stats.blocks_out * self.block_bytes);
        metrics::swapped_in(stats.blocks_in, stats.blocks_in * self.block_bytes);
        for (kind, count) in
            [(Preemption::Swap, stats.preempted_swap), (Preemption::Recompute, stats.preempted_recompute)]
        {
            (0..count).for_each(|_| metrics::preempted(kind));
        }
        self.report_population();
        self.stepping = false;
        self.wake(ctx);
    }

    fn report_plan(&mut self, plan: &StepPlan, used_blocks: usize) {
        for admission in self.policy().take_admissions() {
            metrics::prompt_tokens(admission.prompt_tokens, admission.cached_tokens);
            metrics::prefix_cache(admission.prompt_tokens, admission.cached_tokens);
            if let Some(client) = self.clients.get(&admission.request) {
                metrics::queue_time(client.arrived.elapsed());
            }
        }
        // The step fills the slots of its tokens. Samples that share a partly filled block count it once each.
        let empty_slots = self.policy().empty_slots().saturating_sub(plan.num_tokens());
        metrics::kv_waste(empty_slots, used_blocks * self.block_size);
    }

    fn report_population(&mut self) {
        let population = self.policy().population();
        metrics::set_requests(population.waiting, population.running, population.swapped);
    }

    fn deliver(&mut self, request: RequestId, delivery: Delivery, now: Instant) {
        let Some(client) = self.clients.get_mut(&request) else { return };
        let event = match delivery {
            Delivery::Started { cached_tokens } => {
                metrics::first_token(now - client.arrived);
                Event::Started { cached_tokens: cached_tokens as u32 }
            }
            Delivery::PromptLogprobs(logprobs) => Event::PromptLogprobs(logprobs),
            Delivery::Token { sample, sampled } => {
                metrics::generated_tokens(1);
                if let Some(last) = client.last_token[sample as usize].replace(now) {
                    metrics::inter_token(now - last);
                }
                Event::Token { index: sample, token: sampled.token, logprobs: sampled.logprobs }
            }
            Delivery::Finished { sample, reason } => {
                client.ended_by_length |= reason == FinishReason::Length;
                Event::Finished { index: sample, reason }
            }
        };
        // A closed channel is a client that has gone; its cancellation is on its way.
        let _ = client.events.send(event);
    }

    /// The request has ended: its stream closes, its place at the intake is free.
    fn close(&mut self, request: RequestId, outcome: Outcome) {
        if let Some(client) = self.clients.remove(&request) {
            metrics::request_ended(outcome, client.arrived.elapsed());
        }
    }

    /// The executor has lost all KV: what ran fails, what waits goes on with empty pools.
    fn fail(&mut self, failure: &ExecutorFailed, ctx: &mut Context<Self>) {
        let failed = self.policy().fail_running();
        tracing::error!(requests = failed.len(), "a step failed, its requests with it: {}", failure.0);
        metrics::executor_restarted();
        let error = ApiError::engine(format!("the engine failed while this request ran: {}", failure.0));
        for request in failed {
            if let Some(client) = self.clients.get(&request) {
                let _ = client.events.send(Event::Failed(error.clone()));
            }
            self.close(request, Outcome::Failed);
        }
        self.report_population();
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let reset = async move {
            allocator.send(Reset).await?;
            swap_pool.send(Reset).await
        };
        ctx.wait(reset.into_actor(self).map(|done: Result<_, MailboxError>, this, ctx| match done {
            Ok(()) => {
                this.stepping = false;
                this.wake(ctx);
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
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
}

impl Handler<Arrive> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, arrive: Arrive, ctx: &mut Self::Context) {
        let Arrive { arrival, events, arrived, permit } = arrive;
        let Arrival { id, n, .. } = arrival;
        let last_token = vec![None; n as usize];
        let client = Client { events, arrived, last_token, ended_by_length: false, _permit: permit };
        self.clients.insert(id, client);
        self.policy().arrive(arrival);
        self.report_population();
        self.wake(ctx);
    }
}

impl Handler<Cancel> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, Cancel(request): Cancel, ctx: &mut Self::Context) {
        self.policy().cancel(request);
        self.close(request, Outcome::Cancelled);
        self.wake(ctx);
    }
}

impl Handler<StopSample> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, StopSample(request, sample): StopSample, ctx: &mut Self::Context) {
        self.policy().stop_sample(request, sample);
        if !self.policy().has_request(request) {
            self.close(request, Outcome::Stop);
        }
        self.wake(ctx);
    }
}
