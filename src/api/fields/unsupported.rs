//! Fields of OpenAI, vLLM, SGLang and llama.cpp that this server knows and does not have. Those that change what is
//! generated are refused where they ask for something: ignoring them would give a wrong answer with status 200. The
//! others are hints that change no answer, and have no effect.

use crate::body::refused::{Off, RefusedField, RefusedTable, refuse};

/// Fields that may be given only with values that ask for nothing, at every endpoint that does not read them itself.
#[derive(Debug, Default)]
pub struct UnsupportedFields;

const LEAVE_OUT: &str = "leave it out";
const NO_MEDIA: &str = "this server reads text only";
const NO_DISAGGREGATION: &str = "this server computes prefill and decode itself";
const NOT_REPORTED: &str = "the answer cannot say this";
const OF_LLAMA_CPP: &str = "it is set by llama.cpp's own templates";

/// A hint that changes no answer.
const fn hint(name: &'static str) -> RefusedField {
    refuse(name, "").unless(Off::Any)
}

impl RefusedTable for UnsupportedFields {
    /// Each with what to do instead.
    const FIELDS: &'static [RefusedField] = &[
        hint("adaptive_decay"),
        refuse("adaptive_target", LEAVE_OUT).unless(Off::Number(-1.0)),
        refuse("apply_softmax", LEAVE_OUT),
        refuse("audio", LEAVE_OUT),
        hint("backend_sampling"),
        hint("betas"),
        refuse("bootstrap_host", NO_DISAGGREGATION),
        refuse("bootstrap_port", NO_DISAGGREGATION),
        refuse("bootstrap_room", NO_DISAGGREGATION),
        hint("cache_prompt"),
        refuse("chat_format", OF_LLAMA_CPP),
        refuse("chat_parser", OF_LLAMA_CPP),
        refuse("chat_template_kwargs", "no chat template is rendered here"),
        refuse("content", "use input"),
        refuse("continue_final_message", "a completion always continues its prompt"),
        hint("custom_labels"),
        refuse("custom_logit_processor", LEAVE_OUT),
        refuse("custom_params", LEAVE_OUT),
        refuse("data", "use input"),
        hint("data_parallel_rank"),
        refuse("disagg_prefill_dp_rank", NO_DISAGGREGATION),
        refuse("ec_transfer_params", NO_DISAGGREGATION),
        refuse("embd_normalize", "use normalize").unless(Off::Number(2.0)),
        refuse("embed_override_token_id", LEAVE_OUT),
        refuse("embed_overrides", LEAVE_OUT),
        refuse("enable_response_messages", NOT_REPORTED),
        refuse("extra_key", "use cache_salt"),
        refuse("function_call", "OpenAI has replaced it: use tool_choice"),
        refuse("functions", "OpenAI has replaced it: use tools"),
        refuse("generation_prompt", OF_LLAMA_CPP),
        refuse("grammar_lazy", OF_LLAMA_CPP),
        refuse("grammar_triggers", OF_LLAMA_CPP),
        hint("grammar_type"),
        hint("guided_decoding_backend"),
        hint("id_slot"),
        refuse("images_config", NO_MEDIA),
        refuse("input_embeds", LEAVE_OUT),
        refuse("input_ids", "use messages, or /v1/completions with token ids as the prompt"),
        refuse("instruct", LEAVE_OUT),
        refuse("instruction", LEAVE_OUT),
        refuse("item_embed_overrides", LEAVE_OUT),
        refuse("item_first", LEAVE_OUT),
        refuse("kv_transfer_params", NO_DISAGGREGATION),
        refuse("label_token_ids", LEAVE_OUT),
        refuse("logits_processors", LEAVE_OUT),
        refuse("lora", LEAVE_OUT),
        refuse("lora_path", LEAVE_OUT),
        refuse("max_completion_tokens", "use max_tokens"),
        hint("max_dynamic_patch"),
        refuse("max_tokens_per_doc", "use truncate_prompt_tokens").unless(Off::Number(0.0)),
        refuse("max_tokens_per_query", "use truncate_prompt_tokens").unless(Off::Number(0.0)),
        hint("media_io_kwargs"),
        hint("message_delimiters"),
        hint("min_dynamic_patch"),
        refuse("mm_payload", NO_MEDIA),
        hint("mm_processor_kwargs"),
        hint("n_cache_reuse"),
        refuse("n_cmpl", "use n").unless(Off::Number(1.0)),
        hint("n_discard"),
        refuse("n_indent", LEAVE_OUT).unless(Off::Number(0.0)),
        hint("n_keep"),
        refuse("n_predict", "use max_tokens").unless(Off::Number(-1.0)),
        refuse("n_probs", "use logprobs").unless(Off::Number(0.0)),
        refuse("no_stop_trim", "use include_stop_str_in_output"),
        refuse("parse_tool_calls", "use tool_choice: \"none\"").unless(Off::True),
        refuse("post_sampling_probs", LEAVE_OUT),
        hint("preserved_tokens"),
        refuse("prompt", "use messages"),
        refuse("prompt_embeds", LEAVE_OUT),
        refuse("query", "use text_1"),
        refuse("query_embed_overrides", LEAVE_OUT),
        hint("reasoning_budget_end_tag"),
        hint("reasoning_budget_end_tags"),
        hint("reasoning_budget_message"),
        hint("reasoning_budget_start_tag"),
        refuse("reasoning_budget_tokens", LEAVE_OUT).unless(Off::Number(-1.0)),
        hint("reasoning_control"),
        refuse("reasoning_format", "reasoning is a field of its own where server's model.reasoning_parser is set")
            .unless(Off::Words(&["auto", "deepseek"])),
        refuse("repetition_detection", LEAVE_OUT),
        refuse("response_fields", "the answer has all its fields"),
        refuse("return_cached_tokens_details", "use include_kv_usage"),
        refuse("return_flat_raw_output_top_logprobs", NOT_REPORTED),
        refuse("return_flat_raw_top_logprobs_b64", NOT_REPORTED),
        refuse("return_hidden_states", NOT_REPORTED),
        refuse("return_input_ids_in_sglext", "use return_token_ids"),
        refuse("return_meta_info", NOT_REPORTED),
        refuse("return_mm_kwargs", NO_MEDIA),
        refuse("return_output_ids_in_sglext", "use return_token_ids"),
        refuse("return_pooled_hidden_states", NOT_REPORTED),
        refuse("return_progress", NOT_REPORTED),
        refuse("return_prompt_text", NOT_REPORTED),
        refuse("return_prompt_token_ids", "use return_token_ids"),
        refuse("return_routed_experts", NOT_REPORTED),
        refuse("return_sampling_mask", NOT_REPORTED),
        refuse("return_spec_tokens_details", NOT_REPORTED),
        refuse("return_token_logprobs", "use logprobs"),
        refuse("return_token_offsets", NOT_REPORTED),
        refuse("return_tokens", "use return_token_ids"),
        hint("routed_dp_rank"),
        hint("routed_experts_prompt_start"),
        hint("routed_experts_start_len"),
        refuse("sampling_logprobs_mode", "log-probabilities are those of the model, before sampling"),
        refuse("score_extraction_token", LEAVE_OUT),
        refuse("separate_reasoning", LEAVE_OUT).unless(Off::True),
        hint("session_id"),
        refuse("session_params", "send the whole conversation"),
        hint("speculative.n_max"),
        hint("speculative.n_min"),
        hint("speculative.ngram_min_hits"),
        hint("speculative.ngram_size_m"),
        hint("speculative.ngram_size_n"),
        hint("speculative.p_min"),
        hint("speculative.type"),
        hint("sse_ping_interval"),
        hint("stream_interval"),
        refuse("stream_reasoning", LEAVE_OUT).unless(Off::True),
        refuse("t_max_predict_ms", LEAVE_OUT).unless(Off::Number(0.0)),
        refuse("task", LEAVE_OUT),
        refuse("temperature", LEAVE_OUT),
        refuse("tfs_z", LEAVE_OUT).unless(Off::Number(1.0)),
        refuse("thinking", "use chat_template_kwargs"),
        refuse("thinking_budget_tokens", LEAVE_OUT).unless(Off::Number(-1.0)),
        refuse("thinking_token_budget", LEAVE_OUT),
        refuse("timings_per_token", NOT_REPORTED),
        hint("use_audio_in_video"),
        hint("verbose"),
        hint("video_config"),
        refuse("vllm_xargs", LEAVE_OUT),
        refuse("watermark", LEAVE_OUT),
        refuse("watermarking", LEAVE_OUT),
    ];

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported; {instead}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::read_value;
    use crate::body::refused::Refused;
    use pagetide_base::error::ApiError;
    use serde_json::{Value, json};

    fn refused(body: &Value) -> Result<(), ApiError> {
        read_value::<Refused<UnsupportedFields>>(body)?.body.check()
    }

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (name, value) in [
            ("functions", json!([{"name": "f"}])),
            ("function_call", json!("auto")),
            ("audio", json!({"voice": "a"})),
            ("separate_reasoning", json!(false)),
            ("reasoning_format", json!("none")),
            ("thinking_token_budget", json!(100)),
        ] {
            let error = refused(&json!({ name: value })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_not() {
        for body in [
            json!({"functions": null, "lora_path": "", "audio": {}}),
            json!({"n_cmpl": 1, "n_indent": 0, "separate_reasoning": true, "reasoning_format": "auto"}),
            json!({"cache_prompt": false, "id_slot": 3, "session_id": "a"}),
        ] {
            assert_eq!(refused(&body), Ok(()), "{body}");
        }
    }

    #[test]
    fn the_table_is_sorted_by_name_and_has_each_once() {
        assert!(UnsupportedFields::FIELDS.is_sorted_by(|one, next| one.name < next.name));
    }
}
