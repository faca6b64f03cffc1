//! Sampling on the device (`kernels/sampling.cu`): requests are copied to the device, the kernels write tokens and
//! log-probabilities to pinned memory, and logits stay on the device, but for `HostDraws`.

use super::device::{
    Copy, Device, DeviceBuffer, DeviceError, DevicePtr, DeviceResult, Grid, KernelId, ModuleId, ModuleSource,
    PinnedBuffer, Stream,
};
use super::host_draws::HostDraws;
use super::transfers::TransferKernels;
use crate::{LogitsRequest, LogitsResult, LogitsWant, MAX_STEPS_IN_FLIGHT};
use bytemuck::{NoUninit, Zeroable};
use pagetide_base::sampling::params::{PositionLogprobs, Sampled, SamplingParams, TokenLogprob};
use pagetide_base::sampling::sampler::{History, inverse_temperature, top_p_share, weight_of_min_p};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// The most requests of one launch that change logits in a separate row of working memory.
const MAX_ADJUSTED: usize = 32;
/// The most requests of one launch.
const MAX_REQUESTS: usize = 512;
const NONE: u32 = u32::MAX;
/// `struct Scratch`, in shared memory.
pub const SCRATCH_BYTES: u32 = 8 * 32 + 8 + 8 * 32 + 8 * 2048 + 4 * 32 + 4 * 32 + 8;
/// The most parts that a row is split into, each with a thread block of its own.
const MAX_PARTS: usize = 32;
/// The most threads of a thread block, in the draw and elsewhere.
const DRAW_THREADS: usize = 256;
const PART_THREADS: usize = 1024;
/// Logits of a part, unless that would be more parts.
const PART_LOGITS: usize = 1 << 14;
/// `struct DrawState`
const DRAW_BYTES: usize = 8 * 2048 + (8 + 8 + 4) * MAX_PARTS + 3 * 8 + 6 * 4;
/// `struct PartLogprobs`
const PART_LOGPROBS_BYTES: usize = 8 + 4 + 4;

/// `struct Request`
#[derive(Clone, Copy, NoUninit, Zeroable)]
#[repr(C)]
struct DeviceRequest {
    seed: u64,
    min_weight: u64,
    top_p_share: u64,
    adjusted: u64,
    counts: u64,
    scale: f32,
    repetition_penalty: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    kind: u32,
    row: u32,
    place: u32,
    sample_index: u32,
    position: u32,
    top_k: u32,
    /// Words of the set of allowed tokens. If there are none, all tokens are allowed.
    allowed: List,
    banned: List,
    biases: List,
    prompt: List,
    output: List,
    pending: u32,
    target: u32,
    num_top: u32,
    top: u32,
    num_done: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit, Zeroable)]
#[repr(C)]
struct List {
    first_word: u32,
    len: u32,
}

const SAMPLE: u32 = 0;
const SAMPLE_WITH_LOGPROBS: u32 = 1;
const PROMPT_LOGPROBS: u32 = 2;
const ON_HOST: u32 = 3;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct KernelParams {
    logits: DevicePtr,
    requests: DevicePtr,
    last_sampled: DevicePtr,
    sampled: DevicePtr,
    results: DevicePtr,
    draws: DevicePtr,
    part_logprobs: DevicePtr,
    candidates: DevicePtr,
    vocab: u32,
    max_top: u32,
    pass: u32,
    padding: u32,
}

/// The kind of answer that a request of a step will get.
#[derive(Clone, Copy, Debug)]
struct Expected {
    kind: u32,
    num_top: usize,
    /// Index of a word of the results.
    top: usize,
}

/// Words of `struct Result` and of `struct TopToken`.
const RESULT_WORDS: usize = 4;
const TOP_WORDS: usize = 2;

pub struct SamplingKernels {
    device: Rc<dyn Device>,
    transfers: Rc<TransferKernels>,
    vocab: usize,
    /// The most requests of a step.
    max_places: usize,
    adjust: KernelId,
    sample: KernelId,
    logprobs: KernelId,
    requests: DeviceBuffer,
    /// Pinned memory of the step being enqueued and of the one before. `staged` bytes of it are used.
    staging: [PinnedBuffer; MAX_STEPS_IN_FLIGHT],
    staged: usize,
    /// Tokens by the request's index: of the step being enqueued, and of the one before.
    sampled: DeviceBuffer,
    last_sampled: DeviceBuffer,
    /// Requests of the last step, whose tokens are still in `sampled` alone.
    num_sampled: usize,
    /// `Result` by the request's index, then the most likely tokens: of the step being enqueued and of the one before.
    /// The kernels write to it over the bus, each number once.
    results: [PinnedBuffer; MAX_STEPS_IN_FLIGHT],
    /// `DrawState` for each request of a launch.
    draws: DeviceBuffer,
    /// `PartLogprobs` for each part of each row of a launch.
    part_logprobs: DeviceBuffer,
    /// `TopToken`: the most likely tokens of each part.
    candidates: DeviceBuffer,
    /// `[MAX_ADJUSTED, vocab]` logits, and counts.
    adjusted: DeviceBuffer,
    counts: DeviceBuffer,
    turn: usize,
    /// The answers of the step being enqueued.
    expected: Vec<Expected>,
    result_words: usize,
    ended: VecDeque<(usize, Vec<Expected>)>,
    words: Vec<u32>,
    host: HostDraws,
}

