//! An engine without a model: the actor that answers [`Submit`] hands out events that the test has written, so that
//! every sequence of tokens, cuts of characters and failures can be had, the same every time.

use actix::{Actor, Context, Handler, MessageResult};
use pagetide::actors::engine_config::configured_scheduler;
use pagetide::actors::live_settings::{LiveSettings, SettingsUsers};
use pagetide::actors::messages::{
    Accepted, AskSwapPool, Cancel, EventStream, FailNextStep, FlushCaches, Look, SetPaused, StopSample, Submit,
    TakeRecording, Tune,
};
use pagetide::actors::phase::{LivePhase, Phase};
use pagetide::actors::recordings::Recordings;
use pagetide::actors::runtime::{ModelInfo, RuntimeHandle};
use pagetide::actors::snapshot::{Moves, Snapshot, WatchTotals};
use pagetide::actors::workers::Workers;
use pagetide::api::event::Event;
use pagetide::api::live_server::LiveServer;
use pagetide::api::request::{FieldNames, PromptRequest};
use pagetide::backend::{DType, KvLayout};
use pagetide::budget::Budget;
use pagetide::config::{Config, ConsoleConfig, RecorderConfig, ServerConfig};
use pagetide::engine::bill::{KvBill, Tenant, Terms};
use pagetide::engine::block_pool::{BlockPool, PoolStats};
use pagetide::engine::prefix_cache::EvictionPolicy;
use pagetide::engine::scheduler::{Population, Tuning};
use pagetide::error::ApiError;
use pagetide::http::server::{listen, serve};
use pagetide::ids::{RequestId, TokenId};
use pagetide::model::loader::LoadedModel;
use pagetide::model::runner::PoolSizes;
use pagetide::model::spec::Family;
use pagetide::model::tally::WeightTally;
use pagetide::recorder::{Recorder, RecorderLimits};
use pagetide::sampling::params::{
    FinishReason, Pooling, PositionLogprobs, SamplingDefaults, SamplingParams, TokenLogprob,
};
use pagetide::telemetry::trace::Tracer;
use pagetide::text::chat_output::thinking::ThinkingLimit;
use pagetide::text::chat_output::{ChatFormat, ReasoningFormat, ToolFormat};
use pagetide::text::chat_template::ChatTemplate;
use pagetide::text::grammar::GrammarRequest;
use pagetide::text::tokenizer::Tokenizer;
use pagetide::text::truncation::Truncation;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub const MODEL: &str = "fake/model";
/// Its other name.
pub const ALIAS: &str = "other-name";
pub const BOS: TokenId = 256;
pub const EOS: TokenId = 257;
/// `a` and the first byte of `é`.
pub const A_AND_HALF: TokenId = 258;
/// The second byte of `é` and `b`.
pub const HALF_AND_B: TokenId = 259;
/// `[TOOL_CALLS]`, a special token.
pub const TOOL_CALLS: TokenId = 260;
pub const VOCAB_SIZE: u32 = 264;
pub const MAX_MODEL_LEN: u32 = 100;
pub const CACHED_TOKENS: u32 = 2;
pub const BLOCK_BYTES: usize = 1000;
/// swap.space_gib = 1, its default.
pub const NUM_SWAP_BLOCKS: usize = 1024;
/// Of a request that the fake plays by itself.
pub const BILL: KvBill = KvBill {
    cached_device_tokens: CACHED_TOKENS as usize,
    cached_swap_tokens: 0,
    preemptions: 1,
    swapped_out_blocks: 3,
    swapped_in_blocks: 2,
    recomputed_tokens: 5,
    paused: Duration::from_millis(40),
};
/// Prompts that a batch may have.
pub const MAX_REQUESTS: usize = 100;

/// What the scheduler was told.
#[derive(Debug, PartialEq)]
pub enum Notice {
    Cancelled(RequestId),
    SampleStopped(RequestId, u32),
    ToFail,
    Flushed,
    Paused(bool),
}

