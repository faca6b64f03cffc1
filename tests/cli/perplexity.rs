//! `pagetide perplexity`, with the demo model and a text that it knows.

use super::{output, text};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const TEXT: [&str; 4] = ["--text", "tests/data/demo_text.txt", "--device", "cpu"];
/// The chunks of `TEXT` that are computed, and how.
const FEW: [&str; 6] = ["--context", "128", "--chunks", "3", "--num-device-blocks", "64"];

/// The result as JSON.
fn measure(args: &[&str]) -> Value {
    let run = output(&[&["perplexity", "--json"], args].concat());
    assert_eq!(run.status.code(), Some(0), "{args:?}: {}", text(&run.stderr));
    serde_json::from_str(&text(&run.stdout)).expect("it is JSON")
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path}: {value}"))
}

/// The error of a run that has to fail.
fn refusal(args: &[&str]) -> String {
    let run = output(&[&["perplexity"], args].concat());
    assert_eq!(run.status.code(), Some(1), "{args:?}: {}", text(&run.stdout));
    text(&run.stderr)
}

#[test]
fn a_text_has_the_same_perplexity_however_it_is_computed() {
    let all = measure(&[&TEXT[..], &FEW].concat());
    assert_eq!((&all["chunks"], &all["context"], &all["positions"]), (&3.into(), &128.into(), &189.into()), "{all}");
    assert_eq!((&all["model"], &all["dtype"]), (&"demo".into(), &"bfloat16".into()));
    let (ppl, error) = (number(&all, "/perplexity/value"), number(&all, "/perplexity/error"));
    assert!(ppl > 1.0 && ppl < 2.0 && error > 0.0 && error < ppl, "{all}");
    // A chunk in several steps of several blocks; one chunk at a time, and the rows on one thread.
    let steps = measure(
        &[&TEXT[..], &FEW, &["--max-num-seqs", "9", "--max-num-batched-tokens", "50", "--block-size", "7"]].concat(),
    );
    let alone = measure(&[&TEXT[..], &FEW, &["--num-device-blocks", "8", "--set", "device.threads=1"]].concat());
    for other in [steps, alone] {
        assert_eq!(other["perplexity"], all["perplexity"]);
    }
    let run = output(&[&["perplexity"], &TEXT[..], &FEW].concat());
    assert!(text(&run.stdout).ends_with(&format!("\nPPL = {ppl:.4} ± {error:.5}\n")), "{}", text(&run.stdout));
    assert_eq!(text(&run.stderr).matches(" of 3: PPL = ").count(), 3, "{}", text(&run.stderr));
    // A KV cache of another type. It is a part of the model, so the result changes, but little.
    assert_eq!(all["cache_dtype"], "bfloat16");
    for (dtype, most) in [("int8", 0.01), ("int4", 0.05)] {
        let other = measure(&[&TEXT[..], &FEW, &["--kv-cache-dtype", dtype]].concat());
        assert_eq!(other["cache_dtype"], dtype);
        let other = number(&other, "/perplexity/value");
        assert!(other != ppl && (other / ppl - 1.0).abs() < most, "{dtype}: {other} beside {ppl}");
    }
    // A model that finds all tokens equally likely.
    let null = measure(&[&TEXT[..], &FEW, &["--load-format", "null"]].concat());
    assert!((number(&null, "/perplexity/value") - 2048.0).abs() < 1e-6, "{null}");
}

