//! Grammars to constraints, and those that were compiled lately.

use super::constraint::{CompiledGrammar, RequestGrammar, brief};
use super::lexers::LexerMemory;
use super::sandbox::{GrammarLimits, Sandbox};
use super::schema;
use super::vocabulary::Vocabulary;
use super::{GrammarRequest, GrammarSpec, gbnf};
use crate::budget::{Budget, Cancelled};
use crate::engine::constraint::ConstraintSource;
use crate::error::ApiError;
use crate::ids::TokenId;
use crate::text::tokenizer::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, TokenParser, regex_to_lark};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Bytes at most of a schema, of all choices, of a grammar, and of a regular expression.
const MAX_SCHEMA_BYTES: usize = 1 << 19;
const MAX_GRAMMAR_BYTES: usize = 1 << 16;
const MAX_REGEX_BYTES: usize = 1 << 13;
/// Lines of a grammar: each can define a rule that the one before needs, and llguidance goes down by recursion (16 kB
/// of stack a rule; see [`Workers`](crate::actors::workers::Workers)).
const MAX_GRAMMAR_LINES: usize = 3000;
/// Time for finding the part of a schema that is at fault.
const EXPLAIN: Duration = Duration::from_millis(500);
/// Compiled grammars that are kept, and how long their texts may be together.
const MAX_CACHED: usize = 64;
const MAX_CACHED_BYTES: usize = 4 << 20;

/// What a grammar may cost. A client's grammar beyond the first three is refused; one that goes beyond the others as
/// the text grows fails its request. A mask takes milliseconds at most, and a lexer 50 to 100 MB.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        max_grammar_size: 200_000,
        // An object's optional properties, or the options of an anyOf, are 2 each.
        max_items_in_row: 10_000,
        step_lexer_fuel: 40_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Compiles grammars for one model. What the model's vocabulary needs is worked out for the first grammar (a second
/// for a large one), not at the start.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    /// Of the model, the tokenizer's own first.
    end_tokens: Vec<TokenId>,
    limits: GrammarLimits,
    engine: OnceLock<Result<Sandboxed, String>>,
    cache: Mutex<Cache>,
}

/// llguidance, and where it is tried first.
struct Sandboxed {
    engine: Engine,
    /// `None`: whoever writes the grammars is trusted.
    sandbox: Option<Sandbox>,
}

/// llguidance, knowing the vocabulary.
pub(super) struct Engine {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
}

impl GrammarCompiler {
    /// `vocab_size`: the model's, which may have more rows than there are tokens, or fewer. `limits`: what compiling a
    /// grammar may take, where there is a [`sandbox`](super::sandbox).
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, end_tokens: &[TokenId], limits: GrammarLimits) -> Self {
        let own = tokenizer.special_tokens().eos.as_ref().map(|token| token.id);
        let mut end_tokens = end_tokens.to_vec();
        // What ends a turn in a chat's template is a better end than the others.
        end_tokens.sort_by_key(|token| Some(*token) != own);
        Self { tokenizer, vocab_size, end_tokens, limits, engine: OnceLock::new(), cache: Mutex::default() }
    }

    /// The constraint of a grammar that was compiled lately.
    pub fn known(&self, request: &GrammarRequest) -> Option<Arc<dyn ConstraintSource>> {
        let known = self.cache().get(&key(request))?;
        Some(RequestGrammar::new(known, self.work_per_token()))
    }

    /// Takes from microseconds (a grammar that is known) to seconds: not for a thread that must not block. It ends early,
    /// with an error, where `budget` is used up.
    ///
    /// # Errors
    /// 400, with the field of the request and, for a schema, the place in it.
    pub fn compile(&self, request: &GrammarRequest, budget: &Budget) -> Result<Arc<dyn ConstraintSource>, ApiError> {
        let key = key(request);
        if let Some(known) = self.cache().get(&key) {
            return Ok(RequestGrammar::new(known, self.work_per_token()));
        }
        let invalid = |message: String| ApiError::invalid(&request.param, format!("{}: {message}", request.param));
        let engine = self.engine.get_or_init(|| self.make_engine()).as_ref().map_err(|error| invalid(error.clone()))?;
        let Sandboxed { engine, sandbox } = engine;
        if let Some(sandbox) = sandbox {
            sandbox.check(request, budget)?;
        }
        budget.look().map_err(|why| why.in_param(&request.param))?;
        let compiled = Arc::new(engine.compile(request)?);
        self.cache().insert(key, request.spec.len(), compiled.clone());
        Ok(RequestGrammar::new(compiled, self.work_per_token()))
    }

    /// A mask is found by a walk through the vocabulary: the more tokens there are, the longer it takes.
    fn work_per_token(&self) -> u32 {
        self.limits.work_per_token.unwrap_or(500 + self.vocab_size as u32 / 16)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make_engine(&self) -> Result<Sandboxed, String> {
        let vocabulary = Vocabulary::new(self.tokenizer.clone(), self.vocab_size, &self.end_tokens);
        let engine = Engine::new(vocabulary)?;
        let Engine { vocabulary, .. } = &engine;
        let sandbox = Sandbox::new(self.limits, vocabulary.words(), vocabulary.ends());
        if sandbox.is_none() {
            tracing::warn!(
                "grammars and schemas are compiled in this process alone, which one that was written to can end: \
                 only for clients that are trusted (pagetide::text::grammar::sandbox::use_program)"
            );
        }
        Ok(Sandboxed { engine, sandbox })
    }
}