/// A request in the hands of the test.
pub struct Running {
    pub request: PromptRequest,
    pub id: RequestId,
    pub events: UnboundedSender<Event>,
}

impl Running {
    pub fn token(&self, index: u32, token: TokenId) {
        let params = &self.request.core.params;
        let mut logprobs = params.logprobs.map(|k| position(token, k));
        if let Some(logprobs) = logprobs.as_mut().filter(|_| !params.logprob_token_ids.is_empty()) {
            let asked = params.logprob_token_ids.iter().map(|token| position(*token, 0).chosen);
            logprobs.top = asked.map(|of| TokenLogprob { rank: 1 + u32::from(of.token != token), ..of }).collect();
        }
        self.send(Event::Token { index, token, logprobs });
    }

    pub fn text(&self, index: u32, text: &str) {
        text.bytes().for_each(|byte| self.token(index, byte.into()));
    }

    pub fn finish(&self, index: u32, reason: FinishReason) {
        self.send(Event::Finished { index, reason });
    }

    pub fn send(&self, event: Event) {
        // The client may be gone already; that is what some tests are about.
        let _ = self.events.send(event);
    }

    /// All of a request whose every sample says `reply` and then ends by itself, if nothing ends it before.
    fn play(&self, reply: &[TokenId], prompt: &[TokenId], params: &SamplingParams) {
        self.send(Event::Bill(BILL));
        if self.request.core.reports_progress {
            for computed in [CACHED_TOKENS, prompt.len() as u32] {
                self.send(Event::Prefilled { cached_tokens: CACHED_TOKENS, computed });
            }
        }
        self.send(Event::Started { cached_tokens: CACHED_TOKENS });
        if params.pooling.is_some() {
            self.send(Event::Embedding(vec![prompt.len() as f32, 0.0, 0.0]));
            return self.finish(0, FinishReason::Eos);
        }
        if let Some(k) = params.prompt_logprobs {
            self.send(Event::PromptLogprobs(prompt[1..].iter().map(|token| position(*token, k)).collect()));
        }
        for index in 0..self.request.core.n {
            let mut reason = FinishReason::Length;
            for token in reply.iter().copied().chain(std::iter::repeat(EOS)).take(params.max_tokens as usize) {
                self.token(index, token);
                if params.eos_token_ids.contains(&token) {
                    reason = FinishReason::Eos;
                    break;
                }
                if params.stop_token_ids.contains(&token) {
                    reason = FinishReason::StopToken(token);
                    break;
                }
            }
            self.finish(index, reason);
        }
    }
}

/// Log-probabilities by which a test recognises token and place: `-token / 64`, the `k` tokens after it as the best.
pub fn position(token: TokenId, k: u32) -> PositionLogprobs {
    let entry = |rank: u32| {
        let token = (token + rank - 1) % VOCAB_SIZE;
        TokenLogprob { token, logprob: -(token as f32) / 64.0, rank }
    };
    PositionLogprobs { chosen: entry(1), top: (1..=k).map(entry).collect() }
}

enum Script {
    /// Every request gets these tokens.
    Reply(Vec<TokenId>),
    /// Every request is handed to the test.
    HandOver(UnboundedSender<Running>),
    /// Every request is refused; the error names its fields.
    Refuse(Box<dyn Fn(&FieldNames) -> ApiError + Send>),
}

struct FakeIntake {
    model: Arc<ModelInfo>,
    script: Script,
    submits: Arc<Mutex<Vec<Seen>>>,
    notices: UnboundedSender<Notice>,
    next_id: u64,
    tuned: Arc<Mutex<Vec<Tuning>>>,
    looks: Arc<AtomicUsize>,
    is_flushed: bool,
}

/// What of a [`Submit`] a test asks about.
#[derive(Clone, Debug)]
pub struct Seen {
    pub prompt_tokens: Vec<TokenId>,
    pub params: SamplingParams,
    pub ignore_eos: bool,
    pub seed: Option<u64>,
    pub n: u32,
    pub priority: i32,
    pub cache_salt: Option<String>,
    pub grammar: Option<GrammarRequest>,
    pub thinking: Option<ThinkingLimit>,
    pub terms: Terms,
    pub tenant: Tenant,
}

