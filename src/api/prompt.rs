//! The forms of a prompt.

mod fill_in;

use crate::body::ids::MixedPart;
pub use fill_in::{ContextFile, FillIn};
use pagetide_base::ids::TokenId;
pub use pagetide_text::chat_template::ChatPrompt;

/// What the client sent as its prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    Text {
        text: String,
        add_special_tokens: bool,
    },
    Tokens(Vec<TokenId>),
    /// Texts and token ids one after the other. If the first is a text, the tokenizer adds its special tokens to it.
    Mixed(Vec<MixedPart>),
    /// A gap between two texts.
    FillIn(FillIn),
    /// A conversation. The intake renders it through the chat template.
    Chat(ChatPrompt),
    /// A conversation that goes on from these tokens.
    ChatAfter(Vec<TokenId>, ChatPrompt),
}

impl Prompt {
    /// Bytes of text that have to be tokenised.
    pub fn num_bytes(&self) -> usize {
        match self {
            Prompt::Text { text, .. } => text.len(),
            Prompt::Tokens(_) => 0,
            Prompt::Mixed(parts) => parts.iter().map(MixedPart::num_bytes).sum(),
            Prompt::FillIn(fill_in) => fill_in.num_bytes(),
            Prompt::Chat(chat) | Prompt::ChatAfter(_, chat) => chat.num_bytes(),
        }
    }

    /// A chat goes on from these tokens. Other forms stay as they are.
    pub fn after(self, tokens: Vec<TokenId>) -> Self {
        match self {
            Prompt::Chat(chat) => Prompt::ChatAfter(tokens, chat),
            other => other,
        }
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt::Text { text, add_special_tokens: true }
    }
}

impl From<Vec<TokenId>> for Prompt {
    fn from(tokens: Vec<TokenId>) -> Self {
        Prompt::Tokens(tokens)
    }
}