/// Equal for equal constraints.
fn key(request: &GrammarRequest) -> blake3::Hash {
    let GrammarRequest { spec, param: _, starts_after, whitespace } = request;
    let mut hasher = blake3::Hasher::new();
    // In a form that no two share. A hasher never fails to be written to.
    let written = serde_json::to_writer(&mut hasher, &(spec, starts_after, whitespace));
    written.expect("a grammar is made of strings and JSON, which JSON can say");
    hasher.finalize()
}

impl GrammarSpec {
    /// Bytes of its text, about.
    fn len(&self) -> usize {
        match self {
            GrammarSpec::JsonObject => 0,
            GrammarSpec::JsonSchema(schema) => schema.to_string().len(),
            GrammarSpec::Choice(choices) => choices.iter().map(String::len).sum(),
            GrammarSpec::Regex(text) | GrammarSpec::Grammar(text) | GrammarSpec::Lark(text) => text.len(),
        }
    }
}

/// A request's grammar in llguidance's terms.
enum Source {
    /// With its options.
    Json(Value),
    Lark(String),
}

impl Source {
    fn new(request: &GrammarRequest) -> Result<Self, ApiError> {
        let param = &request.param;
        let limit = |what: &str, got: usize, most: usize| {
            let message = format!("{param} must have at most {most} {what}, got {got}");
            if got > most { Err(ApiError::invalid(param, message)) } else { Ok(()) }
        };
        match &request.spec {
            GrammarSpec::JsonObject => Self::schema(&json!({ "type": "object" }), request),
            GrammarSpec::JsonSchema(schema) => {
                limit("bytes", schema.to_string().len(), MAX_SCHEMA_BYTES)?;
                Self::schema(schema, request)
            }
            GrammarSpec::Regex(regex) => {
                limit("bytes", regex.len(), MAX_REGEX_BYTES)?;
                schema::check_regex(regex).map_err(|error| ApiError::invalid(param, format!("{param}: {error}")))?;
                Ok(Source::Lark(format!("start: /{}/", regex_to_lark(unanchored(regex), ""))))
            }
            GrammarSpec::Choice(choices) => {
                limit("bytes", choices.iter().map(String::len).sum(), MAX_SCHEMA_BYTES)?;
                let choices: Vec<String> = choices.iter().map(|choice| lark_string(choice)).collect();
                Ok(Source::Lark(format!("start: CHOICE\nCHOICE: {}", choices.join(" | "))))
            }
            GrammarSpec::Grammar(text) => {
                limit("bytes", text.len(), MAX_GRAMMAR_BYTES)?;
                limit("lines", text.lines().count(), MAX_GRAMMAR_LINES)?;
                if !gbnf::is_gbnf(text) {
                    return Ok(Source::Lark(text.clone()));
                }
                let lark = gbnf::to_lark(text);
                let lark = lark.map_err(|error| ApiError::invalid(param, format!("{param}: {error}")))?;
                limit("rules and groups", lark.lines().count(), MAX_GRAMMAR_LINES)?;
                Ok(Source::Lark(lark))
            }
            GrammarSpec::Lark(lark) => {
                limit("bytes", lark.len(), MAX_SCHEMA_BYTES)?;
                limit("lines of grammar", lark.lines().count(), MAX_GRAMMAR_LINES)?;
                Ok(Source::Lark(lark.clone()))
            }
        }
    }