impl Actor for FakeIntake {
    type Context = Context<Self>;
}

impl Handler<Submit> for FakeIntake {
    type Result = Result<Accepted, ApiError>;

    fn handle(&mut self, Submit { request, observer, .. }: Submit, _: &mut Self::Context) -> Self::Result {
        let (core, running_names) = (&request.core, request.names.clone());
        let prompt = match request.truncation {
            None => self.model.encode(&request.prompt, &request.names, &Budget::steps(1))?,
            Some(Truncation { keep, side }) => {
                let keep = keep.unwrap_or(MAX_MODEL_LEN - core.params.max_tokens.max(1)) as usize;
                self.model.encode_truncated(&request.prompt, keep, side, &request.names, &Budget::steps(1))?
            }
        };
        self.submits.lock().unwrap().push(Seen {
            prompt_tokens: prompt.clone(),
            params: SamplingParams::clone(&core.params),
            ignore_eos: request.ignore_eos,
            seed: request.seed,
            n: core.n,
            priority: core.priority,
            cache_salt: core.cache_salt.clone(),
            grammar: request.grammar.clone(),
            thinking: request.thinking.clone(),
            terms: core.terms,
            tenant: core.tenant,
        });
        let mut params = SamplingParams::clone(&core.params);
        if params.max_tokens == 0 {
            params.max_tokens = MAX_MODEL_LEN - prompt.len() as u32;
        }
        if !request.ignore_eos {
            params.eos_token_ids = vec![EOS];
        }
        self.next_id += 1;
        let id = RequestId(self.next_id);
        let scheduler = FakeScheduler(self.notices.clone()).start();
        let (events, stream) = EventStream::channel(id, scheduler.clone().recipient(), scheduler.recipient());
        let stream = stream.observed_by(observer.clone());
        if let Some(observer) = &observer {
            let wanted = core.params.max_tokens as usize;
            let num_outputs = if core.params.pooling.is_some() { 0 } else { core.n as usize };
            observer.admit(prompt.len(), num_outputs, (wanted > 0).then_some(wanted))?;
            observer.accepted(id, prompt.len());
            observer.started(id);
        }
        let running = Running { request, id, events };
        match &self.script {
            Script::Reply(reply) => running.play(reply, &prompt, &params),
            Script::HandOver(to) => to.send(running).map_err(|_| ApiError::draining())?,
            Script::Refuse(error) => return Err(error(&running_names)),
        }
        Ok(Accepted { id, prompt_tokens: Arc::new(prompt), params: Arc::new(params), events: stream })
    }
}

/// Its swap pool is half full, whatever its size.
impl Handler<Tune> for FakeIntake {
    type Result = Result<PoolStats, ApiError>;

    fn handle(&mut self, Tune(tuning): Tune, _: &mut Self::Context) -> Self::Result {
        self.tuned.lock().unwrap().push(tuning);
        Ok(self.swap_pool())
    }
}

/// A recorder that has heard of one thing, where it records.
impl Handler<TakeRecording> for FakeIntake {
    type Result = MessageResult<TakeRecording>;

    fn handle(&mut self, _: TakeRecording, _: &mut Self::Context) -> Self::Result {
        let scheduler = configured_scheduler(&Config::default(), 100, 0, false);
        let limits = RecorderLimits { length: Duration::from_secs(60), max_bytes: 1 << 20 };
        let mut recorder = Recorder::new(limits, &scheduler, EvictionPolicy::default());
        recorder.cancel(RequestId(1));
        MessageResult(recorder.take().filter(|_| self.model.served_name == MODEL))
    }
}

impl Handler<FailNextStep> for FakeIntake {
    type Result = ();

    fn handle(&mut self, _: FailNextStep, _: &mut Self::Context) {
        let _ = self.notices.send(Notice::ToFail);
    }
}

