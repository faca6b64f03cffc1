use super::super::reader::GgufFile;
use super::super::test_files::GgufWriter;
use super::*;

const TYPES: &str = "tokenizer.ggml.token_type";
const TOKENS: &str = "tokenizer.ggml.tokens";

fn byte_level(tokens: &[&str], kinds: &[i32]) -> GgufWriter {
    byte_level_without_merges(tokens, kinds).texts(MERGES, &[""; 0])
}

fn byte_level_without_merges(tokens: &[&str], kinds: &[i32]) -> GgufWriter {
    let writer = GgufWriter::new().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
    writer.texts(TOKENS, tokens).integers(TYPES, kinds)
}

/// Each token's score is its id, below 0.
fn sentencepiece(tokens: &[&str], kinds: &[i32]) -> GgufWriter {
    let scores: Vec<f32> = (0..tokens.len()).map(|id| -(id as f32)).collect();
    let writer = GgufWriter::new().text("tokenizer.ggml.model", "llama").texts(TOKENS, tokens);
    writer.integers(TYPES, kinds).floats(SCORES, &scores)
}

fn parsed(file: GgufWriter) -> Value {
    let bytes = file.finish();
    let json = tokenizer_json(&GgufFile::read(&bytes).unwrap().metadata).unwrap().expect("has a tokenizer");
    serde_json::from_str(&json).unwrap()
}

fn config(file: GgufWriter) -> Value {
    Value::Object(tokenizer_config(&GgufFile::read(&file.finish()).unwrap().metadata).unwrap())
}

fn ends(file: GgufWriter) -> Vec<u32> {
    end_token_ids(&GgufFile::read(&file.finish()).unwrap().metadata).unwrap()
}

fn error(file: GgufWriter) -> String {
    let bytes = file.finish();
    tokenizer_json(&GgufFile::read(&bytes).unwrap().metadata).expect_err("must be refused").to_string()
}

#[test]
fn a_file_may_have_no_tokenizer() {
    for file in [GgufWriter::new(), GgufWriter::new().text("tokenizer.ggml.model", "no_vocab")] {
        let bytes = file.finish();
        let metadata = GgufFile::read(&bytes).unwrap().metadata;
        assert_eq!(tokenizer_json(&metadata), Ok(None));
        assert_eq!(tokenizer_config(&metadata), Ok(Map::new()));
        assert_eq!(end_token_ids(&metadata), Ok(Vec::new()));
    }
}