    fn schema(schema: &Value, request: &GrammarRequest) -> Result<Self, ApiError> {
        let schema = schema::prepare(schema, &request.whitespace).map_err(|error| error.in_param(&request.param))?;
        Ok(Source::Json(schema))
    }

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            Source::Json(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Source::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        }
    }
}

/// The anchors of a regular expression that matches from the beginning to the end anyway.
fn unanchored(regex: &str) -> &str {
    // Each belongs to one alternative only where there are several.
    if regex.contains('|') {
        return regex;
    }
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}

/// A literal of Lark.
pub(super) fn lark_string(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

impl Engine {
    /// `None`: the model has no end token.
    pub fn new(vocabulary: Option<Vocabulary>) -> Result<Self, String> {
        let none = "structured output needs a model with an end token, and this one has none";
        let vocabulary = Arc::new(vocabulary.ok_or(none)?);
        let env: llguidance::toktrie::TokEnv = vocabulary.clone();
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| format!("structured output is not available for this vocabulary: {error}"))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { vocabulary, factory })
    }

    /// # Errors
    /// As [`GrammarCompiler::compile`].
    pub fn compile(&self, request: &GrammarRequest) -> Result<CompiledGrammar, ApiError> {
        let source = Source::new(request)?;
        let parser = self.parser(source.grammar()).map_err(|message| self.explain(request, &source, message))?;
        let starts_after = request.starts_after.as_deref().filter(|text| !text.is_empty());
        let compiled = CompiledGrammar::new(parser, self.vocabulary.clone(), starts_after);
        // A vocabulary may have no way to write the very first character.
        let invalid = |message: String| ApiError::invalid(&request.param, format!("{}: {message}", request.param));
        compiled.check_start().map_err(invalid)?;
        Ok(compiled)
    }

    fn parser(&self, grammar: TopLevelGrammar) -> Result<TokenParser, String> {
        self.factory.create_parser(grammar).map_err(|error| format!("{error:#}"))
    }

    /// The client's error for a grammar that was refused with `message`.
    fn explain(&self, request: &GrammarRequest, source: &Source, message: String) -> ApiError {
        let param = &request.param;
        let message = brief(&message);
        match source {
            Source::Json(schema) => {
                let budget = Budget::time(EXPLAIN, Cancelled::default());
                let error_of = |part: Value| {
                    budget.look().ok()?;
                    let refused = self.parser(TopLevelGrammar::from_json_schema(part)).err();
                    refused.map(|error| brief(&error))
                };
                schema::culprit(schema, message, error_of).in_param(param)
            }
            Source::Lark(_) => ApiError::invalid(param, format!("{param}: {}", lark_place(&message))),
        }
    }
}

/// llguidance's "3(5): message", or "at 3(5): message", in words.
fn lark_place(message: &str) -> String {
    let place = || {
        let rest = message.strip_prefix("at ").unwrap_or(message);
        let (line, rest) = rest.split_once('(')?;
        let (column, rest) = rest.split_once("): ")?;
        let (line, column): (usize, usize) = (line.parse().ok()?, column.parse().ok()?);
        Some(format!("line {line}, column {column}: {rest}"))
    };
    place().unwrap_or_else(|| message.to_owned())
}

/// The grammars that were used last.
#[derive(Default)]
struct Cache {
    /// The one used last at the end.
    entries: Vec<Entry>,
}

struct Entry {
    key: blake3::Hash,
    bytes: usize,
    grammar: Arc<CompiledGrammar>,
}

impl Cache {
    fn get(&mut self, key: &blake3::Hash) -> Option<Arc<CompiledGrammar>> {
        let index = self.entries.iter().position(|entry| entry.key == *key)?;
        let entry = self.entries.remove(index);
        let grammar = entry.grammar.clone();
        self.entries.push(entry);
        Some(grammar)
    }

    fn insert(&mut self, key: blake3::Hash, bytes: usize, grammar: Arc<CompiledGrammar>) {
        // Two workers may have compiled the same.
        self.entries.retain(|entry| entry.key != key);
        self.entries.push(Entry { key, bytes, grammar });
        let memory = LexerMemory::of_process();
        while self.entries.len() > MAX_CACHED
            || self.bytes() > MAX_CACHED_BYTES
            || self.entries.len() > 1 && memory.is_over()
        {
            self.entries.remove(0);
        }
    }

    fn bytes(&self) -> usize {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }
}