/// The number of parts of a row. The result of a draw does not depend on it.
fn num_parts(vocab: usize) -> usize {
    vocab.div_ceil(PART_LOGITS).clamp(1, MAX_PARTS)
}

/// How often the draw of a request reads its row (`enum Stage`): for the largest logit, and if the draw is random,
/// three times for `top_k`, once for the sum of the weights, and four times more for `top_p`.
fn num_draw_passes(request: &DeviceRequest, vocab: usize) -> u32 {
    if !matches!(request.kind, SAMPLE | SAMPLE_WITH_LOGPROBS) {
        return 0;
    }
    let is_random = u32::from(request.scale != 0.0);
    let has_top_k = u32::from(request.top_k != 0 && (request.top_k as usize) < vocab);
    let has_top_p = u32::from(request.top_p_share < 1 << 32);
    1 + is_random * (1 + 3 * has_top_k + 4 * has_top_p)
}

/// The source of [`SamplingKernels`]. It does not depend on the model.
pub fn source() -> ModuleSource {
    ModuleSource { file: "sampling.cu", defines: Vec::new() }
}

impl SamplingKernels {
    /// For steps of up to `max_places` requests.
    pub fn new(
        device: &Rc<dyn Device>,
        transfers: &Rc<TransferKernels>,
        module: ModuleId,
        vocab: usize,
        max_places: usize,
    ) -> DeviceResult<Self> {
        let kernel = |name| device.kernel(module, name, SCRATCH_BYTES);
        let on_device = |bytes| DeviceBuffer::new(device, bytes);
        let pinned = |bytes| Ok([PinnedBuffer::new(device, bytes)?, PinnedBuffer::new(device, bytes)?]);
        let row_bytes = 4 * vocab * MAX_ADJUSTED;
        let sampled = on_device(4 * max_places)?;
        // Not every request samples a token, and all places are copied.
        // SAFETY: the memory is ours, and freeing it waits for the device.
        unsafe { device.fill(Stream::Compute, sampled.ptr(), 0, sampled.bytes())? };
        Ok(Self {
            device: device.clone(),
            transfers: transfers.clone(),
            vocab,
            max_places,
            adjust: kernel("adjust_logits")?,
            sample: kernel("sample_tokens")?,
            logprobs: kernel("find_logprobs")?,
            requests: on_device(size_of::<DeviceRequest>() * MAX_REQUESTS)?,
            staging: pinned(size_of::<DeviceRequest>() * MAX_REQUESTS)?,
            staged: 0,
            sampled,
            last_sampled: on_device(4 * max_places)?,
            num_sampled: 0,
            results: pinned(4 * RESULT_WORDS * max_places)?,
            draws: on_device(DRAW_BYTES * MAX_REQUESTS.min(max_places))?,
            part_logprobs: on_device(PART_LOGPROBS_BYTES * num_parts(vocab) * MAX_REQUESTS.min(max_places))?,
            candidates: on_device(4 * TOP_WORDS * MAX_REQUESTS)?,
            adjusted: on_device(row_bytes)?,
            counts: on_device(row_bytes)?,
            turn: 0,
            expected: Vec::new(),
            result_words: RESULT_WORDS * max_places,
            ended: VecDeque::new(),
            words: Vec::new(),
            host: HostDraws::new(device, transfers, vocab),
        })
    }

    /// `[max_places]`: the tokens that the requests of the previous step sampled.
    pub fn last_sampled(&self) -> DevicePtr {
        self.last_sampled.ptr()
    }

    /// Forgets the steps in flight.
    pub fn clear(&mut self) {
        self.ended.clear();
        self.host.clear();
        self.num_sampled = 0;
        self.take_turn();
    }

