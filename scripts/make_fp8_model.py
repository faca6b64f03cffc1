#!/usr/bin/env python3
"""Writes an FP8 checkpoint of a GGUF file of Llama's architecture, to measure what FP8 costs.

    pip install gguf numpy ml_dtypes safetensors
    scripts/make_fp8_model.py models/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

Matrices become E4M3 with a scale for each row, as llm-compressor's FP8_DYNAMIC writes them. Embeddings and norms become
bfloat16. There is no tokenizer in FOLDER.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

LARGEST = 448
# Names in GGUF and in transformers.
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


class Model:
    def __init__(self, path):
        self.reader = GGUFReader(path)
        self.stored = {tensor.name: tensor for tensor in self.reader.tensors}
        self.layers = int(self.value("block_count"))
        self.heads = {"attn_q": int(self.value("attention.head_count"))}
        self.heads["attn_k"] = int(self.value("attention.head_count_kv"))

    def value(self, key):
        field = self.reader.fields[f"llama.{key}"]
        return field.parts[field.data[0]][0]

    def tensor(self, name):
        tensor = self.stored[f"{name}.weight"]
        shape = [int(size) for size in reversed(tensor.shape)]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)

    def matrix(self, layer, name):
        weights = self.tensor(f"blk.{layer}.{name}")
        if name not in self.heads:
            return weights
        # llama.cpp has the two dimensions of a rotation side by side.
        pairs = weights.reshape(self.heads[name], -1, 2, weights.shape[1])
        return pairs.swapaxes(1, 2).reshape(weights.shape)


def checkpoint(model):
    plain = lambda name: model.tensor(name).astype(ml_dtypes.bfloat16)
    tensors = {"model.embed_tokens.weight": plain("token_embd"), "model.norm.weight": plain("output_norm")}
    if "output.weight" in model.stored:
        tensors["lm_head.weight"] = plain("output")
    for layer in range(model.layers):
        for name, to in NORMS.items():
            tensors[f"model.layers.{layer}.{to}.weight"] = plain(f"blk.{layer}.{name}")
        for name, to in MATRICES.items():
            weights = model.matrix(layer, name)
            scales = np.maximum(np.abs(weights).max(1, keepdims=True) / LARGEST, 1e-12).astype(np.float32)
            to = f"model.layers.{layer}.{to}"
            tensors[f"{to}.weight"] = (weights / scales).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{to}.weight_scale"] = scales
    return tensors


def config(model, tensors):
    vocab_size, hidden_size = tensors["model.embed_tokens.weight"].shape
    coded = {"num_bits": 8, "type": "float", "symmetric": True}
    weights, activations = coded | {"strategy": "channel"}, coded | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(model.value("feed_forward_length")),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads["attn_q"],
        "num_key_value_heads": model.heads["attn_k"],
        "max_position_embeddings": int(model.value("context_length")),
        "rope_theta": float(model.value("rope.freq_base")),
        "rms_norm_eps": float(model.value("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    }


def main():
    source, folder = sys.argv[1], Path(sys.argv[2])
    model = Model(source)
    tensors = checkpoint(model)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(model, tensors), indent=2) + "\n")


if __name__ == "__main__":
    main()
