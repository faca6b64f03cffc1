//! The formats in which models mark tool calls and reasoning, and how the format of a model is found.

use crate::chat_template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use pagetide_base::choice;
use pagetide_base::ids::TokenId;

choice!(
    /// Format in which the model writes tool calls.
    ToolCallParser {
        /// Recognised from the chat template.
        Auto = "auto",
        None = "none",
        Hermes = "hermes",
        Llama3Json = "llama3_json",
        Mistral = "mistral",
    }
);
choice!(
    /// Format in which the model marks its reasoning.
    ReasoningParser {
        /// Recognised from the chat template.
        Auto = "auto",
        None = "none",
        DeepseekR1 = "deepseek_r1",
        Qwen3 = "qwen3",
        Mistral = "mistral",
    }
);

/// A format of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.
    Hermes,
    /// `{"name": …, "parameters": {…}}` (Llama 3). Several calls have `;` between them. The first may follow
    /// `<|python_tag|>`.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`; since Mistral's tokenizer 11 `[TOOL_CALLS]name[ARGS]{…}`.
    Mistral,
}

/// A format of reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>…</think>`. An output that begins with neither tag is reasoning up to `</think>`.
    DeepseekR1,
    /// `<think>…</think>`. An output is reasoning if it begins with `<think>` or if the prompt ended with it.
    Qwen3,
    /// `[THINK]…[/THINK]`.
    Mistral,
}

/// The formats of a model, chosen once when it is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChatFormat {
    pub tools: Option<ToolFormat>,
    pub reasoning: Option<ReasoningFormat>,
}

impl ToolFormat {
    /// The text that marks the beginning of a call.
    pub fn marker(self) -> &'static str {
        match self {
            ToolFormat::Hermes => "<tool_call>",
            ToolFormat::Llama3Json => "<|python_tag|>",
            ToolFormat::Mistral => "[TOOL_CALLS]",
        }
    }

    /// All markers of the format. They may be special tokens.
    fn markers(self) -> &'static [&'static str] {
        match self {
            ToolFormat::Hermes => &["<tool_call>", "</tool_call>"],
            ToolFormat::Llama3Json => &["<|python_tag|>"],
            ToolFormat::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            ToolFormat::Hermes => ToolCallParser::Hermes.name(),
            ToolFormat::Llama3Json => ToolCallParser::Llama3Json.name(),
            ToolFormat::Mistral => ToolCallParser::Mistral.name(),
        }
    }

    /// The format in a chat template; `None` if it has none of these.
    fn of_template(template: &ChatTemplate) -> Option<Self> {
        let says = |text: &str| template.mentions(text);
        // Other formats use the same word: the calls of Qwen3-Coder and GLM are not JSON.
        let other = says("<function=") || says("<arg_key>");
        if says("[TOOL_CALLS]") {
            Some(ToolFormat::Mistral)
        } else if says("<tool_call>") && !other {
            Some(ToolFormat::Hermes)
        } else if says("<|python_tag|>") || says("{\"name\": function name, \"parameters\":") {
            Some(ToolFormat::Llama3Json)
        } else {
            None
        }
    }
}

impl ReasoningFormat {
    pub fn begin(self) -> &'static str {
        match self {
            ReasoningFormat::DeepseekR1 | ReasoningFormat::Qwen3 => "<think>",
            ReasoningFormat::Mistral => "[THINK]",
        }
    }

    pub fn end(self) -> &'static str {
        match self {
            ReasoningFormat::DeepseekR1 | ReasoningFormat::Qwen3 => "</think>",
            ReasoningFormat::Mistral => "[/THINK]",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            ReasoningFormat::DeepseekR1 => ReasoningParser::DeepseekR1.name(),
            ReasoningFormat::Qwen3 => ReasoningParser::Qwen3.name(),
            ReasoningFormat::Mistral => ReasoningParser::Mistral.name(),
        }
    }

    /// Whether an output without an opening tag is reasoning.
    pub fn begins_unmarked(self) -> bool {
        self == ReasoningFormat::DeepseekR1
    }

    /// A template that removes reasoning from the history, or begins it, belongs to a model that reasons.
    fn of_template(template: &ChatTemplate) -> Option<Self> {
        if template.mentions("</think>") {
            Some(ReasoningFormat::Qwen3)
        } else if template.mentions("[/THINK]") {
            Some(ReasoningFormat::Mistral)
        } else {
            None
        }
    }
}

