//! The fields that all APIs share which generate text, and their ranges.

use crate::body::body_fields;
use crate::checks::{in_range, one_of, shown, token_id};
use crate::fields::forms::{EarlyStoppingForms, SamplerNames, StopStrings, TruncationSide};
use crate::fields::memory::MemoryFields;
use crate::model_info::ModelInfo;
use crate::prompt::Prompt;
use crate::request::{AnswerOptions, ApiRequest, FieldNames, PromptRequest, StreamOptions};
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::{MAX_REPETITION_PENALTY, MAX_TEMPERATURE, SamplingParams, TokenMask};
use pagetide_text::output::OutputOptions;
use pagetide_text::stop_regex::{BadStopRegex, StopRegexes};
use pagetide_text::truncation::{Side, Truncation};
use serde_json::{Map, Value};
use std::sync::Arc;

/// Samples of one request at most.
pub const MAX_N: i64 = 128;
pub const MAX_STOP_STRINGS: usize = 16;
/// As in SGLang.
const MAX_STOP_REGEXES: usize = 32;
const MAX_STOP_REGEX_BYTES: usize = 256;
/// Every sampled token is looked up in this list.
pub const MAX_STOP_TOKEN_IDS: usize = 256;
/// Each is looked up in a row of logits, for every token.
const MAX_LOGPROB_TOKEN_IDS: usize = 128;
/// Characters of a `cache_salt`.
const MAX_CACHE_SALT: usize = 1024;
/// Every token is compared with the ends of these.
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD_CHARS: usize = 256;
/// Wrong keys of logit_bias that an error names.
const MAX_SHOWN_KEYS: usize = 8;

