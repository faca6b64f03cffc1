//! Every message between actors, in data-path order:
//!
//! http → [`Submit`] → intake → [`Arrive`] → scheduler → ([`FindHeld`] → swap pool) → [`Serve`] → block allocator
//!      → ([`Reserve`] → swap pool) → [`Execute`] → executor → scheduler → [`Event`] → http
//!
//! and for settings that change: LiveSettings → [`Tune`] → intake → scheduler → ([`Resize`] → swap pool)
//! → ([`Discard`] → executor)
//!
//! and to forget prefixes: LiveSettings → [`FlushCaches`] → scheduler → ([`DropCached`] → both pools)
//!
//! and for files of slots: SlotKeeper → [`NamePrefix`], [`CountPrefix`], [`ReadPrefix`], [`PutBackPrefix`],
//! [`ErasePrefix`] → scheduler → ([`Locate`], [`PutBack`], [`Erase`] → pools) → ([`ReadKv`], [`WriteKv`] → executor)
//!
//! and to pause the engine: LiveSettings → [`SetPaused`] → scheduler
//!
//! and for watchers: http → [`Look`] → scheduler → ([`ViewPool`] → both pools)

use crate::observer::RequestObserver;
use crate::places::Place;
use crate::snapshot::Snapshot;
use pagetide_api::event::Event;
use pagetide_api::request::PromptRequest;
use pagetide_base::error::ApiError;
use pagetide_base::ids::{BlockId, KvPlace, RequestId, TokenId};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::allocation::{Demand, Find, Grant, SwapDemand, SwapGrant};
use pagetide_engine::bill::Tenant;
use pagetide_engine::block_pool::{BlockPool, PoolStats, PoolView};
use pagetide_engine::plan::{CopyReport, StepOutput, StepPlan};
use pagetide_engine::prefix_cache::BlockHash;
use pagetide_engine::scheduler::{EngineRequest, Tuning};
use pagetide_recorder::RawRecording;
use std::cell::RefCell;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// http → intake. The answer is an [`Accepted`] request or the client's error.
#[derive(Debug, actix::Message)]
#[rtype(result = "Result<Accepted, ApiError>")]
pub struct Submit {
    pub request: PromptRequest,
    /// Follows the request.
    pub observer: Option<Arc<dyn RequestObserver>>,
    /// Ends when the submitter has given up.
    pub abandoned: Abandoned,
}

/// Resolves, to an error, when its sender is dropped.
pub type Abandoned = tokio::sync::oneshot::Receiver<std::convert::Infallible>;

/// The client that requests are submitted for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    pub tenant: Tenant,
    /// If its prefix cache is its own: this is put before the salts of its requests. All have the same length.
    pub salt: Option<Arc<str>>,
}

impl Caller {
    /// The salt of a request whose client gave `own`.
    pub fn cache_salt(&self, own: Option<String>) -> Option<String> {
        match (&self.salt, own) {
            (None, own) => own,
            (Some(salt), own) => Some(format!("{salt}{}", own.unwrap_or_default())),
        }
    }
}

/// A request that is on its way to the scheduler.
#[derive(Debug)]
pub struct Accepted {
    pub id: RequestId,
    pub prompt_tokens: Arc<Vec<TokenId>>,
    /// As the engine will use them (`max_tokens` resolved).
    pub params: Arc<SamplingParams>,
    /// Events of all samples in the order they happen; closed after each sample has ended or the request failed.
    /// Dropping it cancels the request.
    pub events: EventStream,
}

/// Receiving half of a request's events. Dropping it before the end cancels the request and frees its blocks.
#[derive(Debug)]
pub struct EventStream {
    id: RequestId,
    receiver: mpsc::UnboundedReceiver<Event>,
    cancel: actix::Recipient<Cancel>,
    stop_sample: actix::Recipient<StopSample>,
    observer: Option<Arc<dyn RequestObserver>>,
    /// Samples that their owner has ended.
    stopped: RefCell<Vec<u32>>,
}

impl EventStream {
    /// The stream of request `id`, and the sending half for the scheduler; both recipients are the scheduler.
    pub fn channel(
        id: RequestId,
        cancel: actix::Recipient<Cancel>,
        stop_sample: actix::Recipient<StopSample>,
    ) -> (mpsc::UnboundedSender<Event>, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (sender, Self { id, receiver, cancel, stop_sample, observer: None, stopped: RefCell::default() })
    }

