//! What the families call their tensors.

use crate::spec::Family;

/// What a family calls its tensors, without `.weight` and `.bias`.
pub(super) struct TensorNames {
    /// Before the names of the decoder, newest first: some older checkpoints were saved from an inner module.
    pub prefixes: &'static [&'static str],
    pub embeddings: &'static str,
    pub positions: &'static str,
    pub project_in: &'static str,
    pub project_out: &'static str,
    pub final_norm: &'static str,
    /// Of the list of layers.
    pub layers: &'static str,
    // Within `layers.N.`:
    pub attention_norm: &'static str,
    pub attention_post_norm: &'static str,
    /// Q, K and V, or one tensor of all three.
    pub qkv: &'static [&'static str],
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    pub out: &'static str,
    pub mlp_norm: &'static str,
    pub mlp_post_norm: &'static str,
    /// Gate and up where the MLP is gated, or one tensor of both.
    pub up: &'static [&'static str],
    pub down: &'static str,
    pub router: &'static str,
    /// Within `EXPERTS.N.`: gate, up and down of an expert.
    pub experts: &'static str,
    pub of_expert: [&'static str; 3],
    /// Gate, up and down of the shared expert, and the gate of its part in a row.
    pub shared_expert: [&'static str; 3],
    pub shared_expert_gate: &'static str,
    /// The matrices of the layers are stored as `[in, out]`.
    pub transposed: bool,
    /// The vocabulary product, which has no prefix.
    pub lm_head: &'static str,
    /// All experts of a layer are in one tensor, `[num_experts, out, in]`.
    pub stacked_experts: bool,
    /// Tensors in which the two dimensions of a head that turn together are neighbours. In the others there are half as
    /// many dimensions between them as a head has.
    pub interleaved: &'static [&'static str],
    /// Norms are stored as they are applied, also where the family's own files store them minus 1.
    pub whole_norms: bool,
}

/// Who named the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorNaming {
    /// The family's classes in transformers.
    Transformers,
    /// llama.cpp's converter.
    Gguf,
}

const LLAMA: TensorNames = TensorNames {
    prefixes: &["model.", ""],
    embeddings: "embed_tokens",
    positions: "",
    project_in: "",
    project_out: "",
    final_norm: "norm",
    layers: "layers",
    attention_norm: "input_layernorm",
    attention_post_norm: "",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    out: "self_attn.o_proj",
    mlp_norm: "post_attention_layernorm",
    mlp_post_norm: "",
    up: &["mlp.gate_proj", "mlp.up_proj"],
    down: "mlp.down_proj",
    router: "mlp.gate",
    experts: "mlp.experts",
    of_expert: ["gate_proj", "up_proj", "down_proj"],
    shared_expert: ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"],
    shared_expert_gate: "mlp.shared_expert_gate",
    transposed: false,
    lm_head: "lm_head",
    stacked_experts: false,
    interleaved: &[],
    whole_norms: false,
};

const MIXTRAL: TensorNames = TensorNames {
    router: "block_sparse_moe.gate",
    experts: "block_sparse_moe.experts",
    of_expert: ["w1", "w3", "w2"],
    ..LLAMA
};

const PHI3: TensorNames = TensorNames { qkv: &["self_attn.qkv_proj"], up: &["mlp.gate_up_proj"], ..LLAMA };

const GEMMA: TensorNames = TensorNames {
    prefixes: &["model.", "language_model.model.", "model.language_model.", ""],
    attention_post_norm: "post_attention_layernorm",
    mlp_norm: "pre_feedforward_layernorm",
    mlp_post_norm: "post_feedforward_layernorm",
    ..LLAMA
};

const OPT: TensorNames = TensorNames {
    prefixes: &["model.decoder.", "decoder.", ""],
    positions: "embed_positions",
    project_in: "project_in",
    project_out: "project_out",
    final_norm: "final_layer_norm",
    attention_norm: "self_attn_layer_norm",
    out: "self_attn.out_proj",
    mlp_norm: "final_layer_norm",
    up: &["fc1"],
    down: "fc2",
    ..LLAMA
};

const GPT2: TensorNames = TensorNames {
    prefixes: &["transformer.", ""],
    embeddings: "wte",
    positions: "wpe",
    final_norm: "ln_f",
    layers: "h",
    attention_norm: "ln_1",
    qkv: &["attn.c_attn"],
    out: "attn.c_proj",
    mlp_norm: "ln_2",
    up: &["mlp.c_fc"],
    down: "mlp.c_proj",
    transposed: true,
    ..LLAMA
};

/// `gguf-py/gguf/tensor_mapping.py` of llama.cpp.
const GGUF: TensorNames = TensorNames {
    prefixes: &[""],
    embeddings: "token_embd",
    positions: "position_embd",
    project_in: "",
    project_out: "",
    final_norm: "output_norm",
    layers: "blk",
    attention_norm: "attn_norm",
    attention_post_norm: "post_attention_norm",
    qkv: &["attn_q", "attn_k", "attn_v"],
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    out: "attn_output",
    mlp_norm: "ffn_norm",
    mlp_post_norm: "post_ffw_norm",
    up: &["ffn_gate", "ffn_up"],
    down: "ffn_down",
    router: "ffn_gate_inp",
    experts: "",
    of_expert: ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"],
    shared_expert: ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"],
    shared_expert_gate: "ffn_gate_inp_shexp",
    transposed: false,
    lm_head: "output",
    stacked_experts: true,
    interleaved: &[],
    whole_norms: true,
};

/// llama.cpp turns neighbouring dimensions in models that it calls `llama`, and its converter reorders their Q and K.
const GGUF_LLAMA: TensorNames = TensorNames { interleaved: &["attn_q", "attn_k"], ..GGUF };

const GGUF_FUSED: TensorNames = TensorNames { qkv: &["attn_qkv"], up: &["ffn_up"], ..GGUF };

impl TensorNames {
    pub fn of(family: Family, naming: TensorNaming) -> &'static Self {
        match naming {
            TensorNaming::Transformers => Self::of_transformers(family),
            TensorNaming::Gguf => match family {
                Family::Llama | Family::Mistral | Family::Mixtral => &GGUF_LLAMA,
                Family::Phi3 | Family::Gpt2 => &GGUF_FUSED,
                _ => &GGUF,
            },
        }
    }

    fn of_transformers(family: Family) -> &'static Self {
        match family {
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen2Moe | Family::Qwen3 | Family::Qwen3Moe => {
                &LLAMA
            }
            Family::Mixtral => &MIXTRAL,
            Family::Phi3 => &PHI3,
            Family::Gemma2 | Family::Gemma3 => &GEMMA,
            Family::Opt => &OPT,
            Family::Gpt2 => &GPT2,
        }
    }
}