body_fields! {
    /// As they stand in the body. Numbers are wide, so that a value out of range reaches the message that says the
    /// range.
    pub struct SamplingFields {
        /// No end token, stop token or stop string before this many tokens; at most max_tokens.
        #[schema(minimum = 0, default = 0)]
        pub min_tokens: Option<i64>,
        /// 0 takes the most likely token; higher is more varied. Default: the model's own, else 1.
        #[schema(minimum = 0, maximum = 100)]
        pub temperature: Option<f64>,
        /// Samples from the most likely tokens that together have this probability. Default: the model's own, else 1.
        #[schema(exclusive_minimum = 0, maximum = 1)]
        pub top_p: Option<f64>,
        /// Samples from this many most likely tokens; 0 or -1: from all. Default: the model's own, else 0.
        #[schema(minimum = -1, maximum = 4294967295_i64)]
        pub top_k: Option<i64>,
        /// Samples from tokens at least this likely, as a part of the most likely one's probability. Default: the
        /// model's own, else 0.
        #[schema(minimum = 0, maximum = 1)]
        pub min_p: Option<f64>,
        /// Answers to generate.
        #[schema(minimum = 1, maximum = 128, default = 1)]
        pub n: Option<i64>,
        /// The same seed and request give the same answer, whatever else is running. Default: a random one.
        pub seed: Option<i64>,
        /// A string that ends the answer, or up to 16 of them; left out of it.
        #[schema(value_type = Option<StopStrings>)]
        pub stop: Option<Value>,
        /// A regular expression, or up to 32 of them: the answer ends with the token that completes a match, which
        /// stays in it. Each has at most 256 bytes, no look-around and no references back.
        #[schema(value_type = Option<StopStrings>)]
        pub stop_regex: Option<Value>,
        /// The answer ends after the stop string or stop token, not before it.
        #[schema(default = false)]
        pub include_stop_str_in_output: bool,
        /// Token ids that end the answer.
        #[schema(max_items = 256)]
        pub stop_token_ids: Option<Vec<i64>>,
        /// End tokens of the model are tokens like any other.
        #[schema(default = false)]
        pub ignore_eos: bool,
        /// Above 0: tokens that were generated already become less likely.
        #[schema(minimum = -2, maximum = 2, default = 0)]
        pub presence_penalty: Option<f64>,
        /// Above 0: tokens become less likely with each time they were generated.
        #[schema(minimum = -2, maximum = 2, default = 0)]
        pub frequency_penalty: Option<f64>,
        /// Above 1: tokens of the prompt and of the answer so far become less likely. Default: the model's own, else 1.
        #[schema(exclusive_minimum = 0, maximum = 100)]
        pub repetition_penalty: Option<f64>,
        /// Another name of repetition_penalty. With it, repeat_last_n is 64 where it is not given, as in llama.cpp.
        #[schema(exclusive_minimum = 0, maximum = 100)]
        pub repeat_penalty: Option<f64>,
        /// Repetition, frequency and presence penalty look at this many last tokens of prompt and answer; 0: at none;
        /// -1: at all. Default: 64 with repeat_penalty, else -1.
        #[schema(minimum = -1, maximum = 4294967295_i64)]
        pub repeat_last_n: Option<i64>,
        /// DRY, above 0: tokens that would go on with a repetition become less likely, the more the longer it is.
        #[schema(minimum = 0, maximum = 100, default = 0)]
        pub dry_multiplier: Option<f64>,
        /// How fast DRY grows with the length of a repetition.
        #[schema(minimum = 1, maximum = 100, default = 1.75)]
        pub dry_base: Option<f64>,
        /// DRY begins with repetitions of this many tokens.
        #[schema(minimum = 0, maximum = 4294967295_i64, default = 2)]
        pub dry_allowed_length: Option<i64>,
        /// DRY looks at this many last tokens of prompt and answer; 0: at none; -1: at all.
        #[schema(minimum = -1, maximum = 4294967295_i64, default = -1)]
        pub dry_penalty_last_n: Option<i64>,
        /// Texts over which no repetition counts; 16 at most, each of 1 to 40 bytes. Default: line break, colon, double
        /// quote and asterisk.
        #[schema(min_items = 1, max_items = 16)]
        pub dry_sequence_breakers: Option<Vec<String>>,
        /// Samples from tokens whose logit is at most this many standard deviations below the best; 0 or -1: from all.
        #[schema(minimum = -1, maximum = 1000, default = -1)]
        pub top_n_sigma: Option<f64>,
        /// Locally typical sampling: from the tokens nearest to the expected surprise that together have this
        /// probability; 1: from all.
        #[schema(minimum = 0, maximum = 1, default = 1)]
        pub typical_p: Option<f64>,
        /// XTC: with this probability, of the tokens that reach xtc_threshold only the least likely stays.
        #[schema(minimum = 0, maximum = 1, default = 0)]
        pub xtc_probability: Option<f64>,
        /// The probability that a token needs for XTC; above 0.5 XTC is off.
        #[schema(minimum = 0, maximum = 1, default = 0.1)]
        pub xtc_threshold: Option<f64>,
        /// Above 0: the temperature is in temperature ± this, the higher the more open the choice is.
        #[schema(minimum = 0, maximum = 100, default = 0)]
        pub dynatemp_range: Option<f64>,
        /// With dynatemp_range: above 1 favours low temperatures, below 1 high ones.
        #[schema(minimum = 0, maximum = 100, default = 1)]
        pub dynatemp_exponent: Option<f64>,
        /// Holds the surprise of the answer near mirostat_tau, in place of the filters (top_k, top_p and the like); 1
        /// or 2: the algorithm; 0: off.
        #[schema(minimum = 0, maximum = 2, default = 0)]
        pub mirostat: Option<i64>,
        /// The surprise that mirostat aims at, in bits.
        #[schema(minimum = 0, maximum = 100, default = 5)]
        pub mirostat_tau: Option<f64>,
        /// How fast mirostat learns.
        #[schema(minimum = 0, maximum = 10, default = 0.1)]
        pub mirostat_eta: Option<f64>,
        /// min_p, typical_p, top_p and XTC leave at least this many tokens.
        #[schema(minimum = 0, maximum = 4294967295_i64, default = 0)]
        pub min_keep: Option<i64>,
        /// The samplers that apply, by llama.cpp's names or letters; the others are off. The order has to be that of
        /// this server. Default: all.
        #[schema(value_type = Option<SamplerNames>)]
        pub samplers: Option<Value>,
        /// Added to the logits, by token id; each in [-100, 100].
        #[schema(value_type = Option<HashMap<String, f64>>)]
        pub logit_bias: Option<Map<String, Value>>,
        /// Only these tokens are generated.
        #[schema(min_items = 1)]
        pub allowed_token_ids: Option<Vec<i64>>,
        /// Texts that do not occur in the answer, wherever they would begin.
        #[schema(max_items = 256)]
        pub bad_words: Option<Vec<String>>,
        /// Answers to make, of which the best n are given; with use_beam_search the width, 16 at most. Default: n.
        #[schema(minimum = 1, maximum = 128)]
        pub best_of: Option<i64>,
        /// Searches the n most likely answers instead of sampling.
        #[schema(default = false)]
        pub use_beam_search: bool,
        /// With use_beam_search: above 0 prefers longer answers, below 0 shorter ones.
        #[schema(minimum = -10, maximum = 10, default = 1)]
        pub length_penalty: Option<f64>,
        /// With use_beam_search: true ends the search with as many whole answers as beams, false when better ones are
        /// unlikely, never when there can be none.
        #[schema(value_type = Option<EarlyStoppingForms>, default = false)]
        pub early_stopping: Option<Value>,
        /// Log-probabilities of the prompt's tokens, each with this many most likely ones. 0 with stream at most. More
        /// than 20, and -1 for all tokens, where server.max_logprobs lets it.
        #[schema(minimum = 0, maximum = 20)]
        pub prompt_logprobs: Option<i64>,
        /// With logprobs: these tokens with their log-probabilities instead of the most likely ones, and the chosen
        /// token. 128 at most.
        pub logprob_token_ids: Option<Vec<i64>>,
        /// Leaves special tokens out of the text.
        #[schema(default = true)]
        pub skip_special_tokens: Option<bool>,
        /// With skip_special_tokens: false, whether a special token may begin with the space that some tokenizers put
        /// between all tokens. Byte-level tokenizers (Llama 3, Qwen) have no such space, and this changes nothing.
        #[schema(default = true)]
        pub spaces_between_special_tokens: Option<bool>,
        /// Cuts a longer prompt to its last tokens, this many; -1: to as many as leave room for max_tokens. Special
        /// tokens that the tokenizer puts before a text stay.
        #[schema(minimum = -1)]
        pub truncate_prompt_tokens: Option<i64>,
        /// With truncate_prompt_tokens: left cuts off the prompt's beginning, right its end; exactly, special tokens
        /// included. Default: left, but for these.
        #[schema(value_type = Option<TruncationSide>)]
        pub truncation_side: Option<String>,
        /// The answer says the token ids of prompt and output.
        #[schema(default = false)]
        pub return_token_ids: bool,
        /// Log-probabilities name tokens by their ids, as token_id:5. Default: server.return_tokens_as_token_ids.
        pub return_tokens_as_token_ids: Option<bool>,
        /// Lower goes first, where the server schedules by priority.
        #[schema(minimum = -2147483648, maximum = 2147483647, default = 0)]
        pub priority: Option<i64>,
        /// Requests share cached prefixes only with those of the same salt.
        #[schema(min_length = 1, max_length = 1024)]
        pub cache_salt: Option<String>,
        /// Answer as server-sent events, the last of which is `[DONE]`.
        #[schema(default = false)]
        pub stream: bool,
        /// Whether a stream says in comments (lines that begin with a colon) when memory pressure pauses it and when it
        /// goes on. Default: as the server is set (server.pause_comments).
        pub pause_comments: Option<bool>,
        /// Only with stream.
        pub stream_options: Option<StreamOptions>,
    }
}

