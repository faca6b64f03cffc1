//! Fields of OpenAI, vLLM, SGLang and llama.cpp that change what is generated and that this server does not have.
//! Ignoring them would give a wrong answer with status 200, so they are refused where they ask for something.

use crate::body::refused::RefusedTable;
use serde_json::Value;

/// Chat's and completions' fields that may be given only as null, false, empty, or a number that changes nothing.
#[derive(Debug, Default)]
pub struct UnsupportedFields;

const LEAVE_OUT: &str = "leave it out";

/// Fields with the number that turns them off. Programs that know llama.cpp send it.
const OFF: [(&str, f64); 11] = [
    ("dry_multiplier", 0.0),
    ("dynatemp_range", 0.0),
    ("mirostat", 0.0),
    ("n_predict", -1.0),
    ("n_probs", 0.0),
    ("repeat_penalty", 1.0),
    ("t_max_predict_ms", 0.0),
    ("tfs_z", 1.0),
    ("top_n_sigma", -1.0),
    ("typical_p", 1.0),
    ("xtc_probability", 0.0),
];

impl RefusedTable for UnsupportedFields {
    /// Each with what to do instead.
    const FIELDS: &'static [(&'static str, &'static str)] = &[
        ("audio", LEAVE_OUT),
        ("custom_logit_processor", LEAVE_OUT),
        ("dry_multiplier", LEAVE_OUT),
        ("dynatemp_range", LEAVE_OUT),
        ("function_call", "OpenAI has replaced it: use tool_choice"),
        ("functions", "OpenAI has replaced it: use tools"),
        ("input_embeds", LEAVE_OUT),
        ("logits_processors", LEAVE_OUT),
        ("logprob_token_ids", LEAVE_OUT),
        ("lora", LEAVE_OUT),
        ("lora_path", LEAVE_OUT),
        ("mirostat", LEAVE_OUT),
        ("n_predict", "use max_tokens"),
        ("n_probs", "use logprobs"),
        ("no_stop_trim", "use include_stop_str_in_output"),
        ("post_sampling_probs", LEAVE_OUT),
        ("prompt_embeds", LEAVE_OUT),
        ("repeat_penalty", "use repetition_penalty"),
        ("return_tokens_as_token_ids", "return_token_ids gives the ids beside the texts"),
        ("stop_regex", "use stop"),
        ("suffix", LEAVE_OUT),
        ("t_max_predict_ms", LEAVE_OUT),
        ("tfs_z", LEAVE_OUT),
        ("top_n_sigma", LEAVE_OUT),
        ("typical_p", LEAVE_OUT),
        ("xtc_probability", LEAVE_OUT),
    ];

    fn asks(name: &str, value: &Value) -> bool {
        let is_off = OFF.iter().any(|(known, off)| *known == name && value.as_f64() == Some(*off));
        asks_for_something(value) && !is_off
    }

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported; {instead}")
    }
}

fn asks_for_something(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::read_value;
    use crate::body::refused::Refused;
    use pagetide_base::error::ApiError;
    use serde_json::json;

    fn refuse(body: &Value) -> Result<(), ApiError> {
        read_value::<Refused<UnsupportedFields>>(body)?.body.check()
    }

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (name, value) in [
            ("functions", json!([{"name": "f"}])),
            ("function_call", json!("auto")),
            ("suffix", json!("end")),
            ("audio", json!({"voice": "a"})),
            ("stop_regex", json!("[.!?]")),
            ("mirostat", json!(2)),
            ("typical_p", json!(0.9)),
        ] {
            let error = refuse(&json!({ name: value })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_not() {
        for body in [json!({"functions": null, "suffix": ""}), json!({"functions": [], "audio": {}}), json!({})]
            .into_iter()
            .chain(OFF.map(|(name, off)| json!({ name: off })))
            .chain([json!({"mirostat": 0, "repeat_penalty": 1, "top_n_sigma": -1})])
        {
            assert_eq!(refuse(&body), Ok(()), "{body}");
        }
    }
}