    /// Tells `observer` what comes out of the stream from now on.
    pub fn observed_by(mut self, observer: Option<Arc<dyn RequestObserver>>) -> Self {
        self.observer = observer;
        self
    }

    fn heard(&self, event: Option<Event>) -> Option<Event> {
        if let (Some(observer), Some(event)) = (&self.observer, &event) {
            observer.heard(self.id, event);
        }
        event
    }

    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.receiver.recv().await;
        self.heard(event)
    }

    /// [`EventStream::next`] for merging several streams.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        self.receiver.poll_recv(cx).map(|event| self.heard(event))
    }

    /// Events that are there and were not read.
    pub fn num_unread(&self) -> usize {
        self.receiver.len()
    }

    /// An event that is already there, without waiting.
    pub fn try_next(&mut self) -> Option<Event> {
        let event = self.receiver.try_recv().ok();
        self.heard(event)
    }

    /// Ends sample `index` early (a stop string matched); the others go on. Tokens that were already under way may
    /// still arrive.
    pub fn stop_sample(&self, index: u32) {
        if let Some(observer) = &self.observer {
            observer.stopped(self.id);
        }
        self.stopped.borrow_mut().push(index);
        self.stop_sample.do_send(StopSample(self.id, index));
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if let Some(observer) = &self.observer {
            let stopped = self.stopped.get_mut();
            // Tokens that were made for it count, whether or not its client was there to read them.
            while let Ok(event) = self.receiver.try_recv() {
                if matches!(&event, Event::Token { index, .. } if !stopped.contains(index)) {
                    observer.heard(self.id, &event);
                }
            }
            observer.left(self.id);
        }
        self.cancel.do_send(Cancel(self.id));
    }
}

/// anyone → scheduler: the client is gone. Unknown ids (the request has ended) are ignored.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "()")]
pub struct Cancel(pub RequestId);

/// http → scheduler: sample `.1` of the request is finished for its client. Its blocks are freed and no
/// [`Event::Finished`] follows for it. Samples that have ended and unknown ids are ignored.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "()")]
pub struct StopSample(pub RequestId, pub u32);

/// intake → scheduler: a valid request, with the sending half of its stream and its place in the bounded queue.
#[derive(Debug, actix::Message)]
#[rtype(result = "()")]
pub struct Arrive {
    pub arrival: EngineRequest,
    pub events: mpsc::UnboundedSender<Event>,
    pub arrived: Instant,
    pub place: Place,
    pub observer: Option<Arc<dyn RequestObserver>>,
}

/// scheduler → swap pool: which blocks it holds of the sequences that may start. Not sent if none may start.
#[derive(Debug, actix::Message)]
#[rtype(result = "Vec<Vec<bool>>")]
pub struct FindHeld(pub Vec<Find>);

/// scheduler → block allocator: one a step.
#[derive(Debug, actix::Message)]
#[rtype(result = "Grant")]
pub struct Serve(pub Demand);

/// scheduler → swap pool: at most one a step, and none on a step that copies nothing between the tiers.
#[derive(Debug, actix::Message)]
#[rtype(result = "SwapGrant")]
pub struct Reserve(pub SwapDemand);

/// scheduler → executor: one step. The answers come when the steps are done, in their order.
#[derive(Debug, actix::Message)]
#[rtype(result = "Result<Executed, ExecutorFailed>")]
pub struct Execute {
    pub plan: StepPlan,
    /// Failures that the scheduler has heard of. A plan that was made before the last one means nothing any more, and
    /// is refused.
    pub failures: u64,
}

/// LiveSettings → executor, to see what a failure of the device does: its next step fails as if the device had.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "()")]
pub struct FailNextStep;

/// scheduler → executor, where everything that runs waits for copies between the tiers: the answer comes when some have
/// ended, or before the next step is begun.
#[derive(Debug, actix::Message)]
#[rtype(result = "Result<CopyReport, ExecutorFailed>")]
pub struct AwaitCopies;

/// A step that is done.
#[derive(Clone, Debug)]
pub struct Executed {
    pub output: StepOutput,
    /// From the end of the step before to the start of this one; zero where this one had been submitted before that.
    pub gap: Duration,
}

/// The device failed, and all plans that it had with it. All KV is lost and its pools are empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecutorFailed {
    pub message: String,
    /// False where it cannot go on: the runner could not start over.
    pub restarted: bool,
}

