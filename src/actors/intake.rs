//! The way in: bounds what the engine holds, tokenises off the HTTP workers, and refuses what can never run.

use crate::messages::{Abandoned, Accepted, Arrive, Cancel, EventStream, StopSample, Submit, Tune};
use crate::observer::RequestObserver;
use crate::places::{NoPlace, Places};
use crate::scheduler::SchedulerActor;
use crate::stop::stop_system;
use crate::workers::{Weight, Workers};
use actix::{Actor, Addr, Context, Handler, Recipient, ResponseFuture};
use pagetide_api::model_info::ModelInfo;
use pagetide_api::prompt::Prompt;
use pagetide_api::request::{FieldNames, PromptRequest};
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::rules::ConstraintSource;
use pagetide_base::sampling::extra::DryBreakers;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::bill::Tenant;
use pagetide_engine::block_pool::PoolStats;
use pagetide_engine::request::EngineRequest;
use pagetide_engine::scheduler::Tuning;
use pagetide_engine::{beam, bill};
use pagetide_metrics::{self as metrics, Rejection};
use pagetide_text::breakers::dry_breakers;
use pagetide_text::chat_output::thinking::LimitedThinking;
use pagetide_text::grammar::sandbox::GrammarLimits;
use pagetide_text::grammar::{GrammarCompiler, GrammarRequest};
use pagetide_text::truncation::{Side, Truncation};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Log-probabilities of a request's prompt.
const MAX_PROMPT_LOGPROBS: usize = 200_000;

/// What a request may ask for at most.
#[derive(Clone, Copy, Debug)]
pub struct IntakeLimits {
    pub block_size: usize,
    pub num_device_blocks: usize,
    /// Of those: what requests that are not preemptible may hold together.
    pub non_preemptible_blocks: usize,
    /// Beams of one request are all in the same step.
    pub max_num_seqs: usize,
}

impl IntakeLimits {
    /// Tokens that each output can have after a prompt of `length` tokens, where a request has `num_blocks` to itself:
    /// all its sequences share the prompt's full blocks. The last token needs no slot: nothing comes after it.
    fn room(&self, num_blocks: usize, length: usize, num_seqs: usize) -> usize {
        let shared = length / self.block_size;
        let own = num_blocks.saturating_sub(shared) / num_seqs;
        ((shared + own) * self.block_size + 1).saturating_sub(length)
    }

    /// What `num_tokens` tokens, of which `length` are the prompt's, need.
    fn blocks(&self, length: usize, num_tokens: usize, num_seqs: usize) -> usize {
        bill::most_blocks(self.block_size, length, num_tokens, num_seqs)
    }

    /// Tokens that each output of a request can have that may not be preempted: all of them have to fit at once into
    /// the part of the pool that such requests may hold. `wanted` 0: as many as fit.
    fn non_preemptible_room(&self, length: usize, wanted: usize, num_seqs: usize) -> Result<usize, ApiError> {
        let most = self.non_preemptible_blocks;
        let room = self.room(most, length, num_seqs);
        if room >= wanted.max(1) {
            return Ok(room);
        }
        let outputs = if num_seqs > 1 { format!("each of {num_seqs} outputs") } else { "the output".into() };
        let message = format!(
            "preemptible: false needs room for all that the request may become, {} KV blocks of {} tokens ({length} \
             tokens in the prompt, {} for {outputs}); such requests may hold {most} of this server's {} blocks \
             (scheduler.non_preemptible_share)",
            self.blocks(length, length + wanted.max(1) - 1, num_seqs),
            self.block_size,
            wanted.max(1),
            self.num_device_blocks,
        );
        Err(ApiError::invalid("preemptible", message))
    }
}

pub struct RequestIntake {
    shared: Rc<IntakeShared>,
    /// One is taken for each request from here to its end.
    places: Places,
}

struct IntakeShared {
    model: Arc<ModelInfo>,
    limits: Cell<IntakeLimits>,
    workers: Workers,
    grammars: Arc<GrammarCompiler>,
    scheduler: Addr<SchedulerActor>,
    next_id: AtomicU64,
    /// DRY's breakers that were lately used, by their texts; the last one was used last.
    breakers: RefCell<VecDeque<Arc<KnownBreakers>>>,
}

