//! The text to predict, cut into chunks of tokens.

use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use pagetide_text::tokenizer::Tokenizer;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// The smallest chunk, of which three positions count.
pub const MIN_CONTEXT: usize = 8;
/// A tokenised text takes about fifty times as much memory.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Chunks of equal length that a model predicts one by one.
pub struct TextChunks {
    /// `[chunks, context]`
    tokens: Vec<TokenId>,
    context: usize,
}

impl TextChunks {
    /// `tokens` without those that do not fill a chunk, and at most `limit` chunks.
    ///
    /// # Errors
    /// There is no whole chunk, or a token is not in the model's vocabulary.
    pub fn new(mut tokens: Vec<TokenId>, context: usize, limit: usize, vocab_size: usize) -> Result<Self, StartError> {
        let num = (tokens.len() / context).min(limit);
        if num == 0 {
            let len = tokens.len();
            return Err(StartError::new(format!(
                "the text has {len} tokens, and one chunk needs {context} (--context)"
            )));
        }
        tokens.truncate(num * context);
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab_size) {
            return Err(StartError::new(format!(
                "token {token} is not in the model's vocabulary of {vocab_size} tokens"
            )));
        }
        Ok(Self { tokens, context })
    }

    pub fn num(&self) -> usize {
        self.tokens.len() / self.context
    }

    /// Tokens of a chunk.
    pub fn context(&self) -> usize {
        self.context
    }

    /// All chunks: `[num, context]`.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The first position of a chunk whose prediction counts. Those before it have too little context.
    pub fn first_scored(&self) -> usize {
        self.context / 2
    }

    /// The number of positions of a chunk whose prediction counts: from [`TextChunks::first_scored`] to the last but
    /// one.
    pub fn num_scored(&self) -> usize {
        num_scored(self.context)
    }

    /// The tokens of a chunk.
    pub fn chunk(&self, chunk: usize) -> &[TokenId] {
        &self.tokens[chunk * self.context..][..self.context]
    }

    /// The tokens of a chunk that are fed: all but the last, with `bos` in place of the first.
    pub fn fed(&self, chunk: usize, bos: Option<TokenId>) -> Arc<Vec<TokenId>> {
        let mut tokens = self.chunk(chunk)[..self.context - 1].to_vec();
        tokens[0] = bos.unwrap_or(tokens[0]);
        Arc::new(tokens)
    }
}

/// [`TextChunks::num_scored`] of chunks of this length.
pub fn num_scored(context: usize) -> usize {
    context - 1 - context / 2
}

/// The tokens of a file. Special tokens that are written in it are text, and a line end at its end is left out.
pub fn read_tokens(path: &Path, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, StartError> {
    let wrong = |why: String| StartError::new(format!("--text {}: {why}", path.display()));
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut text));
    read.map_err(|error| wrong(error.to_string()))?;
    if text.len() as u64 > MAX_TEXT_BYTES {
        return Err(wrong(format!("the file is larger than {} MiB", MAX_TEXT_BYTES >> 20)));
    }
    let text =
        String::from_utf8(text).map_err(|error| wrong(format!("the file is not UTF-8: {}", error.utf8_error())))?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    tokenizer.encode_plain(text, true).map_err(|error| wrong(error.message))
}

