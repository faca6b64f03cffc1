//! From the engine's events to an answer: text, chat pieces, finish reasons, log-probabilities and counts.
//!
//! A client's request has `prompts × n` choices. Each prompt is one request of the engine and has a [`PromptFold`];
//! [`AnswerFold`] holds those of all prompts. Where no text is wanted (embeddings, the benchmark), [`PromptFacts`] is
//! enough.

mod echo;
mod sample;

use crate::delta::{Delta, Finish, PauseNotice, Position, ProgressNotice};
use crate::event::Event;
use crate::request::AnswerOptions;
use crate::timings::{PromptProgress, Timings};
use crate::usage::{KvUsage, Usage};
pub use echo::echoed_text;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{FinishReason, PositionLogprobs, SamplingParams, TokenLogprob};
use pagetide_engine::bill::KvBill;
use pagetide_text::tokenizer::Tokenizer;
use sample::SampleFold;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the engine has said about a prompt itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptFacts {
    /// Prompt tokens that the prefix cache held.
    pub cached_tokens: u32,
    /// What memory pressure has cost so far.
    pub bill: KvBill,
    /// From the second token on; `None` until they are known, and where they were not asked for.
    pub logprobs: Option<Vec<PositionLogprobs>>,
    /// As the model gives it, of any length.
    pub embedding: Option<Vec<f32>>,
}

/// What the engine has said about one sample.
#[derive(Clone, Debug, PartialEq)]
pub enum SampleEvent {
    Token {
        index: u32,
        token: TokenId,
        logprobs: Option<PositionLogprobs>,
    },
    Finished {
        index: u32,
        reason: FinishReason,
    },
    Paused {
        index: u32,
    },
    Resumed {
        index: u32,
        after: Duration,
    },
    /// Of the prompt of all samples: so many tokens are there.
    Prefilled {
        computed: usize,
    },
}

impl PromptFacts {
    /// Keeps what `event` says about the prompt. Gives back what it says about a sample.
    ///
    /// # Errors
    /// The request failed; nothing follows.
    pub fn take(&mut self, event: Event) -> Result<Option<SampleEvent>, ApiError> {
        match event {
            Event::Token { index, token, logprobs } => return Ok(Some(SampleEvent::Token { index, token, logprobs })),
            Event::Finished { index, reason } => return Ok(Some(SampleEvent::Finished { index, reason })),
            Event::Paused { index } => return Ok(Some(SampleEvent::Paused { index })),
            Event::Resumed { index, after } => return Ok(Some(SampleEvent::Resumed { index, after })),
            Event::Started { cached_tokens } => self.cached_tokens = cached_tokens,
            Event::Prefilled { cached_tokens, computed } => {
                self.cached_tokens = cached_tokens;
                return Ok(Some(SampleEvent::Prefilled { computed: computed as usize }));
            }
            Event::Bill(bill) => self.bill = bill,
            Event::PromptLogprobs(logprobs) => self.logprobs = Some(logprobs),
            Event::Embedding(values) => self.embedding = Some(values),
            Event::Failed(error) => return Err(error),
        }
        Ok(None)
    }
}

/// The error of a request whose events end before it is complete.
pub fn engine_stopped() -> ApiError {
    ApiError::engine("the engine stopped before the request was complete")
}

/// One prompt and its samples.
pub struct PromptFold {
    tokenizer: Arc<Tokenizer>,
    tokens: Arc<Vec<TokenId>>,
    params: Arc<SamplingParams>,
    options: AnswerOptions,
    facts: PromptFacts,
    samples: Vec<SampleFold>,
    pauses: Vec<PauseNotice>,
    progress: Vec<ProgressNotice>,
    /// When the request started, where it is told how far the prompt is.
    prefill_began: Option<Instant>,
    /// A sample that ended here before it ended in the engine.
    stopped_early: Option<u32>,
}

/// A prompt, and what the engine has said about it.
pub struct AnsweredPrompt {
    pub tokens: Arc<Vec<TokenId>>,
    pub facts: PromptFacts,
}

