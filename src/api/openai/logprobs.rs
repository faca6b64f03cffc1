//! Log-probabilities in the shapes of the two APIs, and vLLM's `prompt_logprobs`.

use crate::delta::Position;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{PositionLogprobs, TokenLogprob};
use pagetide_text::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use utoipa::ToSchema;

/// JSON has no infinity; this is what OpenAI writes for a token that cannot occur.
const LEAST_LOGPROB: f64 = -9999.0;

pub fn json_logprob(of: &TokenLogprob) -> f64 {
    f64::from(of.logprob).max(LEAST_LOGPROB)
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Logprobs {
    Chat(ChatLogprobs),
    Completion(CompletionLogprobs),
}

/// `choices[].logprobs` of a chat.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatLogprobs {
    content: Vec<ChatPosition>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct ChatPosition {
    #[serde(flatten)]
    chosen: ChatToken,
    top_logprobs: Vec<ChatToken>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ChatToken {
    token: String,
    logprob: f64,
    /// The token's exact bytes: `token` cannot show half a character.
    bytes: Vec<u8>,
}

/// `choices[].logprobs` of a completion: parallel arrays, one element a token.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f64>>,
    tokens: Vec<String>,
    /// The token itself, then the most likely ones.
    #[schema(value_type = Vec<Option<HashMap<String, f64>>>)]
    top_logprobs: Vec<Option<Map<String, Value>>>,
}

/// How tokens are written.
#[derive(Clone, Copy)]
pub struct TokenNames<'a> {
    pub tokenizer: &'a Tokenizer,
    /// As `token_id:5`, so that tokens of the same text can be told apart (`return_tokens_as_token_ids`).
    pub as_ids: bool,
}

impl TokenNames<'_> {
    fn id(token: TokenId) -> String {
        format!("token_id:{token}")
    }

    /// The token's text.
    fn text(self, token: TokenId) -> String {
        if self.as_ids { Self::id(token) } else { self.tokenizer.token_text(token) }
    }

    /// The token's text; for what is not UTF-8 by itself its bytes, as OpenAI writes them (`bytes:\xe2\x82`), so that
    /// two such tokens are two keys.
    fn unique(self, token: TokenId) -> String {
        if self.as_ids { Self::id(token) } else { token_name(self.tokenizer, token) }
    }
}

impl Logprobs {
    /// `num_top` most likely tokens of each position.
    pub fn chat(names: TokenNames<'_>, positions: &[Position], num_top: u32) -> Self {
        Self::chat_of(names, positions, |at| at.top.iter().take(num_top as usize))
    }

    /// The candidates of each position that `candidates` says.
    pub fn chat_of<'a, I: Iterator<Item = &'a TokenLogprob>>(
        names: TokenNames<'_>,
        positions: &'a [Position],
        candidates: impl Fn(&'a PositionLogprobs) -> I,
    ) -> Self {
        let known = positions.iter().filter_map(|at| at.logprobs.as_ref());
        let position = |at| ChatPosition::new(names, at, candidates(at));
        Logprobs::Chat(ChatLogprobs { content: known.map(position).collect() })
    }

    /// `num_top` most likely tokens of each position, and one more where the token itself is not among them.
    pub fn completion(names: TokenNames<'_>, positions: &[Position], num_top: u32) -> Self {
        let mut columns = CompletionLogprobs::default();
        for position in positions {
            columns.text_offset.push(position.text_offset);
            columns.tokens.push(names.unique(position.token));
            let at = position.logprobs.as_ref();
            columns.token_logprobs.push(at.map(|at| json_logprob(&at.chosen)));
            columns.top_logprobs.push(at.map(|at| {
                let tokens = std::iter::once(&at.chosen).chain(at.top.iter().take(num_top as usize));
                tokens.map(|of| (names.unique(of.token), json!(json_logprob(of)))).collect()
            }));
        }
        Logprobs::Completion(columns)
    }
}

/// A token and the `num_top` most likely ones in its place, as chat and Responses write them.
pub fn chat_position(names: TokenNames<'_>, at: &PositionLogprobs, num_top: u32) -> ChatPosition {
    ChatPosition::new(names, at, at.top.iter().take(num_top as usize))
}

impl ChatPosition {
    fn new<'a>(
        names: TokenNames<'_>,
        at: &PositionLogprobs,
        candidates: impl Iterator<Item = &'a TokenLogprob>,
    ) -> Self {
        let token = |of: &TokenLogprob| ChatToken {
            token: names.text(of.token),
            logprob: json_logprob(of),
            bytes: names.tokenizer.token_bytes(of.token),
        };
        Self { chosen: token(&at.chosen), top_logprobs: candidates.map(token).collect() }
    }
}

/// vLLM's `prompt_logprobs`: for each token of the prompt the token itself and the most likely ones by id; null for
/// the first.
pub struct PromptLogprobs<'a> {
    pub tokenizer: &'a Tokenizer,
    /// From the second token on.
    pub logprobs: &'a [PositionLogprobs],
    pub num_top: u32,
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entry = |of: &TokenLogprob| {
            let value = json!({
                "logprob": json_logprob(of),
                "rank": of.rank,
                "decoded_token": self.tokenizer.token_text(of.token),
            });
            (of.token.to_string(), value)
        };
        let position = |at: &PositionLogprobs| {
            let tokens = std::iter::once(&at.chosen).chain(at.top.iter().take(self.num_top as usize));
            Some(tokens.map(entry).collect::<Map<String, Value>>())
        };
        serializer.collect_seq(std::iter::once(None).chain(self.logprobs.iter().map(position)))
    }
}

fn token_name(tokenizer: &Tokenizer, token: TokenId) -> String {
    String::from_utf8(tokenizer.token_bytes(token)).unwrap_or_else(|error| {
        let mut name = String::from("bytes:");
        for byte in error.as_bytes() {
            write!(name, "\\x{byte:02x}").expect("writing to a string does not fail");
        }
        name
    })
}