impl SamplingFields {
    /// The engine's parameters but for `max_tokens` and `logprobs`, which the endpoints read differently.
    pub fn params(&self, model: &ModelInfo) -> Result<SamplingParams, ApiError> {
        let defaults = &model.default_sampling;
        let number = |name: &str, given: Option<f64>, default: Option<f32>, off: f32, low: f64, high: f64| match given {
            // What is above 0 stays so.
            Some(value) if value > 0.0 => in_range(name, value, low..=high).map(|v| (v as f32).max(f32::MIN_POSITIVE)),
            Some(value) => in_range(name, value, low..=high).map(|value| value as f32),
            None => Ok(default.unwrap_or(off)),
        };
        // 0 is refused, so the error does not name it as allowed.
        let above_0 = |name: &str, given: Option<f64>, default: Option<f32>, high: f64| match given {
            Some(value) if value <= 0.0 || value > high => {
                Err(ApiError::invalid(name, format!("{name} must be above 0 and at most {high}, got {value}")))
            }
            given => number(name, given, default, 1.0, 0.0, high),
        };
        let (repetition_penalty, given_penalty) = self.repetition_penalty()?;
        let mut params = SamplingParams {
            max_tokens: 0,
            min_tokens: in_range("min_tokens", self.min_tokens.unwrap_or(0), 0..=i64::from(u32::MAX))? as u32,
            temperature: number("temperature", self.temperature, defaults.temperature, 1.0, 0.0, MAX_TEMPERATURE)?,
            top_p: above_0("top_p", self.top_p, defaults.top_p, 1.0)?,
            top_k: self.top_k()?.or(defaults.top_k).unwrap_or(0),
            min_p: number("min_p", self.min_p, defaults.min_p, 0.0, 0.0, 1.0)?,
            presence_penalty: number("presence_penalty", self.presence_penalty, None, 0.0, -2.0, 2.0)?,
            frequency_penalty: number("frequency_penalty", self.frequency_penalty, None, 0.0, -2.0, 2.0)?,
            repetition_penalty: above_0(
                repetition_penalty,
                given_penalty,
                defaults.repetition_penalty,
                MAX_REPETITION_PENALTY,
            )?,
            repeat_last_n: None,
            extra: None,
            logit_bias: self.logit_bias(model.vocab_size)?,
            allowed_tokens: self.allowed_tokens(model.vocab_size)?,
            bad_words: self.bad_words(model)?,
            pooling: None,
            beam: None,
            seed: 0,
            eos_token_ids: Vec::new(),
            stop_token_ids: self.stop_token_ids(model.vocab_size)?,
            logprobs: None,
            logprob_token_ids: Vec::new(),
            prompt_logprobs: num_logprobs("prompt_logprobs", self.prompt_logprobs, model)?,
        };
        self.set_samplers(&mut params)?;
        for (name, value) in [("top_p", params.top_p), ("repetition_penalty", params.repetition_penalty)] {
            if value <= 0.0 {
                return Err(ApiError::invalid(name, format!("{name} must be above 0, got {value}")));
            }
        }
        Ok(params)
    }