/// Texts of DRY, and their tokens.
struct KnownBreakers {
    texts: Vec<String>,
    tokens: Arc<DryBreakers>,
}

/// Most clients use the default breakers.
const MAX_KNOWN_BREAKERS: usize = 16;

impl RequestIntake {
    pub fn new(
        model: Arc<ModelInfo>,
        limits: IntakeLimits,
        places: Places,
        workers: Workers,
        grammars: GrammarLimits,
        scheduler: Addr<SchedulerActor>,
    ) -> Self {
        let tokenizer = model.tokenizer.clone();
        let grammars = GrammarCompiler::new(tokenizer, model.vocab_size as usize, &model.eos_token_ids, grammars);
        let grammars = Arc::new(grammars);
        let (limits, next_id, breakers) = (Cell::new(limits), AtomicU64::new(1), RefCell::default());
        let shared = IntakeShared { model, limits, workers, grammars, scheduler, next_id, breakers };
        Self { shared: Rc::new(shared), places }
    }
}

/// The actor panicked: nothing would ever come in again.
impl Drop for RequestIntake {
    fn drop(&mut self) {
        if std::thread::panicking() {
            stop_system("the intake panicked");
        }
    }
}

impl Actor for RequestIntake {
    type Context = Context<Self>;
}

impl Handler<Submit> for RequestIntake {
    type Result = ResponseFuture<Result<Accepted, ApiError>>;

    fn handle(&mut self, Submit { request, observer, abandoned }: Submit, _: &mut Self::Context) -> Self::Result {
        let arrived = Instant::now();
        let shared = self.shared.clone();
        let server = shared.model.server.get();
        let (most, most_of_key) = (server.max_requests, server.max_requests_of_key());
        let tenant = request.core.tenant;
        let place = self.places.try_take(tenant, most, most_of_key);
        Box::pin(async move {
            let place = place.map_err(|reason| {
                metrics::request_rejected(Rejection::QueueFull, tenant);
                match reason {
                    NoPlace::Full => ApiError::overloaded(most, server.retry_after_s),
                    NoPlace::TenantFull => ApiError::key_overloaded(most_of_key, most, server.retry_after_s),
                }
            })?;
            let accepted = tokio::select! {
                biased;
                accepted = shared.accept(request, observer.as_deref()) => {
                    accepted.inspect_err(|error| count_rejection(error, tenant))
                }
                // Its jobs on the text threads end with it, and its place becomes free.
                () = is_abandoned(abandoned) => Err(ApiError::abandoned()),
            };
            let accepted = accepted?;
            // No await from here on: ids reach the scheduler in their order.
            let id = RequestId(shared.next_id.fetch_add(1, Ordering::Relaxed));
            let scheduler = &shared.scheduler;
            let (cancel, stop): (Recipient<Cancel>, Recipient<StopSample>) =
                (scheduler.clone().recipient(), scheduler.clone().recipient());
            let (sender, events) = EventStream::channel(id, cancel, stop);
            let arrival = EngineRequest { id, ..accepted };
            let (prompt_tokens, params) = (arrival.prompt.clone(), arrival.params.clone());
            if let Some(observer) = &observer {
                observer.accepted(id, prompt_tokens.len());
            }
            let events = events.observed_by(observer.clone());
            scheduler.do_send(Arrive { arrival, events: sender, arrived, place, observer });
            Ok(Accepted { id, prompt_tokens, params, events })
        })
    }
}

/// Refuses a prompt whose log-probabilities would not fit into the memory of an answer: each takes a kilobyte there.
fn check_num_logprobs(params: &SamplingParams, prompt_tokens: usize, n: u32) -> Result<(), ApiError> {
    let Some(top) = params.prompt_logprobs else { return Ok(()) };
    let num = prompt_tokens.saturating_mul(top as usize + 1).saturating_mul(n as usize);
    if num <= MAX_PROMPT_LOGPROBS {
        return Ok(());
    }
    let message = format!(
        "the answer would have {num} log-probabilities of the prompt: {prompt_tokens} tokens, each with {top} others, for each of \
         {n} outputs; at most {MAX_PROMPT_LOGPROBS} are allowed"
    );
    Err(ApiError::too_complex("prompt_logprobs", message))
}