    /// The copy that makes the last step's tokens those of the previous step. It is to be enqueued before the step
    /// being enqueued reads [`SamplingKernels::last_sampled`].
    pub fn begin_step(&mut self) -> Copy {
        let bytes = 4 * std::mem::take(&mut self.num_sampled);
        Copy { to: self.last_sampled.ptr(), from: self.sampled.ptr(), bytes }
    }

    fn take_turn(&mut self) {
        self.turn = (self.turn + 1) % MAX_STEPS_IN_FLIGHT;
        self.staged = 0;
        self.expected.clear();
        self.result_words = RESULT_WORDS * self.max_places;
    }

    /// Enqueues the answers to requests about `logits: [_, vocab]`.
    pub fn sample(&mut self, logits: DevicePtr, requests: &[LogitsRequest<'_>]) -> DeviceResult<()> {
        assert!(self.expected.len() + requests.len() <= self.max_places, "more requests than a step may have");
        let mut uses = HashMap::new();
        for request in requests {
            *uses.entry(request.row).or_insert(0) += 1;
        }
        let mut rest = requests;
        while !rest.is_empty() {
            // As many requests as have working memory.
            let needs_row = |request: &&LogitsRequest<'_>| adjusts(&request.want);
            let fits = |n: &usize| rest[..*n].iter().filter(needs_row).count() <= MAX_ADJUSTED;
            let most = rest.len().min(MAX_REQUESTS);
            let num = if fits(&most) { most } else { (1..most).take_while(fits).last().unwrap_or(1) };
            let (now, later) = rest.split_at(num);
            self.sample_some(logits, now, &uses)?;
            rest = later;
        }
        Ok(())
    }

    fn sample_some(
        &mut self,
        logits: DevicePtr,
        requests: &[LogitsRequest<'_>],
        uses: &HashMap<usize, usize>,
    ) -> DeviceResult<()> {
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        words.resize(requests.len() * size_of::<DeviceRequest>() / 4, 0);
        let (mut adjusts_any, mut logprobs_any, mut max_top, mut num_adjusted) = (false, false, 0, 0);
        let mut num_passes = 0;
        for (i, request) in requests.iter().enumerate() {
            let row_bytes = 4 * self.vocab;
            let mut entry = self.entry(request, &mut words)?;
            if adjusts(&request.want) {
                adjusts_any = true;
                // In place, if no other request wants the row.
                let in_place = uses[&request.row] == 1 && entry.kind == SAMPLE;
                let at = match in_place {
                    true => logits + request.row * row_bytes,
                    false => self.adjusted.ptr() + num_adjusted * row_bytes,
                };
                entry.adjusted = at.0;
                if entry.counts != 0 {
                    entry.counts = (self.counts.ptr() + num_adjusted * row_bytes).0;
                }
                num_adjusted += 1;
            }
            if entry.kind == ON_HOST {
                self.host.ask(logits + request.row * row_bytes, &request.want)?;
            }
            logprobs_any |= matches!(entry.kind, SAMPLE_WITH_LOGPROBS | PROMPT_LOGPROBS);
            max_top = max_top.max(entry.num_top);
            num_passes = num_passes.max(num_draw_passes(&entry, self.vocab));
            let bytes = bytemuck::bytes_of(&entry);
            let at = &mut words[i * size_of::<DeviceRequest>() / 4..][..size_of::<DeviceRequest>() / 4];
            bytemuck::cast_slice_mut(at).copy_from_slice(bytes);
        }
        // Then no list was beyond it.
        offset_of(words.len())?;
        self.upload(&words)?;
        self.words = words;
        let num_requests = requests.len();
        let parts = num_parts(self.vocab);
        let part_len = self.vocab.div_ceil(parts);
        let max_top = part_len.min(max_top as usize);
        self.make_room(max_top * parts, num_requests)?;

        let params = KernelParams {
            logits,
            requests: self.requests.ptr(),
            last_sampled: self.last_sampled.ptr(),
            sampled: self.sampled.ptr(),
            results: self.results[self.turn].ptr(),
            draws: self.draws.ptr(),
            part_logprobs: self.part_logprobs.ptr(),
            candidates: self.candidates.ptr(),
            vocab: self.vocab as u32,
            max_top: max_top as u32,
            pass: 0,
            padding: 0,
        };
        let launch = |kernel, max_threads: usize, params: KernelParams| {
            let threads = (part_len / 4).next_power_of_two().clamp(64, max_threads);
            let blocks = [parts as u32, num_requests as u32, 1];
            let grid = Grid { blocks, threads: threads as u32, shared_bytes: SCRATCH_BYTES };
            // SAFETY: the struct is the one that the kernels expect. The buffers live as long as `self`, and the logits
            // as long as the backend.
            unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(&params)) }
        };
        if adjusts_any {
            launch(self.adjust, PART_THREADS, params)?;
        }
        // A thread block that has a row of its own does all passes in one launch.
        let num_launches = if parts == 1 { num_passes.min(1) } else { num_passes };
        for pass in 0..num_launches {
            launch(self.sample, DRAW_THREADS, KernelParams { pass, ..params })?;
        }
        if logprobs_any {
            launch(self.logprobs, PART_THREADS, params)?;
        }
        Ok(())
    }