#[test]
fn a_model_is_compared_with_a_file_of_log_probabilities() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("base.kld");
    let base = ["--kl-divergence-base", file.to_str().unwrap()];
    let compare = ["--kl-divergence", "--device", "cpu", "--num-device-blocks", "64"];
    let written = measure(&[&TEXT[..], &FEW, &base].concat());
    assert_eq!(fs::metadata(&file).unwrap().len(), 20 + 4 * 3 * 128 + 189 * (8 + 2 * 2048));

    let same = measure(&[&base[..], &compare].concat());
    assert_eq!(same["perplexity"], written["perplexity"], "the text is in the file");
    assert_eq!(number(&same, "/same_top/value"), 1.0, "{same}");
    for (path, most) in [("/mean_kld/value", 1e-5), ("/kld/maximum", 1e-4), ("/rms_delta_p/value", 1e-4)] {
        assert!(number(&same, path).abs() < most, "{path}: {same}");
    }
    // The file does not have the probabilities of tokens that surprised the model most.
    assert!((number(&same, "/ratio/value") - 1.0).abs() < 0.02 && number(&same, "/correlation") > 0.99, "{same}");

    let precise = measure(&[&base[..], &compare, &["--dtype", "float32"]].concat());
    let kld = number(&precise, "/mean_kld/value");
    assert!(kld > 1e-6 && kld < 0.1 && kld > 5.0 * number(&same, "/mean_kld/value").abs(), "{precise}");
    assert!(number(&precise, "/kld/maximum") > kld && number(&precise, "/same_top/value") > 0.9, "{precise}");
    let ratio = number(&precise, "/perplexity/value") / number(&same, "/base_perplexity/value");
    assert!((number(&precise, "/ratio/value") / ratio - 1.0).abs() < 1e-9, "{precise}");

    // The same weights, but each chunk begins with the token that the tokenizer adds.
    let model = model_with_bos(folder.path());
    let other = measure(&[&base[..], &compare, &["--model", &model]].concat());
    assert!(number(&other, "/mean_kld/value") > 1e-4, "{other}");

    let run = output(&[&["perplexity", "--chunks", "2"], &base[..], &compare].concat());
    let shown = text(&run.stdout);
    assert!(shown.contains("2 chunks of 128 tokens, 126 positions"), "{shown}");
    for heading in
        ["\nPerplexity\n", "\nKL divergence\n", "\nSame most likely token, in %\n  mean         100.000 ± 0.000\n"]
    {
        assert!(shown.contains(heading), "{heading}: {shown}");
    }
    broken_files_are_refused(&file, &[&base[..], &compare].concat());
}

/// The demo model with a tokenizer that puts a token in front of a text.
fn model_with_bos(folder: &Path) -> String {
    let folder = folder.join("model");
    fs::create_dir(&folder).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer_config.json"] {
        fs::copy(format!("models/demo/{file}"), folder.join(file)).unwrap();
    }
    let mut tokenizer: Value = serde_json::from_slice(&fs::read("models/demo/tokenizer.json").unwrap()).unwrap();
    let (bos, text) = (json!({"id": "<|endoftext|>", "type_id": 0}), json!({"Sequence": {"id": "A", "type_id": 0}}));
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": bos}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder.to_str().unwrap().to_owned()
}

fn broken_files_are_refused(file: &Path, args: &[&str]) {
    let good = fs::read(file).unwrap();
    fs::write(file, &good[..good.len() - 1]).unwrap();
    assert!(refusal(args).contains("it was not written to its end"));
    // The size of the vocabulary.
    let mut other = good;
    other[12..16].copy_from_slice(&2049i32.to_le_bytes());
    fs::write(file, other).unwrap();
    assert!(refusal(args).contains("of a model with 2049 tokens, and this model has 2048"));
    fs::remove_file(file).unwrap();
    assert!(refusal(args).contains("--kl-divergence-base "));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let with = |more: &[&str]| refusal(&[&TEXT[..], more].concat());
    assert!(refusal(&["--text", "no-such-file"]).contains("--text no-such-file: "));
    assert!(with(&["--context", "100000"]).contains("one chunk needs 100000 (--context)"));
    assert!(with(&["--context", "256", "--max-model-len", "255"]).contains("at most 255 (--max-model-len)"));
    assert!(with(&["--context", "256", "--num-device-blocks", "15"]).contains("takes 16 KV blocks, and there are 15"));
    assert!(with(&["--set", "model.skip_tokenizer_init=true"]).contains("needs the model's tokenizer"));
    assert!(with(&["--kl-divergence-base", "no/such/folder"]).contains("--kl-divergence-base no/such/folder: "));
    for wrong in [
        &["perplexity"] as &[&str],
        &["perplexity", "--text", "tests/data/demo_text.txt", "--context", "7"],
        &["perplexity", "--kl-divergence"],
        &["perplexity", "--text", "tests/data/demo_text.txt", "--kl-divergence", "--kl-divergence-base", "file"],
    ] {
        assert_eq!(output(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