/// scheduler → both pools, after [`ExecutorFailed`]: forget everything.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "()")]
pub struct Reset;

/// LiveSettings → intake → scheduler: other settings from the next step on. The answer is how the swap pool is then.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Result<PoolStats, ApiError>")]
pub struct Tune(pub Tuning);

/// scheduler → swap pool, between two steps: so many blocks from now on.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "PoolStats")]
pub struct Resize(pub usize);

/// LiveSettings → scheduler: both pools are to forget all prefixes. False where requests run or wait: then some
/// prefixes may still be there.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "Result<bool, ApiError>")]
pub struct FlushCaches;

/// SlotKeeper → scheduler: the hashes of the full blocks of these tokens.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Vec<BlockHash>")]
pub struct NamePrefix {
    pub salt: Option<String>,
    pub tokens: Arc<Vec<TokenId>>,
}

/// SlotKeeper → scheduler: how many leading blocks of a prefix are on either tier.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Result<usize, ApiError>")]
pub struct CountPrefix(pub Vec<BlockHash>);

/// SlotKeeper → scheduler: the contents of the leading blocks of a part of a prefix that are on either tier, one behind
/// the other.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Result<Vec<u8>, ApiError>")]
pub struct ReadPrefix(pub Vec<BlockHash>);

/// SlotKeeper → scheduler: puts a part of a prefix into the device's prefix cache, as far as it fits.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Result<(), ApiError>")]
pub struct PutBackPrefix {
    pub names: Vec<BlockHash>,
    /// The contents of the blocks, one behind the other.
    pub content: Vec<u8>,
}

/// SlotKeeper → scheduler: both pools are to forget what they have of a prefix and no sequence holds. The answer is the
/// number of blocks.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Result<usize, ApiError>")]
pub struct ErasePrefix(pub Vec<BlockHash>);

/// LiveSettings → scheduler: whether steps are planned. Steps that the executor has are completed in any case. While
/// the engine is paused, requests arrive, wait and leave.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "()")]
pub struct SetPaused(pub bool);

/// scheduler → both pools, while no request runs or waits: forget all that is cached.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "PoolStats")]
pub struct DropCached;

/// scheduler → both pools, between two steps: the blocks of a prefix that they hold.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Vec<Option<BlockId>>")]
pub struct Locate(pub Arc<Vec<BlockHash>>);

/// scheduler → block allocator, between two steps: see [`put_back`](pagetide_engine::kept_prefix::put_back).
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Vec<(usize, BlockId)>")]
pub struct PutBack(pub Arc<Vec<BlockHash>>);

/// scheduler → both pools, between two steps: see [`erase`](pagetide_engine::kept_prefix::erase).
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Vec<bool>")]
pub struct Erase(pub Arc<Vec<BlockHash>>);

/// scheduler → executor: the contents of these blocks behind all plans that were sent before, up to the first that
/// holds nothing.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Result<Vec<u8>, ExecutorFailed>")]
pub struct ReadKv {
    pub places: Vec<KvPlace>,
    /// Of each block.
    pub block_bytes: usize,
    /// As in [`Execute`].
    pub failures: u64,
}

/// scheduler → executor: other contents for these blocks of the device, behind all plans that were sent before and
/// ahead of all that are sent later.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "Result<(), ExecutorFailed>")]
pub struct WriteKv {
    pub blocks: Vec<BlockId>,
    /// One behind the other.
    pub content: Vec<u8>,
    /// As in [`Execute`].
    pub failures: u64,
}

/// swap pool → executor: blocks that have left the pool, and hold nothing that anybody needs. They come back, if they
/// do, only by plans that are sent after this.
#[derive(Clone, Debug, actix::Message)]
#[rtype(result = "()")]
pub struct Discard(pub Vec<BlockId>);

/// scheduler → both pools, between two steps: their states as they are.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "BlockPool")]
pub struct ClonePool;

/// anyone → scheduler: what the flight recorder holds; `None`: nothing.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "Option<RawRecording>")]
pub struct TakeRecording;

/// LiveSettings → swap pool: how it is.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "PoolStats")]
pub struct AskSwapPool;

/// http → scheduler: everything at one moment, with the first `most_waiting` of those who wait without blocks.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "Result<Snapshot, ApiError>")]
pub struct Look {
    pub most_waiting: usize,
}

/// scheduler → both pools: their blocks, for the console.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "PoolView")]
pub struct ViewPool;