    /// A request in the kernels' format. Its lists are appended to `words`. `counts` is 1 if it needs counts.
    fn entry(&mut self, request: &LogitsRequest<'_>, words: &mut Vec<u32>) -> DeviceResult<DeviceRequest> {
        let mut entry = DeviceRequest {
            row: request.row as u32,
            place: self.expected.len() as u32,
            pending: NONE,
            ..DeviceRequest::zeroed()
        };
        match request.want {
            LogitsWant::PromptLogprobs { target, num_top } => {
                entry.kind = PROMPT_LOGPROBS;
                entry.target = target;
                entry.num_top = num_top.min(self.vocab as u32);
            }
            LogitsWant::Sample { params, .. } if params.draws_on_host() => entry.kind = ON_HOST,
            LogitsWant::Sample { params, limits, prompt, output, mu: _, pending, draw } => {
                let own_limits = params.limits(draw.position as usize);
                let limits = limits.unwrap_or(&own_limits);
                entry.kind = if params.logprobs.is_some() { SAMPLE_WITH_LOGPROBS } else { SAMPLE };
                entry.num_top = params.logprobs.unwrap_or(0).min(self.vocab as u32);
                entry.seed = draw.seed;
                entry.sample_index = draw.sample_index;
                entry.position = draw.position;
                set_filters(&mut entry, params);
                let mut append = |tokens: &mut dyn Iterator<Item = u32>| {
                    let first = words.len();
                    words.extend(tokens);
                    List { first_word: first as u32, len: (words.len() - first) as u32 }
                };
                if let Some(allowed) = &limits.allowed {
                    entry.allowed = append(&mut allowed.words().iter().copied());
                }
                entry.banned = append(&mut limits.banned.iter().copied());
                let pairs = params.logit_bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]);
                entry.biases = append(&mut pairs.into_iter());
                entry.biases.len /= 2;
                if params.has_penalties() {
                    entry.counts = 1;
                    entry.repetition_penalty = params.repetition_penalty;
                    entry.frequency_penalty = params.frequency_penalty;
                    entry.presence_penalty = params.presence_penalty;
                    entry.pending = pending.unwrap_or(NONE);
                    // The pending token is one of the last ones.
                    let last_n = params.repeat_last_n.map(|n| n.saturating_sub(u32::from(pending.is_some())));
                    let history = History { prompt, output, ..History::default() }.last(last_n);
                    entry.output = append(&mut history.output.iter().copied());
                    if params.repetition_penalty != 1.0 {
                        entry.prompt = append(&mut history.prompt.iter().copied());
                    }
                }
            }
        }
        entry.top = offset_of(self.result_words)?;
        self.result_words += TOP_WORDS * entry.num_top as usize;
        let (kind, num_top, top) = (entry.kind, entry.num_top as usize, entry.top as usize);
        self.expected.push(Expected { kind, num_top, top });
        Ok(entry)
    }

    fn upload(&mut self, words: &[u32]) -> DeviceResult<()> {
        let bytes: &[u8] = bytemuck::cast_slice(words);
        if bytes.len() > self.requests.bytes() {
            self.requests = DeviceBuffer::new(&self.device, 2 * bytes.len())?;
        }
        if self.staged + bytes.len() > self.staging[self.turn].bytes() {
            // Dropping the old memory waits for its copies.
            self.staging[self.turn] = PinnedBuffer::new(&self.device, 2 * (self.staged + bytes.len()))?;
            self.staged = 0;
        }
        let staging = &mut self.staging[self.turn];
        let start = self.staged;
        // SAFETY: this step copies only from the memory before `start`, and the copies of the step that last used this
        // memory are done.
        unsafe { &mut staging.as_mut_slice()[start..start + bytes.len()] }.copy_from_slice(bytes);
        let copy = Copy { to: self.requests.ptr(), from: staging.ptr() + start, bytes: bytes.len() };
        self.staged += bytes.len();
        // SAFETY: both live as long as `self`, and freeing them waits for the device.
        unsafe { self.transfers.copy(copy) }
    }

    /// Makes room for the most likely tokens: `num_candidates` of each request, and those of the results.
    fn make_room(&mut self, num_candidates: usize, num_requests: usize) -> DeviceResult<()> {
        let bytes = 4 * TOP_WORDS * num_candidates * num_requests;
        if bytes > self.candidates.bytes() {
            self.candidates = DeviceBuffer::new(&self.device, bytes)?;
        }
        let results = &mut self.results[self.turn];
        if 4 * self.result_words > results.bytes() {
            let mut larger = PinnedBuffer::new(&self.device, 8 * self.result_words)?;
            // The old memory may hold results of earlier requests of this step.
            self.device.synchronize()?;
            // SAFETY: everything enqueued is done. Nobody has written all of the old memory, but it is the host's.
            let (old, new) = unsafe { (results.as_slice(), larger.as_mut_slice()) };
            new[..old.len()].copy_from_slice(old);
            *results = larger;
        }
        Ok(())
    }

    /// All requests of the step are enqueued.
    pub fn end_step(&mut self) {
        self.num_sampled = self.expected.len();
        self.ended.push_back((self.turn, std::mem::take(&mut self.expected)));
        self.take_turn();
    }

    /// The results of the oldest step that was ended. The step must be done.
    pub fn finish_step(&mut self) -> Vec<LogitsResult> {
        let (turn, expected) = self.ended.pop_front().expect("a step was ended that is not finished");
        if expected.is_empty() {
            return Vec::new();
        }
        // SAFETY: the step is done, so its kernels have written all that is read here, and the next step that writes
        // this memory has not begun.
        let words: &[u32] = bytemuck::cast_slice(unsafe { self.results[turn].as_slice() });
        let answer = |(place, expected): (usize, &Expected)| match expected.kind {
            ON_HOST => LogitsResult::Sampled(self.host.draw()),
            _ => result_of(words, place, expected),
        };
        expected.iter().enumerate().map(answer).collect()
    }
}

