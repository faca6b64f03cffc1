//! The echoed prompt at the beginning of an answer.

use crate::prompt::Prompt;
use pagetide_base::ids::TokenId;
use pagetide_text::detokenizer::Detokenizer;
use pagetide_text::tokenizer::Tokenizer;
use std::sync::Arc;

/// What an answer with `echo` begins with; `None`: the text of the prompt's tokens. `is_cut`: the prompt may be cut to
/// fit.
pub fn echoed_text(prompt: &Prompt, is_cut: bool) -> Option<String> {
    match prompt {
        Prompt::Text { text, .. } if !is_cut => Some(text.clone()),
        Prompt::Chat(chat) => {
            let role = chat.messages.last().and_then(|message| message.get("role")?.as_str());
            let continues = !chat.add_generation_prompt || role == Some("assistant");
            Some(if continues { chat.last_text() } else { String::new() })
        }
        _ => None,
    }
}

/// Where each of the prompt's tokens begins in `text`, in characters. Special tokens that the tokenizer added are not
/// in the text and take no room.
pub(super) fn offsets(tokenizer: &Arc<Tokenizer>, prompt: &[TokenId], text: &str) -> Vec<usize> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), &[], false);
    let num_chars = text.chars().count();
    let (mut rest, mut offset) = (text, 0);
    prompt
        .iter()
        .map(|token| {
            let begin = offset;
            let piece = detokenizer.push(*token);
            if let Some(after) = rest.strip_prefix(piece.as_str()) {
                rest = after;
                offset += piece.chars().count();
            } else if !tokenizer.is_special(*token) {
                // The tokenizer normalised the text: count on.
                offset = (offset + piece.chars().count()).min(num_chars);
                rest = text.char_indices().nth(offset).map_or("", |(at, _)| &text[at..]);
            }
            begin
        })
        .collect()
}
