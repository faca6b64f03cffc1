use crate::{data, read};
use pagetide::ids::TokenId;
use pagetide::text::detokenizer::Detokenizer;
use pagetide::text::output::{OutputOptions, OutputText, StopMatch};
use pagetide::text::tokenizer::{SpecialToken, Tokenizer};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::json;
use std::sync::{Arc, LazyLock};

#[derive(Deserialize)]
struct Golden {
    encoded: Vec<Encoded>,
    decoded: Vec<Decoded>,
    special_ids: Vec<TokenId>,
    vocab_size: usize,
    bos: (Option<String>, Option<TokenId>),
    eos: (Option<String>, Option<TokenId>),
    pad: (Option<String>, Option<TokenId>),
    unk: (Option<String>, Option<TokenId>),
}

#[derive(Deserialize)]
struct Encoded {
    text: String,
    add_special_tokens: bool,
    ids: Vec<TokenId>,
}

#[derive(Deserialize)]
struct Decoded {
    ids: Vec<TokenId>,
    skip_special_tokens: bool,
    text: String,
}

const KINDS: [&str; 7] = [
    "byte_level_llama3",
    "byte_level_gpt2",
    "sentencepiece_llama2",
    "sentencepiece_gemma",
    "metaspace_unigram",
    "wordpiece_bert",
    "wordlevel",
];

static ALL: LazyLock<Vec<(&str, Arc<Tokenizer>, Golden)>> = LazyLock::new(|| {
    let load = |kind: &'static str| {
        let folder = data("tokenizers").join(kind);
        let config = read(&folder.join("tokenizer_config.json"));
        let tokenizer = Tokenizer::from_json(&read(&folder.join("tokenizer.json")), Some(&config));
        let golden = serde_json::from_str(&read(&folder.join("golden.json")));
        (kind, Arc::new(tokenizer.expect("tokenizer")), golden.expect("golden"))
    };
    KINDS.into_iter().map(load).collect()
});

fn tokenizer(kind: &str) -> Arc<Tokenizer> {
    Arc::clone(&ALL.iter().find(|(name, ..)| *name == kind).expect("a kind of the list").1)
}

fn detokenize(tokenizer: &Arc<Tokenizer>, prompt: &[TokenId], tokens: &[TokenId], skip: bool) -> String {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), prompt, skip);
    let mut text: String = tokens.iter().map(|token| detokenizer.push(*token)).collect();
    text.push_str(&detokenizer.finish());
    text
}

#[test]
fn encodes_as_transformers_does() {
    for (kind, tokenizer, golden) in &*ALL {
        for case in &golden.encoded {
            let ids = tokenizer.encode(&case.text, case.add_special_tokens).expect("encodes");
            assert_eq!(ids, case.ids, "{kind}: {:?}, add_special_tokens {}", case.text, case.add_special_tokens);
        }
    }
}

#[test]
fn decodes_as_transformers_does_at_once_and_by_token() {
    for (kind, tokenizer, golden) in &*ALL {
        for case in &golden.decoded {
            let text = tokenizer.decode(&case.ids, case.skip_special_tokens).expect("decodes");
            assert_eq!(text, case.text, "{kind}: {:?}", case.ids);
            let text = detokenize(tokenizer, &[], &case.ids, case.skip_special_tokens);
            assert_eq!(text, case.text, "{kind}, by token: {:?}", case.ids);
        }
    }
}

#[test]
fn special_tokens_are_those_of_transformers() {
    for (kind, tokenizer, golden) in &*ALL {
        assert_eq!(tokenizer.vocab_size(), golden.vocab_size, "{kind}");
        let special: Vec<TokenId> = (0..golden.vocab_size as TokenId).filter(|id| tokenizer.is_special(*id)).collect();
        assert_eq!(special, golden.special_ids, "{kind}");
        let named = tokenizer.special_tokens();
        let pair = |token: &Option<SpecialToken>| (token.clone().map(|t| t.text), token.as_ref().map(|t| t.id));
        assert_eq!(pair(&named.bos), golden.bos, "{kind}");
        assert_eq!(pair(&named.eos), golden.eos, "{kind}");
        assert_eq!(pair(&named.pad), golden.pad, "{kind}");
        assert_eq!(pair(&named.unk), golden.unk, "{kind}");
    }
}

