//! A client's request in the engine: its prompts are submitted, and their events become one answer.

use crate::deadline::Deadline;
use crate::messages::{Accepted, EventStream};
use crate::runtime::RuntimeHandle;
use crate::slots::SlotInUse;
use crate::under_way::{Aborted, RequestUnderWay};
use pagetide_api::delta::Delta;
use pagetide_api::event::Event;
use pagetide_api::fold::{AnswerFold, AnsweredPrompt, PromptFold, echoed_text, engine_stopped};
use pagetide_api::openai::{self, Endpoint, response::WholeAnswer};
use pagetide_api::prompt::Prompt;
use pagetide_api::request::ApiRequest;
use pagetide_base::error::ApiError;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

/// A request that the engine has accepted. Dropping it cancels what still runs.
pub struct Generation {
    answers: AnswerFold,
    /// One for each prompt; `None` once all its samples have ended.
    streams: Vec<Option<EventStream>>,
    /// The stream to look at first, so that none is starved.
    next_stream: usize,
    deadline: Deadline,
    under_way: RequestUnderWay,
    /// The last deltas of an aborted request.
    aborted: VecDeque<Delta>,
    max_answer_logprobs: usize,
    /// The slot that gets the tokens of the first sample of the first prompt, until it has ended.
    slot: Option<SlotInUse>,
}

impl Generation {
    /// Submits every prompt. If one is refused, those before it are cancelled.
    pub async fn start(handle: &RuntimeHandle, request: &mut ApiRequest) -> Result<Self, ApiError> {
        request.check_num_prompts(handle.max_requests())?;
        let chosen = handle.choose_slot(request)?;
        let mut slot = None;
        let mut under_way = handle.requests().enter(&request.id, handle.tenant())?;
        for (prompt, id) in request.prompt_ids.iter().enumerate() {
            under_way.enter_prompt(id, prompt)?;
        }
        let tokenizer = &handle.model().tokenizer;
        let mut deadline = Deadline::new(handle);
        let (mut prompts, mut streams) = (Vec::new(), Vec::new());
        for (index, prompt) in std::mem::take(&mut request.prompts).into_iter().enumerate() {
            let options = &request.answer;
            // A copy, which may be long: only where it is asked for.
            let text = options.echo.then(|| echoed_text(&prompt, request.each.truncation.is_some())).flatten();
            // Special tokens that the client sent are a part of its prompt.
            let skips_special = options.text.skip_special_tokens && !matches!(prompt, Prompt::Tokens(_));
            let accepted = deadline.or(handle.submit(request.of_prompt(prompt))).await?;
            let Accepted { prompt_tokens, params, events, .. } = accepted;
            let echo = match text {
                _ if !options.echo => None,
                Some(text) => Some(text),
                None => Some(tokenizer.decode(&prompt_tokens, skips_special)?),
            };
            if let (0, Some(slots), Some(chosen)) = (index, handle.slots(), chosen) {
                let salt = request.each.core.cache_salt.clone();
                slot = Some(slots.enter(handle.caller(), chosen, salt, prompt_tokens.clone()));
            }
            let num_samples = request.num_samples();
            let first_choice = index as u32 * num_samples;
            let echo = echo.as_deref();
            prompts.push(PromptFold::new(first_choice, num_samples, options, tokenizer, prompt_tokens, params, echo));
            streams.push(Some(events));
        }
        let answers = AnswerFold::new(prompts, request.num_samples());
        let max_answer_logprobs = handle.model().server.get().max_answer_logprobs;
        let aborted = VecDeque::new();
        Ok(Self { answers, streams, next_stream: 0, deadline, under_way, aborted, max_answer_logprobs, slot })
    }

    /// Limits the answer's log-probabilities to `server.max_answer_logprobs`, divided by `copies`. For answers that are
    /// kept until their end.
    pub fn keep_logprobs(&mut self, copies: usize) {
        if self.max_answer_logprobs > 0 {
            self.answers.limit_logprobs(self.max_answer_logprobs / copies.max(1));
        }
    }

    /// The next delta; `None` when every choice is complete. Nothing follows an error.
    pub async fn next(&mut self) -> Option<Result<Delta, ApiError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Delta, ApiError>>> {
        let next = self.poll_streams(cx);
        if let Poll::Ready(Some(Err(_))) = &next {
            // What still runs is cancelled.
            self.streams.clear();
        }
        next
    }