/// The first flush finds requests, and those after it none.
impl Handler<FlushCaches> for FakeIntake {
    type Result = Result<bool, ApiError>;

    fn handle(&mut self, _: FlushCaches, _: &mut Self::Context) -> Self::Result {
        let _ = self.notices.send(Notice::Flushed);
        Ok(std::mem::replace(&mut self.is_flushed, true))
    }
}

impl Handler<SetPaused> for FakeIntake {
    type Result = ();

    fn handle(&mut self, SetPaused(is_paused): SetPaused, _: &mut Self::Context) {
        let _ = self.notices.send(Notice::Paused(is_paused));
    }
}

impl Handler<AskSwapPool> for FakeIntake {
    type Result = MessageResult<AskSwapPool>;

    fn handle(&mut self, _: AskSwapPool, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.swap_pool())
    }
}

/// Four blocks on the device, of which the first look finds one used, the second two, and so on; and two beside them.
impl Handler<Look> for FakeIntake {
    type Result = Result<Snapshot, ApiError>;

    fn handle(&mut self, _: Look, _: &mut Self::Context) -> Self::Result {
        let looks = 1 + self.looks.fetch_add(1, Ordering::SeqCst);
        let mut device = BlockPool::new(4, true);
        for _ in 0..looks.min(4) {
            device.allocate().expect("a block is free");
        }
        Ok(Snapshot {
            seqs: Vec::new(),
            population: Population::default(),
            block_size: 16,
            block_bytes: BLOCK_BYTES,
            device: device.view(),
            swap: BlockPool::new(2, true).view(),
            totals: WatchTotals::default(),
            moves: Moves::default(),
            cost: Duration::from_micros(7),
        })
    }
}

impl FakeIntake {
    fn swap_pool(&self) -> PoolStats {
        let most = self.tuned.lock().unwrap().last().map_or(NUM_SWAP_BLOCKS, |tuning| tuning.num_swap_blocks);
        let used = NUM_SWAP_BLOCKS / 2;
        let draining = used.saturating_sub(most);
        PoolStats { used, draining, free: most - (used - draining), ..PoolStats::default() }
    }
}

struct FakeScheduler(UnboundedSender<Notice>);

impl Actor for FakeScheduler {
    type Context = Context<Self>;
}

impl Handler<Cancel> for FakeScheduler {
    type Result = ();
    fn handle(&mut self, cancel: Cancel, _: &mut Self::Context) {
        let _ = self.0.send(Notice::Cancelled(cancel.0));
    }
}

impl Handler<StopSample> for FakeScheduler {
    type Result = ();
    fn handle(&mut self, stop: StopSample, _: &mut Self::Context) {
        let _ = self.0.send(Notice::SampleStopped(stop.0, stop.1));
    }
}

/// A listening server before a fake engine.
pub struct TestServer {
    pub url: String,
    /// Of `server.admin_listen`.
    pub admin_url: Option<String>,
    pub client: reqwest::Client,
    pub notices: UnboundedReceiver<Notice>,
    submits: Arc<Mutex<Vec<Seen>>>,
    tuned: Arc<Mutex<Vec<Tuning>>>,
    pub phase: LivePhase,
    looks: Arc<AtomicUsize>,
    pub server: actix_web::dev::ServerHandle,
    pub recordings_dir: tempfile::TempDir,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        // Sent at once; the answer is of no interest.
        drop(self.server.stop(false));
    }
}

impl TestServer {
    /// Every request is answered with `text`, one token a byte.
    pub fn saying(text: &str) -> Self {
        Self::replying(text.bytes().map(TokenId::from).collect())
    }

    pub fn replying(reply: Vec<TokenId>) -> Self {
        Self::start(Script::Reply(reply), &ServerConfig::default(), model_info())
    }

    pub fn refusing(error: ApiError) -> Self {
        Self::refusing_by_name(move |_| error.clone())
    }

