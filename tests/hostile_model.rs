//! Malicious model files: a start rejects them, and `pagetide doctor` reports the same error.

use pagetide::actors::preflight::check_model;
use pagetide::actors::runtime::Runtime;
use pagetide::config::{CacheDtype, Config, DeviceKind, LoadFormat};
use pagetide::model::loader::LoadTarget;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A copy of a small model, which tests change.
struct Model {
    folder: TempDir,
}

impl Model {
    fn of(name: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/models").join(name);
        for entry in fs::read_dir(from).expect("the model is there") {
            let entry = entry.expect("a file");
            if entry.file_name() != "golden.json" {
                fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("copied");
            }
        }
        Self { folder }
    }

    fn llama() -> Self {
        Self::of("llama-mha")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        fs::write(self.file(name), bytes).expect("written");
        self
    }

    /// A copy with these members in a JSON file.
    fn with(self, name: &str, members: Value) -> Self {
        let text = fs::read_to_string(self.file(name)).unwrap_or_else(|_| "{}".into());
        let mut json: Value = serde_json::from_str(&text).expect("JSON");
        for (key, value) in members.as_object().expect("an object") {
            json[key] = value.clone();
        }
        self.write(name, json.to_string())
    }

    fn without(self, name: &str) -> Self {
        fs::remove_file(self.file(name)).expect("removed");
        self
    }

    fn config(&self) -> Config {
        let mut config = Config::default();
        config.model.path = self.folder.path().to_str().expect("UTF-8").into();
        config.device.kind = DeviceKind::Cpu;
        config.device.threads = 1;
        config.cache.num_device_blocks = Some(16);
        config.swap.space_gib = Some(0.0);
        config
    }

    /// Checks that a start and the doctor report the same error.
    #[track_caller]
    fn says(&self, config: &Config, what: &str) -> Result<(), String> {
        let doctor = check_model(config, LoadTarget::of(&config.load_options()));
        let doctor = doctor.map(drop).map_err(|error| error.to_string());
        let start = Runtime::start(config, Box::new(|_, _, _| {})).map(drop).map_err(|error| error.to_string());
        assert_eq!(doctor, start, "{what}: the doctor and a start must say the same");
        start
    }
}

#[track_caller]
fn refused(model: Model, expected: &str) {
    let message = model.says(&model.config(), expected).expect_err(expected);
    assert!(message.contains(expected), "{message:.500} does not say {expected:?}");
    assert!(message.len() < 4000, "{expected}: an error of {} bytes", message.len());
}

#[test]
fn unchanged_it_starts() {
    for name in ["llama-mha", "gpt2", "mixtral", "llama-bf16-sharded"] {
        let model = Model::of(name);
        assert_eq!(model.says(&model.config(), name), Ok(()), "{name}");
    }
}

#[test]
fn a_gpu_refuses_the_quantised_caches_that_it_cannot_hold() {
    let model = Model::llama();
    let mut config = model.config();
    let refused = |config: &Config| check_model(config, LoadTarget::Gpu).map(drop).map_err(|error| error.to_string());
    config.cache.dtype = CacheDtype::Fp8;
    assert_eq!(refused(&config), Ok(()));
    config.cache.block_size = 20;
    assert_eq!(
        refused(&config).unwrap_err(),
        "cache.block_size = 20: on a GPU it has to be a multiple of 8 with cache.dtype = fp8"
    );
    config.cache.block_size = 16;
    config.cache.dtype = CacheDtype::Int4;
    assert_eq!(model.says(&config, "int4"), Ok(()));
    assert_eq!(
        refused(&config).unwrap_err(),
        "cache.dtype = int4: so far only the CPU backend has a KV cache of 4 bits; use cache.dtype = auto, int8 or \
         fp8, or --device cpu"
    );
}

#[test]
fn the_program_says_so_too() {
    let doctor = |model: &Model| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        // Settings in the environment of the test run must not apply.
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PAGETIDE_")) {
            command.env_remove(name);
        }
        let path = model.folder.path().to_str().expect("UTF-8");
        let output = command.args(["doctor", "--json", "--device", "cpu", "--model", path]).output().expect("it runs");
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        (output.status.code(), report["problems"].clone())
    };
    assert_eq!(doctor(&Model::llama()), (Some(0), json!([])));
    let (status, problems) = doctor(&Model::llama().with("config.json", json!({"num_hidden_layers": 1_u64 << 31})));
    assert_eq!(status, Some(1));
    assert!(problems[0].as_str().is_some_and(|problem| problem.contains("num_hidden_layers")), "{problems}");
}