    /// Has the tokens reported that the client names. `params` and `answer` know already how many log-probabilities it
    /// wants.
    pub fn log_tokens(
        &self,
        params: &mut SamplingParams,
        answer: &mut AnswerOptions,
        vocab_size: u32,
    ) -> Result<(), ApiError> {
        const PARAM: &str = "logprob_token_ids";
        let ids = self.logprob_token_ids.as_deref().unwrap_or_default();
        if ids.is_empty() {
            return Ok(());
        }
        let invalid = |message: &str| Err(ApiError::invalid(PARAM, message));
        let Some(num_top) = answer.logprobs else {
            return invalid("logprob_token_ids is only allowed with logprobs");
        };
        if self.use_beam_search {
            return invalid("logprob_token_ids and use_beam_search cannot be combined");
        }
        if answer.prompt_only {
            return invalid("logprob_token_ids is not allowed with max_tokens: 0, which generates no token");
        }
        params.logprob_token_ids = logged_tokens(PARAM, ids, vocab_size)?;
        // With the chosen token. An echoed prompt keeps the most likely ones.
        let num = num_top.max(params.logprob_token_ids.len() as u32 + 1);
        (params.logprobs, answer.logprobs) = (Some(num), Some(num));
        Ok(())
    }

    pub fn n(&self) -> Result<u32, ApiError> {
        in_range("n", self.n.unwrap_or(1), 1..=MAX_N).map(|n| n as u32)
    }

    pub fn seed(&self) -> Option<u64> {
        self.seed.map(|seed| seed as u64)
    }

    /// Whether the answer is a stream that says when it pauses.
    pub fn pause_comments(&self, model: &ModelInfo) -> bool {
        self.stream && self.pause_comments.unwrap_or_else(|| model.server.get().pause_comments)
    }

    /// `with_usage`: a stream has usage, whether or not its options ask for it.
    pub fn stream(&self, with_usage: bool) -> Result<Option<StreamOptions>, ApiError> {
        if !self.stream && self.stream_options.is_some() {
            return Err(ApiError::invalid("stream_options", "stream_options is only allowed with stream: true"));
        }
        let options = self.stream_options.unwrap_or_default();
        let include_usage = options.include_usage || with_usage;
        Ok(self.stream.then_some(StreamOptions { include_usage, ..options }))
    }

    /// The prompt's log-probabilities are one big field, as in vLLM only of a whole answer.
    pub fn check_streamed_prompt_logprobs(&self) -> Result<(), ApiError> {
        if self.stream && self.prompt_logprobs.is_some_and(|num_top| num_top != 0) {
            return Err(ApiError::invalid("prompt_logprobs", "prompt_logprobs is not available with stream: true"));
        }
        Ok(())
    }

