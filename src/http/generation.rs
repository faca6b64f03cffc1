//! From the engine's events to what the client reads: the text, finish reasons and counts of all choices of a request.
//!
//! A request has `prompts × n` choices; each prompt is one request of the engine (`PromptRun`). Whole answers and
//! streams read the same [`Delta`]s, so both say the same.

use crate::actors::messages::{Accepted, Event, EventStream, Prompt};
use crate::actors::runtime::RuntimeHandle;
use crate::engine::bill::KvBill;
use crate::error::ApiError;
use crate::http::deadline::Deadline;
use crate::http::openai::completion::too_many;
use crate::http::openai::response::{KvUsage, Usage};
use crate::http::openai::{AnswerOptions, Request};
use crate::ids::TokenId;
use crate::sampling::params::{FinishReason, PositionLogprobs, SamplingParams, TokenLogprob};
use crate::text::chat_output::{self, ChatParser, ChatPiece};
use crate::text::detokenizer::Detokenizer;
use crate::text::output::{OutputText, Piece};
use crate::text::tokenizer::Tokenizer;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// What one choice gained.
#[derive(Debug, Default, PartialEq)]
pub struct Delta {
    pub choice: u32,
    pub text: String,
    /// Of a chat: what `text` says.
    pub pieces: Vec<ChatPiece>,
    /// Generated tokens. Their text may still be held back (half a character, the beginning of a stop string).
    pub tokens: Vec<TokenId>,
    /// Where log-probabilities were asked for: the positions of `tokens`, after those of an echoed prompt.
    pub positions: Vec<Position>,
    /// Sum of the log-probabilities of `tokens`, where the engine gave them.
    pub sum_logprob: f64,
    /// The choice is complete.
    pub finish: Option<Finish>,
}

/// Memory pressure has paused a choice, or it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseNotice {
    pub choice: u32,
    /// It goes on, and was paused this long.
    pub after: Option<Duration>,
}

/// A token of the answer with its log-probabilities; the first token of a prompt has none.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    pub token: TokenId,
    /// Characters of the answer's text before this token.
    pub text_offset: usize,
    pub logprobs: Option<PositionLogprobs>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// `stop`, `length` or `tool_calls`.
    pub reason: &'static str,
    /// The stop string or stop token that ended it, where it was one of the client's.
    pub stop_reason: Option<StopReason>,
}

#[derive(Clone, Debug, PartialEq, serde::Serialize, utoipa::ToSchema)]
#[serde(untagged)]
pub enum StopReason {
    Text(String),
    #[schema(value_type = u32)]
    Token(TokenId),
}

impl Delta {
    fn push_token(&mut self, token: TokenId, text_offset: usize, logprobs: Option<PositionLogprobs>) {
        self.tokens.push(token);
        if let Some(logprobs) = &logprobs {
            self.sum_logprob += f64::from(logprobs.chosen.logprob);
        }
        if logprobs.is_some() {
            self.positions.push(Position { token, text_offset, logprobs });
        }
    }

    /// The mean of its tokens' log-probabilities: what `best_of` goes by.
    pub fn mean_logprob(&self) -> f64 {
        self.sum_logprob / self.tokens.len().max(1) as f64
    }

    /// Adds what came after; `self` and `next` are of one choice.
    pub fn append(&mut self, next: Delta) {
        debug_assert_eq!(self.choice, next.choice);
        self.text.push_str(&next.text);
        for piece in next.pieces {
            chat_output::append(&mut self.pieces, piece);
        }
        self.tokens.extend(next.tokens);
        self.positions.extend(next.positions);
        self.sum_logprob += next.sum_logprob;
        self.finish = next.finish;
    }
}

impl AnswerOptions {
    fn stopped_by(&self, stop: usize) -> Finish {
        Finish { reason: "stop", stop_reason: Some(StopReason::Text(self.text.stop[stop].clone())) }
    }
}

/// A request that the engine has accepted. Dropping it cancels what still runs.
pub struct Generation {
    runs: Vec<PromptRun>,
    n: u32,
    /// The run to look at first, so that none is starved.
    next_run: usize,
    deadline: Deadline,
    max_answer_logprobs: usize,
    logprobs: LogprobsKept,
}

