//! Chat templates: render a conversation as the text of a prompt, like `apply_chat_template` of transformers.
//!
//! A template is an untrusted program: its authors are those of the model, or a client. The cost of a rendering is
//! bounded: `meter` counts it, and `rewrite` wraps every operation for this.

mod builtins;
pub(super) mod meter;
mod rewrite;

use crate::python;
use crate::tokenizer::{named_special_tokens, parse_config};
use meter::{Exceeded, MAX_PROBE_STEPS, MAX_STEPS};
use minijinja::machinery::{eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use pagetide_base::error::{ApiError, StartError};
use rewrite::TemplateProgram;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use time::OffsetDateTime;

/// The input of a chat template.
#[derive(Clone, Debug, Default)]
pub struct ChatPrompt {
    /// Messages as the client sent them (`role`, `content`, …). The content is a string, or a list of text parts.
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    /// The prompt ends with the beginning of an assistant message.
    pub add_generation_prompt: bool,
    /// The prompt ends with the content of the last message, which the model continues.
    pub continue_final_message: bool,
    /// The tokenizer adds its special tokens to the rendered text. Most templates write them themselves.
    pub add_special_tokens: bool,
    /// Additional variables of the template.
    pub kwargs: Map<String, Value>,
    /// A template from the request, instead of the model's.
    pub template: Option<String>,
}

impl ChatPrompt {
    /// Approximate size of the texts in bytes. The cost of rendering and tokenising grows with it.
    pub fn num_bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(num_bytes).sum();
        let tools = self.tools.as_ref().map_or(0, num_bytes);
        let kwargs: usize = self.kwargs.iter().map(|(name, value)| name.len() + num_bytes(value)).sum();
        messages + tools + kwargs
    }

    /// The text of the last message.
    pub fn last_text(&self) -> String {
        self.messages.last().and_then(|message| message.get("content")).map(content_text).unwrap_or_default()
    }
}

/// The bytes of all strings in a value, and one for everything else.
fn num_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(num_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + num_bytes(value)).sum(),
        _ => 1,
    }
}

/// A checkpoint's chat template.
pub type ChatTemplate = Template<'static>;

/// A compiled chat template, from the checkpoint or from a request.
#[derive(Debug)]
pub struct Template<'s> {
    environment: Environment<'s>,
    /// The templates by name.
    programs: Vec<(&'s str, TemplateProgram<'s>)>,
    /// `bos_token` and similar variables of every rendering.
    special_tokens: Map<String, Value>,
    content: ContentForm,
    takes_later_system: bool,
    /// The field that errors of rendering name.
    param: &'static str,
    /// Whether it is only tried, under smaller limits.
    is_tried: bool,
}

/// The form of a message's content that a template expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentForm {
    /// One string. Parts are joined with line breaks.
    Text,
    /// A list of parts.
    Parts,
}

/// Maximum number of templates of a checkpoint. Published ones have two or three.
const MAX_TEMPLATES: usize = 16;
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// Marks the end of the message to be continued. Its trailing space shows whether the template trims content.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// Maximum length of a template's own error message (`raise_exception`), which goes to the client.
const MAX_RAISED: usize = 4096;

/// Keeps the source for the life of the process, because the model is loaded once.
fn kept(source: &str) -> &'static str {
    Box::leak(without_generation_tags(source).into_boxed_str())
}

impl ChatTemplate {
    /// Compiles a template with `special_tokens` (`bos_token`, …) as variables. The source stays in memory.
    pub fn new(source: &str, special_tokens: Map<String, Value>) -> Result<Self, StartError> {
        Self::with_named(vec![(DEFAULT, kept(source))], special_tokens)
    }