#[test]
fn token_bytes_joined_are_the_text() {
    for (kind, bos) in [("byte_level_llama3", 0), ("sentencepiece_llama2", 1)] {
        let tokenizer = tokenizer(kind);
        for text in ["Hello  wörld", "👩‍👩‍👧 東京\n", "x▁y"] {
            let ids = tokenizer.encode(text, false).expect("encodes");
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect();
            // SentencePiece adds a space before a text, and cannot distinguish `▁` from a space.
            assert_eq!(
                String::from_utf8(bytes).expect("UTF-8")[bos..],
                text.replace('▁', if bos == 1 { " " } else { "▁" })
            );
        }
    }
    let llama = tokenizer("sentencepiece_llama2");
    let newline = llama.token_id("<0x0A>").expect("in the vocabulary");
    assert_eq!(llama.token_bytes(newline), b"\n");
    assert_eq!(llama.token_text(newline), "\n");
    assert_eq!(llama.token_text(llama.token_id("<0xE2>").expect("in the vocabulary")), "\u{FFFD}");
    assert_eq!(llama.token_bytes(1_000_000), b"");
    assert_eq!(llama.token_text(llama.token_id("<s>").expect("in the vocabulary")), "<s>");
}

#[test]
fn ordinary_text_is_not_held_back() {
    let tokenizer = tokenizer("byte_level_llama3");
    let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), &[], true);
    for id in tokenizer.encode("The tide comes in: 42!", false).expect("encodes") {
        assert_eq!(detokenizer.push(id), tokenizer.token_text(id));
        assert!(!detokenizer.is_holding());
    }
    // An emoji is returned with its last byte. A truncated one becomes one U+FFFD at the end.
    let emoji = tokenizer.encode("🙂", false).expect("encodes");
    let (last, rest) = emoji.split_last().expect("tokens");
    for id in rest {
        assert_eq!(detokenizer.push(*id), "");
    }
    assert_eq!(detokenizer.push(*last), "🙂");
    rest.iter().for_each(|id| assert_eq!(detokenizer.push(*id), ""));
    assert_eq!(detokenizer.finish(), "\u{FFFD}");
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn a_character_that_begins_in_the_prompt_belongs_to_the_output() {
    for kind in ["byte_level_llama3", "sentencepiece_llama2"] {
        let tokenizer = tokenizer(kind);
        let ids = tokenizer.encode("The🙂", false).expect("encodes");
        let (prompt, output) = ids.split_at(ids.len() - 2);
        assert_eq!(detokenize(&tokenizer, prompt, output, true), "🙂", "{kind}");
    }
}

#[test]
fn the_space_after_the_prompt_is_kept() {
    let tokenizer = tokenizer("sentencepiece_llama2");
    let prompt = tokenizer.encode("The", true).expect("encodes");
    let word = tokenizer.encode("tide", false).expect("encodes");
    assert_eq!(detokenize(&tokenizer, &prompt, &word, true), " tide");
    assert_eq!(detokenize(&tokenizer, &prompt[..1], &word, true), "tide", "after nothing but the skipped <s>");
    assert_eq!(detokenize(&tokenizer, &prompt[..1], &word, false), " tide", "after a visible <s>");
}

