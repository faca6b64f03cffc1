//! The form of hub names and revisions.

use super::gguf::is_quant;

/// Whether `model` has the form of a hub name, `OWNER/NAME`. A path may have this form too.
fn is_name(model: &str) -> bool {
    let is_part = |part: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty()
            && part.chars().all(is_plain)
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
            // Folders of the cache have two dashes between owner and name.
            && !part.contains("--")
            && !part.contains("..")
    };
    model.len() <= 96 && model.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
}

/// Splits `OWNER/NAME:QUANT`, the name of GGUF files on the hub, into the hub's name and the quantisation, and
/// `OWNER/NAME` into the name and none. `None` for anything else.
pub fn split_quant(model: &str) -> Option<(&str, Option<&str>)> {
    let (name, quant) = model.split_once(':').map_or((model, None), |(name, quant)| (name, Some(quant)));
    (is_name(name) && quant.is_none_or(is_quant)).then_some((name, quant))
}

/// Whether `revision` can be a branch, a tag or a commit.
pub fn is_revision(revision: &str) -> bool {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !"~^:?*[\\%#".contains(c);
    !revision.is_empty()
        && revision.chars().all(is_plain)
        && !revision.contains("..")
        && revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        for name in ["Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-1B", "a/b", "01-ai/Yi_1.5"] {
            assert!(is_name(name), "{name}");
        }
        let long = format!("a/{}", "b".repeat(100));
        for path in
            ["demo", "/a/b", "./a", "../a", "a/", "/a", "a/b/c", "~/a", "a/..", "a//b", "a b/c", "a/b--c", "", &long]
        {
            assert!(!is_name(path), "{path}");
        }
    }

    #[test]
    fn a_quantisation_stands_behind_a_name() {
        assert_eq!(split_quant("a/b"), Some(("a/b", None)));
        assert_eq!(split_quant("a/b-GGUF:Q4_K_M"), Some(("a/b-GGUF", Some("Q4_K_M"))));
        for other in ["a/b:", "a:Q4_K_M", "a/b:Q4/K", "a/b:Q4:K", "./a/b:Q4_K_M"] {
            assert_eq!(split_quant(other), None, "{other}");
        }
    }

    #[test]
    fn revisions_stay_in_their_folder() {
        for revision in ["main", "v1.0", "refs/pr/3", "0123456789abcdef0123456789abcdef01234567"] {
            assert!(is_revision(revision), "{revision}");
        }
        for revision in ["", "../x", "/x", "a//b", "a b", "x/", ".git", "a?b", "a%2e"] {
            assert!(!is_revision(revision), "{revision}");
        }
    }
}