    /// The template of a checkpoint: `chat_template.jinja` if there is one, else `chat_template` of
    /// `tokenizer_config.json` (a string, or a list of named templates). `None` if there is neither.
    pub fn from_files(
        chat_template_jinja: Option<&str>,
        tokenizer_config_json: Option<&str>,
    ) -> Result<Option<Self>, StartError> {
        let config = parse_config(tokenizer_config_json)?;
        let special_tokens =
            named_special_tokens(&config).into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
        if let Some(source) = chat_template_jinja {
            return Self::new(source, special_tokens).map(Some);
        }
        let wrong = || {
            StartError::new(
                "tokenizer_config.json: chat_template must be a string or a list of {\"name\": …, \"template\": …}",
            )
        };
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(source)) => Self::new(source, special_tokens).map(Some),
            Some(Value::Array(list)) => {
                let text = |entry: &'_ Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                let named: Option<Vec<(String, String)>> =
                    list.iter().map(|entry| Some((text(entry, "name")?, text(entry, "template")?))).collect();
                let named = named.ok_or_else(wrong)?;
                if named.len() > MAX_TEMPLATES {
                    let message = format!("tokenizer_config.json: chat_template: more than {MAX_TEMPLATES} templates");
                    return Err(StartError::new(message));
                }
                let keep = |(name, source): (String, String)| -> (&'static str, _) { (name.leak(), kept(&source)) };
                Self::with_named(named.into_iter().map(keep).collect(), special_tokens).map(Some)
            }
            Some(_) => Err(wrong()),
        }
    }
}

/// Renders a conversation with a template from the request. For `special_tokens` see [`ChatTemplate::new`].
pub fn render_by_request(
    source: &str,
    special_tokens: Map<String, Value>,
    prompt: &ChatPrompt,
) -> Result<String, ApiError> {
    let source = without_generation_tags(source);
    let mut template = Template::with_named(vec![(DEFAULT, &*source)], special_tokens)
        .map_err(|error| ApiError::invalid("chat_template", error.to_string()))?;
    template.param = "chat_template";
    template.render_chat(prompt)
}

impl<'s> Template<'s> {
    fn with_named(named: Vec<(&'s str, &'s str)>, special_tokens: Map<String, Value>) -> Result<Self, StartError> {
        let (environment, syntax) = environment()?;
        let compile = |(name, source)| {
            let program = rewrite::compile(name, source, &syntax)
                .map_err(|error| StartError::new(format!("chat template: {}", describe(&error))))?;
            Ok((name, program))
        };
        let programs = named.into_iter().map(compile).collect::<Result<_, StartError>>()?;
        let mut template = Self {
            environment,
            programs,
            special_tokens,
            content: ContentForm::Text,
            takes_later_system: true,
            param: "messages",
            is_tried: true,
        };
        template.environment.set_fuel(Some(MAX_PROBE_STEPS));
        template.content = template.content_form();
        template.takes_later_system = template.renders_later_system();
        template.environment.set_fuel(Some(MAX_STEPS));
        template.is_tried = false;
        Ok(template)
    }

    /// The source of the template that chats without tools are rendered by; empty where there is none.
    pub fn source(&self) -> &str {
        self.program(DEFAULT).map_or("", |program| program.instructions.source())
    }