fn result_of(words: &[u32], place: usize, expected: &Expected) -> LogitsResult {
    let [token, logprob, rank, _] = words.as_chunks::<RESULT_WORDS>().0[place];
    let tops = words[expected.top..][..TOP_WORDS * expected.num_top].as_chunks::<TOP_WORDS>().0;
    let top = |(i, [token, logprob]): (usize, &[u32; 2])| TokenLogprob {
        token: *token,
        logprob: f32::from_bits(*logprob),
        rank: i as u32 + 1,
    };
    let logprobs = || PositionLogprobs {
        chosen: TokenLogprob { token, logprob: f32::from_bits(logprob), rank },
        top: tops.iter().enumerate().map(top).collect(),
    };
    match expected.kind {
        SAMPLE => LogitsResult::Sampled(Sampled::of(token)),
        SAMPLE_WITH_LOGPROBS => {
            LogitsResult::Sampled(Sampled { logprobs: Some(Box::new(logprobs())), ..Sampled::of(token) })
        }
        _ => LogitsResult::PromptLogprobs(logprobs()),
    }
}

/// The offset of a request's list or results as the kernels have it.
fn offset_of(words: usize) -> DeviceResult<u32> {
    u32::try_from(words).map_err(|_| {
        DeviceError::Other(format!(
            "the sampling requests of a step and their log-probabilities may have up to {} words, and not {words}: \
             lower scheduler.max_num_batched_tokens, scheduler.max_num_seqs or server.max_logprobs",
            u32::MAX
        ))
    })
}

/// Whether the request changes logits before the draw.
fn adjusts(want: &LogitsWant<'_>) -> bool {
    match want {
        LogitsWant::PromptLogprobs { .. } => false,
        LogitsWant::Sample { params, .. } if params.draws_on_host() => false,
        LogitsWant::Sample { params, limits, draw, .. } => match limits {
            Some(limits) => params.changes_logits(limits),
            None => params.changes_logits(&params.limits(draw.position as usize)),
        },
    }
}

/// Sets temperature and filters in the form that the draw's integer arithmetic needs.
fn set_filters(entry: &mut DeviceRequest, params: &SamplingParams) {
    entry.scale = if params.is_greedy() { 0.0 } else { inverse_temperature(params.temperature) };
    entry.top_k = params.top_k;
    entry.min_weight = weight_of_min_p(params.min_p);
    entry.top_p_share = top_p_share(params.top_p);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_beyond_32_bits_are_refused() {
        assert_eq!(offset_of(u32::MAX as usize), Ok(u32::MAX));
        let error = offset_of(1 << 32).unwrap_err().to_string();
        assert!(error.contains("server.max_logprobs") && error.contains("up to 4294967295 words"), "{error}");
    }
}
