//! `pagetide doctor` on a model.

use crate::{output, text};

#[test]
fn doctor_says_how_weights_are_converted() {
    let model = "tests/data/quantized/gptq-v1-sym";
    let checked = ["doctor", "--device", "cpu", "--model", model, "--set", "model.skip_tokenizer_init=true"];
    let run = output(&checked);
    let report = text(&run.stdout);
    assert!(report.contains("\nweights   converted: GPTQ int4 to Q4_0 (14 matrices)\n"), "{report}");
    assert_eq!(run.status.code(), Some(0), "{report}");
    let run = output(&[&checked[..], &["--json"]].concat());
    assert!(
        text(&run.stdout).contains("\"conversions\": \"GPTQ int4 to Q4_0 (14 matrices)\""),
        "{}",
        text(&run.stdout)
    );
    let run = output(&["doctor", "--device", "cpu"]);
    assert!(!text(&run.stdout).contains("converted"), "{}", text(&run.stdout));
}