/// Log-probabilities that whoever reads the answer keeps until its end.
struct LogprobsKept {
    most: usize,
    left: usize,
}

/// A prompt and what the engine says of it.
pub struct AnsweredPrompt {
    pub tokens: Arc<Vec<TokenId>>,
    /// From its second token on; empty unless they were asked for.
    pub logprobs: Vec<PositionLogprobs>,
}

impl Generation {
    /// Submits every prompt. If one is refused, those before it are cancelled.
    pub async fn start(handle: &RuntimeHandle, request: &mut Request) -> Result<Self, ApiError> {
        let (num_prompts, most) = (request.prompts.len(), handle.max_requests());
        if num_prompts > most {
            return Err(too_many("prompt", most, num_prompts));
        }
        let mut deadline = Deadline::new(handle);
        let mut runs = Vec::with_capacity(num_prompts);
        for (index, prompt) in std::mem::take(&mut request.prompts).into_iter().enumerate() {
            // A copy, which may be long: only where it is asked for.
            let text = request.answer.echo.then(|| echoed(&prompt, request)).flatten();
            let accepted = deadline.or(handle.submit(request.submit(prompt))).await?;
            let first_choice = index as u32 * request.num_samples();
            runs.push(PromptRun::new(first_choice, request, &handle.model().tokenizer, accepted, text)?);
        }
        let logprobs = LogprobsKept { most: usize::MAX, left: usize::MAX };
        let max_answer_logprobs = handle.model().server.get().max_answer_logprobs;
        Ok(Self { runs, n: request.num_samples(), next_run: 0, deadline, max_answer_logprobs, logprobs })
    }

    /// Limits the answer's log-probabilities to `server.max_answer_logprobs`, divided by `copies`. For answers that keep
    /// them to their end.
    pub fn keep_logprobs(&mut self, copies: usize) {
        let most =
            Some(self.max_answer_logprobs).filter(|most| *most > 0).map_or(usize::MAX, |most| most / copies.max(1));
        self.logprobs = LogprobsKept { most, left: most };
    }

