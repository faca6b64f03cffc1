//! The marks of a tokenizer for filling in the middle: the model sees what stands before a gap and what stands behind
//! it, and writes what belongs between them (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in
//! the Middle"). Checkpoints do not say which tokens these are, so they are known by their names.

use crate::tokenizer::Tokenizer;
use pagetide_base::ids::TokenId;

// The names of each mark: of Qwen, of SantaCoder, of StarCoder and Granite, of DeepSeek, of CodeLlama, of GLM.
const PREFIX: [&str; 8] = [
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
];
const SUFFIX: [&str; 8] = [
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
];
const MIDDLE: [&str; 8] = [
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];
const REPOSITORY: [&str; 5] = ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"];
const FILE: [&str; 1] = ["<|file_sep|>"];
/// Other tokens that models write behind the middle.
const ENDS: [&str; 6] = ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<EOT>", "▁<EOT>"];

/// The marks that a tokenizer has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FillInMarks {
    pub prefix: TokenId,
    pub suffix: TokenId,
    pub middle: TokenId,
    /// Stands before the name of the repository.
    pub repository: Option<TokenId>,
    /// Stands before the name of a file.
    pub file: Option<TokenId>,
    /// Tokens that end the middle, besides the model's own end tokens.
    pub ends: Vec<TokenId>,
}

impl FillInMarks {
    /// # Errors
    /// Which of the three marks that cannot be missed are missing.
    pub fn find(tokenizer: &Tokenizer) -> Result<Self, String> {
        let find = |names: &[&str]| names.iter().find_map(|name| tokenizer.token_id(name));
        let (prefix, suffix, middle) = (find(&PREFIX), find(&SUFFIX), find(&MIDDLE));
        let (Some(prefix), Some(suffix), Some(middle)) = (prefix, suffix, middle) else {
            let all = [("prefix", prefix), ("suffix", suffix), ("middle", middle)];
            let missing: Vec<&str> = all.iter().filter(|(_, mark)| mark.is_none()).map(|(name, _)| *name).collect();
            return Err(missing.join(", "));
        };
        let (repository, file) = (find(&REPOSITORY), find(&FILE));
        let ends = ENDS.iter().filter_map(|name| tokenizer.token_id(name)).chain(repository).chain(file).collect();
        Ok(Self { prefix, suffix, middle, repository, file, ends })
    }
}
