//! The merges of a SentencePiece vocabulary. A GGUF file has a score for each token instead.

use super::super::reader::GgufError;
use super::vocabulary::{GgufVocabulary, SCORES, TOKENS};
use std::collections::HashSet;

/// Length of a token in bytes, and merges per token on average. Published vocabularies have less than a tenth of it.
/// Without these maxima, a file could take time and memory that grow with the square of its size.
const MAX_TOKEN_BYTES: usize = 1024;
const MAX_MERGES_PER_TOKEN: usize = 32;

/// A way to make a token of two others.
struct ScoredMerge {
    score: f64,
    id: u32,
    /// Where its right part begins, in bytes.
    at: usize,
    left_chars: usize,
    right_chars: usize,
}

/// The merges that do what the scores say: the token with the highest score is put together first. A token has a merge
/// for each way to split it into two tokens. Among equal scores, the longer left part comes first: SentencePiece begins
/// at the left.
pub fn merges<'t>(vocabulary: &'t GgufVocabulary<'_>, scores: &[f64]) -> Result<Vec<(&'t str, &'t str)>, GgufError> {
    if let Some(id) = scores.iter().position(|score| score.is_nan()) {
        return Err(GgufError::new(format!("{SCORES}: the score of token {id} is not a number")));
    }
    let in_text = || vocabulary.entries().filter(|(_, _, kind)| kind.is_merged());
    let known: HashSet<&str> = in_text().map(|(_, text, _)| text).collect();
    let max_merges = known.len() * MAX_MERGES_PER_TOKEN;
    let mut found = Vec::new();
    for (id, text, _) in in_text() {
        if text.len() > MAX_TOKEN_BYTES {
            let problem = format!("token {id} has {} bytes; the maximum is {MAX_TOKEN_BYTES}", text.len());
            return Err(GgufError::new(format!("{TOKENS}: {problem}")));
        }
        let num_chars = text.chars().count();
        for (left_chars, (at, _)) in text.char_indices().enumerate().skip(1) {
            if known.contains(&text[..at]) && known.contains(&text[at..]) {
                let right_chars = num_chars - left_chars;
                found.push(ScoredMerge { score: scores[id as usize], id, at, left_chars, right_chars });
            }
        }
        if found.len() > max_merges {
            let problem = format!("its tokens can be split in more than {max_merges} ways");
            return Err(GgufError::new(format!("{TOKENS}: {problem}")));
        }
    }
    found.sort_by(|one, other| {
        let by_score = other.score.partial_cmp(&one.score).expect("no score is NaN");
        by_score.then_with(|| (other.left_chars, other.right_chars).cmp(&(one.left_chars, one.right_chars)))
    });
    Ok(found.iter().map(|merge| vocabulary.tokens[merge.id as usize].split_at(merge.at)).collect())
}