impl PromptFold {
    /// `tokens`, `params`: as the intake accepted them. `first_choice`: the number of sample 0 within the answer.
    /// `echo`: the text before each output; `None` where there is none.
    pub fn new(
        first_choice: u32,
        num_samples: u32,
        options: &AnswerOptions,
        tokenizer: &Arc<Tokenizer>,
        tokens: Arc<Vec<TokenId>>,
        params: Arc<SamplingParams>,
        echo: Option<&str>,
    ) -> Self {
        let sample =
            |index| SampleFold::new(first_choice + index, options, tokenizer, &tokens, echo.unwrap_or_default());
        Self {
            tokenizer: tokenizer.clone(),
            samples: (0..num_samples).map(sample).collect(),
            tokens,
            params,
            options: options.clone(),
            facts: PromptFacts::default(),
            pauses: Vec::new(),
            progress: Vec::new(),
            prefill_began: None,
            stopped_early: None,
        }
    }

    /// Takes the next event; gives what a choice gained by it.
    ///
    /// # Errors
    /// The request failed; nothing follows.
    pub fn take(&mut self, event: Event) -> Result<Option<Delta>, ApiError> {
        let is_about_prompt = matches!(event, Event::PromptLogprobs(_));
        let Some(event) = self.facts.take(event)? else {
            if is_about_prompt {
                self.echo_positions();
            }
            return Ok(None);
        };
        Ok(match event {
            SampleEvent::Token { index, token, logprobs } => self.token(index, token, logprobs),
            SampleEvent::Finished { index, reason } => self.finished(index, reason),
            SampleEvent::Paused { index } => {
                self.pause(index, None);
                None
            }
            SampleEvent::Resumed { index, after } => {
                self.pause(index, Some(after));
                None
            }
            SampleEvent::Prefilled { computed } => {
                self.prefilled(computed);
                None
            }
        })
    }

    /// The sample that the last event ended, where the engine does not know yet that it has ended: the engine has to
    /// be told.
    pub fn take_stopped_early(&mut self) -> Option<u32> {
        self.stopped_early.take()
    }

    /// Whether every sample has ended.
    pub fn is_complete(&self) -> bool {
        self.samples.iter().all(|sample| sample.ended)
    }

    pub fn facts(&self) -> &PromptFacts {
        &self.facts
    }

    /// The prompt and what the engine has said about it.
    pub fn into_prompt(self) -> AnsweredPrompt {
        AnsweredPrompt { tokens: self.tokens, facts: self.facts }
    }

    /// Memory that one event takes, about.
    pub fn event_bytes(&self) -> usize {
        let top = self.params.logprobs.map_or(0, |top| 1 + top as usize);
        size_of::<Event>() + top * size_of::<TokenLogprob>()
    }

    fn pause(&mut self, index: u32, after: Option<Duration>) {
        let sample = &self.samples[index as usize];
        if self.options.pause_comments && !sample.ended {
            self.pauses.push(PauseNotice { choice: sample.pending.choice, after });
        }
    }

    fn prefilled(&mut self, computed: usize) {
        let Some(first) = self.samples.first().filter(|_| self.options.progress) else { return };
        let time = self.prefill_began.get_or_insert_with(Instant::now).elapsed();
        let cached = self.facts.cached_tokens as usize;
        // The first notice comes before anything is computed.
        let time = if computed > cached { time } else { Duration::ZERO };
        self.progress.push(ProgressNotice {
            choice: first.pending.choice,
            progress: PromptProgress::new(self.tokens.len(), cached, computed, time),
            timings: self.options.timings_per_token.then(|| Timings::of_prompt(cached, computed, time)),
        });
    }

    fn token(&mut self, index: u32, token: TokenId, logprobs: Option<PositionLogprobs>) -> Option<Delta> {
        let is_eos = self.params.eos_token_ids.contains(&token);
        let is_stop = self.params.stop_token_ids.contains(&token);
        if is_eos || (is_stop && !self.options.text.include_stop_str_in_output) {
            self.take_end_token(index, token, logprobs);
            return None;
        }
        if !self.hold(index, token, logprobs) {
            return None;
        }
        let sample = &mut self.samples[index as usize];
        match sample.push(token) {
            Some(end) => {
                sample.pending.finish = Some(end.finish(&self.options));
                Some(self.end(index, true))
            }
            None if is_stop || sample.num_tokens >= self.params.max_tokens as usize => None,
            None => Some(sample.next_delta()),
        }
    }

    /// Takes the token that ends a sample and is no part of its text. It goes out with the sample's end, which follows.
    pub fn take_end_token(&mut self, index: u32, token: TokenId, logprobs: Option<PositionLogprobs>) {
        self.hold(index, token, logprobs);
    }

