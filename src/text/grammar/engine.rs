//! llguidance for one vocabulary: brings a request's grammar into llguidance's form and compiles it.

use super::constraint::{CompiledGrammar, brief};
use super::gbnf;
use super::lark::lark_string;
use super::request::{GrammarRequest, GrammarSpec};
use super::schema;
use super::structural_tag;
use super::vocabulary::Vocabulary;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, TokenParser, regex_to_lark};
use pagetide_base::budget::{Budget, Cancelled};
use pagetide_base::error::ApiError;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Maximum sizes in bytes: of a schema or of all choices together, of a grammar, and of a regular expression.
const MAX_SCHEMA_BYTES: usize = 1 << 19;
const MAX_GRAMMAR_BYTES: usize = 1 << 16;
const MAX_REGEX_BYTES: usize = 1 << 13;
/// Maximum number of lines of a grammar. Each line can define a rule that the one before needs, and llguidance recurses
/// (16 kB of stack per rule; see [`STACK_BYTES`](super::STACK_BYTES)).
const MAX_GRAMMAR_LINES: usize = 3000;
/// Time limit for finding the wrong part of a schema.
const EXPLAIN: Duration = Duration::from_millis(500);
/// The limits of a grammar. A grammar beyond the first three is rejected. One that exceeds the others as the text grows
/// fails its request. A mask takes milliseconds at most, and a lexer 50 to 100 MB.
fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        max_grammar_size: 200_000,
        // Each optional property of an object, and each option of an anyOf, counts as two.
        max_items_in_row: 10_000,
        step_lexer_fuel: 40_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// llguidance for one vocabulary.
pub struct GrammarEngine {
    pub vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
}

/// A grammar in llguidance's form.
enum GrammarSource {
    /// With options.
    Json(Value),
    Lark(String),
}

impl GrammarSource {
    fn new(request: &GrammarRequest, vocabulary: &Vocabulary) -> Result<Self, ApiError> {
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
                Ok(GrammarSource::Lark(format!("start: /{}/", regex_to_lark(unanchored(regex), ""))))
            }
            GrammarSpec::Choice(choices) => {
                limit("bytes", choices.iter().map(String::len).sum(), MAX_SCHEMA_BYTES)?;
                let choices: Vec<String> = choices.iter().map(|choice| lark_string(choice)).collect();
                Ok(GrammarSource::Lark(format!("start: CHOICE\nCHOICE: {}", choices.join(" | "))))
            }
            GrammarSpec::Grammar(text) => {
                limit("bytes", text.len(), MAX_GRAMMAR_BYTES)?;
                limit("lines", text.lines().count(), MAX_GRAMMAR_LINES)?;
                if !gbnf::is_gbnf(text) {
                    return Ok(GrammarSource::Lark(text.clone()));
                }
                let lark = gbnf::to_lark(text);
                let lark = lark.map_err(|error| ApiError::invalid(param, format!("{param}: {error}")))?;
                limit("rules and groups", lark.lines().count(), MAX_GRAMMAR_LINES)?;
                Ok(GrammarSource::Lark(lark))
            }
            GrammarSpec::StructuralTag(tag) => {
                limit("bytes", tag.to_string().len(), MAX_SCHEMA_BYTES)?;
                let lark = structural_tag::to_lark(tag, param, &request.whitespace, vocabulary)?;
                limit("rules", lark.lines().count(), MAX_GRAMMAR_LINES)?;
                Ok(GrammarSource::Lark(lark))
            }
            GrammarSpec::Lark(lark) => {
                limit("bytes", lark.len(), MAX_SCHEMA_BYTES)?;
                limit("lines of grammar", lark.lines().count(), MAX_GRAMMAR_LINES)?;
                Ok(GrammarSource::Lark(lark.clone()))
            }
        }
    }

    fn schema(schema: &Value, request: &GrammarRequest) -> Result<Self, ApiError> {
        let schema = schema::prepare(schema, &request.whitespace).map_err(|error| error.in_param(&request.param))?;
        Ok(GrammarSource::Json(schema))
    }

    fn grammar(&self) -> TopLevelGrammar {
        match self {
            GrammarSource::Json(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            GrammarSource::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        }
    }
}

