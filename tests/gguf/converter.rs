//! Converts the tiny models of `tests/data/models` to GGUF files by the rules of llama.cpp's converter.

use crate::checks::directory;
use crate::gguf_files::GgufWriter;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::fs;

/// ggml's numbers of element types.
pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const BF16: u32 = 30;

/// A tensor in float32.
#[derive(Clone)]
pub struct PlainTensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// A model of `tests/data/models`.
pub struct SourceModel {
    pub config: Map<String, Value>,
    tokenizer: Value,
    /// By their names in transformers, without what stands before the names of the decoder.
    pub tensors: BTreeMap<String, PlainTensor>,
}

/// A tensor's element type and its data in that type.
pub type Encoding<'e> = dyn Fn(&str, &PlainTensor) -> (u32, Vec<u8>) + 'e;

impl SourceModel {
    pub fn of(name: &str) -> Self {
        let folder = directory(name);
        let json = |file: &str| serde_json::from_slice(&fs::read(folder.join(file)).unwrap()).unwrap();
        let Value::Object(mut config) = json("config.json") else { panic!("config.json is an object") };
        if let Some(Value::Object(text)) = config.remove("text_config") {
            config.extend(text);
        }
        let mut tensors = BTreeMap::new();
        for file in fs::read_dir(&folder).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let bytes = fs::read(path).unwrap();
                for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
                    let plain =
                        PlainTensor { shape: tensor.shape().to_vec(), values: floats(tensor.dtype(), tensor.data()) };
                    let name = name.trim_start_matches("language_model.").trim_start_matches("model.");
                    tensors.insert(name.trim_start_matches("transformer.").to_owned(), plain);
                }
            }
        }
        Self { config, tokenizer: json("tokenizer.json"), tensors }
    }

    fn architecture(&self) -> &'static str {
        match self.config["model_type"].as_str().unwrap() {
            "llama" | "mistral" | "mixtral" => "llama",
            "qwen2" => "qwen2",
            "qwen3" => "qwen3",
            "qwen2_moe" => "qwen2moe",
            "qwen3_moe" => "qwen3moe",
            "gemma2" => "gemma2",
            "gemma3" | "gemma3_text" => "gemma3",
            "phi3" => "phi3",
            "gpt2" => "gpt2",
            other => panic!("llama.cpp's converter is not written down here for {other}"),
        }
    }

    fn size(&self, key: &str) -> Option<u32> {
        self.config.get(key)?.as_u64().map(|size| size as u32)
    }

    fn number(&self, key: &str) -> Option<f32> {
        self.config.get(key)?.as_f64().map(|number| number as f32)
    }

    fn num_heads(&self) -> u32 {
        self.size("num_attention_heads").unwrap()
    }

    fn head_dim(&self) -> u32 {
        self.size("head_dim").unwrap_or_else(|| self.size("hidden_size").unwrap() / self.num_heads())
    }

    /// The keys of positions, in either spelling of transformers.
    fn rope(&self) -> Map<String, Value> {
        let object = |key: &str| self.config.get(key).and_then(Value::as_object).cloned();
        let rope = object("rope_parameters").or_else(|| object("rope_scaling")).unwrap_or_default();
        let mut full = rope.get("full_attention").and_then(Value::as_object).cloned().unwrap_or(rope);
        for key in ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings"] {
            if let Some(value) = self.config.get(key) {
                full.entry(key).or_insert_with(|| value.clone());
            }
        }
        if let Some(kind) = full.get("type").cloned() {
            full.entry("rope_type").or_insert(kind);
        }
        full
    }

    /// The file.
    pub fn to_gguf(&self, encode: &Encoding<'_>) -> Vec<u8> {
        self.write(encode).finish()
    }

    /// The file, to which more can be added.
    pub fn write(&self, encode: &Encoding<'_>) -> GgufWriter {
        let writer = self.tokenizer_of(self.parameters(GgufWriter::new()));
        self.converted().into_iter().fold(writer, |writer, (name, tensor)| {
            let (kind, data) = encode(&name, &tensor);
            writer.tensor(&name, &tensor.shape, kind, &data)
        })
    }

    /// The file in `count` parts, as llama.cpp's `llama-gguf-split` writes them. Only the first has metadata.
    pub fn to_splits(&self, encode: &Encoding<'_>, count: usize) -> Vec<Vec<u8>> {
        let first = self.tokenizer_of(self.parameters(GgufWriter::new()));
        let mut writers: Vec<_> = std::iter::once(first).chain((1..count).map(|_| GgufWriter::new())).collect();
        for (number, writer) in writers.iter_mut().enumerate() {
            let old = std::mem::replace(writer, GgufWriter::new());
            *writer = old.half("split.no", number as u16).half("split.count", count as u16);
        }
        for (index, (name, tensor)) in self.converted().into_iter().enumerate() {
            let (kind, data) = encode(&name, &tensor);
            let writer = &mut writers[index % count];
            *writer = std::mem::replace(writer, GgufWriter::new()).tensor(&name, &tensor.shape, kind, &data);
        }
        writers.into_iter().map(GgufWriter::finish).collect()
    }

    fn parameters(&self, writer: GgufWriter) -> GgufWriter {
        let arch = self.architecture();
        let key = |name: &str| format!("{arch}.{name}");
        let writer = writer.text("general.architecture", arch);
        if arch == "gpt2" {
            let width = self.size("n_embd").unwrap();
            return writer
                .integer(&key("block_count"), self.size("n_layer").unwrap())
                .integer(&key("context_length"), self.size("n_positions").unwrap())
                .integer(&key("embedding_length"), width)
                .integer(&key("feed_forward_length"), 4 * width)
                .integer(&key("attention.head_count"), self.size("n_head").unwrap())
                .float(&key("attention.layer_norm_epsilon"), self.number("layer_norm_epsilon").unwrap_or(1e-5));
        }
        let size = |name: &str| self.size(name).unwrap();
        let mut writer = writer
            .integer(&key("block_count"), size("num_hidden_layers"))
            .integer(&key("context_length"), size("max_position_embeddings"))
            .integer(&key("embedding_length"), size("hidden_size"))
            .integer(&key("feed_forward_length"), size("intermediate_size"))
            .integer(&key("attention.head_count"), self.num_heads())
            .integer(&key("attention.head_count_kv"), self.size("num_key_value_heads").unwrap_or(self.num_heads()))
            .float(&key("attention.layer_norm_rms_epsilon"), self.number("rms_norm_eps").unwrap());
        if let Some(head_dim) = self.size("head_dim") {
            writer = writer
                .integer(&key("attention.key_length"), head_dim)
                .integer(&key("attention.value_length"), head_dim);
        }
        let rope = self.rope();
        let number = |name: &str| rope.get(name).and_then(Value::as_f64).map(|number| number as f32);
        // For Gemma 2, the converter leaves it out.
        if let Some(theta) = number("rope_theta").filter(|_| arch != "gemma2") {
            writer = writer.float(&key("rope.freq_base"), theta);
        }
        for (name, number) in [
            ("expert_count", self.size("num_local_experts").or(self.size("num_experts"))),
            ("expert_used_count", self.size("num_experts_per_tok")),
            ("expert_feed_forward_length", self.size("moe_intermediate_size")),
            ("expert_shared_feed_forward_length", self.size("shared_expert_intermediate_size")),
        ] {
            writer = number.into_iter().fold(writer, |writer, number| writer.integer(&key(name), number));
        }
        let kind = rope.get("rope_type").and_then(Value::as_str).unwrap_or("default");
        if matches!(kind, "linear" | "yarn") {
            writer = writer
                .text(&key("rope.scaling.type"), kind)
                .float(&key("rope.scaling.factor"), number("factor").unwrap());
        }
        if kind == "yarn" {
            let original = rope["original_max_position_embeddings"].as_u64().unwrap();
            writer = writer.integer(&key("rope.scaling.original_context_length"), original as u32);
            for (theirs, ours) in [
                ("attention_factor", "yarn_attn_factor"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            ] {
                let number = number(theirs).into_iter();
                writer =
                    number.fold(writer, |writer, number| writer.float(&key(&format!("rope.scaling.{ours}")), number));
            }
        }
        match arch {
            "llama" => writer.integer(&key("rope.dimension_count"), self.head_dim()),
            "gemma2" => writer
                .integer(&key("attention.sliding_window"), size("sliding_window"))
                .float(&key("attn_logit_softcapping"), self.number("attn_logit_softcapping").unwrap())
                .float(&key("final_logit_softcapping"), self.number("final_logit_softcapping").unwrap()),
            "gemma3" => self.parameters_of_gemma3(writer),
            "phi3" => self.parameters_of_phi3(writer, &rope),
            _ => writer,
        }
    }

    fn parameters_of_gemma3(&self, writer: GgufWriter) -> GgufWriter {
        let nested = &self.config.get("rope_parameters").unwrap_or(&Value::Null)["sliding_attention"]["rope_theta"];
        let local = nested.as_f64().map(|theta| theta as f32).or(self.number("rope_local_base_freq"));
        // The converter leaves the pattern to its default of 6, which is that of all published models.
        let period = self.config.get("layer_types").map_or_else(
            || self.size("sliding_window_pattern").unwrap(),
            |layers| {
                let full = layers.as_array().unwrap().iter().position(|kind| kind == "full_attention");
                full.unwrap() as u32 + 1
            },
        );
        writer
            .integer("gemma3.attention.sliding_window", self.size("sliding_window").unwrap())
            .integer("gemma3.attention.sliding_window_pattern", period)
            .float("gemma3.rope.freq_base_swa", local.unwrap())
    }

    fn parameters_of_phi3(&self, writer: GgufWriter, rope: &Map<String, Value>) -> GgufWriter {
        let partial = rope.get("partial_rotary_factor").and_then(Value::as_f64).unwrap_or(1.0);
        let rotary = (partial * f64::from(self.head_dim())) as u32;
        let original = rope["original_max_position_embeddings"].as_u64().unwrap() as u32;
        let writer = writer
            .integer("phi3.rope.dimension_count", rotary)
            .integer("phi3.rope.scaling.original_context_length", original)
            .integer("phi3.attention.sliding_window", self.size("sliding_window").unwrap_or(0));
        if !rope.contains_key("long_factor") {
            return writer;
        }
        let scale = f64::from(self.size("max_position_embeddings").unwrap()) / f64::from(original);
        let factor = if scale > 1.0 { (1.0 + scale.ln() / f64::from(original).ln()).sqrt() } else { 1.0 };
        writer.float("phi3.rope.scaling.attn_factor", factor as f32)
    }

    fn tokenizer_of(&self, writer: GgufWriter) -> GgufWriter {
        let vocabulary = self.tokenizer["model"]["vocab"].as_object().unwrap();
        let mut tokens = vec![""; vocabulary.len()];
        for (text, id) in vocabulary {
            tokens[id.as_u64().unwrap() as usize] = text;
        }
        let added = self.tokenizer["added_tokens"].as_array().unwrap();
        let is_added = |text: &str| added.iter().any(|token| token["content"] == text);
        // Ordinary tokens and control tokens.
        let kinds: Vec<i32> = tokens.iter().map(|text| if is_added(text) { 3 } else { 1 }).collect();
        let merge = |pair: &Value| match pair {
            Value::String(text) => text.clone(),
            pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        };
        let merges: Vec<String> = self.tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
        writer
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "gpt-2")
            .texts("tokenizer.ggml.tokens", &tokens)
            .integers("tokenizer.ggml.token_type", &kinds)
            .texts("tokenizer.ggml.merges", &merges)
            .integer("tokenizer.ggml.bos_token_id", self.size("bos_token_id").unwrap())
            .integer("tokenizer.ggml.eos_token_id", self.size("eos_token_id").unwrap())
    }

    /// The tensors with their names and forms in GGUF.
    fn converted(&self) -> BTreeMap<String, PlainTensor> {
        let arch = self.architecture();
        let mut converted = BTreeMap::new();
        for (name, tensor) in &self.tensors {
            if name.ends_with(".attn.bias") || name.starts_with("vision_tower.") || name.contains(".experts.") {
                continue;
            }
            let mut tensor = tensor.clone();
            match arch {
                "llama" if name.contains("q_proj.") => tensor.interleave(self.num_heads()),
                "llama" if name.contains("k_proj.") => {
                    tensor.interleave(self.size("num_key_value_heads").unwrap_or(self.num_heads()));
                }
                "gpt2" if tensor.shape.len() == 2 && name.starts_with("h.") => tensor.transpose(),
                "gemma2" | "gemma3" if name.ends_with("norm.weight") => tensor.map(|weight| weight + 1.0),
                _ => {}
            }
            self.scale_queries(name, &mut tensor);
            converted.insert(gguf_name(arch, name), tensor);
        }
        self.stack_experts(&mut converted);
        for (name, factors) in self.rope_factors() {
            converted.insert(name.into(), PlainTensor { shape: vec![factors.len()], values: factors });
        }
        converted
    }

    /// A GGUF file cannot say by what Gemma's scores are divided. llama.cpp takes the head's size, which is right for
    /// the published models and not for these, so their Q is scaled.
    fn scale_queries(&self, name: &str, tensor: &mut PlainTensor) {
        let is_of_queries = match self.architecture() {
            "gemma2" => name.contains("q_proj."),
            "gemma3" => name.ends_with("q_norm.weight"),
            _ => false,
        };
        if is_of_queries {
            let scale = (self.head_dim() as f32 / self.number("query_pre_attn_scalar").unwrap()).sqrt();
            tensor.map(|weight| weight * scale);
        }
    }

    fn stack_experts(&self, converted: &mut BTreeMap<String, PlainTensor>) {
        let count = self.size("num_local_experts").or(self.size("num_experts")).unwrap_or(0);
        if count == 0 {
            return;
        }
        let (experts, parts) = match self.architecture() {
            "llama" => ("block_sparse_moe.experts", ["w1", "w3", "w2"]),
            _ => ("mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
        };
        for layer in 0..self.size("num_hidden_layers").unwrap_or(0) {
            for (part, stacked) in parts.into_iter().zip(["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]) {
                let name = |expert: u32| format!("layers.{layer}.{experts}.{expert}.{part}.weight");
                let Some(first) = self.tensors.get(&name(0)) else { continue };
                let shape = [&[count as usize], first.shape.as_slice()].concat();
                let values = (0..count).flat_map(|expert| self.tensors[&name(expert)].values.clone()).collect();
                converted.insert(format!("blk.{layer}.{stacked}.weight"), PlainTensor { shape, values });
            }
        }
    }

    fn rope_factors(&self) -> Vec<(&'static str, Vec<f32>)> {
        let rope = self.rope();
        let list = |key: &str| {
            let list = rope.get(key)?.as_array()?;
            Some(list.iter().map(|factor| factor.as_f64().unwrap() as f32).collect::<Vec<_>>())
        };
        if let (Some(short), Some(long)) = (list("short_factor"), list("long_factor")) {
            return vec![("rope_factors_short.weight", short), ("rope_factors_long.weight", long)];
        }
        if rope.get("rope_type").and_then(Value::as_str) != Some("llama3") {
            return Vec::new();
        }
        let number = |key: &str| rope[key].as_f64().unwrap();
        let (low, high, factor) = (number("low_freq_factor"), number("high_freq_factor"), number("factor"));
        let original = number("original_max_position_embeddings");
        let dim = self.head_dim();
        let of_pair = |pair: u32| {
            let wavelength = 2.0 * PI * number("rope_theta").powf(f64::from(2 * pair) / f64::from(dim));
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor as f32
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
            }
        };
        vec![("rope_freqs.weight", (0..dim / 2).map(of_pair).collect())]
    }
}