/// Completes when the submitter has given up.
async fn is_abandoned(abandoned: Abandoned) {
    // Nothing is ever sent: the receiver only learns that the sender is dropped.
    drop(abandoned.await);
}

fn count_rejection(error: &ApiError, tenant: Tenant) {
    if error.status == 429 {
        return; // counted where it was refused
    }
    let too_long = error.code == Some("context_length_exceeded");
    metrics::request_rejected(if too_long { Rejection::TooLong } else { Rejection::Invalid }, tenant);
}

/// What is accepted from now on goes by the new settings; the scheduler copes with what was accepted before.
impl Handler<Tune> for RequestIntake {
    type Result = ResponseFuture<Result<PoolStats, ApiError>>;

    fn handle(&mut self, tune: Tune, _: &mut Self::Context) -> Self::Result {
        let Tuning { non_preemptible_blocks, max_num_seqs, .. } = tune.0;
        self.shared.limits.set(IntakeLimits { non_preemptible_blocks, max_num_seqs, ..self.shared.limits() });
        let answer = self.shared.scheduler.send(tune);
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err(ApiError::engine("the engine has stopped"))) })
    }
}

impl IntakeShared {
    fn limits(&self) -> IntakeLimits {
        self.limits.get()
    }

    /// The request as the scheduler reads it, all but its id.
    async fn accept(
        &self,
        request: PromptRequest,
        observer: Option<&dyn RequestObserver>,
    ) -> Result<EngineRequest, ApiError> {
        let PromptRequest { prompt, names, truncation, filled_up_with, ignore_eos, seed, .. } = request;
        let PromptRequest { shortens_output, thinking, grammar, mut core, .. } = request;
        let n = core.n;
        if n == 0 {
            return Err(ApiError::invalid("n", "must be at least 1, got 0"));
        }
        let params = Arc::make_mut(&mut core.params);
        let wanted = (params.max_tokens > 0).then_some(params.max_tokens as usize);
        let cut = truncation.map(|cut| (self.prompt_room(cut, params), cut.side));
        let mut prompt = self.tokenise(prompt, cut, &names).await?;
        if let Some(token) = filled_up_with {
            prompt.resize(prompt.len().max(self.most_pooled()), token);
        }
        if !core.terms.preemptible {
            self.fit_non_preemptible(params, prompt.len(), n)?;
        }
        if let Some(dry) = params.extra.as_mut().and_then(|extra| extra.dry.as_mut()) {
            dry.breakers = self.find_breakers(&dry.breakers).await?;
        }
        self.resolve(params, &prompt, &names, shortens_output, ignore_eos, seed)?;
        check_num_logprobs(params, prompt.len(), n)?;
        if let Some(grammar) = grammar {
            core.constraint = Some(self.constrain(grammar, &prompt, params).await?);
        }
        if let Some(limit) = thinking {
            if params.beam.is_some() {
                let message = format!("use_beam_search cannot be combined with {}", limit.param);
                return Err(ApiError::invalid("use_beam_search", message));
            }
            let rule = LimitedThinking::new(&limit, &prompt, self.model.tokenizer.clone(), core.constraint.take())?;
            core.constraint = Some(Arc::new(rule));
        }
        if let Some(observer) = observer {
            let num_outputs = match (&params.pooling, &params.beam) {
                (Some(_), _) => 0,
                (None, Some(beam)) => beam.width as usize,
                (None, None) => n as usize,
            };
            observer.admit(prompt.len(), num_outputs, wanted)?;
        }
        core.prompt = Arc::new(prompt);
        Ok(core)
    }

    /// Tokens that a prompt which may be cut has at most.
    fn prompt_room(&self, truncation: Truncation, params: &SamplingParams) -> usize {
        let room = || self.model.max_model_len.saturating_sub(params.max_tokens.max(1)).max(1);
        truncation.keep.unwrap_or_else(room) as usize
    }

