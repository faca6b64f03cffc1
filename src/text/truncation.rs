//! Cuts a prompt to a number of tokens.

use crate::tokenizer::Tokenizer;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;

/// vLLM's `truncate_prompt_tokens` and `truncation_side`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncation {
    /// Maximum number of tokens to keep. `None`: as many as leave room for the output.
    pub keep: Option<u32>,
    /// The side that is cut off. `None`: the left, but special tokens of the tokenizer stay.
    pub side: Option<Side>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// Cuts `tokens` to `keep`. `text` is their text, if the tokenizer has added special tokens to it.
pub fn truncate(
    tokens: Vec<TokenId>,
    keep: usize,
    side: Option<Side>,
    text: Option<(&Tokenizer, &str)>,
) -> Result<Vec<TokenId>, ApiError> {
    let cut = tokens.len().saturating_sub(keep);
    if cut == 0 {
        return Ok(tokens);
    }
    if let (None, Some((tokenizer, text))) = (side, text) {
        let plain = tokenizer.encode(text, false)?;
        if let Some((before, after)) = added(&tokens, &plain)
            && keep > before.len() + after.len()
        {
            return Ok([before, &plain[cut..], after].concat());
        }
    }
    Ok(match side {
        None | Some(Side::Left) => tokens[cut..].to_vec(),
        Some(Side::Right) => tokens[..keep].to_vec(),
    })
}

/// The tokens before and after `plain` in `tokens`.
fn added<'a>(tokens: &'a [TokenId], plain: &[TokenId]) -> Option<(&'a [TokenId], &'a [TokenId])> {
    let num_added = tokens.len().checked_sub(plain.len())?;
    let start = (0..=num_added).find(|start| tokens[*start..].starts_with(plain))?;
    Some((&tokens[..start], &tokens[start + plain.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_is_cut_off() {
        let cut = |keep, side| truncate(vec![1, 2, 3, 4], keep, side, None).unwrap();
        assert_eq!(cut(2, None), [3, 4]);
        assert_eq!(cut(2, Some(Side::Left)), [3, 4]);
        assert_eq!(cut(2, Some(Side::Right)), [1, 2]);
        assert_eq!(cut(4, None), [1, 2, 3, 4]);
        assert_eq!(cut(9, Some(Side::Right)), [1, 2, 3, 4]);
    }

    #[test]
    fn what_was_added_is_found() {
        assert_eq!(added(&[9, 1, 2, 8], &[1, 2]), Some((&[9][..], &[8][..])));
        assert_eq!(added(&[1, 2], &[1, 2]), Some((&[][..], &[][..])));
        assert_eq!(added(&[9, 7, 2], &[1, 2]), None);
        assert_eq!(added(&[1], &[1, 2]), None);
    }
}