    fn poll_streams(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Delta, ApiError>>> {
        if let Some(delta) = self.aborted.pop_front() {
            return Poll::Ready(Some(Ok(delta)));
        }
        if self.streams.iter().any(Option::is_some) {
            if let Poll::Ready(error) = self.deadline.poll(cx) {
                return Poll::Ready(Some(Err(error)));
            }
            while let Poll::Ready(aborted) = self.under_way.poll_aborted(cx) {
                match aborted {
                    Aborted::Request => (0..self.streams.len()).for_each(|index| self.abort(index)),
                    Aborted::Prompt(index) => self.abort(index),
                }
            }
            if let Some(delta) = self.aborted.pop_front() {
                return Poll::Ready(Some(Ok(delta)));
            }
        }
        let mut all_done = true;
        for i in 0..self.streams.len() {
            let index = (self.next_stream + i) % self.streams.len();
            match self.poll_prompt(index, cx) {
                Poll::Ready(None) => {}
                Poll::Pending => all_done = false,
                Poll::Ready(Some(next)) => {
                    self.next_stream = (index + 1) % self.streams.len();
                    return Poll::Ready(Some(next));
                }
            }
        }
        if all_done { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Ends every choice of a prompt that has not ended, with the text that it has.
    fn abort(&mut self, index: usize) {
        let Some(stream) = self.streams[index].take() else { return };
        let prompt = self.answers.prompt_mut(index);
        // For the log these are ends, and the client has not left.
        prompt.unfinished().for_each(|sample| stream.stop_sample(sample));
        self.aborted.extend(prompt.abort());
    }

    /// The next delta of one prompt.
    fn poll_prompt(&mut self, index: usize, cx: &mut Context<'_>) -> Poll<Option<Result<Delta, ApiError>>> {
        loop {
            let Some(stream) = &mut self.streams[index] else { return Poll::Ready(None) };
            let Some(event) = ready!(stream.poll_next(cx)) else { return Poll::Ready(Some(Err(engine_stopped()))) };
            if let (0, Some(slot), Event::Token { index: 0, token, .. }) = (index, &mut self.slot, &event) {
                slot.push(*token);
            }
            let delta = self.answers.take(index, event);
            let prompt = self.answers.prompt_mut(index);
            if let Some(sample) = prompt.take_stopped_early() {
                // Also where it is the last one: this is an end, not a client that went away.
                stream.stop_sample(sample);
            }
            if prompt.is_complete() {
                self.streams[index] = None;
                if index == 0 {
                    // Before the client hears of the end.
                    self.slot = None;
                }
            }
            if let Some(delta) = delta.transpose() {
                return Poll::Ready(Some(delta));
            }
        }
    }

    /// Waits for the whole answer, delta by delta.
    pub async fn finish(&mut self, mut take: impl FnMut(Delta)) -> Result<(), ApiError> {
        while let Some(delta) = self.next().await {
            take(delta?);
        }
        Ok(())
    }

    /// What has been answered so far.
    pub fn answers(&self) -> &AnswerFold {
        &self.answers
    }

    pub fn answers_mut(&mut self) -> &mut AnswerFold {
        &mut self.answers
    }

    pub fn into_answers(self) -> AnswerFold {
        self.answers
    }

    /// About how much memory the events take that have not been read.
    pub fn unread_bytes(&self) -> usize {
        let of_prompt = |(stream, prompt): (&Option<EventStream>, &PromptFold)| {
            stream.as_ref().map_or(0, EventStream::num_unread) * prompt.event_bytes()
        };
        self.streams.iter().zip(self.answers.prompts()).map(of_prompt).sum()
    }
}

/// The whole answer to a request, whether it asked for a stream or not.
pub async fn whole_answer(
    handle: &RuntimeHandle,
    endpoint: Endpoint,
    mut request: ApiRequest,
) -> Result<WholeAnswer, ApiError> {
    let answer = openai::response::OpenAiAnswer::new(endpoint, &request, handle.model());
    let (choices, answers) = collect(handle, &mut request).await?;
    Ok(answer.whole(choices, answers))
}

/// The prompts of a request for embeddings, each with its embedding.
pub async fn embedded(handle: &RuntimeHandle, request: &mut ApiRequest) -> Result<Vec<AnsweredPrompt>, ApiError> {
    let mut generation = Generation::start(handle, request).await?;
    generation.finish(drop).await?;
    let prompts = generation.into_answers().into_prompts();
    match prompts.iter().all(|prompt| prompt.facts.embedding.is_some()) {
        true => Ok(prompts),
        false => Err(engine_stopped()),
    }
}

/// All that each choice of the answer gained, in the order of the answer.
pub async fn collect(handle: &RuntimeHandle, request: &mut ApiRequest) -> Result<(Vec<Delta>, AnswerFold), ApiError> {
    let mut generation = Generation::start(handle, request).await?;
    generation.keep_logprobs(1);
    let mut choices: Vec<Delta> =
        (0..generation.answers().num_choices() as u32).map(|choice| Delta { choice, ..Delta::default() }).collect();
    generation.finish(|delta| choices[delta.choice as usize].append(delta)).await?;
    Ok((best(choices, request), generation.into_answers()))
}

/// The `n` best samples of each prompt, best first, by the mean of their log-probabilities. Where no more than `n` were
/// drawn: all, as they are.
fn best(mut choices: Vec<Delta>, request: &ApiRequest) -> Vec<Delta> {
    let (n, num_samples) = (request.n as usize, request.num_samples() as usize);
    if num_samples > n {
        for samples in choices.chunks_mut(num_samples) {
            samples.sort_by(|a, b| b.mean_logprob().total_cmp(&a.mean_logprob()));
        }
        let mut place = 0..;
        choices.retain(|_| place.next().is_some_and(|place| place % num_samples < n));
    }
    choices
}