    /// The error is made with the names of the request's fields, as the intake makes it.
    pub fn refusing_by_name(error: impl Fn(&FieldNames) -> ApiError + Send + 'static) -> Self {
        Self::start(Script::Refuse(Box::new(error)), &ServerConfig::default(), model_info())
    }

    pub fn configured(config: &ServerConfig) -> Self {
        Self::start(Script::Reply(vec![b'x'.into()]), config, model_info())
    }

    pub fn with_sampling_defaults(defaults: SamplingDefaults) -> Self {
        let model = ModelInfo { default_sampling: defaults, ..model_info() };
        Self::start(Script::Reply(vec![b'x'.into()]), &ServerConfig::default(), model)
    }

    /// Every request comes out of the receiver, and the test plays the engine.
    pub fn by_hand() -> (Self, UnboundedReceiver<Running>) {
        Self::by_hand_with(&ServerConfig::default())
    }

    pub fn by_hand_with(config: &ServerConfig) -> (Self, UnboundedReceiver<Running>) {
        let (to, requests) = unbounded_channel();
        (Self::start(Script::HandOver(to), config, model_info()), requests)
    }

    /// Every request is answered with `reply`, by a model whose outputs are of this format.
    pub fn chatting(reply: Vec<TokenId>, tools: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> Self {
        let model = ModelInfo { chat_format: ChatFormat { tools, reasoning }, ..model_info() };
        Self::start(Script::Reply(reply), &ServerConfig::default(), model)
    }

    /// A model that reasons says `text`.
    pub fn reasoning(text: &str, format: ReasoningFormat, config: &ServerConfig) -> Self {
        let chat_format = ChatFormat { tools: None, reasoning: Some(format) };
        let reply = text.bytes().map(TokenId::from).collect();
        Self::start(Script::Reply(reply), config, ModelInfo { chat_format, ..model_info() })
    }

    /// Its engine has no recorder.
    pub fn start_recording_nothing(config: &ServerConfig) -> Self {
        let model = ModelInfo { served_name: "not recorded".into(), ..model_info() };
        Self::start(Script::Reply(vec![EOS]), config, model)
    }

    /// Renders the chat templates of requests.
    pub fn trusting_templates() -> Self {
        Self::configured(&ServerConfig { trust_request_chat_template: true, ..ServerConfig::default() })
    }

    pub fn with_console(config: &ServerConfig, console: ConsoleConfig) -> Self {
        let all = Config { server: config.clone(), console, ..Config::default() };
        Self::start_with(Script::Reply(vec![b'x'.into()]), &all, model_info(), None)
    }

    /// As [`TestServer::by_hand`], with all of the settings, and traces.
    pub fn by_hand_with_all(config: &Config, tracer: Option<Arc<Tracer>>) -> (Self, UnboundedReceiver<Running>) {
        let (to, requests) = unbounded_channel();
        (Self::start_with(Script::HandOver(to), config, model_info(), tracer), requests)
    }

    /// As [`TestServer::saying`], with all of the settings.
    pub fn saying_with_all(text: &str, config: &Config) -> Self {
        Self::start_with(Script::Reply(text.bytes().map(TokenId::from).collect()), config, model_info(), None)
    }

    /// As [`TestServer::saying`], with a tokenizer that has marks for filling in the middle.
    pub fn filling_in(text: &str) -> Self {
        let tokenizer = Arc::new(byte_tokenizer(&["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]));
        let reply = text.bytes().map(TokenId::from).collect();
        Self::start(Script::Reply(reply), &ServerConfig::default(), ModelInfo { tokenizer, ..model_info() })
    }

    fn start(script: Script, config: &ServerConfig, model: ModelInfo) -> Self {
        Self::start_with(script, &Config { server: config.clone(), ..Config::default() }, model, None)
    }

    fn start_with(script: Script, all: &Config, model: ModelInfo, tracer: Option<Arc<Tracer>>) -> Self {
        let config = ServerConfig { port: 0, workers: 1, max_requests: MAX_REQUESTS, ..all.server.clone() };
        let all = Config { server: config.clone(), ..all.clone() };
        let server = LiveServer::new(config.clone());
        let model = Arc::new(ModelInfo { server: server.clone(), ..model });
        let (to_test, notices) = unbounded_channel();
        let (submits, tuned, looks) = (Arc::new(Mutex::new(Vec::new())), Arc::default(), Arc::default());
        let intake = FakeIntake {
            model: Arc::clone(&model),
            script,
            submits: Arc::clone(&submits),
            notices: to_test,
            next_id: 0,
            tuned: Arc::clone(&tuned),
            looks: Arc::clone(&looks),
            is_flushed: false,
        };
        let phase = LivePhase::default();
        let intake = intake.start();
        let (tune, swap_pool) = (intake.clone().recipient(), intake.clone().recipient());
        let (fail, flush) = (intake.clone().recipient(), intake.clone().recipient());
        let pause = intake.clone().recipient();
        let recordings_dir = tempfile::tempdir().unwrap();
        let dir = recordings_dir.path().join("new").to_str().unwrap().to_owned();
        let recordings = Recordings::new(intake.clone().recipient(), RecorderConfig { dir, ..Default::default() });
        let live_settings = LiveSettings::new(
            all.clone().into(),
            SettingsUsers { tune, swap_pool, fail, flush, pause, server, loaded: Arc::new(loaded()), recordings },
        );
        let text = Workers::start(2, Duration::from_secs(600)).unwrap();
        let handle = RuntimeHandle::new(intake.clone().recipient(), intake.recipient(), model, text, phase.clone());
        let listeners = listen(&all).unwrap();
        let (url, admin_url) = (listeners.url().unwrap(), listeners.admin_addr().unwrap());
        let admin_url = admin_url.map(|addr| format!("http://{addr}"));
        let server = serve(handle, live_settings, &all, listeners, tracer).unwrap();
        let server_handle = server.handle();
        actix_web::rt::spawn(server);
        let client = reqwest::Client::new();
        let server = server_handle;
        Self { url, admin_url, client, notices, submits, tuned, phase, looks, server, recordings_dir }
    }

    pub fn drain(&self) {
        self.phase.advance(Phase::Draining);
    }

    pub async fn get(&self, path: &str) -> reqwest::Response {
        self.client.get(format!("{}{path}", self.url)).send().await.unwrap()
    }

    pub async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.client.post(format!("{}{path}", self.url)).json(body).send().await.unwrap()
    }

    /// The answer to a request that must succeed.
    pub async fn ok(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).await;
        let status = response.status();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(status, 200, "{body} → {answer}");
        answer
    }

    /// Status and error object of a request that must fail.
    pub async fn refused(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.post(path, body).await;
        let status = response.status().as_u16();
        let mut answer: Value = response.json().await.unwrap();
        assert!(answer["error"]["message"].is_string(), "{body} → {answer}");
        (status, answer["error"].take())
    }

    /// The chunks of a stream; it must end with `[DONE]`.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.post(path, &body).await;
        assert_eq!(response.status(), 200, "{body}");
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        let mut events = events_of(&response.text().await.unwrap());
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{body}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// The events of a stream that has names, each with its data; the type in the data is the name.
    pub async fn named_events(&self, path: &str, body: &Value) -> Vec<(String, Value)> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.post(path, &body).await;
        assert_eq!(response.status(), 200, "{body}");
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        named_events_of(&response.text().await.unwrap())
    }

    /// What the engine was asked last.
    pub fn last_submit(&self) -> Seen {
        self.submits.lock().unwrap().last().expect("a request reached the engine").clone()
    }

    /// What the engine was told last to go by.
    pub fn last_tuning(&self) -> Option<Tuning> {
        self.tuned.lock().unwrap().last().cloned()
    }

    /// How often the console has looked at the engine.
    pub fn num_looks(&self) -> usize {
        self.looks.load(Ordering::SeqCst)
    }

    pub fn submits(&self) -> Vec<Seen> {
        self.submits.lock().unwrap().clone()
    }
}

/// The data of each event of an event stream.
pub fn events_of(text: &str) -> Vec<String> {
    let events = text.split_terminator("\n\n");
    events.map(|event| event.strip_prefix("data: ").expect("an event has one data line").to_owned()).collect()
}

/// Name and data of each event of a stream whose events have names.
pub fn named_events_of(text: &str) -> Vec<(String, Value)> {
    // The last event of some APIs has no name.
    let text = text.strip_suffix("data: [DONE]\n\n").unwrap_or(text);
    let events = text.split_terminator("\n\n").map(|event| {
        let lines = event.strip_prefix("event: ").and_then(|rest| rest.split_once("\ndata: "));
        let (name, data) = lines.expect("an event has a name and one line of data");
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    });
    events.collect()
}

fn model_info() -> ModelInfo {
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}\
                    {% if add_generation_prompt %}[assistant]{% endif %}\
                    {% if think is defined %}{{ '<think>\n' if think else '<think>\n\n</think>\n\n' }}{% endif %}";
    ModelInfo {
        served_name: MODEL.into(),
        aliases: vec![ALIAS.into()],
        created_s: 1_700_000_000,
        max_model_len: MAX_MODEL_LEN,
        vocab_size: VOCAB_SIZE,
        tokenizer: Arc::new(byte_tokenizer(&[])),
        chat_template: Some(ChatTemplate::new(template, Map::new()).unwrap()),
        chat_format: ChatFormat::default(),
        eos_token_ids: vec![EOS],
        embedding_size: 3,
        pooling: Pooling::Last,
        default_sampling: SamplingDefaults::default(),
        kv_block_bytes: BLOCK_BYTES,
        max_prompt_bytes: 1 << 20,
        server: LiveServer::default(),
    }
}

