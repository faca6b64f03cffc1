//! Sends the clients what the commits deliver.

use super::SchedulerActor;
use super::clients::News;
use actix::{ActorFutureExt, AsyncContext, Context, WrapFuture};
use pagetide_api::event::Event;
use pagetide_base::error::ApiError;
use pagetide_base::ids::RequestId;
use pagetide_base::sampling::params::FinishReason;
use pagetide_engine::bill::KvBill;
use pagetide_engine::plan::Delivery;
use pagetide_metrics::{self as metrics, EndedRequest, Outcome};
use std::future::poll_fn;
use std::task::Poll;
use std::time::Instant;

impl SchedulerActor {
    /// Calls [`SchedulerActor::tell`] after the step that was just planned has reached the executor. Every event wakes
    /// a thread, which may take the processor, and the device must not wait for that.
    pub(super) fn tell_soon(&self, ctx: &mut Context<Self>) {
        let mut is_queued = false;
        // The executor's actor is in this thread's queue. One turn later it has passed the step to its own thread.
        let turn = poll_fn(move |cx| match std::mem::replace(&mut is_queued, true) {
            true => Poll::Ready(()),
            false => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        });
        ctx.spawn(turn.into_actor(self).map(|(), this, _| this.tell()));
    }

    /// Sends the deliveries of the last commit to the clients.
    pub(super) fn tell(&mut self) {
        let Some(News { prefilled, deliveries, ended, at }) = self.news.take() else { return };
        for (request, computed) in prefilled {
            self.tell_progress(request, computed);
        }
        let is_token = |delivery: &Delivery| matches!(delivery, Delivery::Token { .. });
        let num_tokens = deliveries.iter().filter(|(_, delivery)| is_token(delivery)).count();
        metrics::generated_tokens(num_tokens);
        self.totals.generated_tokens += num_tokens as u64;
        for (request, delivery) in deliveries {
            self.deliver(request, delivery, at);
        }
        for request in ended {
            let by_length = self.clients.get(&request).is_some_and(|client| client.ended_by_length);
            self.close(request, if by_length { Outcome::Length } else { Outcome::Stop });
        }
    }

    /// Says how far the prompt is, to a client that wants to hear it.
    fn tell_progress(&self, request: RequestId, computed: usize) {
        let Some(client) = self.clients.get(&request) else { return };
        if client.hears_progress {
            let (cached_tokens, computed) = (client.cached_tokens as u32, computed.min(client.prompt_tokens) as u32);
            let _ = client.events.send(Event::Prefilled { cached_tokens, computed });
        }
    }

    pub(super) fn deliver(&mut self, request: RequestId, delivery: Delivery, now: Instant) {
        let Some(client) = self.clients.get_mut(&request) else { return };
        let event = match delivery {
            Delivery::Started { cached_tokens } => {
                let waited = now - client.arrived;
                client.first_token = Some(waited);
                metrics::first_token(waited);
                self.totals.first_token.add(waited);
                Event::Started { cached_tokens: cached_tokens as u32 }
            }
            Delivery::Bill(bill) => {
                client.bill = KvBill { paused: client.bill.paused, ..*bill };
                Event::Bill(client.bill)
            }
            Delivery::Paused { sample } => match client.pauses[sample as usize].begin(now) {
                true => Event::Paused { index: sample },
                false => return,
            },
            Delivery::Resumed { sample } => {
                let Some(after) = client.pauses[sample as usize].end(now) else { return };
                client.bill.paused += after;
                let _ = client.events.send(Event::Resumed { index: sample, after });
                Event::Bill(client.bill)
            }
            Delivery::PromptLogprobs(logprobs) => Event::PromptLogprobs(logprobs),
            Delivery::Embedding(values) => Event::Embedding(values),
            Delivery::Token { sample, sampled } => {
                if let Some(last) = client.last_token[sample as usize].replace(now) {
                    metrics::inter_token(now - last);
                    self.totals.inter_token.add(now - last);
                }
                client.generated[sample as usize] += 1;
                client.tenant.iter().for_each(|tenant| tenant.generated_token());
                Event::Token {
                    index: sample,
                    token: sampled.token,
                    logprobs: sampled.logprobs.map(|logprobs| *logprobs),
                }
            }
            Delivery::Failed { message } => {
                let error = ApiError::constraint_failed(&message);
                return self.fail_client(request, &error);
            }
            Delivery::Finished { sample, reason } => {
                client.ended_by_length |= reason == FinishReason::Length;
                Event::Finished { index: sample, reason }
            }
        };
        // A closed channel means that the client has gone. Its cancellation follows.
        let _ = client.events.send(event);
    }

    /// The request has ended. Its stream closes and its place is released.
    pub(super) fn close(&mut self, request: RequestId, outcome: Outcome) {
        if let Some(client) = self.clients.remove(&request) {
            let last_token = client.last_token.iter().flatten().max();
            metrics::request_ended(&EndedRequest {
                outcome,
                tenant: client.tenant,
                e2e: client.arrived.elapsed(),
                queued: client.queued,
                first_token: client.first_token,
                last_token: last_token.map(|last| *last - client.arrived),
                prompt_tokens: client.prompt_tokens,
                cached_tokens: client.cached_tokens,
                preemptions: client.bill.preemptions,
                max_tokens: client.max_tokens,
                generated: client.generated,
            });
            self.totals.ended += 1;
        }
    }

    pub(super) fn fail_client(&mut self, request: RequestId, error: &ApiError) {
        if let Some(client) = self.clients.get(&request) {
            let _ = client.events.send(Event::Failed(error.clone()));
        }
        self.close(request, Outcome::Failed);
    }
}