    /// The next delta; `None` when every choice is complete. Nothing follows an error.
    pub async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Delta, ApiError>>> {
        if self.runs.iter().any(|run| run.events.is_some())
            && let Poll::Ready(error) = self.deadline.poll(cx)
        {
            self.runs.clear();
            return Poll::Ready(Some(Err(error)));
        }
        let mut all_done = true;
        for i in 0..self.runs.len() {
            let index = (self.next_run + i) % self.runs.len();
            match self.runs[index].poll_next(cx) {
                Poll::Ready(None) => {}
                Poll::Pending => all_done = false,
                Poll::Ready(Some(Ok(delta))) => {
                    if let Err(error) = self.logprobs.take(&delta) {
                        self.runs.clear();
                        return Poll::Ready(Some(Err(error)));
                    }
                    self.next_run = (index + 1) % self.runs.len();
                    return Poll::Ready(Some(Ok(delta)));
                }
                Poll::Ready(Some(Err(error))) => {
                    self.runs.clear();
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
        if all_done { Poll::Ready(None) } else { Poll::Pending }
    }

    /// The pauses that have been heard of since the last call, where the request wants to hear of them.
    pub fn take_pauses(&mut self) -> impl Iterator<Item = PauseNotice> {
        self.runs.iter_mut().flat_map(|run| std::mem::take(&mut run.pauses))
    }

    pub fn num_choices(&self) -> usize {
        self.runs.iter().map(|run| run.samples.len()).sum()
    }

    /// Of all prompts and choices so far.
    pub fn usage(&self) -> Usage {
        self.runs.iter().map(PromptRun::usage).sum()
    }

    /// Of one choice so far.
    pub fn choice_usage(&self, choice: u32) -> Usage {
        let run = self.run_of(choice);
        run.usage_of(std::slice::from_ref(&run.samples[(choice % self.n) as usize]))
    }

    /// The prompt that a choice answers.
    pub fn prompt_tokens(&self, choice: u32) -> &Arc<Vec<TokenId>> {
        &self.run_of(choice).prompt_tokens
    }

    /// Memory of what the engine has said and nobody has read, about.
    pub fn unread_bytes(&self) -> usize {
        let of_run = |run: &PromptRun| {
            let events = run.events.as_ref().map_or(0, EventStream::num_unread);
            let top = run.params.logprobs.map_or(0, |top| 1 + top as usize);
            events * (size_of::<Event>() + top * size_of::<TokenLogprob>())
        };
        self.runs.iter().map(of_run).sum()
    }

    /// Samples of each prompt.
    pub fn num_samples(&self) -> u32 {
        self.n
    }

    /// What is left when the answer is complete.
    pub fn into_prompts(self) -> Vec<AnsweredPrompt> {
        let prompt = |run: PromptRun| AnsweredPrompt { tokens: run.prompt_tokens, logprobs: run.prompt_logprobs };
        self.runs.into_iter().map(prompt).collect()
    }

    fn run_of(&self, choice: u32) -> &PromptRun {
        &self.runs[(choice / self.n) as usize]
    }
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

/// What an answer with `echo` begins with; `None`: the text of the prompt's tokens.
fn echoed(prompt: &Prompt, request: &Request) -> Option<String> {
    match prompt {
        Prompt::Text { text, .. } if request.truncation.is_none() => Some(text.clone()),
        Prompt::Chat(chat) => {
            let role = chat.messages.last().and_then(|message| message.get("role")?.as_str());
            let continues = !chat.add_generation_prompt || role == Some("assistant");
            Some(if continues { chat.last_text() } else { String::new() })
        }
        _ => None,
    }
}

/// One prompt and its samples.
struct PromptRun {
    tokenizer: Arc<Tokenizer>,
    prompt_tokens: Arc<Vec<TokenId>>,
    prompt_logprobs: Vec<PositionLogprobs>,
    cached_tokens: usize,
    bill: KvBill,
    pauses: Vec<PauseNotice>,
    params: Arc<SamplingParams>,
    options: AnswerOptions,
    samples: Vec<Sample>,
    /// `None` once every sample has ended.
    events: Option<EventStream>,
}

/// One choice in the making.
struct Sample {
    text: OutputText,
    /// Reads the text of a chat.
    chat: Option<ChatParser>,
    num_tokens: usize,
    /// Tokens of those that are reasoning.
    num_reasoning: usize,
    /// Characters of the echoed prompt, which stands before the output.
    echo_chars: usize,
    output_chars: usize,
    /// Tokens whose text is not wholly out.
    held: VecDeque<(TokenId, Option<PositionLogprobs>)>,
    /// What goes out with the next delta.
    pending: Delta,
    ended: bool,
}

impl PromptRun {
    /// `first_choice`: the number of sample 0. `prompt_text`: see [`echoed`].
    fn new(
        first_choice: u32,
        request: &Request,
        tokenizer: &Arc<Tokenizer>,
        accepted: Accepted,
        prompt_text: Option<String>,
    ) -> Result<Self, ApiError> {
        let options = request.answer.clone();
        let prompt = accepted.prompt_tokens;
        let echo = match prompt_text {
            _ if !options.echo => String::new(),
            Some(text) => text,
            None => tokenizer.decode(&prompt, options.text.skip_special_tokens)?,
        };
        let echo_chars = echo.chars().count();
        let echo_piece = (options.chat.is_some() && !echo.is_empty()).then(|| ChatPiece::Content(echo.clone()));
        let sample = |index| Sample {
            text: OutputText::new(Arc::clone(tokenizer), &prompt, &options.text),
            chat: options.chat.as_ref().map(|reading| ChatParser::new(reading, tokenizer, &prompt)),
            num_reasoning: 0,
            num_tokens: 0,
            echo_chars,
            output_chars: 0,
            held: VecDeque::new(),
            pending: Delta {
                choice: first_choice + index,
                text: echo.clone(),
                pieces: echo_piece.iter().cloned().collect(),
                ..Delta::default()
            },
            ended: false,
        };
        Ok(Self {
            tokenizer: Arc::clone(tokenizer),
            samples: (0..request.num_samples()).map(sample).collect(),
            prompt_tokens: prompt,
            prompt_logprobs: Vec::new(),
            cached_tokens: 0,
            bill: KvBill::default(),
            pauses: Vec::new(),
            params: accepted.params,
            options,
            events: Some(accepted.events),
        })
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Delta, ApiError>>> {
        loop {
            let Some(events) = &mut self.events else { return Poll::Ready(None) };
            let delta = match ready!(events.poll_next(cx)) {
                None => {
                    let message = "the engine stopped before the request was complete";
                    return Poll::Ready(Some(Err(ApiError::engine(message))));
                }
                Some(Event::Failed(error)) => return Poll::Ready(Some(Err(error))),
                // Nobody asks for embeddings here.
                Some(Event::Embedding(_)) => None,
                Some(Event::Started { cached_tokens }) => {
                    self.cached_tokens = cached_tokens as usize;
                    None
                }
                Some(Event::Bill(bill)) => {
                    self.bill = bill;
                    None
                }
                Some(Event::Paused { index }) => {
                    self.pause(index, None);
                    None
                }
                Some(Event::Resumed { index, after }) => {
                    self.pause(index, Some(after));
                    None
                }
                Some(Event::PromptLogprobs(logprobs)) => {
                    self.prompt_logprobs = logprobs;
                    self.echo_positions();
                    None
                }
                Some(Event::Token { index, token, logprobs }) => self.token(index, token, logprobs),
                Some(Event::Finished { index, reason }) => self.finished(index, reason),
            };
            if let Some(delta) = delta {
                return Poll::Ready(Some(Ok(delta)));
            }
        }
    }

    fn pause(&mut self, index: u32, after: Option<Duration>) {
        let sample = &self.samples[index as usize];
        if self.options.pause_comments && !sample.ended {
            self.pauses.push(PauseNotice { choice: sample.pending.choice, after });
        }
    }

    fn token(&mut self, index: u32, token: TokenId, logprobs: Option<PositionLogprobs>) -> Option<Delta> {
        let sample = &mut self.samples[index as usize];
        // Tokens that were under way when a stop string matched come too late.
        if sample.ended || self.options.prompt_only {
            return None;
        }
        sample.num_tokens += 1;
        sample.held.push_back((token, logprobs));
        let is_eos = self.params.eos_token_ids.contains(&token);
        let is_stop = self.params.stop_token_ids.contains(&token);
        if is_eos || (is_stop && !self.options.text.include_stop_str_in_output) {
            // No part of the text; it goes out with the sample's end, which follows.
            return None;
        }
        let piece = sample.text.push(token);
        let stopped = piece.stopped;
        let was_reasoning = sample.is_reasoning();
        sample.take(piece);
        // A token that is a mark is not counted.
        sample.num_reasoning += usize::from(was_reasoning && sample.is_reasoning());
        if let Some(stop) = stopped {
            sample.pending.finish = Some(self.options.stopped_by(stop));
            return Some(self.end(index, true));
        }
        if sample.chat.as_ref().is_some_and(ChatParser::is_full) {
            sample.pending.finish = Some(Finish { reason: "stop", stop_reason: None });
            return Some(self.end(index, true));
        }
        let is_last = is_stop || sample.num_tokens >= self.params.max_tokens as usize;
        if is_last { None } else { Some(sample.next_delta()) }
    }

    fn finished(&mut self, index: u32, reason: FinishReason) -> Option<Delta> {
        let sample = &mut self.samples[index as usize];
        if sample.ended {
            return None;
        }
        let piece = sample.text.finish();
        let stopped = piece.stopped;
        sample.take(piece);
        sample.pending.finish = Some(match (stopped, reason) {
            (Some(stop), _) => self.options.stopped_by(stop),
            (None, _) if self.options.prompt_only => Finish { reason: "length", stop_reason: None },
            (None, FinishReason::Length) => Finish { reason: "length", stop_reason: None },
            (None, FinishReason::Eos) => Finish { reason: "stop", stop_reason: None },
            (None, FinishReason::StopToken(id)) => Finish { reason: "stop", stop_reason: Some(StopReason::Token(id)) },
        });
        Some(self.end(index, false))
    }

    /// The last delta of a sample. `early`: the engine does not know yet that it has ended.
    fn end(&mut self, index: u32, early: bool) -> Delta {
        let sample = &mut self.samples[index as usize];
        sample.ended = true;
        let offset = sample.echo_chars + sample.output_chars;
        for (token, logprobs) in std::mem::take(&mut sample.held) {
            sample.pending.push_token(token, offset, logprobs);
        }
        if let Some(chat) = &mut sample.chat {
            chat.finish(&mut sample.pending.pieces);
            if let Some(finish) = &mut sample.pending.finish
                && finish.reason == "stop"
                && chat.num_calls() > 0
                && !self.options.named_tool
            {
                finish.reason = "tool_calls";
            }
        }
        let delta = sample.next_delta();
        if early && let Some(events) = &self.events {
            // Also where it is the last one: this is an end, not a client that went away.
            events.stop_sample(index);
        }
        if self.samples.iter().all(|sample| sample.ended) {
            self.events = None;
        }
        delta
    }

    /// Puts the echoed prompt's positions before those of the output.
    fn echo_positions(&mut self) {
        if !self.options.echo || self.options.chat.is_some() || self.options.logprobs.is_none() {
            return;
        }
        let offsets = echo_offsets(&self.tokenizer, &self.prompt_tokens, &self.samples[0].pending.text);
        let logprobs = std::iter::once(None).chain(self.prompt_logprobs.iter().cloned().map(Some));
        let positions: Vec<Position> = std::iter::zip(&*self.prompt_tokens, offsets)
            .zip(logprobs)
            .map(|((token, text_offset), logprobs)| Position { token: *token, text_offset, logprobs })
            .collect();
        for sample in &mut self.samples {
            sample.pending.positions = positions.clone();
        }
    }

    fn usage(&self) -> Usage {
        self.usage_of(&self.samples)
    }

    fn usage_of(&self, samples: &[Sample]) -> Usage {
        let completion_tokens = samples.iter().map(|sample| sample.num_tokens).sum();
        let reasoning_tokens = samples.iter().map(|sample| sample.num_reasoning).sum();
        let kv = self.options.kv_block_bytes.map(|block_bytes| KvUsage::new(&self.bill, block_bytes));
        Usage::new(self.prompt_tokens.len(), completion_tokens, self.cached_tokens)
            .with_reasoning(reasoning_tokens)
            .with_kv(kv)
    }
}

impl Sample {
    /// Moves text that is certain, and the tokens that are wholly in it, to what goes out next.
    fn take(&mut self, piece: Piece) {
        self.output_chars += piece.text.chars().count();
        self.pending.text.push_str(&piece.text);
        if let Some(chat) = &mut self.chat {
            chat.push(&piece.text, &mut self.pending.pieces);
        }
        for offset in piece.token_offsets {
            let (token, logprobs) = self.held.pop_front().expect("every token pushed was put here before");
            self.pending.push_token(token, self.echo_chars + offset, logprobs);
        }
    }

    fn is_reasoning(&self) -> bool {
        self.chat.as_ref().is_some_and(ChatParser::is_reasoning)
    }

    fn next_delta(&mut self) -> Delta {
        let next = Delta { choice: self.pending.choice, ..Delta::default() };
        std::mem::replace(&mut self.pending, next)
    }
}

/// Where each of the prompt's tokens begins in `text`, in characters. Special tokens that the tokenizer added are not
/// in the text and take no room.
fn echo_offsets(tokenizer: &Arc<Tokenizer>, prompt: &[TokenId], text: &str) -> Vec<usize> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), &[], false);
    let num_chars = text.chars().count();
    let (mut rest, mut offset) = (text, 0);
    prompt
        .iter()
        .map(|token| {
            let begin = offset;
            let piece = detokenizer.push(*token);
            if let Some(after) = rest.strip_prefix(piece.as_str()) {
                rest = after;
                offset += piece.chars().count();
            } else if !tokenizer.is_special(*token) {
                // The tokenizer normalised the text: count on.
                offset = (offset + piece.chars().count()).min(num_chars);
                rest = text.char_indices().nth(offset).map_or("", |(at, _)| &text[at..]);
            }
            begin
        })
        .collect()
}
