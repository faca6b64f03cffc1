//! The systems on the configured model, on this machine: the same engine behind each front, by the clock on the wall.

use super::systems::{Front, FrontRequest, KvMemory, System};
use crate::client::BenchTarget;
use crate::common::warm_up;
use crate::memory::lengths::{Lengths, SHAREGPT};
use crate::memory::model::ModelFacts;
use crate::workload::{RandomStream, TokenSource, WorkItem, WorkloadArgs, poisson_arrivals};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use pagetide_actors::runtime::Runtime;
use pagetide_base::error::StartError;
use pagetide_config::{AdmissionPolicy, Config};
use pagetide_terminal::progress::{self, RequestProgress};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// One system with one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredRun {
    pub system: System,
    /// Requests a second; `None`: all are there from the start.
    pub rate: Option<f64>,
    pub requests: usize,
    pub wall_s: f64,
    pub req_per_s: f64,
    /// Tokens that clients wanted, without padding.
    pub out_tok_per_s: f64,
    pub normalised_latency_s: f64,
    pub block_size: usize,
}

/// The load, and what it runs on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredSetup {
    /// Model, device and element types.
    pub subject: String,
    pub source: String,
    pub requests: usize,
    pub mean_prompt: f64,
    pub mean_output: f64,
    pub memory: KvMemory,
    /// Of the weights, and of the KV cache with this many blocks.
    pub weights_bytes: u64,
    pub kv_bytes_per_token: u64,
}

pub struct MeasuredBench<'a> {
    config: &'a Config,
    pub work: Vec<WorkItem>,
    pub memory: KvMemory,
    source: String,
    seed: u64,
    warmup: usize,
}

/// Factor on ShareGPT-like lengths, if no other load is given, and the longest sequence then.
const SCALE: f64 = 0.25;
const MAX_LEN: usize = 512;
/// Sequences of the maximum length that the memory holds: as OPT-13B has on its GPU.
const LONGEST_SEQUENCES: usize = 8;

impl<'a> MeasuredBench<'a> {
    /// `num` requests of `workload`, or else ShareGPT-like ones.
    pub fn new(
        config: &'a Config,
        workload: &WorkloadArgs,
        num: usize,
        kv_tokens: Option<usize>,
    ) -> Result<Self, StartError> {
        let facts = ModelFacts::read(config)?;
        let own_load = workload.trace.is_some() || workload.fixed.is_some();
        let (work, source) = if own_load {
            let work = workload.build(num, facts.vocab_size)?;
            let name = workload.trace.as_ref().and_then(|path| path.file_name());
            let name = name.map_or("fixed lengths".into(), |name| name.to_string_lossy().into_owned());
            (work, format!("{name} x {}", workload.scale))
        } else {
            let scale = if workload.scale == 1.0 { SCALE } else { workload.scale };
            (like_sharegpt(num, workload.seed, scale, facts.vocab_size), format!("ShareGPT-like x {scale}"))
        };
        let longest = work.iter().map(|item| item.prompt.len() + item.output_tokens as usize).max().unwrap_or(1);
        let max_model_len = longest.next_power_of_two().max(MAX_LEN).min(facts.max_model_len);
        if longest > max_model_len {
            return Err(StartError::new(format!(
                "--scale: a request has {longest} tokens, and the model takes {max_model_len}: give a smaller factor"
            )));
        }
        let block_size = config.cache.block_size as usize;
        let num_slots = kv_tokens.unwrap_or(LONGEST_SEQUENCES * max_model_len);
        if num_slots < max_model_len {
            return Err(StartError::new(format!(
                "--kv-tokens: {num_slots} is out of range: at least {max_model_len}, a sequence of the maximum length"
            )));
        }
        let memory = KvMemory { num_blocks: num_slots / block_size, block_size, max_model_len };
        Ok(Self { config, work, memory, source, seed: workload.seed, warmup: 2 })
    }

    pub fn lengths(&self) -> Vec<Lengths> {
        let lengths = |item: &WorkItem| Lengths { prompt: item.prompt.len(), output: item.output_tokens };
        self.work.iter().map(lengths).collect()
    }

    /// One engine from its start to its end: all requests at once, or `rate` of them a second.
    pub fn run(
        &self,
        system: System,
        rate: Option<f64>,
        block_size: usize,
    ) -> Result<(MeasuredRun, MeasuredSetup), StartError> {
        let num_blocks = self.memory.num_blocks * self.memory.block_size / block_size;
        let memory = KvMemory { num_blocks, block_size, ..self.memory };
        let mut config = self.config.clone();
        config.cache.block_size = block_size as u32;
        config.cache.num_device_blocks = Some(num_blocks as u32);
        config.cache.enable_prefix_caching = false;
        config.server.max_requests = config.server.max_requests.max(self.work.len());
        // As in the paper: a request starts if its prompt fits. Where memory is reserved, it always does.
        config.scheduler.admission = AdmissionPolicy::Prompt;
        if system != System::Paged {
            config.scheduler.watermark = 0.0;
        }
        let runtime = Runtime::start(&config, progress::loading())?;
        let handle = runtime.handle();
        let setup = self.setup(&runtime, handle.model().served_name.clone());
        let target = match system {
            System::Paged => BenchTarget::Untold { handle, most: memory.max_model_len },
            _ => BenchTarget::InProcess(handle),
        };
        let times = match rate {
            Some(rate) => poisson_arrivals(self.work.len(), rate, self.seed),
            None => vec![Duration::ZERO; self.work.len()],
        };
        let mut front = Front::new(system, memory);
        let (latencies, wall) = actix_web::rt::System::new().block_on(async {
            warm_up(&target, self.warmup, &self.work).await?;
            serve(&target, &self.work, &times, &mut front).await
        })?;
        drop(runtime);
        let wall_s = wall.as_secs_f64();
        let tokens: u64 = self.work.iter().map(|item| u64::from(item.output_tokens)).sum();
        let run = MeasuredRun {
            system,
            rate,
            requests: latencies.len(),
            wall_s,
            req_per_s: latencies.len() as f64 / wall_s,
            out_tok_per_s: tokens as f64 / wall_s,
            normalised_latency_s: latencies.iter().sum::<f64>() / latencies.len().max(1) as f64,
            block_size,
        };
        Ok((run, setup))
    }