    /// What all APIs read the same way; they add log-probabilities and echo.
    pub fn answer(
        &self,
        params: &SamplingParams,
        names: &FieldNames,
        model: &ModelInfo,
    ) -> Result<AnswerOptions, ApiError> {
        let (stop, stop_regexes) = (self.stop_strings(names.stop)?, self.stop_regexes()?);
        if !stop.is_empty() {
            model.tokenizer.check_present(names.stop, "finding stop strings")?;
        }
        if !stop_regexes.is_empty() {
            model.tokenizer.check_present("stop_regex", "finding a match in the text")?;
        }
        let as_ids = self.return_tokens_as_token_ids.unwrap_or(model.server.get().return_tokens_as_token_ids);
        Ok(AnswerOptions {
            text: OutputOptions {
                kept_tokens: Arc::default(),
                skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
                join_added_tokens: self.spaces_between_special_tokens == Some(false),
                stop,
                stop_regexes,
                include_stop_str_in_output: self.include_stop_str_in_output,
                min_tokens: params.min_tokens as usize,
            },
            prompt_logprobs: params.prompt_logprobs,
            return_token_ids: self.return_token_ids,
            tokens_as_ids: as_ids || model.tokenizer.is_absent(),
            ..AnswerOptions::default()
        })
    }

    /// The request, with what the fields say beside the parameters. `each` has the parameters.
    pub fn into_request(
        mut self,
        prompts: Vec<Prompt>,
        mut each: PromptRequest,
        answer: AnswerOptions,
        memory: &MemoryFields,
        model: &ModelInfo,
    ) -> Result<ApiRequest, ApiError> {
        if let Some(grammar) = &mut each.grammar
            && model.server.get().closes_objects()
        {
            grammar.spec.close_objects();
        }
        let (n, best_of) = (self.n()?, self.best_of()?);
        let in_every_chunk = model.server.get().force_include_usage;
        let mut stream = self.stream(memory.include_kv_usage == Some(true) || in_every_chunk)?;
        if let Some(options) = &mut stream {
            options.continuous_usage_stats |= in_every_chunk;
        }
        let mut core = each.core;
        let params = Arc::make_mut(&mut core.params);
        self.search(params, &answer)?;
        self.check_streamed_prompt_logprobs()?;
        core.n = if params.beam.is_some() { n } else { best_of };
        core.priority = priority(self.priority)?;
        core.cache_salt = cache_salt(self.cache_salt.take())?;
        core.terms = memory.terms()?;
        let (ignore_eos, seed) = (self.ignore_eos, self.seed());
        let truncation = truncation(self.truncate_prompt_tokens, self.truncation_side.as_deref(), model)?;
        let each = PromptRequest { ignore_eos, seed, truncation, core, ..each };
        Ok(ApiRequest { n, answer, stream, ..ApiRequest::new(prompts, each) })
    }

    /// `None`: not given; `Some(0)`: off, also written -1.
    fn top_k(&self) -> Result<Option<u32>, ApiError> {
        match self.top_k {
            None => Ok(None),
            Some(-1 | 0) => Ok(Some(0)),
            Some(k) => u32::try_from(k).map(Some).map_err(|_| {
                ApiError::invalid("top_k", format!("top_k must be at least 1, or 0 or -1 for off, got {k}"))
            }),
        }
    }

    fn stop_strings(&self, param: &str) -> Result<Vec<String>, ApiError> {
        one_or_several(param, self.stop.as_ref(), MAX_STOP_STRINGS)
    }

    fn stop_regexes(&self) -> Result<StopRegexes, ApiError> {
        const PARAM: &str = "stop_regex";
        let patterns = one_or_several(PARAM, self.stop_regex.as_ref(), MAX_STOP_REGEXES)?;
        if let Some(long) = patterns.iter().find(|pattern| pattern.len() > MAX_STOP_REGEX_BYTES) {
            let message = format!("{PARAM} must have at most {MAX_STOP_REGEX_BYTES} bytes, got {}", long.len());
            return Err(ApiError::invalid(PARAM, message));
        }
        StopRegexes::new(patterns).map_err(|BadStopRegex { index, message }| {
            let place =
                if matches!(self.stop_regex, Some(Value::Array(_))) { format!("[{index}]") } else { String::new() };
            let param = format!("{PARAM}{place}");
            ApiError::invalid(
                &param,
                format!("{param} must be a regular expression that this server can run: {message}"),
            )
        })
    }