#[test]
fn errors_name_the_key() {
    for model in ["bert", "t5", "rwkv", "plamo2", "gemma4"] {
        let error = error(GgufWriter::new().text("tokenizer.ggml.model", model));
        assert!(error.starts_with(&format!("tokenizer.ggml.model: '{model}' is not supported; supported are gpt2 ")));
    }
    let pre = |name: &str| GgufWriter::new().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", name);
    let unknown = error(pre("kimi-k2"));
    assert!(
        unknown.starts_with("tokenizer.ggml.pre: 'kimi-k2' is not supported; supported are a.x-4.0, "),
        "{unknown}"
    );
    assert!(unknown.contains(", llama-bpe, ") && unknown.contains(", qwen2, "), "{unknown}");

    assert_eq!(error(pre("gpt-2")), "tokenizer.ggml.tokens: it is missing");
    assert_eq!(
        error(pre("gpt-2").texts(TOKENS, &[""; 0])),
        "tokenizer.ggml.tokens: 0 tokens; 1 to 16777216 are supported"
    );
    assert_eq!(error(pre("gpt-2").integers(TOKENS, &[1])), "tokenizer.ggml.tokens: not a list of strings");
    let twice = error(byte_level(&["a", "b", "a"], &[1; 3]));
    assert_eq!(twice, "tokenizer.ggml.tokens: tokens 0 and 2 are the same, \"a\"");

    assert_eq!(error(byte_level(&["a", "b"], &[1; 3])), "tokenizer.ggml.token_type: 3 values for 2 tokens");
    for kind in [-1, 7] {
        let error = error(byte_level(&["a"], &[kind]));
        assert_eq!(error, format!("tokenizer.ggml.token_type: {kind} is not a type (0 to 6)"));
    }

    let merges = |merges: &[&str]| error(byte_level_without_merges(&["a", "b", "ab"], &[1; 3]).texts(MERGES, merges));
    assert_eq!(error(byte_level_without_merges(&["a"], &[1])), "tokenizer.ggml.merges: it is missing");
    assert_eq!(merges(&["a b", "ab"]), "tokenizer.ggml.merges: \"ab\": not two tokens with a space between them");
    assert_eq!(merges(&[" "]), "tokenizer.ggml.merges: \" \": not two tokens with a space between them");
    assert_eq!(merges(&["a c"]), "tokenizer.ggml.merges: \"a c\": \"c\" is not a token");
    assert_eq!(merges(&["b a"]), "tokenizer.ggml.merges: \"b a\": \"ba\" is not a token");

    let llama = || GgufWriter::new().text("tokenizer.ggml.model", "llama").texts(TOKENS, &["a", "b"]);
    assert_eq!(error(llama()), "tokenizer.ggml.scores: it is missing");
    assert_eq!(error(llama().floats(SCORES, &[0.0])), "tokenizer.ggml.scores: 1 values for 2 tokens");
    let nan = error(llama().floats(SCORES, &[0.0, f32::NAN]));
    assert_eq!(nan, "tokenizer.ggml.scores: the score of token 1 is not a number");

    for role in ["bos", "eos"] {
        let key = format!("tokenizer.ggml.{role}_token_id");
        let add = format!("tokenizer.ggml.add_{role}_token");
        let outside = error(byte_level(&["a"], &[1]).flag(&add, true).integer(&key, 1));
        assert_eq!(outside, format!("{key}: 1 is not one of the 1 tokens"));
        let missing = error(byte_level(&["a"], &[1]).flag(&add, true));
        assert_eq!(missing, format!("{add}: it is true, but there is no {key}"));
    }
    let bytes = byte_level(&["a"], &[1]).integer("tokenizer.ggml.padding_token_id", u32::MAX).finish();
    let outside = tokenizer_config(&GgufFile::read(&bytes).unwrap().metadata).unwrap_err().to_string();
    assert_eq!(outside, "tokenizer.ggml.padding_token_id: 4294967295 is not one of the 1 tokens");
    let bytes = byte_level(&["a"], &[1]).integer("tokenizer.ggml.eot_token_id", 1).finish();
    let outside = end_token_ids(&GgufFile::read(&bytes).unwrap().metadata).unwrap_err().to_string();
    assert_eq!(outside, "tokenizer.ggml.eot_token_id: 1 is not one of the 1 tokens");
    let bytes = GgufWriter::new().texts("tokenizer.chat_templates", &["rag"]).finish();
    let missing = tokenizer_config(&GgufFile::read(&bytes).unwrap().metadata).unwrap_err().to_string();
    assert_eq!(missing, "tokenizer.chat_template.rag: it is missing");
}

/// Vocabularies whose merges would take time and memory that grow with the square of the file's size.
#[test]
fn scores_cannot_ask_for_endless_merges() {
    let long = "a".repeat(1025);
    let error_of_long = error(sentencepiece(&["a", &long], &[1; 2]));
    assert_eq!(error_of_long, "tokenizer.ggml.tokens: token 1 has 1025 bytes; the maximum is 1024");
    let control = parsed(sentencepiece(&["<unk>", "<s>", &long], &[2, 3, 3]));
    assert_eq!(control["model"]["merges"], json!([]), "control tokens are not split");

    let runs: Vec<String> = (1..=400).map(|len| "a".repeat(len)).collect();
    let runs: Vec<&str> = runs.iter().map(String::as_str).collect();
    let error_of_runs = error(sentencepiece(&runs, &[1; 400]));
    assert_eq!(error_of_runs, "tokenizer.ggml.tokens: its tokens can be split in more than 12800 ways");
}

#[test]
fn merges_come_in_the_order_of_the_scores() {
    let tokens = ["<unk>", "<s>", "</s>", "abc", "ab", "bc", "a", "b", "c", "<0x61>", "a<s>", "▁a", "▁"];
    let kinds = [2, 3, 3, 1, 1, 1, 1, 1, 1, 6, 1, 4, 5];
    let json = parsed(sentencepiece(&tokens, &kinds));
    // Nothing leads to control tokens and bytes, or from them.
    assert_eq!(json["model"]["merges"], json!([["ab", "c"], ["a", "bc"], ["a", "b"], ["b", "c"], ["▁", "a"]]));
    assert_eq!(json["model"]["unk_token"], "<unk>");
    assert_eq!(json["model"]["vocab"]["<0x61>"], 9);
}