    /// Keeps a token until its text goes out; false where it is dropped.
    fn hold(&mut self, index: u32, token: TokenId, logprobs: Option<PositionLogprobs>) -> bool {
        let sample = &mut self.samples[index as usize];
        if let Some(clock) = sample.clock.as_mut().filter(|_| !sample.ended) {
            clock.tick();
        }
        // Tokens that were under way when a stop string matched come too late.
        if sample.ended || self.options.prompt_only {
            return false;
        }
        sample.num_tokens += 1;
        sample.held.push_back((token, logprobs));
        true
    }

    fn finished(&mut self, index: u32, reason: FinishReason) -> Option<Delta> {
        let finish = if self.options.prompt_only { Finish::length() } else { Finish::of_engine(reason) };
        self.finish(index, finish)
    }

    /// The sample has ended in the engine. Gives its last delta, if it has not ended before.
    pub fn finish(&mut self, index: u32, finish: Finish) -> Option<Delta> {
        let sample = &mut self.samples[index as usize];
        if sample.ended {
            return None;
        }
        let stopped = sample.finish_text();
        sample.pending.finish = Some(stopped.map_or(finish, |end| end.finish(&self.options)));
        Some(self.end(index, false))
    }

    /// Gives the tokens whose text is not wholly out, before the text.
    pub fn take_held(&mut self, index: u32) -> Delta {
        self.samples[index as usize].take_held()
    }

    /// What all samples have used so far.
    pub fn usage(&self) -> Usage {
        self.usage_of(&self.samples)
    }

    /// The samples that have not ended.
    pub fn unfinished(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.samples).filter(|(_, sample)| !sample.ended).map(|(index, _)| index)
    }

    /// Ends the samples that have not ended. Gives the last delta of each.
    pub fn abort(&mut self) -> Vec<Delta> {
        let unfinished: Vec<u32> = self.unfinished().collect();
        unfinished.into_iter().filter_map(|index| self.finish(index, Finish::aborted())).collect()
    }

    /// The last delta of a sample. `early`: the engine does not know yet that it has ended.
    fn end(&mut self, index: u32, early: bool) -> Delta {
        let delta = self.samples[index as usize].end(self.options.named_tool);
        if early {
            self.stopped_early = Some(index);
        }
        delta
    }

    /// Puts the echoed prompt's positions before those of the output.
    fn echo_positions(&mut self) {
        if !self.options.echo || self.options.chat.is_some() || self.options.logprobs.is_none() {
            return;
        }
        let logprobs = self.facts.logprobs.iter().flatten().cloned().map(Some);
        let logprobs = std::iter::once(None).chain(logprobs);
        let offsets = echo::offsets(&self.tokenizer, &self.tokens, &self.samples[0].pending.text);
        let positions: Vec<Position> = std::iter::zip(&*self.tokens, offsets)
            .zip(logprobs)
            .map(|((token, text_offset), logprobs)| Position { token: *token, text_offset, logprobs })
            .collect();
        for sample in &mut self.samples {
            sample.pending.positions = positions.clone();
        }
    }

    /// As the intake accepted them.
    pub fn params(&self) -> &Arc<SamplingParams> {
        &self.params
    }

    /// `None` where nothing is measured.
    fn measured(&self, sample: usize) -> Option<Timings> {
        let sample = &self.samples[sample];
        let cached = self.facts.cached_tokens as usize;
        sample.clock.map(|clock| Timings::new(&clock, self.tokens.len(), cached, sample.num_tokens))
    }

    fn usage_of(&self, samples: &[SampleFold]) -> Usage {
        let completion_tokens = samples.iter().map(|sample| sample.num_tokens).sum();
        let reasoning_tokens = samples.iter().map(|sample| sample.num_reasoning).sum();
        let kv = self.options.kv_block_bytes.map(|block_bytes| KvUsage::new(&self.facts.bill, block_bytes));
        Usage::new(self.tokens.len(), completion_tokens, self.facts.cached_tokens as usize)
            .with_reasoning(reasoning_tokens)
            .with_kv(kv)
    }
}

/// All prompts of a client's request. Choices are numbered through: those of the first prompt come first.
pub struct AnswerFold {
    prompts: Vec<PromptFold>,
    /// Samples of each prompt.
    num_samples: u32,
    logprobs: LogprobsKept,
}

