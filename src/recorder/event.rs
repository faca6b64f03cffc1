//! The events of a recording: the scheduler's inputs in order, each with a summary of what was decided.

use super::deliveries::DeliverySummary;
use super::labels::{decisive_params, label};
use pagetide_base::ids::{RequestId, SeqId, TokenId};
use pagetide_base::sampling::params::{
    BeamParams, EarlyStopping, FinishReason, Pooling, PositionLogprobs, Sampled, SamplingParams,
};
use pagetide_engine::bill::{Tenant, Terms};
use pagetide_engine::plan::{CopyReport, SeqOutput, StepOutput, StepTiming};
use pagetide_engine::prefix_cache::BlockHash;
use pagetide_engine::scheduler::summary::PlanSummary;
use pagetide_engine::scheduler::{EngineRequest, RecordedResults, SearchStep, Tuning};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// An event with its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// The time since the event before, in µs.
    pub after_us: u64,
    pub event: RecordedEvent,
}

/// A call of the scheduler, with the decision if it made one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RecordedEvent {
    Arrive(Box<Arrived>),
    Cancel(RequestId),
    StopSample(RequestId, u32),
    /// A demand was asked for at `now`, in the scheduler's time. `plan` is `None` if the scheduler needed results
    /// first.
    Plan {
        now: f64,
        plan: Option<Box<PlanSummary>>,
    },
    Commit(Box<Committed>),
    Copied(CopyReport),
    /// The executor failed, and with it these requests.
    Failed(Vec<RequestId>),
    Tune(Tuning),
    /// Both pools dropped what they had cached.
    DropCached,
    /// A part of a prefix came from a file into the device pool's cache.
    PutBack(Vec<BlockHash>),
    /// Both pools forgot what they had of a prefix and no table held.
    Erased(Vec<BlockHash>),
}

/// A prompt, or only its length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RecordedPrompt {
    Tokens(Vec<TokenId>),
    Length(usize),
}

/// A request, as far as decisions depend on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arrived {
    pub id: RequestId,
    pub prompt: RecordedPrompt,
    /// The hashes of the prompt's full blocks. Empty until the recording is written.
    pub names: Vec<BlockHash>,
    /// The salt of the block hashes. It is only in the process's memory and never in a file.
    pub salt: Option<String>,
    pub max_tokens: u32,
    pub min_tokens: u32,
    /// Tokens that end an output: the model's, and the client's.
    pub ends: [Vec<TokenId>; 2],
    pub pooling: Option<Pooling>,
    pub beam_width: Option<u32>,
    pub has_prompt_logprobs: bool,
    pub n: u32,
    pub priority: i32,
    pub terms: Terms,
    pub tenant: Tenant,
    /// Whether the next step always depends on its draws: its output follows rules, or the host draws its tokens.
    pub has_rules: bool,
}

impl Arrived {
    pub fn new(arrival: &EngineRequest) -> Self {
        let params = &arrival.params;
        Self {
            id: arrival.id,
            prompt: RecordedPrompt::Tokens(arrival.prompt.to_vec()),
            names: Vec::new(),
            salt: arrival.cache_salt.clone(),
            max_tokens: params.max_tokens,
            min_tokens: params.min_tokens,
            ends: [params.eos_token_ids.clone(), params.stop_token_ids.clone()],
            pooling: params.pooling,
            beam_width: params.beam.as_ref().map(|beam| beam.width),
            has_prompt_logprobs: params.prompt_logprobs.is_some(),
            n: arrival.n,
            priority: arrival.priority,
            terms: arrival.terms,
            tenant: arrival.tenant,
            has_rules: arrival.constraint.is_some() || !params.bad_words.is_empty() || params.draws_on_host(),
        }
    }

    pub fn num_prompt_tokens(&self) -> usize {
        match &self.prompt {
            RecordedPrompt::Tokens(tokens) => tokens.len(),
            RecordedPrompt::Length(len) => *len,
        }
    }

    pub fn params(&self) -> SamplingParams {
        let [eos_token_ids, stop_token_ids] = self.ends.clone();
        let beam =
            |width| BeamParams { width, length_penalty: 1.0, early_stopping: EarlyStopping::default(), logprobs: None };
        SamplingParams {
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            eos_token_ids,
            stop_token_ids,
            pooling: self.pooling,
            beam: self.beam_width.map(beam),
            prompt_logprobs: self.has_prompt_logprobs.then_some(0),
            ..SamplingParams::default()
        }
    }

    /// Drops the tokens.
    pub fn redact(&mut self) {
        let params = decisive_params(&self.params(), false);
        self.prompt = RecordedPrompt::Length(self.num_prompt_tokens());
        self.ends = [params.eos_token_ids, params.stop_token_ids];
    }
}

/// A step's output for one sequence. Sequences are stored as the difference of their ids to the one before, which is
/// mostly 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RecordedOutput {
    Token(i64, TokenId),
    Other { after: i64, tokens: Vec<TokenId>, num_prompt_logprobs: usize, is_beam: bool },
}

