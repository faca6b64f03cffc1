//! One request from its JSON body to the whole answer: what HTTP and `pagetide generate` share.

use crate::actors::runtime::{ModelInfo, RuntimeHandle};
use crate::error::ApiError;
use crate::http::generation::{Delta, Generation};
use crate::http::openai::response::{Answer, WholeAnswer};
use crate::http::openai::{AnswerOptions, Endpoint, Request};
use serde_json::Value;

/// Answers `body` as `endpoint` does without `stream`. Dropping the future cancels the request.
pub async fn complete(handle: &RuntimeHandle, endpoint: Endpoint, body: &Value) -> Result<Value, ApiError> {
    let whole = answer(handle, Request::parse(endpoint, body, handle.model())?).await?;
    serde_json::to_value(&whole).map_err(|error| ApiError::engine(format!("the answer cannot be written: {error}")))
}

/// About how many values there will be in its answer, beside its texts.
pub fn num_values(request: &Request, model: &ModelInfo) -> usize {
    let AnswerOptions { logprobs, prompt_logprobs, echo, return_token_ids, .. } = request.answer;
    let of_token = logprobs.map_or(0, |top| 4 * (1 + top as usize)) + usize::from(return_token_ids);
    let of_prompt = prompt_logprobs.map_or(0, |top| 4 * (1 + top as usize)) + if echo { of_token } else { 0 };
    let (prompts, len) = (request.prompts.len(), model.max_model_len as usize);
    let max_tokens = match request.params.max_tokens {
        0 => len,
        most => len.min(most as usize),
    };
    let outputs = prompts * request.n as usize * max_tokens;
    outputs * of_token + prompts * len * of_prompt + prompts * request.n as usize
}

/// The whole answer to a request, whether it asked for a stream or not.
pub async fn answer(handle: &RuntimeHandle, mut request: Request) -> Result<WholeAnswer, ApiError> {
    let answer = Answer::new(&request, handle.model());
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.keep_logprobs(1);
    let mut choices: Vec<Delta> =
        (0..generation.num_choices() as u32).map(|choice| Delta { choice, ..Delta::default() }).collect();
    while let Some(delta) = generation.next().await {
        let delta = delta?;
        choices[delta.choice as usize].append(delta);
    }
    Ok(answer.whole(best(choices, &request), generation))
}

/// The `n` best samples of each prompt, best first, by the mean of their log-probabilities; all, as they are, where no
/// more were drawn.
fn best(mut choices: Vec<Delta>, request: &Request) -> Vec<Delta> {
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