impl AnswerFold {
    /// `num_samples`: of each prompt.
    pub fn new(prompts: Vec<PromptFold>, num_samples: u32) -> Self {
        Self { prompts, num_samples, logprobs: LogprobsKept { most: usize::MAX, left: usize::MAX } }
    }

    /// Limits the log-probabilities that the answer may have in all. For answers that are kept until their end.
    pub fn limit_logprobs(&mut self, most: usize) {
        self.logprobs = LogprobsKept { most, left: most };
    }

    /// The next event about the prompt of this number; see [`PromptFold::take`].
    pub fn take(&mut self, prompt: usize, event: Event) -> Result<Option<Delta>, ApiError> {
        let delta = self.prompts[prompt].take(event)?;
        if let Some(delta) = &delta {
            self.logprobs.take(delta)?;
        }
        Ok(delta)
    }

    pub fn prompts(&self) -> &[PromptFold] {
        &self.prompts
    }

    pub fn prompt_mut(&mut self, prompt: usize) -> &mut PromptFold {
        &mut self.prompts[prompt]
    }

    /// The pauses since the last call, where the request wants to hear of them.
    pub fn take_pauses(&mut self) -> impl Iterator<Item = PauseNotice> {
        self.prompts.iter_mut().flat_map(|prompt| std::mem::take(&mut prompt.pauses))
    }

    /// How far prompts are since the last call, where the request wants to hear of it.
    pub fn take_progress(&mut self) -> Vec<ProgressNotice> {
        self.prompts.iter_mut().flat_map(|prompt| std::mem::take(&mut prompt.progress)).collect()
    }

    pub fn num_choices(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.samples.len()).sum()
    }

    /// Of all prompts and choices so far.
    pub fn usage(&self) -> Usage {
        self.prompts.iter().map(PromptFold::usage).sum()
    }

    /// Of one choice so far.
    pub fn choice_usage(&self, choice: u32) -> Usage {
        let prompt = self.prompt_of(choice);
        prompt.usage_of(std::slice::from_ref(&prompt.samples[(choice % self.num_samples) as usize]))
    }

    /// How long a choice has taken so far; `None` where the answer does not say it.
    pub fn timings(&self, choice: u32) -> Option<Timings> {
        self.measured(choice).filter(|_| self.prompt_of(choice).options.timings)
    }

    /// The same, for an answer that shows how it was made; `None` where nothing is measured.
    pub fn measured(&self, choice: u32) -> Option<Timings> {
        self.prompt_of(choice).measured((choice % self.num_samples) as usize)
    }

    /// What a part of a stream that is not the last says of it.
    pub fn part_timings(&self, choice: u32) -> Option<Timings> {
        self.timings(choice).filter(|_| self.prompt_of(choice).options.timings_per_token)
    }

    /// What the engine was asked for a choice, as the intake accepted it.
    pub fn params(&self, choice: u32) -> &Arc<SamplingParams> {
        self.prompt_of(choice).params()
    }

    /// The prompt that a choice answers.
    pub fn prompt_tokens(&self, choice: u32) -> &Arc<Vec<TokenId>> {
        &self.prompt_of(choice).tokens
    }

    /// Samples of each prompt.
    pub fn num_samples(&self) -> u32 {
        self.num_samples
    }

    /// What is left when the answer is complete.
    pub fn into_prompts(self) -> Vec<AnsweredPrompt> {
        self.prompts.into_iter().map(PromptFold::into_prompt).collect()
    }

    fn prompt_of(&self, choice: u32) -> &PromptFold {
        &self.prompts[(choice / self.num_samples) as usize]
    }
}

/// Log-probabilities that an answer keeps until its end.
struct LogprobsKept {
    most: usize,
    left: usize,
}

impl LogprobsKept {
    fn take(&mut self, delta: &Delta) -> Result<(), ApiError> {
        let of_position = |position: &Position| position.logprobs.as_ref().map_or(0, |logprobs| 1 + logprobs.top.len());
        let num = delta.positions.iter().map(of_position).sum();
        self.left = self.left.checked_sub(num).ok_or_else(|| {
            let message = format!(
                "the answer has more than {} log-probabilities, this server's limit for answers that are kept to their end \
                 (server.max_answer_logprobs): ask for fewer tokens, outputs or log-probabilities of each token, or for a \
                 stream of chat completions or completions",
                self.most
            );
            ApiError::too_complex("logprobs", message)
        })?;
        Ok(())
    }
}
