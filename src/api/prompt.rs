//! The forms of a prompt.

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
    /// A conversation. The intake renders it through the chat template.
    Chat(ChatPrompt),
}

impl Prompt {
    /// Bytes of text that have to be tokenised.
    pub fn num_bytes(&self) -> usize {
        match self {
            Prompt::Text { text, .. } => text.len(),
            Prompt::Tokens(_) => 0,
            Prompt::Chat(chat) => chat.num_bytes(),
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
