#!/usr/bin/env python3
"""Makes tests/data/beams.json: what transformers' beam search finds with the tiny models of tests/data/models.

    pip install torch==2.13.0 transformers==5.19.0 safetensors
    python scripts/make_beam_goldens.py [--out tests/data/beams.json]

searches[]  model, prompt (token ids), width, n, length_penalty, early_stopping, min_tokens, max_tokens, stop_token_ids
  results[]   tokens (with the one that ended it), score

Everything is computed in float32. A search is kept only if float64 finds the same, because then no choice in it was close.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
MODELS = ["llama-gqa-tied", "qwen2", "mistral-window", "opt"]
SEARCHES_PER_MODEL = 12


def search(model, tokens, case):
    with torch.no_grad():
        found = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            do_sample=False,
            num_beams=case["width"],
            num_return_sequences=case["n"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            min_new_tokens=case["min_tokens"],
            max_new_tokens=case["max_tokens"],
            eos_token_id=case["stop_token_ids"] or None,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_scores=True,
        )
    results = []
    for row, score in zip(found.sequences, found.sequences_scores):
        output = row[len(tokens) :].tolist()
        ends = [i for i, token in enumerate(output) if token in case["stop_token_ids"] and i + 1 > case["min_tokens"]]
        results.append({"tokens": output[: ends[0] + 1] if ends else output, "score": round(score.item(), 6)})
    return results


def load(name, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ROOT / "tests/data/models" / name, dtype=dtype, attn_implementation="eager"
    )
    model.generation_config = transformers.GenerationConfig()
    return model.eval()


def cases(model, tokens, rng):
    """Random settings; tokens that a search without an end would find are made to end it."""
    while True:
        width = rng.choice([2, 3, 4, 8, 16])
        max_tokens = rng.randint(1, 24)
        case = {
            "width": width,
            "n": rng.randint(1, width),
            "length_penalty": rng.choice([1.0, 1.0, 0.0, 2.0, -1.0, 0.5]),
            "early_stopping": rng.choice([False, True, "never"]),
            "min_tokens": rng.choice([0, 0, rng.randint(0, max_tokens)]),
            "max_tokens": max_tokens,
            "stop_token_ids": [],
        }
        if rng.random() < 0.8:
            free = search(model, tokens, {**case, "min_tokens": 0})
            seen = sorted({token for result in free for token in result["tokens"][1:]})
            case["stop_token_ids"] = sorted(rng.sample(seen, min(len(seen), rng.randint(1, 3))))
        if case["min_tokens"] and not case["stop_token_ids"]:
            continue
        yield case


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/beams.json")
    args = parser.parse_args()
    rng, searches, close = random.Random(1), [], 0
    for name in MODELS:
        single, double = load(name, torch.float32), load(name, torch.float64)
        golden = json.loads((ROOT / "tests/data/models" / name / "golden.json").read_text())
        taken = 0
        while taken < SEARCHES_PER_MODEL:
            tokens = rng.choice(golden["prompts"])["tokens"][: rng.randint(4, 40)]
            case = next(cases(single, tokens, rng))
            results, exact = search(single, tokens, case), search(double, tokens, case)
            if [r["tokens"] for r in results] != [r["tokens"] for r in exact]:
                close += 1
                continue
            searches.append({"model": name, "prompt": tokens, **case, "results": results})
            taken += 1
    text = {"transformers": transformers.__version__, "torch": torch.__version__, "searches": searches}
    args.out.write_text(json.dumps(text, separators=(",", ":")) + "\n")
    ended = sum(len(r["tokens"]) < s["max_tokens"] for s in searches for r in s["results"])
    print(f"{len(searches)} searches, {ended} results ended before their limit, {close} too close to take")


if __name__ == "__main__":
    main()