/// A step's results, and what they changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Committed {
    pub timing: StepTiming,
    pub copies: CopyReport,
    pub outputs: Vec<RecordedOutput>,
    /// The results of rules: the forced tokens, or `None` if the rules failed.
    pub rules: Vec<(SeqId, Option<Vec<TokenId>>)>,
    pub searches: Vec<SearchStep>,
    /// The hashes of blocks that have become full. Empty until the recording is written.
    pub names: Vec<(SeqId, Vec<BlockHash>)>,
    pub deliveries: DeliverySummary,
}

impl Committed {
    pub fn new(output: &StepOutput, rules: Vec<(SeqId, Option<Vec<TokenId>>)>) -> Self {
        let mut last = 0;
        let of = |seq: &SeqOutput| {
            let after = seq.seq.0.wrapping_sub(std::mem::replace(&mut last, seq.seq.0)) as i64;
            match &seq.sampled[..] {
                [Sampled { token, logprobs: None, .. }] if seq.prompt_logprobs.is_empty() => {
                    RecordedOutput::Token(after, *token)
                }
                sampled => RecordedOutput::Other {
                    after,
                    tokens: sampled.iter().map(|sampled| sampled.token).collect(),
                    num_prompt_logprobs: seq.prompt_logprobs.len(),
                    is_beam: sampled.iter().any(|sampled| sampled.logprobs.is_some()),
                },
            }
        };
        Self {
            outputs: output.seqs.iter().map(of).collect(),
            timing: output.timing,
            copies: output.copies.clone(),
            rules,
            searches: Vec::new(),
            names: Vec::new(),
            deliveries: DeliverySummary::default(),
        }
    }

    /// The output for the scheduler, without log-probabilities and embeddings.
    pub fn output(&self) -> StepOutput {
        let sampled = |tokens: &[TokenId], has_logprobs: bool| {
            let logprobs = || has_logprobs.then(|| Box::new(PositionLogprobs::unknown()));
            tokens.iter().map(|token| Sampled { logprobs: logprobs(), ..Sampled::of(*token) }).collect::<SmallVec<_>>()
        };
        let seqs = self.seqs().map(|(seq, output)| match output {
            RecordedOutput::Token(_, token) => SeqOutput { sampled: sampled(&[*token], false), ..SeqOutput::of(seq) },
            RecordedOutput::Other { tokens, num_prompt_logprobs, is_beam, .. } => SeqOutput {
                sampled: sampled(tokens, *is_beam),
                prompt_logprobs: vec![PositionLogprobs::unknown(); *num_prompt_logprobs],
                ..SeqOutput::of(seq)
            },
        });
        StepOutput { seqs: seqs.collect(), timing: self.timing, copies: self.copies.clone() }
    }

    pub fn recorded_results(&self) -> RecordedResults {
        let rules = self.rules.iter().map(|(seq, forced)| {
            let forced = forced.clone().ok_or_else(|| "the rules of its output failed".to_owned());
            (*seq, forced)
        });
        RecordedResults { rules: rules.collect(), searches: self.searches.clone() }
    }

    fn seqs(&self) -> impl Iterator<Item = (SeqId, &RecordedOutput)> {
        let mut last = 0u64;
        self.outputs.iter().map(move |output| {
            let (RecordedOutput::Token(after, _) | RecordedOutput::Other { after, .. }) = output;
            last = last.wrapping_add(*after as u64);
            (SeqId(last), output)
        })
    }

    /// Replaces each token by its label under the parameters of its sequence or request.
    pub fn redact<'a>(
        &mut self,
        of_seq: impl Fn(SeqId) -> Option<&'a SamplingParams>,
        of_request: impl Fn(RequestId) -> Option<&'a SamplingParams>,
    ) {
        let label = |params: Option<&SamplingParams>, token: TokenId| params.map_or(0, |params| label(params, token));
        let seqs: Vec<SeqId> = self.seqs().map(|(seq, _)| seq).collect();
        for (seq, output) in seqs.into_iter().zip(&mut self.outputs) {
            match output {
                RecordedOutput::Token(_, token) => *token = label(of_seq(seq), *token),
                RecordedOutput::Other { tokens, .. } => {
                    tokens.iter_mut().for_each(|token| *token = label(of_seq(seq), *token));
                }
            }
        }
        for (seq, forced) in &mut self.rules {
            forced.iter_mut().flatten().for_each(|token| *token = label(of_seq(*seq), *token));
        }
        for step in &mut self.searches {
            let params = of_request(step.request);
            step.beams.iter_mut().for_each(|(_, token)| *token = label(params, *token));
            for (_, reason) in &mut step.results {
                if let FinishReason::StopToken(token) = reason {
                    *token = label(params, *token);
                }
            }
        }
    }
}