#[test]
fn sizes_that_no_model_has() {
    let config = |members| Model::llama().with("config.json", members);
    refused(
        config(json!({"num_hidden_layers": 2_147_483_648_u64})),
        "num_hidden_layers: 2147483648 is not a whole number",
    );
    refused(config(json!({"num_hidden_layers": 2_147_483_647})), "num_hidden_layers: 2147483647 is not a whole number");
    refused(config(json!({"num_hidden_layers": 0})), "num_hidden_layers: 0 is not");
    refused(config(json!({"num_hidden_layers": -1})), "num_hidden_layers: -1 is not");
    refused(config(json!({"num_hidden_layers": 1e300})), "num_hidden_layers");
    refused(
        config(json!({"vocab_size": 2_147_483_647})),
        "vocabulary: 2147483647 is not in the supported range from 1 to",
    );
    refused(
        config(json!({"hidden_size": 2_147_483_640})),
        "hidden size: 2147483640 is not in the supported range from 1 to",
    );
    refused(config(json!({"intermediate_size": 2_147_483_647})), "intermediate size: 2147483647");
    refused(
        config(json!({"num_attention_heads": 2_147_483_647, "num_key_value_heads": 1, "head_dim": 2})),
        "heads times",
    );
    refused(config(json!({"head_dim": 2_147_483_646})), "attention heads times head size");
    refused(config(json!({"head_dim": 7})), "head_dim: 7 is odd");
    refused(config(json!({"head_dim": 4098})), "shape");
    // Each size is within its bounds, but the product is not.
    let large =
        json!({"num_hidden_layers": 4096, "hidden_size": 1 << 20, "intermediate_size": 1 << 24, "head_dim": 1 << 10});
    refused(config(large), "parameters: at most");
    refused(config(json!({"rms_norm_eps": -1.0})), "rms_norm_eps: -1.0 is not a number from 0 to 1");
    refused(config(json!({"rope_theta": 1e200})), "rope_theta: 1e+200 is not a number above 0");
    let scaling = json!({"rope_type": "linear", "factor": 1e-300});
    refused(config(json!({"rope_scaling": scaling})), "rope_scaling.factor");
    let ids: Vec<u32> = (0..100_000).collect();
    refused(config(json!({"hidden_act": ids})), "hidden_act: [0,1,2");
    let experts = |members| Model::of("mixtral").with("config.json", members);
    refused(experts(json!({"num_local_experts": 2_147_483_647})), "experts: 2147483647 is not in the supported range");
    refused(experts(json!({"num_local_experts": 0})), "num_local_experts: 0");
    refused(experts(json!({"num_experts_per_tok": 1000})), "num_experts_per_tok: 1000 of");
}

#[test]
fn sizes_of_a_model_without_weights() {
    // Matrices of terabytes, and a rotary table of terabytes.
    for members in [
        json!({"hidden_size": 1 << 20, "intermediate_size": 1 << 20, "head_dim": 16}),
        json!({"max_position_embeddings": 2_147_483_647, "head_dim": 256}),
    ] {
        let model = Model::llama().with("config.json", members);
        let mut config = model.config();
        config.model.load_format = LoadFormat::Dummy;
        let message = model.says(&config, "dummy").expect_err("too large");
        assert!(message.contains("this machine has"), "{message}");
    }
}

#[test]
fn an_end_token_that_the_model_does_not_have_ends_nothing() {
    let generation = json!({"eos_token_id": [4_294_967_295_u32, 1]});
    let model = Model::llama().with("generation_config.json", generation);
    assert_eq!(model.says(&model.config(), "eos_token_id"), Ok(()));
    let files = pagetide::model::files::ModelFiles::open(model.folder.path().to_str().unwrap()).unwrap();
    assert_eq!(pagetide::model::spec::ModelSpec::load(&files).unwrap().eos_token_ids, [1]);
}

#[test]
fn sampling_that_no_request_may_ask_for() {
    let generation = |members| Model::llama().with("generation_config.json", members);
    refused(generation(json!({"temperature": -1.0})), "temperature: -1 is not between 0 and 100");
    refused(generation(json!({"top_p": 7.0})), "top_p: 7 is not between 0 and 1");
    refused(generation(json!({"repetition_penalty": 1e30})), "repetition_penalty");
    refused(generation(json!({"top_k": -5})), "generation_config.json");
}