    /// Whether the source of the template contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        self.programs.iter().any(|(_, program)| program.instructions.source().contains(text))
    }

    fn program(&self, name: &str) -> Option<&TemplateProgram<'s>> {
        self.programs.iter().find(|(other, _)| *other == name).map(|(_, program)| program)
    }

    /// The message with its content in the form that the template expects.
    fn with_content(&self, message: &Value) -> Value {
        let content = match (message.get("content"), self.content) {
            (Some(content @ Value::Array(_)), ContentForm::Text) => content_text(content).into(),
            (Some(Value::String(text)), ContentForm::Parts) => json!([{"type": "text", "text": text}]),
            _ => return message.clone(),
        };
        let mut message = message.clone();
        message["content"] = content;
        message
    }

    /// Tries the template with a list of parts. A template for lists shows the text of a part. A template that accepts
    /// strings shows nothing else than for a string.
    fn content_form(&self) -> ContentForm {
        const PROBE: &str = "probe of the content's form";
        let with = |content: Value| {
            let messages = vec![json!({"role": "user", "content": content})];
            self.render(&ChatPrompt { messages, ..ChatPrompt::default() }).ok()
        };
        let text = with(PROBE.into()).filter(|text| text.contains(PROBE));
        let parts = with(json!([{"type": "text", "text": PROBE}])).filter(|text| text.contains(PROBE));
        match (text, parts) {
            (Some(text), Some(parts)) if text == parts => ContentForm::Parts,
            (None, Some(_)) => ContentForm::Parts,
            _ => ContentForm::Text,
        }
    }

    /// Whether system messages may come behind other messages. Some templates refuse them there.
    pub fn takes_later_system(&self) -> bool {
        self.takes_later_system
    }

    /// True where the template knows no system messages at all.
    fn renders_later_system(&self) -> bool {
        let renders = |roles: &[&str]| {
            let messages = roles.iter().map(|role| json!({"role": role, "content": "probe"})).collect();
            self.render_chat(&ChatPrompt { messages, ..ChatPrompt::default() }).is_ok()
        };
        renders(&["system", "user", "assistant", "system", "user"])
            || !renders(&["system", "user", "assistant", "user"])
    }

    /// Sets another clock for `strftime_now`, for reproducible results.
    pub fn with_clock(mut self, clock: fn() -> OffsetDateTime) -> Self {
        set_clock(&mut self.environment, clock);
        self
    }

    /// [`ChatTemplate::render`] with the content of each message in the form that the template expects: parts become
    /// one string, or a string one part.
    pub fn render_chat(&self, prompt: &ChatPrompt) -> Result<String, ApiError> {
        let messages = prompt.messages.iter().map(|message| self.with_content(message)).collect();
        self.render(&ChatPrompt { messages, ..prompt.clone() })
    }

    /// Renders the prompt. An error of the template is an error of the client in `messages`.
    pub fn render(&self, prompt: &ChatPrompt) -> Result<String, ApiError> {
        if prompt.continue_final_message && prompt.add_generation_prompt {
            return Err(ApiError::invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other: the first continues the \
                 last message, the second begins a new one",
            ));
        }
        let has_tools = prompt.tools.as_ref().is_some_and(|tools| !tools.is_null());
        let for_tools = self.program(TOOL_USE).filter(|_| has_tools);
        let program = for_tools.or_else(|| self.program(DEFAULT)).ok_or_else(|| {
            let names: Vec<&str> = self.programs.iter().map(|(name, _)| *name).collect();
            let message = format!("the model has no default chat template, only: {}", names.join(", "));
            ApiError::invalid("messages", message)
        })?;
        let (messages, continued) = if prompt.continue_final_message {
            let (messages, content) = tag_final_message(&prompt.messages)?;
            (Cow::Owned(messages), Some(content))
        } else {
            (Cow::Borrowed(&prompt.messages), None)
        };

        let given = self.special_tokens.iter().chain(&prompt.kwargs);
        let given = given.map(|(name, value)| (name.as_str(), template_value(value)));
        let own = [
            ("messages", messages.iter().map(template_value).collect()),
            ("tools", template_value(prompt.tools.as_ref().unwrap_or(&Value::Null))),
            ("add_generation_prompt", prompt.add_generation_prompt.into()),
        ];
        // Of equal names the last one counts.
        let variables = minijinja::Value::from_pairs([("documents", ().into())].into_iter().chain(given).chain(own));
        let input = messages.iter().chain(&prompt.tools).chain(prompt.kwargs.values()).map(num_bytes).sum::<usize>();
        let render = || {
            let mut text = String::new();
            let (instructions, blocks) = (&program.instructions, &program.blocks);
            let mut out = make_string_output(&mut text);
            eval(&self.environment, instructions, variables, blocks, &mut out, AutoEscape::None)?;
            Ok(text)
        };
        let text = meter::run(input as u64, self.is_tried, render)
            .map_err(|error| ApiError::invalid(self.param, describe(&error)))?;
        match continued {
            Some(content) => cut_at_tag(text, &content),
            None => Ok(text),
        }
    }
}

/// A message's content as one string.
fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
            texts.join("\n")
        }
        _ => String::new(),
    }
}

