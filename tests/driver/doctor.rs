//! `pagetide doctor` over drivers that have nothing to offer: it says why, and does not panic.

use super::fake::{compile, compile_all};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// `pagetide doctor --json` with the libraries of `folder`: exit status and report. `None` on a machine that has a
/// driver of its own.
fn doctor(folder: &Path, kind: &str) -> Option<(Option<i32>, Value)> {
    doctor_of(folder, kind, &[])
}

/// [`doctor`] with more arguments.
fn doctor_of(folder: &Path, kind: &str, arguments: &[&str]) -> Option<(Option<i32>, Value)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PAGETIDE_")) {
        command.env_remove(name);
    }
    command.args(["doctor", "--json", "--device", kind, "--set"]);
    command.arg(format!("device.cuda_library_path={}", folder.display()));
    command.arg("--set").arg(format!("device.kernel_cache={}", folder.join("kernels").display()));
    command.args(arguments);
    let output = command.output().expect("the binary runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(!stderr.contains("panicked"), "{stderr}");
    if stdout.contains("the system's loader takes") {
        println!("skipped: this machine has CUDA's libraries");
        return None;
    }
    Some((output.status.code(), serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"))))
}

/// What stops a start on the GPU with this driver, which is no reason not to start on the CPU.
fn check(flags: &[&str], why: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    compile_all(folder.path());
    compile(folder.path(), "libcuda.c", "libcuda.so.1", flags);
    let Some((status, report)) = doctor(folder.path(), "cuda") else { return };
    assert_eq!(status, Some(1));
    let problem = report["problems"][0].as_str().unwrap();
    assert!(why.iter().all(|word| problem.contains(word)), "{problem}");
    assert!(problem.starts_with("device.kind = cuda: ") && report["runs_on"].is_null(), "{report}");
    let (status, report) = doctor(folder.path(), "auto").unwrap();
    assert_eq!(status, Some(0), "{report}");
    assert!(report["runs_on"].as_str().unwrap().starts_with("cpu ("), "{report}");
    assert!(why.iter().all(|word| report["gpu"]["error"].as_str().unwrap().contains(word)), "{report}");
}

#[test]
fn no_device_that_the_driver_sees() {
    check(&["-DINIT=100"], &["sees no GPU", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES", "libcuda.so.1"]);
    check(&["-DDEVICES=0"], &["sees no GPU", "CUDA_ERROR_NO_DEVICE"]);
}

#[test]
fn a_driver_that_does_not_start() {
    check(&["-DINIT=803"], &["of different releases", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"]);
    check(&["-DINIT=999"], &["cannot start", "CUDA_ERROR_UNKNOWN"]);
}

#[test]
fn a_driver_that_is_too_old() {
    check(
        &["-DOLD"],
        &[
            "CUDA 13.0",
            "too old; CUDA 12.8 (release 570) or newer is needed",
            "lacks the function cuEventElapsedTime_v2",
        ],
    );
}

#[test]
fn a_device_that_is_too_old() {
    check(&["-DCAPABILITY_MAJOR=7"], &["compute capability 8.0 or newer", "Fake 0: 7.0"]);
}

#[test]
fn something_else_under_the_drivers_name() {
    let folder = tempfile::tempdir().unwrap();
    compile(folder.path(), "libnvrtc.c", "libcuda.so.1", &[]);
    let Some((status, report)) = doctor(folder.path(), "cuda") else { return };
    assert_eq!(status, Some(1));
    assert_eq!(report["driver"]["error"], "the NVIDIA driver lacks the function cuInit");
    std::fs::write(folder.path().join("libcuda.so.1"), "not a library").unwrap();
    let (status, report) = doctor(folder.path(), "cuda").unwrap();
    assert_eq!(status, Some(1));
    assert!(report["driver"]["error"].as_str().unwrap().contains("cannot be opened"), "{report}");
}

#[test]
fn a_machine_with_everything() {
    let folder = tempfile::tempdir().unwrap();
    compile_all(folder.path());
    let Some((status, report)) = doctor(folder.path(), "cuda") else { return };
    assert_eq!(status, Some(0), "{report}");
    assert_eq!(report["runs_on"], "cuda (Fake 0)");
    assert_eq!(report["driver"]["devices"][0]["compute_capability"], "9.0");
    assert_eq!(report["nvrtc"]["architecture"], "sm_90a");
    assert_eq!(report["gpu"]["total_bytes"], 1000);
    assert!(report["gpu"]["copies"]["both_ways"].as_f64().unwrap() > 0.0);
    assert_eq!(report["gpu"]["small_copies"]["batched"], true);
    assert!(report["gpu"]["small_copies"]["one_by_one_ms"].as_f64().unwrap() > 1.0);
    let decode = &report["gpu"]["attention"][1];
    assert_eq!((&decode["kernel"], &decode["expected_blocks"]), (&"attention_decode".into(), &3.into()), "{report}");
    assert_eq!(decode["blocks_per_multiprocessor"], 3, "{report}");
    assert_eq!(report["gpu"]["attention"][0]["kernel"], "attention_prefill_hopper", "{report}");
    assert!(report["gpu"]["no_warp_groups"].is_null() && report["gpu"]["no_fp8_activations"].is_null(), "{report}");
    assert_eq!(report["kernel_cache"]["kernels"], 3, "the files that were tried are kept");
    let path = report["cublaslt"]["path"].as_str().unwrap();
    assert!(path.starts_with(folder.path().to_str().unwrap()), "{path}");
}

#[test]
fn fp8_activations_need_hopper_and_a_new_library() {
    let wanted = ["--set", "device.fp8_activations=true"];
    let folder = tempfile::tempdir().unwrap();
    compile_all(folder.path());
    let Some((status, report)) = doctor_of(folder.path(), "cuda", &wanted) else { return };
    assert_eq!(status, Some(0), "{report}");
    let cases = [
        ("libcuda.c", "libcuda.so.1", "-DCAPABILITY_MAJOR=8", "this GPU has compute capability 8.0"),
        ("libcublasLt.c", "libcublasLt.so.13", "-DCUBLASLT_VERSION=120805", "cuBLASLt is version 12.8.5"),
    ];
    for (source, file, flag, why) in cases {
        compile_all(folder.path());
        compile(folder.path(), source, file, &[flag]);
        let (status, report) = doctor_of(folder.path(), "cuda", &wanted).unwrap();
        let problem = report["problems"][0].as_str().unwrap();
        assert!(
            problem.starts_with("device.fp8_activations = true: cuBLASLt has") && problem.contains(why),
            "{problem}"
        );
        assert_eq!(status, Some(1));
        let (status, report) = doctor(folder.path(), "cuda").unwrap();
        assert!(report["gpu"]["no_fp8_activations"].as_str().unwrap().contains(why), "{report}");
        assert_eq!(status, Some(0), "it is not asked for");
    }
}

#[test]
fn attention_is_that_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    compile_all(folder.path());
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantized/ct-fp8");
    let model = ["--model", model.to_str().unwrap(), "--set", "model.skip_tokenizer_init=true"];
    let int8 = [&model[..], &["--set", "cache.dtype=int8"]].concat();
    // On the hub, so it is not known yet.
    let unknown = vec!["--model", "nobody/has-this"];
    for (arguments, attention) in [
        (model.to_vec(), "4 heads of 16, 2 KV heads, bfloat16, KV cache of bfloat16 in blocks of 16"),
        (int8, "4 heads of 16, 2 KV heads, bfloat16, KV cache of int8 in blocks of 16"),
        (unknown, "32 heads of 128, 8 KV heads, bfloat16, KV cache of bfloat16 in blocks of 16"),
    ] {
        let Some((_, report)) = doctor_of(folder.path(), "cuda", &arguments) else { return };
        assert_eq!(report["gpu"]["attention_of"], attention, "{report}");
    }
}

#[test]
fn fp8_weights_stay_on_a_gpu_and_are_converted_for_a_cpu() {
    let folder = tempfile::tempdir().unwrap();
    compile_all(folder.path());
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantized/ct-fp8");
    let model = ["--model", model.to_str().unwrap(), "--set", "model.skip_tokenizer_init=true"];
    let Some((_, report)) = doctor_of(folder.path(), "cuda", &model) else { return };
    let text = |report: &Value, key: &str| report[key].as_str().unwrap_or_default().to_string();
    assert!(text(&report, "weights").contains("FP8 12 matrices"), "{report}");
    // Those whose rows are not whole blocks.
    assert_eq!(text(&report, "conversions"), "compressed-tensors FP8 to bfloat16 (2 matrices)");
    let (_, report) = doctor_of(folder.path(), "cpu", &model).unwrap();
    assert!(!text(&report, "weights").contains("FP8"), "{report}");
    assert_eq!(text(&report, "conversions"), "compressed-tensors FP8 to bfloat16 (14 matrices)");
}

#[test]
fn without_any_library_the_missing_one_and_the_setting_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some((status, report)) = doctor(folder.path(), "cuda") else { return };
    if report["driver"]["path"].is_null() {
        assert_eq!(status, Some(1));
        let error = report["driver"]["error"].as_str().unwrap();
        assert!(error.starts_with("no NVIDIA driver (libcuda.so.1 not found): looked in "), "{error}");
        assert!(
            error.contains(folder.path().to_str().unwrap()) && error.contains("device.cuda_library_path"),
            "{error}"
        );
    }
    let cpu = doctor(folder.path(), "cpu").unwrap();
    assert_eq!(cpu.0, Some(0));
    assert!(cpu.1["cpu"]["available"].as_array().unwrap().iter().any(|isa| isa == "portable"));
}
