//! The clean-up of spaces that some tokenizers need after decoding.

/// Removes the spaces that tokenising put before punctuation and around contractions, in the order of transformers.
pub fn clean_up_spaces(text: &str) -> String {
    const RULES: [(&str, &str); 10] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    RULES
        .iter()
        .fold(text.to_owned(), |text, (from, to)| if text.contains(from) { text.replace(from, to) } else { text })
}

/// The last place before a space that no rule of [`clean_up_spaces`] can reach across, even with later text. Every rule
/// begins with a space, and only `'` and `n` can precede a second space inside a match.
pub fn last_word_boundary(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    (1..bytes.len()).rev().find(|&i| bytes[i] == b' ' && !matches!(bytes[i - 1], b' ' | b'\'' | b'n'))
}