#[test]
fn files_that_are_no_files_of_a_model() {
    refused(Model::llama().write("config.json", "{"), "not valid JSON");
    refused(Model::llama().write("config.json", "[".repeat(1_000_000)), "not valid JSON");
    refused(Model::llama().write("config.json", b"\xff\xfe"), "not UTF-8");
    refused(Model::llama().without("tokenizer.json"), "there is no ");
    refused(Model::llama().write("tokenizer_config.json", "["), "tokenizer_config.json");
    refused(Model::llama().write("chat_template.jinja", "{%}"), "chat template");
    refused(Model::llama().write("chat_template.jinja", "a".repeat(300_000)), "300000 bytes");
    let config = Model::llama();
    fs::File::create(config.file("tokenizer.json")).unwrap().set_len(1 << 40).unwrap();
    refused(config, "larger than 512 MiB");
    let folder = Model::llama().without("model.safetensors");
    fs::create_dir(folder.file("model.safetensors")).unwrap();
    refused(folder, "a directory, where a file is expected");
    let device = Model::llama().without("generation_config.json");
    std::os::unix::fs::symlink("/dev/zero", device.file("generation_config.json")).unwrap();
    refused(device, "not a regular file");
}

/// A template that would hang when it is tried: the start continues, and requests that need it are refused.
#[test]
fn a_template_that_hangs() {
    for source in
        ["{{ [1] * 100000000 }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"]
    {
        let model = Model::llama().write("chat_template.jinja", source);
        assert_eq!(model.says(&model.config(), source), Ok(()));
    }
}

#[test]
fn weights_that_are_not_what_they_say() {
    let whole = fs::read(Model::llama().file("model.safetensors")).unwrap();
    let weights = |bytes: &[u8]| Model::llama().write("model.safetensors", bytes);
    for cut in [0, 1, 7, 8, 9, 100, whole.len() / 2, whole.len() - 1] {
        refused(weights(&whole[..cut]), "not a whole safetensors file");
    }
    refused(weights(&[0xff; 64]), "not a whole safetensors file");
    refused(weights(&[&(1_u64 << 40).to_le_bytes()[..], b"{}"].concat()), "not a whole safetensors file");
    let with_header = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        bytes
    };
    let name = "model.embed_tokens.weight";
    for (header, data) in [
        (format!(r#"{{"{name}":{{"dtype":"F32","shape":[320,32],"data_offsets":[0,8]}}}}"#), 8),
        (format!(r#"{{"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}}}"#), 8),
        (format!(r#"{{"{name}":{{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}}}"#), 8),
        (format!(r#"{{"{name}":{{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}}}"#), 8),
        (
            format!(
                r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}}}"#
            ),
            12,
        ),
        ("[".repeat(100_000), 0),
    ] {
        refused(weights(&with_header(&header, data)), "not a whole safetensors file");
    }
    refused(weights(&with_header("{}", 0)), "has no tensor");
    // Unaligned data is still valid.
    let header_len = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(whole[8..8 + header_len].to_vec()).unwrap() + " ";
    let mut odd = with_header(&header, 0);
    odd.extend(&whole[8 + header_len..]);
    let model = weights(&odd);
    assert_eq!(model.says(&model.config(), "unaligned data"), Ok(()));
}

#[test]
fn an_index_that_points_elsewhere() {
    let index =
        |map: Value| Model::llama().write("model.safetensors.index.json", json!({"weight_map": map}).to_string());
    refused(index(json!({"a": "../../../etc/passwd"})), "lies outside the model's directory");
    refused(index(json!({"a": "/etc/passwd"})), "lies outside the model's directory");
    refused(index(json!({"a": ".."})), "a directory, where a file is expected");
    refused(index(json!({"a": "."})), "a directory, where a file is expected");
    refused(index(json!({"a": ""})), "lies outside the model's directory");
    refused(index(json!({"a": 3})), "not a file name");
    refused(index(json!({"a": "config.json"})), "not a whole safetensors file");
    refused(index(json!({"a": "nowhere.safetensors"})), "is missing");
    refused(index(json!({"a": "model.safetensors"})), "the tensor a is not in model.safetensors");
    refused(index(json!(3)), "weight_map: missing, or not an object");
}

#[test]
fn a_tokenizer_of_another_model() {
    let text = fs::read_to_string(Model::llama().file("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().expect("a vocabulary");
    vocab.insert("far".into(), json!(1_000_000_000));
    refused(Model::llama().write("tokenizer.json", tokenizer.to_string()), "the highest token id is 1000000000");
    let vocab = tokenizer["model"]["vocab"].as_object_mut().expect("a vocabulary");
    vocab.insert("far".into(), json!(100_000));
    refused(Model::llama().write("tokenizer.json", tokenizer.to_string()), "it belongs to another model");
}
