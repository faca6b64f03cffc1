//! Files that are refused, and what the errors say.

use crate::checks::settings;
use crate::common;
use crate::converter::{F32, SourceModel, plain};
use crate::gguf_files::GgufWriter;
use pagetide::actors::preflight::check_model;
use pagetide::config::{Config, DeviceKind, Quantization};
use pagetide::model::loader::LoadTarget;
use serde_json::json;
use std::fs;
use std::path::Path;

/// The error of a model, if it has one.
fn error(path: &Path) -> Option<String> {
    let loaded = common::load(path.to_str().unwrap(), &settings(16), &mut |_, _| Ok(()));
    loaded.err().map(|error| error.to_string())
}

#[track_caller]
fn refused(path: &Path, expected: &[&str]) {
    let message = error(path).expect("must be refused");
    for part in expected {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    assert!(message.len() < 2000, "an error of {} bytes", message.len());
}

/// Checks what is said of one file.
#[track_caller]
fn file_refused(file: &[u8], expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.gguf");
    fs::write(&path, file).unwrap();
    refused(&path, &[&["odd.gguf"], expected].concat());
}

fn llama() -> SourceModel {
    SourceModel::of("llama-mha")
}

#[test]
fn a_directory_says_which_models_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let file = llama().to_gguf(&plain(F32));
    refused(folder.path(), &["holds no config.json and no GGUF file"]);
    fs::write(folder.path().join("tiny-Q8_0.gguf"), &file).unwrap();
    fs::write(folder.path().join("mmproj-tiny.gguf"), "not a model").unwrap();
    assert_eq!(error(folder.path()), None);
    fs::write(folder.path().join("tiny-Q4_0.gguf"), &file).unwrap();
    refused(folder.path(), &["holds several models; give one: ", "tiny-Q4_0.gguf, ", "tiny-Q8_0.gguf"]);
}

#[test]
fn a_gguf_file_is_not_quantised_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    fs::write(&path, llama().to_gguf(&plain(F32))).unwrap();
    let mut config = Config::default();
    config.model.path = path.to_str().unwrap().into();
    config.device.kind = DeviceKind::Cpu;
    let check = |config: &Config| check_model(config, LoadTarget::of(&config.load_options()));
    assert!(check(&config).unwrap().quantized.is_none());
    config.model.quantization = Quantization::Q4_0;
    let message = check(&config).unwrap_err().to_string();
    let expected = format!("model.quantization = q4_0: {} is a GGUF file", path.display());
    assert!(message.contains(&expected) && message.contains("set model.quantization = none"), "{message}");
}

#[test]
fn a_split_model_needs_all_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(format!("tiny-{number:05}-of-00003.gguf"));
    let splits = llama().to_splits(&plain(F32), 3);
    let write = || (1..).zip(&splits).for_each(|(number, split)| fs::write(path(number), split).unwrap());
    write();
    for whole in [folder.path().to_path_buf(), path(1), path(3)] {
        assert_eq!(error(&whole), None, "{}", whole.display());
    }

    fs::remove_file(path(2)).unwrap();
    refused(folder.path(), &["tiny-00002-of-00003.gguf: No such file"]);
    fs::copy(path(3), path(2)).unwrap();
    refused(folder.path(), &["tiny-00002-of-00003.gguf: split.no: is 2, not 1"]);
    write();
    fs::write(path(3), llama().to_gguf(&plain(F32))).unwrap();
    refused(folder.path(), &["tiny-00003-of-00003.gguf: split.no: it is missing"]);
    fs::write(path(3), llama().write(&plain(F32)).half("split.no", 2).finish()).unwrap();
    refused(folder.path(), &["tiny-00003-of-00003.gguf: the tensor ", " is also in another file"]);

    let renamed = folder.path().join("renamed.gguf");
    fs::rename(path(1), &renamed).unwrap();
    refused(&renamed, &["renamed.gguf: split.count is 3", "-00001-of-00003.gguf"]);
    file_refused(
        &llama().write(&plain(F32)).integer("split.count", 2_000_000_000).finish(),
        &["split.count: 2000000000"],
    );
}

#[test]
fn names_what_it_does_not_support() {
    let architecture = GgufWriter::new().text("general.architecture", "mamba");
    file_refused(&architecture.finish(), &["general.architecture: 'mamba' is not supported", "llama, qwen2"]);
    file_refused(&GgufWriter::new().finish(), &["general.architecture: it is missing"]);
    let kinds =
        [(16, "its type is IQ2_XXS"), (35, "its type is TQ2_0"), (28, "an integer or float64"), (99, "number 99")];
    for (kind, expected) in kinds {
        let file = llama().write(&plain(F32)).tensor("odd", &[256], kind, &[0; 66]).finish();
        file_refused(&file, &["tensor odd: ", expected, "supported are F32, F16, BF16, Q4_0"]);
    }
    let file = llama().write(&plain(F32)).tensor("odd", &[2, 33], 8, &[0; 100]).finish();
    file_refused(&file, &["tensor odd: rows of 33 elements of type Q8_0, whose blocks have 32"]);
}