fn environment<'s>() -> Result<(Environment<'s>, SyntaxConfig), StartError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| StartError::new(format!("chat template syntax: {error}")))?;
    meter::install(&mut environment);
    builtins::install(&mut environment);
    environment.add_function("raise_exception", |mut message: String| -> Result<String, Error> {
        if let Some((cut, _)) = message.char_indices().nth(MAX_RAISED) {
            message.truncate(cut);
        }
        Err(Error::new(ErrorKind::InvalidOperation, RAISED).with_source(Raised(message)))
    });
    set_clock(&mut environment, OffsetDateTime::now_utc);
    Ok((environment, syntax))
}

/// `strftime_now` returns UTC, so that a prompt does not depend on the machine's time zone.
fn set_clock(environment: &mut Environment<'_>, clock: fn() -> OffsetDateTime) {
    // Size of the longest result of a directive of two letters: a date and a time.
    const LONGEST: u64 = 16;
    environment.add_function("strftime_now", move |format: String| -> Result<String, Error> {
        meter::make((format.len() as u64).saturating_mul(LONGEST))?;
        Ok(python::strftime(&format, clock()))
    });
}

/// The date of today, in UTC as in `strftime_now`.
pub fn today(format: &str) -> String {
    python::strftime(format, OffsetDateTime::now_utc())
}

/// JSON as a value of a template. Keys keep their order.
fn template_value(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(value) => minijinja::Value::from(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => minijinja::Value::from(integer),
            (None, Some(integer)) => minijinja::Value::from(integer),
            (None, None) => minijinja::Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => minijinja::Value::from(text.as_str()),
        Value::Array(items) => items.iter().map(template_value).collect(),
        Value::Object(entries) => {
            minijinja::Value::from_pairs(entries.iter().map(|(key, value)| (key.as_str(), template_value(value))))
        }
    }
}

const RAISED: &str = "raise_exception";

/// The message of a template's `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// The message of the template if it raised an exception, else the error of the engine with its line.
fn describe(error: &Error) -> String {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref() {
            return message.clone();
        }
        if let Some(limit) = error.downcast_ref::<Exceeded>() {
            return format!("the chat template does too much: {limit}");
        }
        source = error.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("the chat template does too much: it takes more than {MAX_STEPS} steps");
    }
    format!("the chat template failed: {error}")
}

/// Removes `{% generation %}`, which marks the assistant's part for training.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        // After the opening: in `{%}` the percent sign belongs to it, so this is not an end.
        let Some(end) = rest[2..].find("%}").map(|end| end + 2) else { break };
        let tag = &rest[..end + 2];
        let word = tag[2..end].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => out.push_str(&tag.replacen(word, "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen(word, "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    out
}

/// The messages with the tag appended to the last one, and the text of the last one without it.
fn tag_final_message(messages: &[Value]) -> Result<(Vec<Value>, String), ApiError> {
    let refuse = |why: &str| ApiError::invalid("continue_final_message", why);
    let mut messages = messages.to_vec();
    let last = messages.last_mut().ok_or_else(|| refuse("there is no message to continue"))?;
    let calls_tools = last.get("tool_calls").is_some();
    let text = match last.get_mut("content") {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    let text = text.filter(|text| !(calls_tools && text.is_empty()));
    let text = text.ok_or_else(|| refuse("the last message has no text content to continue"))?;
    let content = text.clone();
    text.push_str(CONTINUE_TAG);
    Ok((messages, content))
}

/// The text up to the tag, without white space at its end if the template has trimmed the message.
fn cut_at_tag(mut text: String, content: &str) -> Result<String, ApiError> {
    let tag = CONTINUE_TAG.trim();
    let place = text.rfind(tag).filter(|_| text.contains(content.trim())).ok_or_else(|| {
        ApiError::invalid(
            "continue_final_message",
            "the chat template does not show the last message's content, so it cannot be continued",
        )
    })?;
    let trimmed = !text[place..].starts_with(CONTINUE_TAG);
    text.truncate(place);
    if trimmed {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}
