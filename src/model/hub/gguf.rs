//! Which GGUF files of a repository are the model that is wanted.
//!
//! A file's name ends with its quantisation: `NAME-Q4_K_M.gguf`, or `NAME-Q4_K_M-00001-of-00003.gguf` if it is split.

use super::failure::Failure;
use crate::gguf::{GGUF_ENDING, split_of};
use std::collections::BTreeSet;
use std::path::Path;

/// What is taken where the user names none, as in llama.cpp.
const DEFAULT_QUANT: &str = "Q4_K_M";
/// Files with these words in their names belong to a model and are none.
const OTHER_PARTS: [&str; 3] = ["mmproj", "imatrix", "mtp-"];

/// Whether `text` can be the quantisation in a file's name.
pub fn is_quant(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
}

/// Whether a file of a repository is a model or a part of one. Its name must stay in its folder.
fn is_model(file: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['\\', '\0']);
    let name = file.rsplit('/').next().unwrap_or(file);
    name.ends_with(GGUF_ENDING)
        && file.split('/').all(is_part)
        && !OTHER_PARTS.iter().any(|other| name.to_lowercase().contains(other))
}

/// The quantisation that a file's name ends with, in capitals.
fn quant_of(file: &str) -> Option<String> {
    let (stem, _) = stem_and_count(file);
    let (_, quant) = stem.rsplit_once(['-', '.', '/'])?;
    Some(quant.to_uppercase())
}

/// A file's name without the numbers of a split and without its ending; and how many files the model has.
fn stem_and_count(file: &str) -> (String, usize) {
    let path = Path::new(file);
    match split_of(path) {
        Some((name, count)) => (path.with_file_name(name).display().to_string(), count),
        None => (file.trim_end_matches(GGUF_ENDING).to_owned(), 1),
    }
}

/// The models among `files`: what their names begin with, and of how many files they consist.
fn models<'f>(files: impl Iterator<Item = &'f str>) -> BTreeSet<(String, usize)> {
    files.filter(|file| is_model(file)).map(stem_and_count).collect()
}

/// Whether any of `files` is a model.
pub fn has_model<'f>(mut files: impl Iterator<Item = &'f str>) -> bool {
    files.any(is_model)
}

/// The files of the model with this quantisation, first the one that it begins with. Without a quantisation, that is
/// Q4_K_M, or the only model that there is. Fails if there is no such model, or if parts of it are missing.
pub fn choose(files: &[&str], quant: Option<&str>) -> Result<Vec<String>, Failure> {
    let models = models(files.iter().copied());
    let wanted = quant.unwrap_or(DEFAULT_QUANT).to_uppercase();
    // The whole quantisation, or the end of a longer one: `Q4_K_XL` finds `UD-Q4_K_XL`.
    let is_wanted = |(stem, _): &&(String, usize)| {
        let stem = stem.to_uppercase();
        stem.strip_suffix(&wanted).is_some_and(|front| front.is_empty() || front.ends_with(['-', '.', '/']))
    };
    let only = || models.first().filter(|_| quant.is_none() && models.len() == 1);
    let Some((stem, count)) = models.iter().find(is_wanted).or_else(only) else {
        let found: BTreeSet<_> = files.iter().filter(|file| is_model(file)).filter_map(|file| quant_of(file)).collect();
        return Err(Failure::NoQuant { quant: quant.map(str::to_owned), found: found.into_iter().collect() });
    };
    let names: Vec<_> = match count {
        1 => vec![format!("{stem}{GGUF_ENDING}")],
        _ => (1..=*count).map(|number| format!("{stem}-{number:05}-of-{count:05}{GGUF_ENDING}")).collect(),
    };
    match names.iter().find(|name| !files.contains(&name.as_str())) {
        Some(missing) => Err(Failure::NoSplit(missing.clone())),
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantisation_finds_its_files() {
        let files = [
            "README.md",
            "mmproj-F16.gguf",
            "Tiny-7B.IQ4_XS.gguf",
            "Tiny-7B-Q4_K_M.gguf",
            "Tiny-7B-UD-Q4_K_XL.gguf",
            "BF16/Tiny-7B-BF16-00001-of-00002.gguf",
            "BF16/Tiny-7B-BF16-00002-of-00002.gguf",
            "Tiny-7B-Q8_0-00001-of-00002.gguf",
            "../Tiny-7B-Q2_K.gguf",
            "/Tiny-7B-Q2_K.gguf",
        ];
        let chosen = |quant| choose(&files, quant).map_err(|failure| failure.to_string());
        assert_eq!(chosen(None).unwrap(), ["Tiny-7B-Q4_K_M.gguf"]);
        assert_eq!(chosen(Some("q4_k_m")).unwrap(), ["Tiny-7B-Q4_K_M.gguf"]);
        assert_eq!(chosen(Some("iq4_xs")).unwrap(), ["Tiny-7B.IQ4_XS.gguf"]);
        assert_eq!(chosen(Some("UD-Q4_K_XL")).unwrap(), ["Tiny-7B-UD-Q4_K_XL.gguf"]);
        assert_eq!(chosen(Some("Q4_K_XL")).unwrap(), ["Tiny-7B-UD-Q4_K_XL.gguf"]);
        assert_eq!(chosen(Some("BF16")).unwrap(), files[5..7]);
        assert_eq!(chosen(Some("Q8_0")).unwrap_err(), "Tiny-7B-Q8_0-00002-of-00002.gguf is missing");
        let missing = "no such quantisation among BF16, IQ4_XS, Q4_K_M, Q4_K_XL, Q8_0";
        // What lies elsewhere does not count, nor does a part of a name.
        for quant in ["Q2_K", "4_XS", "K_M", "Q4_K"] {
            assert_eq!(chosen(Some(quant)).unwrap_err(), missing, "{quant}");
        }
    }

    #[test]
    fn without_a_quantisation_the_only_model_is_taken() {
        assert_eq!(choose(&["a.Q2_K.gguf", "mmproj-a.gguf"], None).unwrap(), ["a.Q2_K.gguf"]);
        assert!(choose(&["a.Q2_K.gguf", "a.Q3_K.gguf"], None).is_err());
        assert!(choose(&["README.md"], None).is_err());
    }
}
