//! The fields that Responses and Messages have in common with a chat.

use super::memory::MemoryFields;
use super::sampling::SamplingFields;
use super::structured::StructuredFields;
use crate::body::{BodyFields, FieldSource};
use crate::chat::TemplateFields;

/// Fields with the same name and meaning in every chat API: what OpenAI's APIs share, and vLLM's additions.
pub const SHARED: &[&str] = &[
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "dynatemp_range",
    "frequency_penalty",
    "ignore_eos",
    "include_kv_usage",
    "include_stop_str_in_output",
    "logit_bias",
    "max_pause_ms",
    "min_keep",
    "min_p",
    "min_tokens",
    "mirostat",
    "mirostat_eta",
    "mirostat_tau",
    "model",
    "pause_comments",
    "preemptible",
    "presence_penalty",
    "priority",
    "repeat_last_n",
    "repeat_penalty",
    "repetition_penalty",
    "samplers",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_regex",
    "stop_token_ids",
    "stream",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_n_sigma",
    "top_p",
    "truncate_prompt_tokens",
    "truncation_side",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
];

/// Of the groups' fields those that are in [`SHARED`].
#[derive(Debug, Default)]
pub struct SharedFields {
    pub sampling: SamplingFields,
    pub memory: MemoryFields,
    pub template: TemplateFields,
    pub structured: StructuredFields,
}

impl BodyFields for SharedFields {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        Ok(SHARED.contains(&name)
            && (self.sampling.read(name, source)?
                || self.memory.read(name, source)?
                || self.template.read(name, source)?
                || self.structured.read(name, source)?))
    }

    fn add_names(names: &mut Vec<&'static str>) {
        names.extend(SHARED);
    }
}