/// The token that the tokenizer puts in front of a text, if it does.
///
/// # Errors
/// It puts several tokens there, or something behind the text.
pub fn added_bos(tokenizer: &Tokenizer) -> Result<Option<TokenId>, StartError> {
    let encode = |special| tokenizer.encode_plain("a", special).map_err(|error| StartError::new(error.message));
    let (bare, whole) = (encode(false)?, encode(true)?);
    match whole.strip_suffix(&bare[..]) {
        Some([]) => Ok(None),
        Some([bos]) => Ok(Some(*bos)),
        _ => Err(StartError::new(
            "the tokenizer adds more to a text than one token in front of it, so its perplexity is not defined",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_into_whole_chunks() {
        let chunks = TextChunks::new((0..29).collect(), 8, usize::MAX, 29).expect("there are three chunks");
        assert_eq!((chunks.num(), chunks.context(), chunks.first_scored(), chunks.num_scored()), (3, 8, 4, 3));
        assert_eq!(chunks.chunk(2), [16, 17, 18, 19, 20, 21, 22, 23]);
        assert_eq!(*chunks.fed(1, None), [8, 9, 10, 11, 12, 13, 14]);
        assert_eq!(*chunks.fed(1, Some(99)), [99, 9, 10, 11, 12, 13, 14]);
        assert_eq!(TextChunks::new((0..29).collect(), 8, 2, 29).expect("there are two").tokens().len(), 16);
        assert_eq!(TextChunks::new((0..11).collect(), 11, 1, 11).expect("there is one").num_scored(), 5);
        let few = TextChunks::new((0..7).collect(), 8, 2, 29).err().expect("there is no chunk");
        assert_eq!(few.to_string(), "the text has 7 tokens, and one chunk needs 8 (--context)");
        let unknown = TextChunks::new((0..29).collect(), 8, 9, 23).err().expect("token 23 is in the last chunk");
        assert_eq!(unknown.to_string(), "token 23 is not in the model's vocabulary of 23 tokens");
    }

    fn tokenizer(post_processor: &str) -> Tokenizer {
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [
                {{"id": 3, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                  "normalized": false, "special": true}}],
                "normalizer": null, "pre_tokenizer": null, "decoder": null, "post_processor": {post_processor},
                "model": {{"type": "BPE", "merges": [],
                  "vocab": {{"a": 0, "<": 1, "s": 2, "<s>": 3, ">": 4, "\n": 5}}}}}}"#
        );
        Tokenizer::from_json(&json, None).expect("it is a tokenizer")
    }

    fn template(single: &str) -> Tokenizer {
        tokenizer(&format!(
            r#"{{"type": "TemplateProcessing", "single": [{single}], "pair": [],
                "special_tokens": {{"<s>": {{"id": "<s>", "ids": [3], "tokens": ["<s>"]}}}}}}"#
        ))
    }

    const TEXT: &str = r#"{"Sequence": {"id": "A", "type_id": 0}}"#;
    const BOS: &str = r#"{"SpecialToken": {"id": "<s>", "type_id": 0}}"#;

    #[test]
    fn the_first_token_is_what_the_tokenizer_adds() {
        let added = |tokenizer: &Tokenizer| added_bos(tokenizer).expect("at most one token is added");
        assert_eq!(added(&tokenizer("null")), None);
        assert_eq!(added(&template(&format!("{BOS}, {TEXT}"))), Some(3));
        for more in [format!("{TEXT}, {BOS}"), format!("{BOS}, {TEXT}, {BOS}"), format!("{BOS}, {BOS}, {TEXT}")] {
            assert!(added_bos(&template(&more)).is_err(), "{more}");
        }
    }

    #[test]
    fn a_text_is_read_as_text() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let read = |bytes: &[u8], tokenizer: &Tokenizer| {
            std::fs::write(file.path(), bytes).expect("it can be written");
            read_tokens(file.path(), tokenizer)
        };
        let bos = template(&format!("{BOS}, {TEXT}"));
        let tokens = read(b"a<s>\na\n\n", &bos).expect("it is a text");
        assert_eq!(tokens, [3, 0, 1, 2, 4, 5, 0, 5], "one line end is left out");
        assert_eq!(read(b"a", &tokenizer("null")).expect("it is a text"), [0]);
        let error = read(b"a\xff", &bos).expect_err("it is not UTF-8").to_string();
        assert!(error.starts_with("--text ") && error.contains("not UTF-8"), "{error}");
        file.as_file().set_len(MAX_TEXT_BYTES + 1).expect("it grows");
        let error = read_tokens(file.path(), &bos).expect_err("it is too large").to_string();
        assert!(error.ends_with("the file is larger than 64 MiB"), "{error}");
    }
}
