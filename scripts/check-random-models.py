#!/usr/bin/env python3
"""Compares tiny models of random configurations with transformers: all families, and options that no golden has.

    pip install torch==2.15.0 transformers==5.23.0 tokenizers==0.23.3 safetensors
    python scripts/check-random-models.py [--binary target/release/pagetide] [--seed 1] [--count 100]

Sizes, biases, RoPE scaling, windows, activations, experts and the type of the weights are drawn, and so are the
server's block size, tokens a step and instruction set. Both programs compute in float32. The server's log-probabilities
of the prompts and of the greedy answers have to be within 1e-3 of those of transformers, and the tokens the same. A
model for which they are not is kept, with the server's log.
"""

import argparse
import json
import random
import shutil
import subprocess
from pathlib import Path

import make_goldens as goldens
import probes
import torch
from make_goldens import Variant, longrope, rope

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-3
HIDDEN_SIZES, POSITIONS = [24, 32, 40, 48, 64], goldens.MAX_MODEL_LEN
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]


class Draw(random.Random):
    """Draws configurations. `variant` names a family's function."""

    def one_in(self, n):
        return self.randrange(n) == 0

    def flag(self):
        return self.one_in(2)

    def llama_like(self, has_head_dim=True):
        kv_heads = self.randint(1, 3)
        heads = kv_heads * self.randint(1, 4)
        size_of_head = dict(hidden_size=self.choice(HIDDEN_SIZES), head_dim=self.choice([8, 16, 24, 32, 40, 64]))
        return dict(
            intermediate_size=self.choice([24, 40, 56, 72]),
            num_hidden_layers=self.randint(1, 3),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=self.flag(),
            rms_norm_eps=self.choice([1e-6, 1e-5, 1e-3]),
            **(size_of_head if has_head_dim else dict(hidden_size=heads * self.choice([8, 16]))),
        )

    def divided(self):
        """With a hidden size that transformers takes for Llama and Gemma: a multiple of the number of heads."""
        model = self.llama_like()
        return model | dict(hidden_size=model["num_attention_heads"] * self.choice([4, 8]))

    def rope(self):
        """The parameters, and the positions that make the model's longest text that of the goldens."""
        kind = self.choice(["default", "linear", "dynamic", "llama3", "yarn"])
        theta, original = self.choice([1e2, 1e4, 1e6]), self.choice([16, 32, 64])
        if kind == "default":
            parameters = {}
        elif kind == "linear":
            parameters = dict(factor=self.choice([1.5, 2.0, 8.0]))
        elif kind == "dynamic":
            factor = self.choice([1, 2, 4])
            parameters = rope(kind, theta, factor=float(factor))
            return dict(rope_parameters=parameters, max_position_embeddings=POSITIONS // factor)
        elif kind == "llama3":
            parameters = dict(factor=self.choice([2.0, 8.0, 32.0]), original_max_position_embeddings=original)
            parameters |= dict(low_freq_factor=self.choice([0.5, 1.0, 2.0]), high_freq_factor=self.choice([4.0, 8.0]))
        else:
            parameters = dict(factor=self.choice([2.0, 4.0, 40.0]), original_max_position_embeddings=original)
            options = dict(beta_fast=[8.0, 32.0], beta_slow=[0.25, 1.0], attention_factor=[0.8, 1.1])
            options |= dict(mscale=[0.707, 1.0], mscale_all_dim=[0.5, 1.0], truncate=[True, False])
            parameters |= {key: self.choice(values) for key, values in options.items() if self.one_in(3)}
        return dict(rope_parameters=rope(kind, theta, **parameters), max_position_embeddings=POSITIONS)

    def layer_types(self, layers):
        return [self.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]

    def activation(self):
        return self.choice(["silu", "gelu", "gelu_pytorch_tanh", "relu"])

    def experts(self):
        count = self.randint(2, 8)
        return count, dict(num_experts_per_tok=self.randint(1, count - 1))

    def sparse_layers(self, layers):
        """At least one layer has experts."""
        if layers < 3:
            return {}
        return dict(decoder_sparse_step=self.randint(1, 2), mlp_only_layers=self.choice([[], [0]]))

    def llama(self):
        options = dict(attention_bias=self.flag(), mlp_bias=self.flag(), hidden_act=self.activation())
        return goldens.Llama, self.divided() | self.rope() | options

    def mistral(self):
        options = dict(sliding_window=self.choice([None, 5, 16, 40]), hidden_act=self.activation())
        return goldens.Mistral, self.llama_like() | self.rope() | options

    def qwen2(self):
        model = self.llama_like(has_head_dim=False) | self.rope()
        if self.flag():
            layers = model["num_hidden_layers"]
            model |= dict(use_sliding_window=True, sliding_window=self.choice([7, 20]))
            model |= dict(max_window_layers=self.randint(0, layers)) if self.flag() else {}
        return goldens.Qwen2, model

    def qwen3(self):
        return goldens.Qwen3, self.llama_like() | self.rope() | dict(attention_bias=self.flag())

    def gemma(self):
        model = self.divided()
        return model | dict(
            query_pre_attn_scalar=self.choice([8, 24, 256]),
            sliding_window=self.choice([5, 12, 40]),
            attention_bias=self.flag(),
            layer_types=self.layer_types(model["num_hidden_layers"]),
        )

    def gemma2(self):
        caps = [self.choice([None, 1.0, 50.0]), self.choice([None, 4.0, 30.0])]
        return goldens.Gemma2, self.gemma() | dict(attn_logit_softcapping=caps[0], final_logit_softcapping=caps[1])

    def gemma3(self):
        full = self.choice([rope("default", 1e6), rope("linear", 1e5, factor=8.0)])
        parameters = dict(sliding_attention=rope("default", self.choice([1e3, 1e4])), full_attention=full)
        return goldens.Gemma3, self.gemma() | dict(rope_parameters=parameters)

    def phi3(self):
        model = self.llama_like(has_head_dim=False)
        model |= dict(hidden_size=model["num_attention_heads"] * 16, sliding_window=self.choice([None, 24]))
        if self.flag():
            turns = longrope(theta=self.choice([500.0, 1e4]))
            model |= dict(original_max_position_embeddings=32, rope_parameters=turns)
        else:
            turns = rope("default", partial_rotary_factor=self.choice([0.5, 0.75, 1.0]))
            model |= dict(original_max_position_embeddings=POSITIONS, rope_parameters=turns)
        return goldens.Phi3, model

    def mixtral(self):
        count, experts = self.experts()
        options = dict(num_local_experts=count, sliding_window=self.choice([None, 9]))
        return goldens.Mixtral, self.llama_like() | experts | options

    def qwen_moe(self, model):
        count, experts = self.experts()
        experts |= dict(moe_intermediate_size=self.choice([16, 20, 40]), norm_topk_prob=self.flag())
        return model | experts | dict(num_experts=count) | self.sparse_layers(model["num_hidden_layers"])

    def qwen2_moe(self):
        options = dict(shared_expert_intermediate_size=self.choice([24, 40]), qkv_bias=self.flag())
        return goldens.Qwen2Moe, self.qwen_moe(self.llama_like(has_head_dim=False)) | options

    def qwen3_moe(self):
        return goldens.Qwen3Moe, self.qwen_moe(self.llama_like())

    def gpt2(self):
        heads = self.randint(1, 3)
        return goldens.Gpt2, dict(
            n_embd=heads * self.choice([8, 16, 32]),
            n_layer=self.randint(1, 3),
            n_head=heads,
            n_inner=self.choice([None, 40, 64]),
            n_positions=POSITIONS,
            activation_function=self.choice(["gelu_new", "relu", "gelu"]),
            layer_norm_epsilon=self.choice([1e-5, 1e-3]),
            scale_attn_weights=not self.one_in(3),
            scale_attn_by_inverse_layer_idx=self.flag(),
            tie_word_embeddings=self.flag(),
        )

    def opt(self):
        heads = self.choice([1, 2, 4])
        size = heads * self.choice([8, 16])
        return goldens.Opt, dict(
            hidden_size=size,
            ffn_dim=self.choice([24, 64]),
            num_hidden_layers=self.randint(1, 3),
            num_attention_heads=heads,
            word_embed_proj_dim=self.choice([size, size, 16]),
            max_position_embeddings=POSITIONS,
            do_layer_norm_before=not self.one_in(3),
            _remove_final_layer_norm=self.one_in(3),
            enable_bias=self.flag(),
            layer_norm_elementwise_affine=not self.one_in(3),
            activation_function=self.choice(["relu", "gelu"]),
        )

    def variant(self, family):
        config, model = getattr(self, family)()
        # The old spelling has no list of layers' types. One layer in two is then the rule.
        old_spelling = self.flag() and not family.startswith("gemma")
        extra = {key: model[key] for key in ("num_experts",) if key in model}
        return Variant(config, model, old_spelling=old_spelling, extra=extra, dtype=self.choice(DTYPES))

    def settings(self, isas):
        return {
            "device.isa": self.choice(isas),
            "cache.block_size": self.choice([1, 5, 7, 16, 64]),
            "scheduler.max_num_seqs": 8,
            "scheduler.max_num_batched_tokens": self.choice([8, 16, 37, 512]),
        }


FAMILIES = "llama mistral qwen2 qwen3 gemma2 gemma3 phi3 mixtral qwen2_moe qwen3_moe gpt2 opt".split()


def difference(server, prompt):
    """The largest difference of a log-probability. Infinite if a token of the answer differs."""
    answer = prompt["greedy"]
    request = dict(prompt=prompt["tokens"], max_tokens=len(answer), temperature=0, ignore_eos=True)
    request |= dict(prompt_logprobs=0, logprobs=1, return_token_ids=True)
    choice = server.post("/v1/completions", request).json()["choices"][0]
    if choice["token_ids"] != [token["token"] for token in answer]:
        return float("inf")
    found = [of[str(token)]["logprob"] for of, token in zip(choice["prompt_logprobs"][1:], prompt["tokens"][1:])]
    found += choice["logprobs"]["token_logprobs"]
    expected = prompt["prompt_logprobs"] + [token["logprob"] for token in answer]
    assert len(found) == len(expected)
    return max(abs(a - b) for a, b in zip(found, expected))


def check(binary, folder, settings):
    """What is wrong with a model's answers, or None."""
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    options += ["--device", "cpu", "--dtype", "float32", "--max-model-len", str(goldens.MAX_MODEL_LEN)]
    server = probes.Server(binary, *options, model=str(folder), log=folder / "log.txt")
    try:
        with server:
            prompts = json.loads((folder / "golden.json").read_text())["prompts"]
            worst = max(difference(server, prompt) for prompt in prompts)
    except (RuntimeError, KeyError) as error:
        return str(error)
    return None if worst <= TOLERANCE else f"log-probabilities differ by {worst}"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--binary", default=ROOT / "target/release/pagetide", type=Path)
    arguments.add_argument("--seed", default=1, type=int, help="the same models for the same number (default: 1)")
    arguments.add_argument("--count", default=100, type=int, help="number of models (default: 100)")
    arguments.add_argument("--family", choices=FAMILIES, help="only models of this family")
    arguments.add_argument("--out", default=ROOT / "target/random-models", type=Path, help="where failures are kept")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    binary = str(arguments.binary.resolve())
    doctor = subprocess.run([binary, "doctor", "--json", "--device", "cpu"], capture_output=True, text=True)
    isas = json.loads(doctor.stdout)["cpu"]["available"]
    tokenizer, left_out, failed = goldens.make_tokenizer(), 0, 0
    for i in range(arguments.count):
        draw = Draw(f"{arguments.seed} {i}")
        family = arguments.family or FAMILIES[i % len(FAMILIES)]
        variant, settings = draw.variant(family), draw.settings(isas)
        folder = arguments.out / f"{arguments.seed}-{i}-{family}"
        try:
            goldens.make_model(folder.name, variant, tokenizer, folder, every_tensor_matters=False)
        except goldens.TooClose as error:
            print(f"left out: {error}", flush=True)
            shutil.rmtree(folder)
            left_out += 1
            continue
        wrong = check(binary, folder, settings)
        if wrong is None:
            shutil.rmtree(folder)
        else:
            failed += 1
            print(f"{folder}: {wrong}, with {settings}", flush=True)
    print(f"{failed} of {arguments.count - left_out} models differ")
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