    /// `cut`: tokens to keep at most, and the side to cut away.
    async fn tokenise(
        &self,
        prompt: Prompt,
        cut: Option<(usize, Option<Side>)>,
        names: &FieldNames,
    ) -> Result<Vec<TokenId>, ApiError> {
        let param = names.prompt;
        let tokens = match (prompt, cut) {
            (Prompt::Tokens(tokens), None) => tokens,
            (prompt, cut) => {
                let model = self.model.clone();
                let weight = Weight::of_bytes(prompt.num_bytes());
                let names = names.clone();
                let encode = move |budget: &Budget| match cut {
                    None => model.encode(&prompt, &names, budget),
                    Some((keep, side)) => model.encode_truncated(&prompt, keep, side, &names, budget),
                };
                self.workers.run(weight, encode).await?
            }
        };
        if tokens.is_empty() {
            return Err(ApiError::invalid(param, "the prompt is empty: at least 1 token is needed"));
        }
        let vocab_size = self.model.vocab_size;
        if let Some(token) = tokens.iter().find(|token| **token >= vocab_size) {
            let message = format!("token id {token} is out of range: this model's ids are 0 to {}", vocab_size - 1);
            return Err(ApiError::invalid(param, message));
        }
        Ok(tokens)
    }

    /// The tokens of DRY's breakers, where they are still texts.
    async fn find_breakers(&self, given: &Arc<DryBreakers>) -> Result<Arc<DryBreakers>, ApiError> {
        if given.texts.is_empty() {
            return Ok(given.clone());
        }
        self.model.tokenizer.check_present("dry_sequence_breakers", "DRY with texts as breakers")?;
        let is_same = |known: &Arc<KnownBreakers>| known.texts == given.texts;
        let place = self.breakers.borrow().iter().position(is_same);
        let known = place.and_then(|place| self.breakers.borrow_mut().remove(place));
        let known = match known {
            Some(known) => known,
            None => {
                let (model, texts) = (self.model.clone(), given.texts.clone());
                let find = move |_: &Budget| {
                    let tokens = Arc::new(dry_breakers(&model.tokenizer, &texts)?);
                    Ok(Arc::new(KnownBreakers { texts, tokens }))
                };
                self.workers.run(Weight::Light, find).await?
            }
        };
        let tokens = known.tokens.clone();
        let mut all = self.breakers.borrow_mut();
        all.push_back(known);
        if all.len() > MAX_KNOWN_BREAKERS {
            all.pop_front();
        }
        Ok(tokens)
    }

    /// What the request's grammar allows, token by token.
    async fn constrain(
        &self,
        mut grammar: GrammarRequest,
        prompt: &[TokenId],
        params: &SamplingParams,
    ) -> Result<Arc<dyn ConstraintSource>, ApiError> {
        self.model.tokenizer.check_present(&grammar.param, "structured output")?;
        let other =
            [("allowed_token_ids", params.allowed_tokens.is_some()), ("use_beam_search", params.beam.is_some())];
        if let Some((name, _)) = other.into_iter().find(|(_, is_given)| *is_given) {
            return Err(ApiError::invalid(name, format!("{name} cannot be combined with {}", grammar.param)));
        }
        if let Some(mark) = &grammar.starts_after
            && self.model.tokenizer.ends_with(prompt, mark)
        {
            // The prompt has gone beyond it: a chat template can end with reasoning that is empty.
            grammar.starts_after = None;
        }
        let (known, grammars, grammar) = (self.grammars.clone(), self.grammars.clone(), Arc::new(grammar));
        let asked = grammar.clone();
        // Grammars that others are compiling must not hold up one that is known.
        if let Some(known) = self.workers.run(Weight::Light, move |_| Ok(known.known(&asked))).await? {
            return Ok(known);
        }
        self.workers.run(Weight::Heavy, move |budget| grammars.compile(&grammar, budget)).await
    }

