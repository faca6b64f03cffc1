//! In which words a model marks its tool calls and its reasoning, and how that is known.

use crate::choice::choice;
use crate::ids::TokenId;
use crate::text::chat_template::ChatTemplate;
use crate::text::tokenizer::Tokenizer;

choice!(
    /// In which words the model calls tools.
    ToolCallParser {
        /// As its chat template shows it.
        Auto = "auto",
        None = "none",
        Hermes = "hermes",
        Llama3Json = "llama3_json",
        Mistral = "mistral",
    }
);
choice!(
    /// How the model marks its reasoning.
    ReasoningParser {
        /// As its chat template shows it.
        Auto = "auto",
        None = "none",
        DeepseekR1 = "deepseek_r1",
        Qwen3 = "qwen3",
        Mistral = "mistral",
    }
);

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.
    Hermes,
    /// `{"name": …, "parameters": {…}}`, several with `;` between them, the first perhaps behind `<|python_tag|>`:
    /// Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, and since Mistral's tokenizer 11 `[TOOL_CALLS]name[ARGS]{…}`.
    Mistral,
}

/// How a model marks its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>…</think>`; an output that does not begin with either is reasoning up to `</think>`.
    DeepseekR1,
    /// `<think>…</think>`; an output is reasoning where it begins with `<think>` or the prompt ended with it.
    Qwen3,
    /// `[THINK]…[/THINK]`.
    Mistral,
}

/// What is known of a model's outputs; decided once, when it is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChatFormat {
    pub tools: Option<ToolFormat>,
    pub reasoning: Option<ReasoningFormat>,
}

impl ToolFormat {
    /// The text before a call.
    pub fn marker(self) -> &'static str {
        match self {
            ToolFormat::Hermes => "<tool_call>",
            ToolFormat::Llama3Json => "<|python_tag|>",
            ToolFormat::Mistral => "[TOOL_CALLS]",
        }
    }

    /// All texts that mark something, which may be special tokens.
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

    /// The format that a chat template teaches the model; `None` where it is none of these.
    fn of_template(template: &ChatTemplate) -> Option<Self> {
        let says = |text: &str| template.mentions(text);
        // Formats of other models that use the same word: Qwen3-Coder's and GLM's calls are not JSON.
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

    /// Whether an output that begins with neither mark is reasoning.
    pub fn begins_unmarked(self) -> bool {
        self == ReasoningFormat::DeepseekR1
    }

    /// A template that takes reasoning out of the history, or begins it, is one of a model that reasons.
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
    /// What the settings say; where they say `auto`, what the chat template shows.
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

    /// Nothing is looked for: all text is content.
    pub fn is_plain(&self) -> bool {
        self.tools.is_none() && self.reasoning.is_none()
    }

    /// For people: `tool calls hermes, reasoning none`.
    pub fn describe(&self) -> String {
        let tools = self.tools.map_or("none", ToolFormat::name);
        let reasoning = self.reasoning.map_or("none", ReasoningFormat::name);
        format!("tool calls {tools}, reasoning {reasoning}")
    }

    /// Special tokens that have to be in the text for it to be understood.
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