impl PlainTensor {
    fn map(&mut self, change: impl Fn(f32) -> f32) {
        self.values.iter_mut().for_each(|value| *value = change(*value));
    }

    fn transpose(&mut self) {
        let [rows, cols] = self.shape[..] else { panic!("not a matrix") };
        self.values = (0..rows * cols).map(|i| self.values[i % rows * cols + i / rows]).collect();
        self.shape = vec![cols, rows];
    }

    /// Puts the rows of each head that turn together side by side.
    fn interleave(&mut self, num_heads: u32) {
        let num_rows = self.shape[0];
        let (row_len, head_dim) = (self.values.len() / num_rows, num_rows / num_heads as usize);
        let row = |row: usize| {
            let (head, dim) = (row / head_dim, row % head_dim);
            let from = head * head_dim + dim % 2 * (head_dim / 2) + dim / 2;
            self.values[from * row_len..][..row_len].to_vec()
        };
        self.values = (0..num_rows).flat_map(row).collect();
    }
}

/// The names of `gguf-py/gguf/tensor_mapping.py`.
fn gguf_name(arch: &str, name: &str) -> String {
    let (stem, ending) = name.rsplit_once('.').unwrap();
    let parts: Vec<&str> = stem.splitn(3, '.').collect();
    let [_, layer, part] = parts[..] else {
        let name = match stem {
            "embed_tokens" | "wte" => "token_embd",
            "wpe" => "position_embd",
            "norm" | "ln_f" => "output_norm",
            "lm_head" => "output",
            other => panic!("the tensor {other} has no name in GGUF"),
        };
        return format!("{name}.{ending}");
    };
    let name = match part {
        "input_layernorm" | "ln_1" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" | "attn.c_attn" => "attn_qkv",
        "self_attn.o_proj" | "attn.c_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "post_attention_layernorm" if arch.starts_with("gemma") => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" | "ln_2" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "mlp.gate" | "block_sparse_moe.gate" => "ffn_gate_inp",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" => "ffn_down_shexp",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.c_fc" => "ffn_up",
        "mlp.down_proj" | "mlp.c_proj" => "ffn_down",
        other => panic!("the tensor {other} has no name in GGUF"),
    };
    format!("blk.{layer}.{name}.{ending}")
}

fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|half| [half[0], half[1]]);
    match dtype {
        Dtype::F16 => halves().map(|half| f16::from_le_bytes(half).to_f32()).collect(),
        Dtype::BF16 => halves().map(|half| bf16::from_le_bytes(half).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|float| f32::from_le_bytes(float.try_into().unwrap())).collect(),
    }
}

/// Matrices in a plain type, and vectors in float32, as the converter writes them.
pub fn plain(kind: u32) -> impl Fn(&str, &PlainTensor) -> (u32, Vec<u8>) {
    move |_, tensor| {
        let kind = if tensor.shape.len() == 1 { F32 } else { kind };
        let encode = |value: &f32| match kind {
            F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
            BF16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        (kind, tensor.values.iter().flat_map(encode).collect())
    }
}