/// Removes the anchors of a regular expression, which always matches a whole text.
fn unanchored(regex: &str) -> &str {
    // With alternatives, each anchor belongs to one of them.
    if regex.contains('|') {
        return regex;
    }
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}

impl GrammarEngine {
    /// `None` if the model has no end token.
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
    /// As [`GrammarCompiler::compile`](super::GrammarCompiler::compile).
    pub fn compile(&self, request: &GrammarRequest) -> Result<CompiledGrammar, ApiError> {
        let source = GrammarSource::new(request, &self.vocabulary)?;
        let parser = self.parser(source.grammar()).map_err(|message| self.explain(request, &source, message))?;
        let starts_after = request.starts_after.as_deref().filter(|text| !text.is_empty());
        let compiled = CompiledGrammar::new(parser, self.vocabulary.clone(), starts_after);
        // The vocabulary may have no token for the first character.
        let invalid = |message: String| ApiError::invalid(&request.param, format!("{}: {message}", request.param));
        compiled.check_start().map_err(invalid)?;
        Ok(compiled)
    }

    fn parser(&self, grammar: TopLevelGrammar) -> Result<TokenParser, String> {
        self.factory.create_parser(grammar).map_err(|error| format!("{error:#}"))
    }

    /// The error for a grammar that was rejected with `message`.
    fn explain(&self, request: &GrammarRequest, source: &GrammarSource, message: String) -> ApiError {
        let param = &request.param;
        let message = brief(&message);
        match source {
            GrammarSource::Json(schema) => {
                let budget = Budget::time(EXPLAIN, Cancelled::default());
                let error_of = |part: Value| {
                    budget.look().ok()?;
                    let refused = self.parser(TopLevelGrammar::from_json_schema(part)).err();
                    refused.map(|error| brief(&error))
                };
                schema::culprit(schema, message, error_of).in_param(param)
            }
            GrammarSource::Lark(_) => {
                let message = match (&request.spec, lark_place(&message)) {
                    (GrammarSpec::StructuralTag(tag), place) => match self.wrong_schema(tag, request) {
                        Some(error) => return error,
                        // The lines are not the client's.
                        None => place.map_or(message.as_str(), |(_, rest)| rest).to_owned(),
                    },
                    (_, Some((place, rest))) => format!("{place}: {rest}"),
                    (_, None) => message,
                };
                ApiError::invalid(param, format!("{param}: {message}"))
            }
        }
    }

    /// The error of the first schema of a structural tag that is rejected alone.
    fn wrong_schema(&self, tag: &Value, request: &GrammarRequest) -> Option<ApiError> {
        let budget = Budget::time(EXPLAIN, Cancelled::default());
        let mut found = None;
        structural_tag::each_schema(&mut tag.clone(), &request.param, &mut |place, schema| {
            if found.is_some() || budget.look().is_err() {
                return;
            }
            let alone = GrammarRequest {
                whitespace: request.whitespace.clone(),
                ..GrammarRequest::new(GrammarSpec::JsonSchema(schema.clone()), place)
            };
            found = self.compile(&alone).err();
        });
        found
    }
}

/// The place in words and the message of llguidance's "3(5): message" or "at 3(5): message".
fn lark_place(message: &str) -> Option<(String, &str)> {
    let rest = message.strip_prefix("at ").unwrap_or(message);
    let (line, rest) = rest.split_once('(')?;
    let (column, rest) = rest.split_once("): ")?;
    let (line, column): (usize, usize) = (line.parse().ok()?, column.parse().ok()?);
    Some((format!("line {line}, column {column}"), rest))
}
