#!/usr/bin/env python3
"""Makes tests/data/models: tiny random models of every family and option, with what transformers says they answer.

    pip install torch==2.13.0 transformers==5.19.0 tokenizers==0.23.3 safetensors
    python scripts/make_goldens.py [--out tests/data/models] [--only NAME]

Every model is a checkpoint as published (config.json, safetensors, tokenizer.json, tokenizer_config.json,
generation_config.json) with a golden.json beside it. golden.json is computed from the written files, in float32 with
eager attention:

    max_model_len     length the dynamic rope scaling is fixed for
    prompts[]         text, tokens
      prompt_logprobs   of tokens[1..], given the tokens before each
      logits[]          position, values[vocab]
      greedy[]          token, logprob: the continuation, end tokens treated as any other

The script checks that the goldens can find errors: the greedy choice is never close, and changing any tensor of the
checkpoint changes the answers.
"""

import argparse
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCAB_SIZE = 320
BOS, EOS, PAD = 0, 1, 2
NUM_GREEDY = 24
MAX_MODEL_LEN = 128
# The gap to the second best token that a greedy choice must have, in logits.
MIN_MARGIN = 0.01
# The gap between the last expert that a router chooses and the next one, in logits.
MIN_ROUTER_MARGIN = 0.004

PROMPTS = [
    "Pages go out with the tide.",
    "A block table maps the tokens of a sequence to blocks that lie anywhere in memory.",
    "When memory runs out, the youngest sequence gives its blocks back: they are swapped out, and come back when there "
    "is room again. Nothing is lost. 🌊 0123456789",
]

CORPUS = PROMPTS + [
    "The scheduler asks, the allocator grants, the executor runs one step, and the tokens go back to the client.",
    "sequence block token memory swap page cache prefix copy write read batch step tide sea shore",
    '{"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 16}',
]


@dataclass
class Variant:
    """One model: the config's class and arguments, and how the checkpoint is written."""

    config: type
    args: dict
    # transformers 4's spelling: rope_theta, rope_scaling, torch_dtype.
    old_spelling: bool = False
    # Keys taken out of config.json (older files lack them).
    without: tuple = ()
    # Keys put into config.json as they are.
    extra: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    num_shards: int = 1
    # Leading part of tensor names that is taken off when the file is written.
    strip_prefix: str = ""
    # The checkpoint of a larger model, of which this is the text's part: Gemma 3 with its vision tower.
    nested: bool = False


def llama(**args):
    base = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return {**base, "max_position_embeddings": 128, "tie_word_embeddings": False, **args}


def opt(**args):
    base = dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32)
    return {**base, "max_position_embeddings": 128, **args}


def gemma(**args):
    base = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    base |= dict(head_dim=16, max_position_embeddings=128, query_pre_attn_scalar=24, sliding_window=12)
    return {**base, **args}


def phi(**args):
    base = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return {**base, "max_position_embeddings": 128, "original_max_position_embeddings": 128, **args}


def longrope(**args):
    """Of a head of 16 dimensions, 12 of which turn."""
    short, long = [1.0, 1.05, 1.1, 1.3, 1.5, 1.7], [1.0, 1.4, 2.5, 4.0, 6.5, 9.0]
    return rope("longrope", short_factor=short, long_factor=long, partial_rotary_factor=0.75, **args)