/// Chains of decoding steps that the tokenizers of the goldens do not have, compared with the tokenizers crate.
#[test]
fn every_supported_chain_decodes_by_token_as_at_once() {
    let source = read(&data("tokenizers").join("sentencepiece_llama2/tokenizer.json"));
    let mut json: serde_json::Value = serde_json::from_str(&source).expect("JSON");
    let replace =
        |pattern: serde_json::Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let strip = |content: char, start: usize| json!({"type": "Strip", "content": content, "start": start, "stop": 0});
    let fuse = json!({"type": "Fuse"});
    let bytes = json!({"type": "ByteFallback"});
    let metaspace =
        |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let wordpiece = |cleanup: bool| json!({"type": "WordPiece", "prefix": "▁", "cleanup": cleanup});
    let chains = [
        vec![],
        vec![fuse.clone()],
        vec![metaspace("never")],
        vec![metaspace("first"), bytes.clone(), fuse.clone()],
        vec![wordpiece(true)],
        vec![wordpiece(false), bytes.clone()],
        vec![replace(json!({"Regex": "[aeiou]+"}), "*"), strip('*', 1), strip('t', 2)],
        vec![replace(json!({"String": "▁"}), " "), bytes.clone(), fuse.clone(), strip(' ', 3)],
        vec![replace(json!({"String": "t"}), ""), fuse.clone(), strip('▁', 2)],
    ];
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for chain in chains {
        json["decoder"] = match chain.len() {
            1 => chain[0].clone(),
            _ => json!({"type": "Sequence", "decoders": chain}),
        };
        let tokenizer = Arc::new(Tokenizer::from_json(&json.to_string(), None).expect("supported"));
        let cases = (tokens(Arc::clone(&tokenizer)), any::<prop::sample::Index>(), any::<bool>());
        let result = runner.run(&cases, |(tokens, cut, skip)| {
            let expected = tokenizer.decode(&tokens, skip).expect("decodes");
            prop_assert_eq!(&detokenize(&tokenizer, &[], &tokens, skip), &expected);
            let (prompt, output) = tokens.split_at(cut.index(tokens.len() + 1));
            let rest = detokenize(&tokenizer, prompt, output, skip);
            prop_assert!(expected.ends_with(&rest), "{:?} does not end with {:?}", expected, rest);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{}: {error}", json["decoder"]));
    }
}

#[test]
fn unsupported_decoders_are_refused_by_name() {
    let source = read(&data("tokenizers").join("wordlevel/tokenizer.json"));
    let mut json: serde_json::Value = serde_json::from_str(&source).expect("JSON");
    json["decoder"] =
        serde_json::json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    let error = Tokenizer::from_json(&json.to_string(), None).expect_err("refused").to_string();
    assert!(error.contains("'CTC' is not supported"), "{error}");
}

#[test]
fn stop_strings_do_not_count_before_min_tokens() {
    let tokenizer = tokenizer("byte_level_llama3");
    let ids = tokenizer.encode("a.b.c", false).expect("encodes");
    assert_eq!(ids.len(), 5, "one token a character");
    for (min_tokens, expected) in [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")] {
        let options = OutputOptions { stop: vec![".".to_owned()], min_tokens, ..OutputOptions::default() };
        let mut output = OutputText::new(Arc::clone(&tokenizer), &[], &options);
        let text: String = ids.iter().map(|id| output.push(*id).text).collect();
        assert_eq!(text, expected, "min_tokens {min_tokens}");
    }
}

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-zA-Z ]{1,8}",
        1 => prop::sample::select(vec!["👩‍👩‍👧‍👦", "🏳️‍🌈", "e\u{301}", "東京", " '", " n't", "'s", " .", "\n\n", "  ", "<s>", "<|end|>"]).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

/// Tokens of a text with random other tokens: invalid UTF-8, special tokens, ids without a token.
fn tokens(tokenizer: Arc<Tokenizer>) -> impl Strategy<Value = Vec<TokenId>> {
    let ids = 0..tokenizer.vocab_size() as TokenId + 2;
    let part = prop_oneof![
        3 => text().prop_map(move |text| tokenizer.encode(&text, false).expect("encodes")),
        2 => prop::collection::vec(ids, 0..6),
    ];
    prop::collection::vec(part, 0..5).prop_map(|parts| parts.concat())
}

fn kind_and_tokens() -> impl Strategy<Value = (usize, Vec<TokenId>)> {
    (0..KINDS.len()).prop_flat_map(|kind| tokens(Arc::clone(&ALL[kind].1)).prop_map(move |tokens| (kind, tokens)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn by_token_is_the_same_as_at_once(
        (kind, tokens) in kind_and_tokens(),
        cut in any::<prop::sample::Index>(),
        skip in any::<bool>(),
    ) {
        let tokenizer = &ALL[kind].1;
        let (prompt, output) = tokens.split_at(cut.index(tokens.len() + 1));
        let mut whole = Detokenizer::new(Arc::clone(tokenizer), &[], skip);
        let certain_of_prompt: String = prompt.iter().map(|token| whole.push(*token)).collect();
        let mut rest: String = output.iter().map(|token| whole.push(*token)).collect();
        rest.push_str(&whole.finish());
        let expected = tokenizer.decode(&tokens, skip).expect("decodes");
        prop_assert_eq!(&certain_of_prompt, &expected[..certain_of_prompt.len()]);
        prop_assert_eq!(&rest, &expected[certain_of_prompt.len()..]);
        let tail = &prompt[Detokenizer::relevant_from(tokenizer, prompt, skip)..];
        prop_assert_eq!(&detokenize(tokenizer, tail, output, skip), &rest, "{} after {:?}", KINDS[kind], tail);
        // What is left of it is as good again.
        let again = &tail[Detokenizer::relevant_from(tokenizer, tail, skip)..];
        prop_assert_eq!(&detokenize(tokenizer, again, output, skip), &rest, "{} after {:?}", KINDS[kind], again);
        prop_assert_eq!(detokenize(tokenizer, prompt, output, skip), rest, "{} after {:?}", KINDS[kind], prompt);
    }

    #[test]
    fn output_text_cuts_at_the_stop_string_and_accounts_for_every_token(
        (kind, tokens) in kind_and_tokens(),
        stop in prop::collection::vec("[a-z ]{1,3}", 0..3),
        include in any::<bool>(),
    ) {
        let tokenizer = &ALL[kind].1;
        let whole = tokenizer.decode(&tokens, true).expect("decodes");
        let options =
            OutputOptions {
                skip_special_tokens: true,
                stop: stop.clone(),
                include_stop_str_in_output: include,
                ..OutputOptions::default()
            };
        let mut output = OutputText::new(Arc::clone(tokenizer), &[], &options);
        let (mut text, mut offsets, mut stopped, mut pushed) = (String::new(), Vec::new(), None, 0);
        for token in &tokens {
            let piece = output.push(*token);
            pushed += 1;
            text.push_str(&piece.text);
            offsets.extend(piece.token_offsets);
            prop_assert!(offsets.len() <= pushed);
            stopped = piece.stopped;
            if stopped.is_some() {
                break;
            }
        }
        if stopped.is_none() {
            let piece = output.finish();
            text.push_str(&piece.text);
            offsets.extend(piece.token_offsets);
            stopped = piece.stopped;
        }
        // The match that ends first, and among those the one that begins first.
        let ends = |(which, stop): (usize, &String)| whole.find(stop.as_str()).map(|at| (at + stop.len(), at, which));
        match stop.iter().enumerate().filter_map(ends).min() {
            Some((end, begin, which)) => {
                prop_assert_eq!(&text, &whole[..if include { end } else { begin }]);
                let found = stopped.map(|found| match found {
                    StopMatch::String(found) => &stop[found],
                    StopMatch::Regex(_) => unreachable!("there are no expressions"),
                });
                prop_assert_eq!(found, Some(&stop[which]));
            }
            None => {
                prop_assert_eq!(&text, &whole);
                prop_assert_eq!(stopped, None);
            }
        }
        prop_assert_eq!(offsets.len(), pushed, "every token is released once");
        prop_assert!(offsets.is_sorted());
        prop_assert!(offsets.last().is_none_or(|last| *last <= text.chars().count()));
    }
}

/// transformers' `spaces_between_special_tokens=False`.
#[test]
fn added_tokens_can_stand_side_by_side() {
    let added = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "special": true, "normalized": false,
                           "single_word": false, "lstrip": false, "rstrip": false})
    };
    // Without a decoder, tokens are joined by spaces.
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "added_tokens": [added(1, "<x>"), added(2, "<y>")],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<x>": 1, "<y>": 2}, "unk_token": "a"},
    });
    let tokenizer = Arc::new(Tokenizer::from_json(&tokenizer.to_string(), None).unwrap());
    let text = |joins: bool| {
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), &[], false).join_added_tokens(joins);
        let pieces: String = [0, 1, 2, 0, 2].iter().map(|token| detokenizer.push(*token)).collect();
        pieces + &detokenizer.finish()
    };
    assert_eq!(text(false), "a <x> <y> a <y>");
    assert_eq!(text(true), "a <x><y> a <y>");
}