#[test]
fn names_the_key_that_is_wrong() {
    let refused = |name: &str, (from, to): (&str, &str), expected: &[&str]| {
        // Of equal lengths, so that nothing moves.
        let mut file = SourceModel::of(name).to_gguf(&plain(F32));
        let at = file.windows(from.len()).position(|bytes| bytes == from.as_bytes()).expect(from);
        file[at..at + to.len()].copy_from_slice(to.as_bytes());
        file_refused(&file, expected);
    };
    for (from, to) in [
        ("llama.embedding_length", "llama.embedding_lengtX"),
        ("llama.block_count", "llama.block_counX"),
        ("llama.context_length", "llama.context_lengtX"),
        ("llama.attention.head_count", "llama.attention.head_counX"),
        ("llama.attention.layer_norm_rms_epsilon", "llama.attention.layer_norm_rms_epsiloX"),
    ] {
        refused("llama-mha", (from, to), &[&format!("{from}: it is missing")]);
    }
    refused("llama-rope-linear", ("linear", "cubic!"), &["llama.rope.scaling.type: 'cubic!' is not supported"]);
    refused(
        "mixtral",
        ("llama.expert_used_count", "llama.expert_used_counX"),
        &["llama.expert_used_count: it is missing"],
    );
    refused("llama-mha", ("token_embd.weight", "token_embd.weighX"), &["the file has no tensor token_embd.weight"]);
    refused("llama-mha", ("blk.1.attn_k.weight", "blk.1.attn_X.weight"), &["has no tensor blk.1.attn_k.weight"]);
}

#[test]
fn sizes_that_no_model_has() {
    for (key, huge) in [
        ("block_count", u32::MAX),
        ("embedding_length", u32::MAX),
        ("context_length", 0),
        ("feed_forward_length", u32::MAX),
    ] {
        let mut source = llama();
        let ours = match key {
            "block_count" => "num_hidden_layers",
            "embedding_length" => "hidden_size",
            "context_length" => "max_position_embeddings",
            _ => "intermediate_size",
        };
        source.tensors.retain(|name, _| !name.contains("layers.1"));
        source.config.insert("head_dim".into(), json!(8));
        source.config.insert(ours.into(), json!(huge));
        file_refused(&source.to_gguf(&plain(F32)), &[&huge.to_string()]);
    }
    for heads in [0, u32::MAX] {
        let mut source = SourceModel::of("llama-gqa-tied");
        let file = GgufWriter::new().text("general.architecture", "gemma2");
        source.tensors.clear();
        let file = ["block_count", "embedding_length", "feed_forward_length", "context_length", "attention.key_length"]
            .into_iter()
            .fold(file, |file, key| file.integer(&format!("gemma2.{key}"), 46))
            .integer("gemma2.attention.head_count", heads)
            .float("gemma2.attention.layer_norm_rms_epsilon", 1e-6)
            .tensor("token_embd.weight", &[4, 4], F32, &[0; 64]);
        file_refused(&file.finish(), &[&heads.to_string()]);
    }
}

#[test]
fn a_file_that_was_cut_is_refused_wherever() {
    let file = llama().to_gguf(&plain(F32));
    for len in (0..file.len()).step_by(997).chain([3, 4, 8, 24, file.len() - 1]) {
        file_refused(&file[..len], &[]);
    }
}

#[test]
fn positions_that_would_be_computed_wrongly() {
    let factors = [1_f32.to_le_bytes(); 4].concat();
    let file = SourceModel::of("llama-rope-linear").write(&plain(F32)).tensor("rope_freqs.weight", &[4], F32, &factors);
    file_refused(&file.finish(), &["llama.rope.scaling.type: 'linear' beside factors for each wavelength"]);
    let file = SourceModel::of("llama-rope-yarn").write(&plain(F32)).float("llama.rope.scaling.yarn_ext_factor", 0.5);
    file_refused(&file.finish(), &["llama.rope.scaling.yarn_ext_factor: 0.5 is not supported, only 1"]);
    let file = SourceModel::of("gemma2").write(&plain(F32)).integer("gemma2.attention.sliding_window_pattern", 3);
    file_refused(&file.finish(), &["gemma2.attention.sliding_window_pattern: 3 is not supported, only 2"]);
    let file =
        llama().write(&plain(F32)).integer("llama.attention.value_length", 4).integer("llama.attention.key_length", 8);
    file_refused(&file.finish(), &["llama.attention.value_length: 4, but keys have 8 dimensions"]);
}