    fn stop_token_ids(&self, vocab_size: u32) -> Result<Vec<u32>, ApiError> {
        let ids = self.stop_token_ids.as_deref().unwrap_or_default();
        if ids.len() > MAX_STOP_TOKEN_IDS {
            let message = format!("stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} ids, got {}", ids.len());
            return Err(ApiError::invalid("stop_token_ids", message));
        }
        ids.iter().enumerate().map(|(i, id)| token_id(format_args!("stop_token_ids[{i}]"), *id, vocab_size)).collect()
    }

    fn allowed_tokens(&self, vocab_size: u32) -> Result<Option<Arc<TokenMask>>, ApiError> {
        let Some(ids) = &self.allowed_token_ids else { return Ok(None) };
        if ids.is_empty() {
            return Err(ApiError::invalid("allowed_token_ids", "allowed_token_ids must have at least one id, got 0"));
        }
        let checked = |(i, id): (usize, &i64)| token_id(format_args!("allowed_token_ids[{i}]"), *id, vocab_size);
        let ids = ids.iter().enumerate().map(checked).collect::<Result<Vec<_>, _>>()?;
        Ok(Some(Arc::new(TokenMask::new(ids))))
    }

    /// Each word as it is tokenized at the beginning of a text and, where that is another token, behind a space.
    fn bad_words(&self, model: &ModelInfo) -> Result<Vec<Vec<u32>>, ApiError> {
        let words = self.bad_words.as_deref().unwrap_or_default();
        if words.len() > MAX_BAD_WORDS {
            let message = format!("bad_words must have at most {MAX_BAD_WORDS} words, got {}", words.len());
            return Err(ApiError::invalid("bad_words", message));
        }
        let mut all = Vec::new();
        for (i, word) in words.iter().enumerate() {
            let param = format!("bad_words[{i}]");
            let length = word.chars().count();
            if word.trim().is_empty() || length > MAX_BAD_WORD_CHARS {
                let message = format!(
                    "{param} must have 1 to {MAX_BAD_WORD_CHARS} characters that are not all white space, got {length}"
                );
                return Err(ApiError::invalid(param, message));
            }
            let word = word.trim_start();
            let first = model.tokenizer.encode(word, false)?;
            let later = model.tokenizer.encode(&format!(" {word}"), false)?;
            let is_another = later.len() == first.len() && later.first() != first.first();
            all.extend([Some(first), is_another.then_some(later)].into_iter().flatten().filter(|ids| !ids.is_empty()));
        }
        Ok(all)
    }

    fn logit_bias(&self, vocab_size: u32) -> Result<Vec<(u32, f32)>, ApiError> {
        let Some(biases) = &self.logit_bias else { return Ok(Vec::new()) };
        let (mut by_id, mut wrong) = (Vec::with_capacity(biases.len()), Vec::new());
        for (key, bias) in biases {
            let param = format!("logit_bias.{key}");
            let Ok(id) = key.parse() else {
                wrong.push(key);
                continue;
            };
            let bias = bias
                .as_f64()
                .ok_or_else(|| ApiError::invalid(&param, format!("{param} must be a number, got {}", shown(bias))))?;
            by_id.push((token_id(&param, id, vocab_size)?, in_range(&param, bias, -100.0..=100.0)? as f32));
        }
        if let Some(first) = wrong.first() {
            let more = if wrong.len() > MAX_SHOWN_KEYS { " and others" } else { "" };
            let wrong: Vec<String> = wrong.iter().take(MAX_SHOWN_KEYS).map(|key| format!("{key:?}")).collect();
            let message = format!("the keys of logit_bias must be token ids, got {}{more}", wrong.join(", "));
            return Err(ApiError::invalid(format!("logit_bias.{first}"), message));
        }
        Ok(by_id)
    }
}