#[test]
fn the_first_of_two_equal_merges_counts() {
    let file = byte_level_without_merges(&["a", "b", "ab", " ", " a"], &[1; 5]);
    let json = parsed(file.texts(MERGES, &["a b", "  a", "a b"]));
    assert_eq!(json["model"]["merges"], json!([["a", "b"], [" ", "a"]]), "a token may begin with a space");
}

#[test]
fn tokens_become_what_their_types_say() {
    let tokens = ["a", "<s>", "<tool>", "<|im_end|>", "[PAD4]", "[PAD4", "", "<unk>"];
    let json = parsed(byte_level(&tokens, &[1, 3, 4, 1, 5, 5, 1, 2]));
    let added: Vec<(&Value, &Value, &Value)> = json["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| (&token["id"], &token["content"], &token["special"]))
        .collect();
    let token = |id: u32, content: &str, special: bool| (json!(id), json!(content), json!(special));
    let expected =
        [token(1, "<s>", true), token(2, "<tool>", false), token(3, "<|im_end|>", true), token(7, "<unk>", true)];
    let expected: Vec<(&Value, &Value, &Value)> =
        expected.iter().map(|(id, text, special)| (id, text, special)).collect();
    assert_eq!(added, expected);
    let vocab = json!({"a": 0, "<s>": 1, "<tool>": 2, "<|im_end|>": 3, "[PAD4": 5, "[EMPTY_6]": 6, "<unk>": 7});
    assert_eq!(json["model"]["vocab"], vocab, "without the filler of the converter");
    let filler = byte_level_without_merges(&["[PAD", "1]x", "[PAD1]x", "[PAD3]", "3]"], &[1, 1, 1, 5, 1]);
    let error = error(filler.texts(MERGES, &["[PAD 1]x", "[PAD 3]"]));
    assert_eq!(error, "tokenizer.ggml.merges: \"[PAD 3]\": \"[PAD3]\" is not a token");
    let filler = parsed(sentencepiece(&["<unk>", "<s>", "[PAD", "3]", "[PAD4]", "4]"], &[2, 3, 1, 1, 5, 1]));
    assert_eq!(filler["model"]["merges"], json!([]));
    let filler = byte_level(&tokens, &[1, 3, 4, 1, 5, 5, 1, 2]).integer("tokenizer.ggml.eos_token_id", 4);
    assert_eq!(config(filler).get("eos_token"), None);
}

#[test]
fn bos_and_eos_are_added_as_in_llama_cpp() {
    let single = |json: &Value| -> Vec<String> {
        let processors = match json["post_processor"]["processors"].as_array() {
            Some(processors) => processors.clone(),
            None => vec![json["post_processor"].clone()],
        };
        let template = processors.into_iter().find(|processor| processor["type"] == "TemplateProcessing");
        let parts = template.map_or(vec![], |template| template["single"].as_array().unwrap().clone());
        let name = |part: &Value| part["SpecialToken"]["id"].as_str().unwrap_or("text").to_owned();
        parts.iter().map(name).collect()
    };
    let bytes = |pre: &str| {
        let writer = GgufWriter::new().text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", pre);
        let writer = writer.texts(TOKENS, &["a", "<s>", "</s>"]).integers(TYPES, &[1, 3, 3]).texts(MERGES, &[""; 0]);
        writer.integer("tokenizer.ggml.eos_token_id", 2)
    };
    let with_bos = |pre: &str| bytes(pre).integer("tokenizer.ggml.bos_token_id", 1);
    let (add_bos, add_eos) = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token");
    assert_eq!(single(&parsed(with_bos("gpt-2"))), [""; 0]);
    assert_eq!(single(&parsed(with_bos("llama-bpe"))), ["<s>", "text"]);
    assert_eq!(single(&parsed(with_bos("tekken"))), ["<s>", "text"]);
    assert_eq!(single(&parsed(bytes("llama-bpe"))), [""; 0], "there is no BOS token");
    assert_eq!(single(&parsed(with_bos("llama-bpe").flag(add_bos, false))), [""; 0]);
    assert_eq!(single(&parsed(with_bos("gpt-2").flag(add_bos, true))), ["<s>", "text"]);
    assert_eq!(single(&parsed(with_bos("gpt-2").flag(add_eos, true))), ["text", "</s>"]);

    let llama = || sentencepiece(&["<unk>", "<s>", "</s>", "<e>"], &[2, 3, 3, 3]);
    assert_eq!(single(&parsed(llama())), ["<s>", "text"]);
    assert_eq!(single(&parsed(llama().flag(add_eos, true))), ["<s>", "text", "</s>"]);
    let other = llama().flag(add_bos, false).flag(add_eos, true).integer("tokenizer.ggml.eos_token_id", 3);
    assert_eq!(single(&parsed(other)), ["text", "<e>"]);
    let template = parsed(llama())["post_processor"].clone();
    assert_eq!(template["special_tokens"], json!({"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}));
}

#[test]
fn special_tokens_of_phi3_take_the_space_behind_them() {
    let tokens = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|end|>"];
    let rstrip = |architecture: &str| -> Vec<bool> {
        let json = parsed(sentencepiece(&tokens, &[2, 3, 3, 3, 3]).text("general.architecture", architecture));
        json["added_tokens"].as_array().unwrap().iter().map(|token| token["rstrip"].as_bool().unwrap()).collect()
    };
    assert_eq!(rstrip("phi3"), [false, false, true, false, true]);
    assert_eq!(rstrip("llama"), [false; 5]);
}

#[test]
fn the_configuration_names_roles_and_templates() {
    let file = || sentencepiece(&["<unk>", "<s>", "</s>", "a", "<pad>"], &[2, 3, 3, 1, 3]);
    let expected = json!({
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": true, "add_eos_token": false,
    });
    assert_eq!(config(file()), expected, "llama.cpp's ids where the file names none");
    assert_eq!(config(file().integer("tokenizer.ggml.padding_token_id", 4))["pad_token"], "<pad>");
    assert_eq!(config(file().integer("tokenizer.ggml.seperator_token_id", 4))["sep_token"], "<pad>");
    let ordinary = config(file().integer("tokenizer.ggml.padding_token_id", 3));
    assert_eq!(ordinary.get("pad_token"), None, "ordinary text stays ordinary");

    let templates = |file: GgufWriter| config(file)["chat_template"].clone();
    assert_eq!(templates(file().text(CHAT_TEMPLATE, "{{ x }}")), "{{ x }}");
    let named = || file().texts(CHAT_TEMPLATES, &["rag"]).text("tokenizer.chat_template.rag", "{{ rag }}");
    let rag = json!({"name": "rag", "template": "{{ rag }}"});
    assert_eq!(templates(named()), json!([rag]));
    let both = json!([{"name": "default", "template": "{{ x }}"}, rag]);
    assert_eq!(templates(named().text(CHAT_TEMPLATE, "{{ x }}")), both);
}

#[test]
fn ends_are_those_of_llama_cpp() {
    // Named ids come first, then tokens that are known by their text.
    let tokens = ["a", "<|endoftext|>", "<|im_end|>", "<|file_sep|>", "<|fim_pad|>", "<|eot_id|>", "<|fim_prefix|>"];
    let file = || byte_level(&tokens, &[1, 3, 3, 3, 3, 1, 3]);
    assert_eq!(ends(file().integer("tokenizer.ggml.eos_token_id", 2)), [2, 5, 1, 4, 3]);
    assert_eq!(ends(file().integer("tokenizer.ggml.eot_token_id", 0)), [0, 5, 2, 1, 4, 3]);
    assert_eq!(ends(file().integer("tokenizer.ggml.fim_pad_token_id", 0)), [5, 2, 1, 0, 3], "an id replaces the text");
    assert_eq!(ends(byte_level(&["a"], &[1])), [0; 0]);
    assert_eq!(ends(sentencepiece(&["<unk>", "<s>", "</s>"], &[2, 3, 3])), [2]);

    // A tag of HTML.
    assert_eq!(ends(byte_level(&["a", "</s>"], &[1, 1])), [0; 0]);
    assert_eq!(ends(byte_level(&["a", "</s>"], &[1, 3])), [1]);

    let parts = ["<|end|>", "<|return|>", "<|call|>"];
    assert_eq!(ends(byte_level(&parts, &[3; 3])), [1, 2], "<|end|> ends a part of an answer");
    assert_eq!(ends(byte_level(&["<|end|>", "<|flush|>", "<|calls|>"], &[3; 3])), [1, 2]);
    assert_eq!(ends(byte_level(&parts[..2], &[3; 2])), [0, 1]);
}