/// Blocks of 1 MiB; steps of at most 512 tokens.
fn loaded() -> LoadedModel {
    let layout = KvLayout { num_layers: 16, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype: DType::BF16.into() };
    let max_swap_blocks = 2 * NUM_SWAP_BLOCKS;
    LoadedModel {
        device: "fake".into(),
        is_gpu: false,
        arithmetic: "fake".into(),
        family: Family::Llama,
        dtype: DType::BF16,
        max_model_len: MAX_MODEL_LEN as usize,
        max_num_batched_tokens: 512,
        max_num_seqs: 512,
        num_parameters: 1,
        weights_bytes: 1,
        weights: WeightTally::default(),
        pools: PoolSizes { layout, num_device_blocks: 100, num_swap_blocks: NUM_SWAP_BLOCKS, max_swap_blocks },
    }
}

/// One token a byte, whose id is the byte; `<s>` and `</s>`; two tokens that cut a character; and special tokens from
/// 261 on.
fn byte_tokenizer(more: &[&str]) -> Tokenizer {
    // GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100.
    let mut next = 0x100;
    let mut vocab = Map::new();
    for byte in 0..=255_u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable { u32::from(byte) } else { next };
        next += u32::from(!printable);
        vocab.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    vocab.insert("<s>".into(), BOS.into());
    vocab.insert("</s>".into(), EOS.into());
    vocab.insert("[TOOL_CALLS]".into(), TOOL_CALLS.into());
    vocab.insert("aÃ".into(), A_AND_HALF.into());
    vocab.insert("©b".into(), HALF_AND_B.into());
    let special = |id: TokenId, content: &str| {
        json!({"id": id, "content": content, "special": true, "normalized": false,
               "single_word": false, "lstrip": false, "rstrip": false})
    };
    let mut added = vec![special(BOS, "<s>"), special(EOS, "</s>"), special(TOOL_CALLS, "[TOOL_CALLS]")];
    for (id, content) in (TOOL_CALLS + 1..).zip(more) {
        vocab.insert((*content).into(), id.into());
        added.push(special(id, content));
    }
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        },
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let config = json!({"bos_token": "<s>", "eos_token": "</s>"});
    Tokenizer::from_json(&tokenizer.to_string(), Some(&config.to_string())).unwrap()
}