    /// Fills in what the client left open, and refuses what the model or the memory can never hold.
    fn resolve(
        &self,
        params: &mut SamplingParams,
        prompt: &[TokenId],
        names: &FieldNames,
        shortens_output: bool,
        ignore_eos: bool,
        seed: Option<u64>,
    ) -> Result<(), ApiError> {
        let param = names.prompt;
        let (length, model_len) = (prompt.len(), self.model.max_model_len as usize);
        if params.pooling.is_some() {
            self.check_pooled(length, param)?;
            return Ok(());
        }
        if length >= model_len {
            let message = format!(
                "this model's maximum context length is {model_len} tokens, of which at least 1 is for the output; the prompt has {length}"
            );
            return Err(ApiError::context_length(param, message).with_context(length, model_len));
        }
        let num_beams = params.beam.as_ref().map_or(1, |beam| beam.width as usize);
        let fits = (model_len - length).min(self.limits().room(self.limits().num_device_blocks, length, num_beams));
        let memory = |what: &str, tokens: usize| {
            let message = format!(
                "{what} needs {} KV blocks of {} tokens, and this server has {}: it could never run",
                self.limits().blocks(length, tokens, num_beams),
                self.limits().block_size,
                self.limits().num_device_blocks
            );
            Err(ApiError::context_length(param, message))
        };
        if fits == 0 {
            return memory(&format!("the prompt of {length} tokens"), length);
        }
        let wanted = params.max_tokens as usize;
        if wanted == 0 || (shortens_output && wanted > fits) {
            params.max_tokens = fits as u32;
        } else if length + wanted > model_len {
            let message = format!(
                "this model's maximum context length is {model_len} tokens; {} were asked for ({length} in the prompt, {wanted} for the output)",
                length + wanted
            );
            return Err(ApiError::context_length(names.max_tokens, message).with_context(length, model_len));
        } else if wanted > fits {
            let what = format!("the request ({length} tokens in the prompt, {wanted} for the output)");
            return memory(&what, length + wanted - 1);
        }
        if params.min_tokens > params.max_tokens {
            let message = format!(
                "min_tokens must be at most {} ({}), got {}",
                names.max_tokens, params.max_tokens, params.min_tokens
            );
            return Err(ApiError::invalid("min_tokens", message));
        }
        if !ignore_eos {
            params.eos_token_ids = self.model.eos_token_ids.clone();
        }
        if params.beam.is_some() {
            self.resolve_beams(params, num_beams)?;
        }
        params.seed = match seed.or(self.model.server.get().default_seed) {
            Some(seed) => seed,
            None => getrandom::u64().map_err(|error| ApiError::engine(format!("no random numbers: {error}")))?,
        };
        Ok(())
    }

    /// Sees to it that a request which may not be preempted fits into what such requests may hold.
    fn fit_non_preemptible(&self, params: &mut SamplingParams, length: usize, n: u32) -> Result<(), ApiError> {
        let model_len = self.model.max_model_len as usize;
        if length >= model_len && params.pooling.is_none() {
            return Ok(()); // `resolve` refuses it in any case
        }
        let num_seqs = params.beam.as_ref().map_or(n, |beam| beam.width) as usize;
        let room = self.limits().non_preemptible_room(length, params.max_tokens as usize, num_seqs)?;
        if params.max_tokens == 0 {
            params.max_tokens = room.min(model_len - length) as u32;
        }
        Ok(())
    }

    /// An embedding needs room for its prompt alone.
    fn check_pooled(&self, length: usize, param: &str) -> Result<(), ApiError> {
        let most = self.most_pooled();
        if length > most {
            let message = format!(
                "the input is too large: this server has room for inputs of up to {most} tokens, got {length}. Please \
                 reduce the length of the input prompt."
            );
            return Err(ApiError::context_length(param, message).with_context(length, most));
        }
        Ok(())
    }

    /// Tokens of which an embedding can be made.
    fn most_pooled(&self) -> usize {
        let slots = self.limits().num_device_blocks * self.limits().block_size;
        slots.min(self.model.max_model_len as usize)
    }

    /// What the search needs to know of each step.
    fn resolve_beams(&self, params: &mut SamplingParams, num_beams: usize) -> Result<(), ApiError> {
        let most = self.limits().max_num_seqs;
        if num_beams > most {
            let message = format!("this server has room for {most} beams (scheduler.max_num_seqs), got {num_beams}");
            return Err(ApiError::invalid("best_of", message));
        }
        let needed = beam::num_candidates(params);
        if needed > self.model.vocab_size {
            let message = format!(
                "{num_beams} beams with {} end and stop tokens need {needed} candidates, and this model has only {} tokens",
                params.end_tokens().count(),
                self.model.vocab_size
            );
            return Err(ApiError::invalid("best_of", message));
        }
        params.logprobs = Some(needed);
        Ok(())
    }
}
