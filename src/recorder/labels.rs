//! What stands for tokens in a file that must not hold them, and what of a request's parameters decisions depend on.

use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::SamplingParams;

/// What stands for a token: 0, or from 1 on its place among the tokens that end the request's output.
pub fn label(params: &SamplingParams, token: TokenId) -> TokenId {
    params.end_tokens().position(|end| end == token).map_or(0, |place| place as TokenId + 1)
}

/// What the scheduler's decisions depend on, as long as the samples come from elsewhere: no seed, no rules, nothing of
/// the draw. Without `keep_tokens`, tokens are replaced by their [`label`]s.
pub fn decisive_params(params: &SamplingParams, keep_tokens: bool) -> SamplingParams {
    let (mut eos_token_ids, mut stop_token_ids) = (params.eos_token_ids.clone(), params.stop_token_ids.clone());
    if !keep_tokens {
        let (num_eos, num_stop) = (eos_token_ids.len() as TokenId, stop_token_ids.len() as TokenId);
        eos_token_ids = (1..=num_eos).collect();
        stop_token_ids = (num_eos + 1..=num_eos + num_stop).collect();
    }
    SamplingParams {
        max_tokens: params.max_tokens,
        min_tokens: params.min_tokens,
        pooling: params.pooling,
        beam: params.beam.clone(),
        eos_token_ids,
        stop_token_ids,
        logprobs: params.logprobs,
        prompt_logprobs: params.prompt_logprobs,
        ..SamplingParams::default()
    }
}
