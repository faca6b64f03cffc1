//! `pagetide doctor` on a model.

use crate::{output, text};

#[test]
fn doctor_says_how_weights_are_converted() {
    let model = "tests/data/quantized/gptq-v1-sym";
    let checked = ["doctor", "--device", "cpu", "--model", model, "--set", "model.skip_tokenizer_init=true"];
    let run = output(&checked);
    let report = text(&run.stdout);
    assert!(report.contains("\nweights   float16 1 matrix 0.0 MiB, Q4_0 14 matrices 0.0 MiB\n"), "{report}");
    assert!(report.contains("\n          converted: GPTQ int4 to Q4_0 (14 matrices)\n"), "{report}");
    assert_eq!(run.status.code(), Some(0), "{report}");
    let run = output(&[&checked[..], &["--json"]].concat());
    assert!(
        text(&run.stdout).contains("\"conversions\": \"GPTQ int4 to Q4_0 (14 matrices)\""),
        "{}",
        text(&run.stdout)
    );
    for dtype in ["int8", "int4"] {
        let run = output(&["doctor", "--device", "cpu", "--kv-cache-dtype", dtype]);
        let report = text(&run.stdout);
        assert!(report.contains(&format!("\nKV cache  {dtype}\n")), "{report}");
    }
    let report = text(&output(&["doctor", "--device", "cpu"]).stdout);
    assert!(report.contains("\nweights   bfloat16 29 matrices 6.6 MiB\n") && !report.contains("converted"), "{report}");
}

/// The demo model is in the program, so its rows of 256 and 704 weights are known.
#[test]
fn a_start_keeps_the_weights_that_it_quantises() {
    let folder = tempfile::tempdir().unwrap();
    let cache = format!("model.quantization_cache={}", folder.path().display());
    let settings = ["--device", "cpu", "--quantization", "q4_k", "--set", &cache];
    let doctor = |more: &[&str]| {
        let run = output(&[&["doctor"], &settings[..], more].concat());
        assert_eq!(run.status.code(), Some(0), "{}", text(&run.stdout));
        text(&run.stdout)
    };
    let report = doctor(&[]);
    for part in [
        "bfloat16 to Q4_K (24 matrices)",
        // The rows of the down projections.
        "bfloat16 to Q5_0 (4 matrices)",
        // The embeddings are the vocabulary product too.
        "bfloat16 to Q6_K (1 matrix)",
        "a start quantises the weights and keeps them in ",
        "\n          products use the kernel for many rows from ",
        " rows on in Q6_K\n",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    let measure = || {
        let few = ["--text", "tests/data/demo_text.txt", "--context", "64", "--chunks", "2"];
        let run = output(&[&["perplexity", "--json", "--num-device-blocks", "32"], &settings[..], &few].concat());
        assert_eq!(run.status.code(), Some(0), "{}", text(&run.stderr));
        (text(&run.stdout), text(&run.stderr))
    };
    let (first, log) = measure();
    assert!(log.contains("weights were quantised in ") && log.contains("the next start reads them from "), "{log}");
    assert!(doctor(&[]).contains("MiB from "), "{}", doctor(&[]));
    let (second, log) = measure();
    assert!(log.contains("quantised weights are read from ") && !log.contains("were quantised"), "{log}");
    assert_eq!(first, second);

    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[1 << 20] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let (third, log) = measure();
    assert!(log.contains("the file is damaged: the weights are quantised again"), "{log}");
    assert_eq!(first, third);
    bytes[1 << 20] ^= 1;
    assert!(std::fs::read(&file).unwrap() == bytes, "the file is whole again");

    let report = doctor(&["--set", "model.quantization_cache=off"]);
    assert!(report.contains("every start quantises the weights: model.quantization_cache is off"), "{report}");
    let report = doctor(&["--set", &format!("model.quantization_cache={}/deeper", file.display())]);
    assert!(
        report.contains("every start quantises the weights: ") && report.contains(" cannot be written"),
        "{report}"
    );
}

#[test]
fn what_is_quantised_already_is_not_quantised_again() {
    let model = "tests/data/quantized/awq";
    let skip = ["--set", "model.skip_tokenizer_init=true"];
    let run = output(&[&["doctor", "--device", "cpu", "--model", model, "--quantization", "q8_0"], &skip[..]].concat());
    let report = text(&run.stdout);
    let says =
        format!("model.quantization = q8_0: {model} is a quantised checkpoint (quantization_config in config.json)");
    assert!(run.status.code() == Some(1) && report.contains(&says), "{report}");
    let run = output(&["doctor", "--quantization", "q3_k"]);
    let says = text(&run.stderr);
    assert!(says.contains("model.quantization: 'q3_k' is not one of none, q8_0, q4_0, "), "{says}");
}
