//! DRY's sequence breakers as tokens.

use crate::tokenizer::Tokenizer;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::extra::DryBreakers;

/// Of the rest of a breaker behind a token, this many tokens are compared at most.
const MAX_TAIL: usize = 20;

/// The tokens of these texts, as llama.cpp finds them: a token that contains a text, and a token that ends with the
/// beginning of a text, if the tokens of its rest follow. Reads the whole vocabulary.
pub fn dry_breakers(tokenizer: &Tokenizer, texts: &[impl AsRef<str>]) -> Result<DryBreakers, ApiError> {
    let mut breakers = DryBreakers::default();
    // For each text the places at which a token may end within it.
    let mut tails = Vec::new();
    for text in texts.iter().map(AsRef::as_ref) {
        for (place, _) in text.char_indices().skip(1) {
            let mut tail = tokenizer.encode(&text[place..], false)?;
            tail.truncate(MAX_TAIL);
            // The beginning alone does not break where the rest has no tokens.
            if !tail.is_empty() {
                tails.push((&text.as_bytes()[..place], tail));
            }
        }
    }
    // The vocabulary is large: of most tokens only the few short beginnings are compared.
    tails.sort_by_key(|(beginning, _)| beginning.len());
    for token in 0..tokenizer.vocab_size() as TokenId {
        let Some(piece) = tokenizer.pieces().get(token) else { continue };
        let contains = |text: &[u8]| match text {
            [byte] => piece.bytes.contains(byte),
            _ => piece.bytes.windows(text.len()).any(|part| part == text),
        };
        if texts.iter().any(|text| contains(text.as_ref().as_bytes())) {
            breakers.single.push(token);
        } else {
            let short = tails.iter().take_while(|(beginning, _)| beginning.len() <= piece.bytes.len());
            let ends = short.filter(|(beginning, _)| piece.bytes.ends_with(beginning));
            breakers.longer.extend(ends.map(|(_, tail)| (token, tail.clone())));
        }
    }
    Ok(breakers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of words, which are tokens where they stand between spaces.
    fn tokenizer() -> Tokenizer {
        let words = ["a", "\n", "b:", "\"", ".\n\n", "q", "uit", "--", "-", "->", ">"];
        let vocab: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [],
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": null},
            "decoder": {"type": "Fuse"},
        });
        Tokenizer::from_json(&json.to_string(), None).expect("it is a tokenizer")
    }

    #[test]
    fn tokens_that_contain_a_text_break_alone() {
        let breakers = dry_breakers(&tokenizer(), &["\n", ":", "\""]).expect("they are texts");
        assert_eq!(breakers, DryBreakers { single: vec![1, 2, 3, 4], longer: Vec::new(), ..DryBreakers::default() });
    }

    #[test]
    fn a_longer_text_breaks_together_with_its_rest() {
        let breakers = dry_breakers(&tokenizer(), &["-q"]).expect("they are texts");
        assert_eq!(
            breakers,
            DryBreakers { single: Vec::new(), longer: vec![(7, vec![5]), (8, vec![5])], ..DryBreakers::default() }
        );
        let breakers = dry_breakers(&tokenizer(), &["->", "-q", "-é"]).expect("they are texts");
        assert_eq!(breakers.single, [9]);
        // There is no token for "é".
        assert_eq!(breakers.longer, [(7, vec![10]), (7, vec![5]), (8, vec![10]), (8, vec![5])]);
    }
}