def experts(**args):
    base = dict(hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return {**base, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False, **args}


def rope(rope_type, theta=10000.0, **args):
    return {"rope_type": rope_type, "rope_theta": theta, **args}


Llama, Mistral, Qwen2, Qwen3, Opt = (
    transformers.LlamaConfig,
    transformers.MistralConfig,
    transformers.Qwen2Config,
    transformers.Qwen3Config,
    transformers.OPTConfig,
)
Gemma2, Gemma3, Phi3, Mixtral, Qwen2Moe, Qwen3Moe, Gpt2 = (
    transformers.Gemma2Config,
    transformers.Gemma3TextConfig,
    transformers.Phi3Config,
    transformers.MixtralConfig,
    transformers.Qwen2MoeConfig,
    transformers.Qwen3MoeConfig,
    transformers.GPT2Config,
)

VARIANTS = {
    # Llama 1: no grouping, and a config.json that knows neither rope_theta nor num_key_value_heads.
    "llama-mha": Variant(
        Llama,
        llama(num_key_value_heads=4),
        old_spelling=True,
        without=("rope_theta", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    ),
    "llama-gqa-tied": Variant(
        Llama, llama(hidden_size=64, num_attention_heads=8, tie_word_embeddings=True, rope_parameters=rope("default", 5e5))
    ),
    "llama-mqa-head-dim": Variant(Llama, llama(hidden_size=48, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-2)),
    "llama-bias": Variant(Llama, llama(attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh")),
    "llama-rope-linear": Variant(
        Llama,
        llama(max_position_embeddings=64, rope_parameters=rope("linear", factor=2.5)),
        old_spelling=True,
    ),
    "llama-rope-dynamic": Variant(
        Llama, llama(max_position_embeddings=32, head_dim=16, rope_parameters=rope("dynamic", factor=4.0))
    ),
    "llama-rope-llama3": Variant(
        Llama,
        llama(
            head_dim=16,
            rope_parameters=rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        old_spelling=True,
    ),
    "llama-rope-yarn": Variant(
        Llama,
        llama(head_dim=32, rope_parameters=rope("yarn", 1000.0, factor=4.0, original_max_position_embeddings=32)),
    ),
    "llama-rope-yarn-mscale": Variant(
        Llama,
        llama(
            head_dim=32,
            rope_parameters=rope(
                "yarn",
                1000.0,
                factor=4.0,
                original_max_position_embeddings=32,
                beta_fast=4.0,
                beta_slow=0.5,
                mscale=1.5,
                mscale_all_dim=0.25,
                truncate=False,
            ),
        ),
        old_spelling=True,
    ),
    # As Qwen2.5's model cards say to extend it: the original length in both places.
    "qwen2-rope-yarn": Variant(
        Qwen2,
        llama(
            max_position_embeddings=32,
            rope_parameters=rope("yarn", 1e6, factor=4.0, attention_factor=1.25, original_max_position_embeddings=32),
        ),
        old_spelling=True,
    ),
    "mistral-window": Variant(Mistral, llama(sliding_window=16), old_spelling=True),
    "mistral-no-window": Variant(Mistral, llama(sliding_window=None, head_dim=16, rope_parameters=rope("default", 1e6))),
    "qwen2": Variant(Qwen2, llama(hidden_size=48, num_attention_heads=6, tie_word_embeddings=True)),
    "qwen2-window": Variant(
        Qwen2,
        llama(num_hidden_layers=3, use_sliding_window=True, sliding_window=12, max_window_layers=1),
        old_spelling=True,
        without=("layer_types",),
    ),
    "qwen2-layer-types": Variant(
        Qwen2,
        llama(
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "qwen3": Variant(Qwen3, llama(head_dim=16, rope_parameters=rope("default", 1e6))),
    "opt": Variant(Opt, opt(), old_spelling=True),
    # OPT-350m: norms after the residual, none at the end, embeddings narrower than the model.
    "opt-post-norm": Variant(Opt, opt(do_layer_norm_before=False, word_embed_proj_dim=24)),
    "opt-no-final-norm": Variant(Opt, opt(_remove_final_layer_norm=True), old_spelling=True, strip_prefix="model."),
    # Galactica's options.
    "opt-no-bias": Variant(
        Opt, opt(enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu")
    ),
    # As published: no prefix, and buffers among the weights.
    "gpt2": Variant(
        Gpt2, dict(n_embd=32, n_layer=2, n_head=2, n_positions=128), old_spelling=True, strip_prefix="transformer."
    ),
    "gpt2-options": Variant(
        Gpt2,
        dict(
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_inner=40,
            n_positions=128,
            activation_function="relu",
            layer_norm_epsilon=1e-2,
            scale_attn_by_inverse_layer_idx=True,
            tie_word_embeddings=False,
        ),
    ),
    "phi3": Variant(Phi3, phi(), old_spelling=True),
    # Phi-4-mini's options; answers up to the length of the training turn with the short factors ...
    "phi3-longrope-short": Variant(
        Phi3,
        phi(max_position_embeddings=512, rope_parameters=longrope(), tie_word_embeddings=True),
        dtype=torch.bfloat16,
    ),
    # ... and those of a server for more with the long ones.
    "phi3-longrope-long": Variant(
        Phi3,
        phi(original_max_position_embeddings=32, sliding_window=24, rope_parameters=longrope(theta=500.0)),
        old_spelling=True,
    ),
    "gemma2": Variant(
        Gemma2, gemma(attn_logit_softcapping=3.0, final_logit_softcapping=4.0), old_spelling=True, without=("layer_types",)
    ),
    "gemma2-options": Variant(
        Gemma2,
        gemma(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attn_logit_softcapping=None,
            final_logit_softcapping=8.0,
            tie_word_embeddings=False,
            attention_bias=True,
            num_key_value_heads=2,
        ),
        dtype=torch.bfloat16,
    ),
    "gemma3": Variant(
        Gemma3,
        gemma(
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "sliding_attention": rope("default", 1e3),
                "full_attention": rope("linear", 1e5, factor=4.0),
            },
        ),
    ),
    # As published with a vision tower, beside which the text's configuration is nested.
    "gemma3-nested": Variant(
        Gemma3,
        gemma(
            num_hidden_layers=4,
            layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            rope_parameters={
                "sliding_attention": rope("default", 1e4),
                "full_attention": rope("linear", 1e6, factor=8.0),
            },
        ),
        old_spelling=True,
        without=("layer_types",),
        extra={"sliding_window_pattern": 3},
        dtype=torch.bfloat16,
        nested=True,
    ),
    "mixtral": Variant(
        Mixtral, experts(num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope("default", 1e6)), old_spelling=True
    ),
    "mixtral-window": Variant(
        Mixtral, experts(num_local_experts=3, num_experts_per_tok=1, sliding_window=16), dtype=torch.bfloat16
    ),
    "qwen2-moe": Variant(
        Qwen2Moe,
        experts(
            num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
        ),
        extra={"num_experts": 5},
    ),
    "qwen2-moe-bf16": Variant(
        Qwen2Moe,
        experts(
            num_hidden_layers=3,
            mlp_only_layers=[1],
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=56,
            norm_topk_prob=True,
            qkv_bias=False,
            tie_word_embeddings=True,
        ),
        extra={"num_experts": 4},
        old_spelling=True,
        dtype=torch.bfloat16,
    ),
    "qwen3-moe": Variant(
        Qwen3Moe,
        experts(
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            norm_topk_prob=False,
        ),
        extra={"num_experts": 6},
        old_spelling=True,
        dtype=torch.bfloat16,
    ),
    "qwen3-moe-norm": Variant(
        Qwen3Moe,
        experts(
            num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, tie_word_embeddings=True
        ),
        extra={"num_experts": 5},
    ),
    "llama-bf16-sharded": Variant(Llama, llama(), dtype=torch.bfloat16, num_shards=3),
    "llama-f16": Variant(Llama, llama(), dtype=torch.float16, old_spelling=True, strip_prefix="model."),
}


def make_tokenizer():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text_files(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant: {% endif %}",
        },
    )
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS], "pad_token_id": PAD})


def random_weights(model, seed):
    """Weights large enough that logits are well apart: a projection's output is about 1.7 times its input."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            # Gemma's are stored less 1.
            weight.data = (0.0 if model.config.model_type.startswith("gemma") else 1.0) + 0.2 * noise
        elif name.endswith("bias"):
            weight.data = 0.3 * noise
        else:
            is_conv1d = model.config.model_type == "gpt2" and ".c_" in name
            weight.data = 1.7 * weight.shape[0 if is_conv1d else -1] ** -0.5 * noise
    model.tie_weights()


def old_spelling(config):
    """config.json as transformers 4 wrote it."""
    parameters = config.pop("rope_parameters", None)
    if parameters is not None and "full_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    if parameters is not None:
        config["rope_theta"] = parameters.pop("rope_theta")
        # They stand beside the others.
        for key in ("partial_rotary_factor", "original_max_position_embeddings"):
            if key in parameters and config["model_type"] == "phi3":
                config[key] = parameters.pop(key)
        # Files from before `rope_type` have `type`; both were seen for long.
        kind = parameters.pop("rope_type")
        key = "rope_type" if kind == "llama3" or config["model_type"] == "gemma3_text" else "type"
        config["rope_scaling"] = None if kind == "default" else {key: kind, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.46.0"
    return config


def write_checkpoint(model, variant, folder):
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = set(variant.args) | {"architectures", "model_type", "dtype", "vocab_size", "rope_parameters", "hidden_act"}
    kept |= {"head_dim", "layer_types", "bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps"}
    config = {key: value for key, value in config.items() if key in kept}
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(variant.dtype).removeprefix("torch.")
    if variant.old_spelling:
        config = old_spelling(config)
    for key in variant.without:
        config.pop(key, None)
    write_json(folder / "config.json", {**config, **variant.extra})

    state = {name: tensor.to(variant.dtype).contiguous() for name, tensor in model.state_dict().items()}
    state = published_experts(state, model.config.model_type)
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    names = sorted(state)
    if variant.num_shards == 1:
        safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(variant.num_shards):
        file = f"model-{shard + 1:05}-of-{variant.num_shards:05}.safetensors"
        part = names[shard :: variant.num_shards]
        safetensors.torch.save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= {name: file for name in part}
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def published_experts(state, model_type):
    """Each expert's matrices by themselves, as checkpoints have them; transformers 5 holds them in one tensor."""
    qwen = ("gate_proj", "up_proj", "down_proj")
    names = {"mixtral": ("w1", "w3", "w2"), "qwen2_moe": qwen, "qwen3_moe": qwen}.get(model_type)
    published = {}
    for name, tensor in state.items():
        scope = name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name
        if names is None or not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            published[scope] = tensor
            continue
        scope, kind = scope.rsplit(".", 1)
        for i, expert in enumerate(tensor):
            parts = zip(names[:2], expert.chunk(2)) if kind == "gate_up_proj" else [(names[2], expert)]
            published |= {f"{scope}.{i}.{part}.weight": matrix.clone() for part, matrix in parts}
    return published


def rename(variant, folder):
    """Renames the tensors as some checkpoints have them; done last, for transformers reads them its own way."""
    path = folder / "model.safetensors"
    if variant.strip_prefix:
        state = safetensors.torch.load_file(path)
        state = {name.removeprefix(variant.strip_prefix): tensor.clone() for name, tensor in state.items()}
        if variant.config is Gpt2:
            state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4).tril() for i in range(2)}
        safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    if variant.nested:
        state = {f"language_model.{name}": tensor for name, tensor in safetensors.torch.load_file(path).items()}
        vision = {"vision_tower.vision_model.embeddings.patch_embedding.weight": torch.ones(8)}
        safetensors.torch.save_file({**state, **vision}, path, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        outer = {key: config.pop(key) for key in ("torch_dtype", "eos_token_id", "transformers_version")}
        del config["architectures"]
        outer |= {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
        write_json(folder / "config.json", {**outer, "text_config": config, "vision_config": {"hidden_size": 8}})


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if rotary is not None and rotary.rope_type == "longrope":
        # transformers goes by the length of the sequence so far, here too.
        rotary.original_inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](model.config, "cpu", seq_len=MAX_MODEL_LEN)
        rotary.long_inv_freq = rotary.original_inv_freq
    if rotary is not None and rotary.rope_type == "dynamic":
        # transformers takes the length of the sequence so far; a server must fix it, see src/model/rope.rs.
        length = MAX_MODEL_LEN
        rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, "cpu", seq_len=length)
        rotary.max_seq_len_cached, rotary.original_max_seq_len = length, 0
    return model


@torch.no_grad()
def logits_of(model, tokens):
    """`[len(tokens), vocab]`: one pass over the whole sequence, no cache."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    output = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True)
    for router in output.router_logits:
        best = router.float().sort(descending=True).values
        last = model.config.num_experts_per_tok - 1
        if (best[:, last] - best[:, last + 1]).min() < MIN_ROUTER_MARGIN:
            raise TooClose
    return output.logits[0].float()


class TooClose(Exception):
    pass


def golden_prompt(model, text, tokens):
    logits = logits_of(model, tokens)
    logprobs = logits.log_softmax(-1)
    positions = sorted({0, len(tokens) // 2, len(tokens) - 1})
    answer = {
        "text": text,
        "tokens": tokens,
        "prompt_logprobs": rounded(logprobs[i, token] for i, token in enumerate(tokens[1:])),
        "logits": [{"position": p, "values": rounded(logits[p])} for p in positions],
        "greedy": [],
    }
    sequence = list(tokens)
    for _ in range(NUM_GREEDY):
        last = logits_of(model, sequence)[-1]
        best = last.topk(2)
        if best.values[0] - best.values[1] < MIN_MARGIN:
            raise TooClose
        token = int(best.indices[0])
        answer["greedy"].append({"token": token, "logprob": rounded([last.log_softmax(-1)[token]])[0]})
        sequence.append(token)
    assert len(sequence) <= MAX_MODEL_LEN
    return answer


def rounded(values):
    return [float(f"{float(value):.7g}") for value in values]


def check_every_tensor_matters(model, tokens):
    """Disturbs one tensor after the other: a reader that ignores it must not pass."""
    input_ids = torch.tensor([tokens])
    before = model(input_ids, use_cache=False).logits
    for name, weight in model.named_parameters():
        if "decoder" in name and name.endswith("k_proj.bias"):
            continue  # Without rope it adds the same to every score of a query, which softmax cancels.
        kept = weight.data
        weight.data = kept + 0.1 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(1))
        change = (model(input_ids, use_cache=False).logits - before).abs().max()
        weight.data = kept
        assert change > 0.01, f"{name} hardly matters: {change}"


def make_model(name, variant, tokenizer, folder, every_tensor_matters=True):
    config = variant.config(
        vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, **variant.args
    )
    prompts = [(text, tokenizer.encode(text, add_special_tokens=False).ids) for text in PROMPTS]
    for seed in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        random_weights(model, seed)
        write_checkpoint(model, variant, folder)
        write_text_files(tokenizer, folder)
        model = load(folder)
        try:
            goldens = [golden_prompt(model, text, tokens) for text, tokens in prompts]
        except TooClose:
            continue
        if every_tensor_matters:
            check_every_tensor_matters(model, prompts[-1][1])
        rename(variant, folder)
        header = {"transformers": transformers.__version__, "torch": torch.__version__, "seed": seed}
        golden = {**header, "max_model_len": MAX_MODEL_LEN, "prompts": goldens}
        (folder / "golden.json").write_text(json.dumps(golden, separators=(",", ":"), ensure_ascii=False) + "\n")
        size = sum(file.stat().st_size for file in folder.iterdir())
        lengths = [len(tokens) for _, tokens in prompts]
        print(f"{name}: seed {seed}, prompts of {lengths} tokens, {size / 1024:.0f} KiB", flush=True)
        return
    raise TooClose(f"{name}: every seed has a greedy choice closer than {MIN_MARGIN}, or a router's that is too close")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    arguments.add_argument("--out", type=Path, default=root / "tests/data/models")
    arguments.add_argument("--only", help="make this model only")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    for name, variant in VARIANTS.items():
        if arguments.only in (None, name):
            make_model(name, variant, tokenizer, arguments.out / name)


if __name__ == "__main__":
    main()