impl ChatFormat {
    /// The formats that the settings name, or for `auto` those in the chat template.
    pub fn choose(tools: ToolCallParser, reasoning: ReasoningParser, template: Option<&ChatTemplate>) -> Self {
        Self {
            tools: match tools {
                ToolCallParser::Auto => template.and_then(ToolFormat::of_template),
                ToolCallParser::None => None,
                ToolCallParser::Hermes => Some(ToolFormat::Hermes),
                ToolCallParser::Llama3Json => Some(ToolFormat::Llama3Json),
                ToolCallParser::Mistral => Some(ToolFormat::Mistral),
            },
            reasoning: match reasoning {
                ReasoningParser::Auto => template.and_then(ReasoningFormat::of_template),
                ReasoningParser::None => None,
                ReasoningParser::DeepseekR1 => Some(ReasoningFormat::DeepseekR1),
                ReasoningParser::Qwen3 => Some(ReasoningFormat::Qwen3),
                ReasoningParser::Mistral => Some(ReasoningFormat::Mistral),
            },
        }
    }

    /// Whether all text is content, because neither format is set.
    pub fn is_plain(&self) -> bool {
        self.tools.is_none() && self.reasoning.is_none()
    }

    /// A description for people: `tool calls hermes, reasoning none`.
    pub fn describe(&self) -> String {
        let tools = self.tools.map_or("none", ToolFormat::name);
        let reasoning = self.reasoning.map_or("none", ReasoningFormat::name);
        format!("tool calls {tools}, reasoning {reasoning}")
    }

    /// Special tokens that must be in the text so that it can be parsed.
    pub fn marker_tokens(&self, tokenizer: &Tokenizer) -> Vec<TokenId> {
        let tools = self.tools.iter().flat_map(|format| format.markers().iter().copied());
        let reasoning = self.reasoning.iter().flat_map(|format| [format.begin(), format.end()]);
        let ids = tools.chain(reasoning).filter_map(|marker| tokenizer.token_id(marker));
        ids.filter(|id| tokenizer.is_special(*id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    fn chosen(template: &str) -> (Option<ToolFormat>, Option<ReasoningFormat>) {
        let template = ChatTemplate::new(template, Map::new()).unwrap();
        let format = ChatFormat::choose(ToolCallParser::Auto, ReasoningParser::Auto, Some(&template));
        (format.tools, format.reasoning)
    }

    #[test]
    fn the_template_tells_the_format() {
        for (template, expected) in [
            ("{{ messages }}", (None, None)),
            (r#"{{ '<tool_call>\n{"name": "' }}"#, (Some(ToolFormat::Hermes), None)),
            (
                "<tool_call>{{ content.split('</think>')[-1] }}",
                (Some(ToolFormat::Hermes), Some(ReasoningFormat::Qwen3)),
            ),
            ("<tool_call>\n<function=example>", (None, None)),
            ("<tool_call>{name}<arg_key>", (None, None)),
            ("{{ '[TOOL_CALLS]' + '[{\"name\": ' }}", (Some(ToolFormat::Mistral), None)),
            ("[TOOL_CALLS] [THINK]x[/THINK]", (Some(ToolFormat::Mistral), Some(ReasoningFormat::Mistral))),
            ("{{- '<|python_tag|>' }}", (Some(ToolFormat::Llama3Json), None)),
            (
                "{{ 'in the format {\"name\": function name, \"parameters\": dictionary of argument name' }}",
                (Some(ToolFormat::Llama3Json), None),
            ),
        ] {
            assert_eq!(chosen(template), expected, "{template}");
        }
    }

    #[test]
    fn settings_come_before_the_template() {
        let template = ChatTemplate::new("<tool_call></think>", Map::new()).unwrap();
        let choose = |tools, reasoning| ChatFormat::choose(tools, reasoning, Some(&template)).describe();
        assert_eq!(choose(ToolCallParser::Auto, ReasoningParser::Auto), "tool calls hermes, reasoning qwen3");
        assert_eq!(choose(ToolCallParser::None, ReasoningParser::None), "tool calls none, reasoning none");
        assert_eq!(
            choose(ToolCallParser::Mistral, ReasoningParser::DeepseekR1),
            "tool calls mistral, reasoning deepseek_r1"
        );
        let without = ChatFormat::choose(ToolCallParser::Llama3Json, ReasoningParser::Auto, None);
        assert_eq!(without.describe(), "tool calls llama3_json, reasoning none");
    }
}
