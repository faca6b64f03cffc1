//! A prompt that asks for the text between two others.

use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_text::fill_in::FillInMarks;
use pagetide_text::tokenizer::Tokenizer;

/// What the model is told of a project and of a file whose names are not known: llama.cpp's words.
const REPOSITORY: &str = "myproject\n";
const FILE: &str = "filename\n";
/// Stands before a file if the tokenizer has no mark for it.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

/// A gap between two texts, and what the model may know besides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FillIn {
    /// Other files of the project; the nearest comes last.
    pub files: Vec<ContextFile>,
    pub prefix: String,
    pub suffix: String,
    /// The beginning of the middle, from which the model goes on.
    pub begun: String,
    /// Tokens that the output may have. 0: as many as fit.
    pub max_tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextFile {
    pub name: String,
    pub text: String,
}

impl FillIn {
    pub fn num_bytes(&self) -> usize {
        let files: usize = self.files.iter().map(|file| file.name.len() + file.text.len()).sum();
        files + self.prefix.len() + self.suffix.len() + self.begun.len()
    }

    /// The tokens, in the order in which the models have learned them (Hui et al. 2024, "Qwen2.5-Coder", section 3.2):
    /// the project and its files, then prefix, suffix and middle, each behind its mark. What does not fit into
    /// `max_model_len` beside the output is left out: the files first, farthest first, then the far ends of prefix and
    /// suffix, of which the prefix keeps three quarters.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        marks: &FillInMarks,
        max_model_len: usize,
    ) -> Result<Vec<TokenId>, ApiError> {
        let plain = |text: &str| tokenizer.encode_plain(text, false);
        let (mut prefix, mut suffix) = (plain(&self.prefix)?, plain(&self.suffix)?);
        let begun = tokenizer.encode(&self.begun, false)?;
        let mut context = self.context(tokenizer, marks)?;
        // The tokenizer's own beginning of a text.
        let begin = tokenizer.special_tokens().bos.as_ref().map(|bos| bos.id);
        let begin = begin.filter(|bos| tokenizer.encode("", true).is_ok_and(|added| added.first() == Some(bos)));

        let for_output = match self.max_tokens as usize {
            0 => max_model_len / 4,
            most => most.min(max_model_len / 2),
        };
        let fixed = for_output + 3 + usize::from(begin.is_some()) + begun.len();
        let room = max_model_len.saturating_sub(fixed);
        let suffix_room = room.saturating_sub(prefix.len()).max(room / 4);
        suffix.truncate(suffix_room);
        keep_end(&mut prefix, room - suffix.len());
        keep_end(&mut context, room - suffix.len() - prefix.len());

        let mut tokens: Vec<TokenId> = begin.into_iter().chain(context).collect();
        tokens.push(marks.prefix);
        tokens.extend(prefix);
        // Models have learned middles that begin right behind their mark, so what is begun belongs to the prefix.
        tokens.extend(begun);
        tokens.push(marks.suffix);
        tokens.extend(suffix);
        tokens.push(marks.middle);
        Ok(tokens)
    }

    /// The project and its files, up to the name of the file with the gap.
    fn context(&self, tokenizer: &Tokenizer, marks: &FillInMarks) -> Result<Vec<TokenId>, ApiError> {
        let mut tokens = Vec::new();
        if let Some(mark) = marks.repository {
            tokens.push(mark);
            tokens.extend(tokenizer.encode_plain(REPOSITORY, false)?);
        }
        for ContextFile { name, text } in &self.files {
            match marks.file {
                Some(mark) => {
                    tokens.push(mark);
                    tokens.extend(tokenizer.encode_plain(&format!("{name}\n"), false)?);
                }
                None => tokens.extend(tokenizer.encode_plain(SNIPPET, false)?),
            }
            tokens.extend(tokenizer.encode_plain(text, false)?);
        }
        if let Some(mark) = marks.file {
            tokens.push(mark);
            tokens.extend(tokenizer.encode_plain(FILE, false)?);
        }
        Ok(tokens)
    }
}

/// Cuts away the beginning.
fn keep_end(tokens: &mut Vec<TokenId>, most: usize) {
    tokens.drain(..tokens.len().saturating_sub(most));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value, json};

    /// A token for each of these letters and for a line break (0 to 4), and these special tokens from 5 on.
    fn tokenizer(special: &[&str]) -> Tokenizer {
        let names = ["a", "b", "c", "d", "\n"].iter().chain(special);
        let vocab: Map<String, Value> = names.zip(0..).map(|(name, id)| ((*name).into(), json!(id))).collect();
        let added = special.iter().zip(5..).map(|(name, id)| {
            json!({"id": id, "content": name, "special": true, "normalized": false,
                   "single_word": false, "lstrip": false, "rstrip": false})
        });
        let added: Vec<Value> = added.collect();
        let model = json!({"type": "BPE", "vocab": vocab, "merges": []});
        let json = json!({"version": "1.0", "added_tokens": added, "model": model});
        Tokenizer::from_json(&json.to_string(), None).unwrap()
    }

    const QWEN: [&str; 6] =
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"];

    #[test]
    fn a_project_comes_before_the_gap() {
        let tokenizer = tokenizer(&QWEN);
        let marks = FillInMarks::find(&tokenizer).unwrap();
        assert_eq!(marks.ends, [10, 8, 9], "padding, repository and file end a middle");
        let file = ContextFile { name: "d".into(), text: "bb".into() };
        let fill_in =
            FillIn { files: vec![file], prefix: "ab".into(), suffix: "cd".into(), begun: "a".into(), max_tokens: 10 };
        // The tokenizer knows only some letters of "myproject" and of "filename".
        let expected = [8, 2, 4, 9, 3, 4, 1, 1, 9, 0, 4, 5, 0, 1, 0, 6, 2, 3, 7];
        assert_eq!(fill_in.encode(&tokenizer, &marks, 100).unwrap(), expected);
        // 12 tokens of the prompt fit beside the output: three marks, what is begun, and eight others.
        let cut = [1, 9, 0, 4, 5, 0, 1, 0, 6, 2, 3, 7];
        assert_eq!(fill_in.encode(&tokenizer, &marks, 22).unwrap(), cut);
    }

    #[test]
    fn a_tokenizer_without_all_three_marks_has_none() {
        assert_eq!(FillInMarks::find(&tokenizer(&["<PRE>", "<MID>"])).unwrap_err(), "suffix");
        assert_eq!(FillInMarks::find(&tokenizer(&[])).unwrap_err(), "prefix, suffix, middle");
        FillInMarks::find(&tokenizer(&["▁<PRE>", "▁<SUF>", "▁<MID>"])).unwrap();
    }
}