/// A text, or an array of at most `most`, none of them empty.
fn one_or_several(param: &str, given: Option<&Value>, most: usize) -> Result<Vec<String>, ApiError> {
    let text = |(i, item): (usize, &Value)| {
        let param = format!("{param}[{i}]");
        let text = item.as_str().map(str::to_owned);
        text.ok_or_else(|| ApiError::invalid(&param, format!("{param} must be a string, got {}", shown(item))))
    };
    let texts = match given {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items.iter().enumerate().map(text).collect::<Result<_, _>>()?,
        Some(other) => {
            let message = format!("{param} must be a string or an array of strings, got {}", shown(other));
            return Err(ApiError::invalid(param, message));
        }
    };
    if texts.len() > most {
        let message = format!("{param} must have at most {most} strings, got {}", texts.len());
        return Err(ApiError::invalid(param, message));
    }
    if texts.iter().any(String::is_empty) {
        return Err(ApiError::invalid(param, format!("{param} must not contain an empty string")));
    }
    Ok(texts)
}

/// A number of most likely tokens to report.
pub fn num_logprobs(param: &str, given: Option<i64>, model: &ModelInfo) -> Result<Option<u32>, ApiError> {
    let vocabulary = i64::from(model.vocab_size);
    let Some(given) = given else { return Ok(None) };
    let most = match model.server.get().max_logprobs {
        0 => vocabulary,
        most => most as i64,
    };
    // -1 is all of them.
    let num = if given == -1 { vocabulary } else { given };
    if (0..=most).contains(&num) {
        return Ok(Some(num.min(vocabulary) as u32));
    }
    let message = format!("{param} must be in [0, {most}] (server.max_logprobs), got {given}");
    Err(ApiError::invalid(param, message))
}

/// The tokens, each once, whose log-probabilities are reported.
pub fn logged_tokens(param: &str, ids: &[i64], vocab_size: u32) -> Result<Vec<u32>, ApiError> {
    if ids.len() > MAX_LOGPROB_TOKEN_IDS {
        let message = format!("{param} must have at most {MAX_LOGPROB_TOKEN_IDS} ids, got {}", ids.len());
        return Err(ApiError::invalid(param, message));
    }
    let mut tokens = Vec::with_capacity(ids.len());
    for (i, id) in ids.iter().enumerate() {
        let token = token_id(format_args!("{param}[{i}]"), *id, vocab_size)?;
        if !tokens.contains(&token) {
            tokens.push(token);
        }
    }
    Ok(tokens)
}

/// A number of tokens to generate, at least `least`. The intake checks whether that many fit.
pub fn max_tokens(param: &str, given: i64, least: i64) -> Result<u32, ApiError> {
    in_range(param, given, least..=i64::from(u32::MAX)).map(|tokens| tokens as u32)
}

/// `min_tokens` against a `max_tokens` that was given; one that was not is known at the intake.
pub fn check_min_tokens(params: &SamplingParams, names: &FieldNames) -> Result<(), ApiError> {
    if params.max_tokens > 0 && params.min_tokens > params.max_tokens {
        let (name, most) = (names.max_tokens, params.max_tokens);
        let message = format!("min_tokens must be in [0, {name} = {most}], got {}", params.min_tokens);
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok(())
}
/// The field `priority`.
pub fn priority(given: Option<i64>) -> Result<i32, ApiError> {
    let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
    in_range("priority", given.unwrap_or(0), range).map(|priority| priority as i32)
}

/// The field `cache_salt`.
pub fn cache_salt(given: Option<String>) -> Result<Option<String>, ApiError> {
    let length = given.as_ref().map(|salt| salt.chars().count());
    match length {
        Some(length) if !(1..=MAX_CACHE_SALT).contains(&length) => Err(ApiError::invalid(
            "cache_salt",
            format!("cache_salt must have 1 to {MAX_CACHE_SALT} characters, got {length}"),
        )),
        _ => Ok(given),
    }
}

/// The fields `truncate_prompt_tokens` and `truncation_side`.
pub fn truncation(keep: Option<i64>, side: Option<&str>, model: &ModelInfo) -> Result<Option<Truncation>, ApiError> {
    one_of("truncation_side", side, &["left", "right"])?;
    let side = side.map(|side| if side == "left" { Side::Left } else { Side::Right });
    let keep = match keep {
        None => return Ok(None),
        Some(-1) => None,
        Some(tokens) if (1..=i64::from(model.max_model_len)).contains(&tokens) => Some(tokens as u32),
        Some(other) => {
            let most = model.max_model_len;
            let smaller = if other > 0 { ". Please request a smaller truncation size." } else { "" };
            let message = format!("truncate_prompt_tokens must be in [1, {most}] or -1, got {other}{smaller}");
            return Err(ApiError::invalid("truncate_prompt_tokens", message));
        }
    };
    Ok(Some(Truncation { keep, side }))
}