    fn setup(&self, runtime: &Runtime, name: String) -> MeasuredSetup {
        let loaded = runtime.loaded();
        let num = self.work.len() as f64;
        let layout = loaded.pools.layout;
        MeasuredSetup {
            subject: crate::memory::model::subject(&name, loaded),
            source: self.source.clone(),
            requests: self.work.len(),
            mean_prompt: self.work.iter().map(|item| item.prompt.len()).sum::<usize>() as f64 / num,
            mean_output: self.work.iter().map(|item| item.output_tokens as usize).sum::<usize>() as f64 / num,
            memory: self.memory,
            weights_bytes: loaded.weights_bytes,
            kv_bytes_per_token: (layout.block_bytes() / layout.block_size) as u64,
        }
    }
}

fn like_sharegpt(num: usize, seed: u64, scale: f64, vocab_size: u32) -> Vec<WorkItem> {
    let mut random = TokenSource::new(seed, RandomStream::Prompts, vocab_size);
    let scaled = |tokens: usize| ((tokens as f64 * scale) as usize).max(1);
    let item = |lengths: Lengths| WorkItem {
        prompt: random.take(scaled(lengths.prompt)),
        output_tokens: scaled(lengths.output as usize) as u32,
        timestamp: Duration::ZERO,
    };
    SHAREGPT.sample(num, seed, (MAX_LEN as f64 / scale) as usize).into_iter().map(item).collect()
}

/// Sends each request when its time has come and the front lets it enter. Returns the normalised latency of each, in
/// seconds, and the time until the last answer.
async fn serve(
    target: &BenchTarget,
    work: &[WorkItem],
    times: &[Duration],
    front: &mut Front,
) -> Result<(Vec<f64>, Duration), StartError> {
    let started = Instant::now();
    let mut running = FuturesUnordered::new();
    let mut latencies = Vec::with_capacity(work.len());
    let mut num_arrived = 0;
    let mut progress = RequestProgress::new(work.len() as u64);
    while latencies.len() < work.len() {
        while times.get(num_arrived).is_some_and(|at| *at <= started.elapsed()) {
            let item = &work[num_arrived];
            let lengths = Lengths { prompt: item.prompt.len(), output: item.output_tokens };
            front.arrive(FrontRequest { id: num_arrived, lengths, width: 1 });
            num_arrived += 1;
        }
        for entered in front.enter(num_arrived == work.len()) {
            let item = padded(&work[entered.id], entered.lengths);
            running.push(async move { (entered.id, target.request(&item).await) });
        }
        let next = times.get(num_arrived).map(|at| tokio::time::Instant::from_std(started + *at));
        let ended = match next {
            Some(next) if running.is_empty() => {
                tokio::time::sleep_until(next).await;
                None
            }
            Some(next) => tokio::time::timeout_at(next, running.next()).await.ok().flatten(),
            None => running.next().await,
        };
        let Some((id, outcome)) = ended else { continue };
        if let Some(error) = outcome.error {
            return Err(StartError::new(format!("a request failed: {error}")));
        }
        for done in front.computed(id) {
            let latency = (started.elapsed() - times[done]).as_secs_f64();
            latencies.push(latency / f64::from(work[done].output_tokens));
            progress.request_done(u64::from(work[done].output_tokens));
        }
    }
    Ok((latencies, started.elapsed()))
}

/// As long as the front says. Padding repeats the prompt's tokens: what they are changes nothing.
fn padded(item: &WorkItem, lengths: Lengths) -> WorkItem {
    let prompt = item.prompt.iter().copied().cycle().take(lengths.prompt).collect();
    WorkItem { prompt, output_tokens: lengths.output, ..item.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_system_serves_the_same_requests_on_the_demo_model() {
        let config = Config::default();
        let workload = WorkloadArgs {
            trace: None,
            fixed: Some((12, 6)),
            num: None,
            skip: 0,
            scale: 1.0,
            shared_prefix: 0,
            seed: 1,
        };
        let bench = MeasuredBench::new(&config, &workload, 6, Some(1_024)).unwrap();
        for system in System::ALL {
            let (run, setup) = bench.run(system, None, 16).unwrap();
            assert_eq!((run.requests, setup.requests), (6, 6), "{system:?}");
            assert!(run.out_tok_per_s > 0.0 && run.normalised_latency_s > 0.0, "{run:?}");
            assert_eq!(setup.memory, KvMemory { num_blocks: 64, block_size: 16, max_model_len: 512 });
        }
    }
}
