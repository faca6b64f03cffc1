#!/usr/bin/env python3
"""Makes tests/data/quantized: tiny models with quantised weights, and what transformers says they answer.

    pip install torch==2.15.0 transformers==5.23.0 tokenizers==0.23.3 safetensors compressed-tensors==0.20.0
    python scripts/make_quantized_models.py [--out tests/data/quantized] [--only NAME]

compressed-tensors itself packs and unpacks its formats. The others are packed here, as GPTQModel, AutoAWQ and DeepSeek
publish them. golden.json has the members of make_goldens.py, computed in float32 with the weights that the codes stand
for, and some of these weights:

    weights{}         by module: rows, cols, and the first and the last of each
"""

import argparse
import json
import shutil
from pathlib import Path

import compressed_tensors
import make_goldens as goldens
import safetensors.torch
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
LLAMA = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
EXPERTS = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    norm_topk_prob=True,
)


def integers(weight, bits, group_size, symmetric, group_of=None, scale_dtype=torch.float16):
    """Codes from 0 `[rows, cols]`, scales and zero points `[rows, groups]`, and the weights that they stand for."""
    rows, cols = weight.shape
    group_size = cols if group_size == -1 else group_size
    if group_of is None:
        group_of = torch.arange(cols) // group_size
    groups, top = int(group_of.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(rows, groups), torch.empty(rows, groups)
    for group in range(groups):
        part = weight[:, group_of == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (top // 2)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, top)
    scales = scales.to(scale_dtype)
    scale, zero = scales.float()[:, group_of], zeros[:, group_of]
    codes = (weight / scale + zero).round().clamp(0, top)
    return codes.int(), scales, zeros.int(), (codes - zero) * scale


def pack(numbers, bits, order=None):
    """Packs the columns of `[rows, cols]` into words of 32 bits."""
    per = 32 // bits
    numbers = numbers.reshape(numbers.shape[0], -1, per).long()
    numbers = numbers if order is None else numbers[:, :, order]
    words = sum(numbers[:, :, place] << (place * bits) for place in range(per))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(bits, group_size, symmetric, version, act_order=False, biases=False):
    def tensors(weight, generator):
        cols = weight.shape[1]
        group_of = torch.arange(cols) // (cols if group_size == -1 else group_size)
        if act_order:
            group_of = group_of[torch.randperm(cols, generator=generator)]
        codes, scales, zeros, exact = integers(weight, bits, group_size, symmetric, group_of)
        stored = {
            "qweight": pack(codes, bits).T.contiguous(),
            "qzeros": pack(zeros.T - (1 if version == 1 else 0), bits),
            "scales": scales.T.contiguous(),
            "g_idx": group_of.int(),
        }
        if biases:
            stored["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
        return stored, exact

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": act_order}
    return config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, lambda name: tensors


def awq(group_size):
    def tensors(weight, generator):
        codes, scales, zeros, exact = integers(weight, 4, group_size, False)
        stored = {
            "qweight": pack(codes.T, 4, AWQ_ORDER),
            "qzeros": pack(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return stored, exact

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return config | {"modules_to_not_convert": None}, lambda name: tensors


def fp8(block):
    def tensors(weight, generator):
        rows, cols = weight.shape
        size = block or [rows, cols]
        lines, groups = -(-rows // size[0]), -(-cols // size[1])
        scales = torch.empty(lines, groups)
        for line in range(lines):
            for group in range(groups):
                part = weight[line * size[0] :, group * size[1] :][: size[0], : size[1]]
                scales[line, group] = part.abs().max() / 448
        spread = scales.repeat_interleave(size[0], 0)[:rows].repeat_interleave(size[1], 1)[:, :cols]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        if block:
            return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread
        stored = {"weight": codes, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.5)}
        return stored, codes.float() * spread

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic" if block else "static"}
    return config | ({"weight_block_size": block} if block else {}), lambda name: tensors


def compressed(format, groups, ignore=()):
    """`groups`: the arguments of weights, by a part of the modules' names."""

    def tensors_of(name):
        if name in ignore:
            return None
        args = QuantizationArgs(**next(args for part, args in groups.items() if part in name))
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(format)

        def tensors(weight, generator):
            state = {"weight": weight}
            if args.type == "float":
                scales = weight.abs().amax(1, keepdim=True) / 448
                state |= {"weight_scale": (scales.amax(0) if args.strategy == "tensor" else scales).to(torch.bfloat16)}
            else:
                group_size = args.group_size or -1
                _, scales, zeros, _ = integers(weight, args.num_bits, group_size, args.symmetric, None, torch.bfloat16)
                zeros = (zeros - 2 ** (args.num_bits - 1)).to(torch.int8)
                state |= {"weight_scale": scales, "weight_zero_point": zeros}
            exact = {key: value.float() if key == "weight_scale" else value for key, value in state.items()}
            stored = compressor.compress(state, scheme)
            exact = compressor.decompress(compressor.compress(exact, scheme), scheme)["weight"].float()
            if args.type == "float":
                stored["input_scale"] = torch.tensor([0.5])
            return {key: value.contiguous() for key, value in stored.items()}, exact

        return tensors

    config = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    targets = {f"group_{i}": (part, args) for i, (part, args) in enumerate(groups.items())}
    config["config_groups"] = {
        name: {"targets": ["Linear"] if len(groups) == 1 else [f"re:.*{part}.*"], "weights": args}
        for name, (part, args) in targets.items()
    }
    return config | {"ignore": ["lm_head", *ignore], "kv_cache_scheme": None}, tensors_of


def args(num_bits, strategy, **more):
    return {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


VARIANTS = {
    # As AutoGPTQ writes it, with biases that the model does not have.
    "gptq-v1-sym": (transformers.LlamaConfig, LLAMA, gptq(4, 32, True, 1, biases=True)),
    # The last group of a row of 96 columns has 32.
    "gptq-v2-asym": (transformers.LlamaConfig, LLAMA, gptq(4, 64, False, 2)),
    "gptq-act-order": (transformers.LlamaConfig, LLAMA, gptq(4, 32, True, 1, act_order=True)),
    "gptq-int8": (transformers.LlamaConfig, LLAMA, gptq(8, -1, True, 1)),
    "awq": (transformers.LlamaConfig, LLAMA, awq(32)),
    # Q, K and V have biases, which are not quantised.
    "awq-qwen2": (transformers.Qwen2Config, LLAMA, awq(32)),
    "ct-int4": (
        transformers.LlamaConfig,
        LLAMA,
        compressed(
            "pack-quantized",
            {"": args(4, "group", group_size=32)},
            ignore=["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"],
        ),
    ),
    "ct-mixed": (
        transformers.LlamaConfig,
        LLAMA,
        compressed(
            "pack-quantized",
            {
                "self_attn": args(8, "channel"),
                "mlp.down": args(4, "channel", symmetric=False),
                "mlp": args(4, "group", group_size=32, symmetric=False),
            },
        ),
    ),
    "ct-w8a8": (transformers.LlamaConfig, LLAMA, compressed("int-quantized", {"": args(8, "channel")})),
    "ct-fp8": (
        transformers.LlamaConfig,
        LLAMA,
        compressed(
            "float-quantized",
            {"self_attn": args(8, "channel") | {"type": "float"}, "": args(8, "tensor") | {"type": "float"}},
        ),
    ),
    # Blocks that fill neither rows nor columns.
    "fp8-blocks": (transformers.Qwen3MoeConfig, EXPERTS, fp8([40, 48])),
    "fp8-tensor": (transformers.LlamaConfig, LLAMA, fp8(None)),
}


def some_of(weight):
    parts = {"rows": weight[[0, -1]], "cols": weight[:, [0, -1]].T}
    return {name: [goldens.rounded(line) for line in part] for name, part in parts.items()}


def quantize(model, tensors_of, dtype, generator):
    """Replaces the weights by those that the codes stand for. Returns the checkpoint and some of the weights."""
    model_type = model.config.model_type
    published = goldens.published_experts(model.state_dict(), model_type)
    state, exact, some = {}, {}, {}
    for name, weight in published.items():
        module, piece = name.rsplit(".", 1)
        is_linear = weight.dim() == 2 and "_proj" in module
        tensors = tensors_of(module) if is_linear else None
        if tensors is None:
            stored, exact[name] = {piece: weight.to(dtype)}, weight.to(dtype).float()
        else:
            stored, exact[name] = tensors(weight.clone(), generator)
            if "layers.1." in name and ("experts" not in name or "experts.1." in name):
                some[module] = some_of(exact[name])
        state |= {f"{module}.{piece}": tensor.contiguous() for piece, tensor in stored.items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state, exact, some


def set_weights(model, exact):
    for name, weight in model.named_parameters():
        if name in exact:
            weight.data = exact[name]
            continue
        scope, kind = name.rsplit(".", 1)
        of_expert = lambda i, part: exact[f"{scope}.{i}.{part}.weight"]
        experts = range(weight.shape[0])
        if kind == "gate_up_proj":
            parts = [torch.cat([of_expert(i, "gate_proj"), of_expert(i, "up_proj")]) for i in experts]
        else:
            parts = [of_expert(i, kind) for i in experts]
        weight.data = torch.stack(parts)
    model.tie_weights()


def make_model(name, variant, folder):
    kind, arguments, (quantization, tensors_of) = variant
    tokenizer = goldens.make_tokenizer()
    prompts = [(text, tokenizer.encode(text, add_special_tokens=False).ids) for text in goldens.PROMPTS[:2]]
    dtype = torch.bfloat16 if name.startswith(("ct", "fp8")) else torch.float16
    config = kind(vocab_size=goldens.VOCAB_SIZE, bos_token_id=0, eos_token_id=1, pad_token_id=2, **arguments)
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        goldens.random_weights(model, seed)
        state, exact, some = quantize(model, tensors_of, dtype, torch.Generator().manual_seed(seed))
        set_weights(model, exact)
        try:
            answers = [goldens.golden_prompt(model, text, tokens) for text, tokens in prompts]
        except goldens.TooClose:
            continue
        kept = set(arguments) | {"model_type", "vocab_size", "rope_parameters", "hidden_act", "head_dim"}
        kept |= {"rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id"}
        written = json.loads(model.config.to_json_string(use_diff=False))
        written = {key: value for key, value in written.items() if key in kept}
        if "num_experts" in arguments:
            written["num_experts"] = arguments["num_experts"]
        written |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
        goldens.write_json(folder / "config.json", written | {"quantization_config": quantization})
        safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        versions = {library.__name__: library.__version__ for library in (transformers, torch, compressed_tensors)}
        golden = {**versions, "seed": seed, "max_model_len": goldens.MAX_MODEL_LEN, "prompts": answers, "weights": some}
        (folder / "golden.json").write_text(json.dumps(golden, separators=(",", ":"), ensure_ascii=False) + "\n")
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name}: seed {seed}, {size / 1024:.0f} KiB", flush=True)
        return
    raise RuntimeError(f"{name}: every seed has a greedy choice closer than {goldens.MIN_MARGIN}")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    arguments.add_argument("--out", type=Path, default=root / "tests/data/quantized")
    arguments.add_argument("--only", help="make this model only")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    for name, variant in VARIANTS.items():
        if arguments.only in (None, name):
            make_model(name, variant, arguments.out / name)


if __name__ == "__main__":
    main()
