"""Asks the exported model held-out questions with transformers and prints a table.

``python scripts/demo_model/check.py [models/demo]``; the exit status is 1 if
fewer than ``--least`` of the greedy answers contain what they must.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from heldout import CONVERSATIONS, FRESH, PROMPTS, QUESTIONS, SYSTEM

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 260


class Model:
    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]

    def complete(self, prompt: str, temperature: float = 0.0, seed: int = 0) -> str:
        torch.manual_seed(seed)
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.9} if temperature else {"do_sample": False, "temperature": None, "top_p": None}
        with torch.inference_mode():
            output = self.model.generate(
                inputs["input_ids"], attention_mask=inputs["attention_mask"],
                max_new_tokens=LIMIT, eos_token_id=self.ends, pad_token_id=0, **sampling,
            )[0, inputs["input_ids"].shape[1]:].tolist()
        ended = output[-1] in self.ends
        return self.tokenizer.decode(output, skip_special_tokens=True) + ("" if ended else " [no end]")

    def answer(self, messages: list[dict], temperature: float = 0.0, seed: int = 0) -> str:
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.complete(prompt, temperature, seed)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def fits(answer: str, wanted: str) -> bool:
    return "[no end]" not in answer and any(part in answer for part in wanted.split("|"))


def show(good: bool, label: str, question: str, answer: str) -> None:
    print(f"{'ok  ' if good else 'MISS'} {label:12} {question}\n                  -> {answer.strip()}", flush=True)


def converse(model: Model, turns, temperature: float = 0.0, seed: int = 0) -> str:
    messages, reply = [], ""
    for turn in turns:
        messages.append(user(turn))
        reply = model.answer(messages, temperature, seed)
        messages.append({"role": "assistant", "content": reply})
    return reply


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "models" / "demo")
    parser.add_argument("--seeds", type=int, default=3, help="sampled answers per question, at temperature 0.7")
    parser.add_argument("--least", type=float, default=0.9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(args.folder)
    passed = total = fresh = sampled = samples = 0

    for question, wanted in QUESTIONS + FRESH:
        for label, before in (("greedy", []), ("with system", [{"role": "system", "content": SYSTEM}])):
            answer = model.answer(before + [user(question)])
            good = fits(answer, wanted)
            passed, total = passed + good, total + 1
            if (question, wanted) in FRESH:
                fresh += good
            if label == "greedy" or not good:
                show(good, label, question, answer)
        for seed in range(args.seeds):
            answer = model.answer([user(question)], 0.7, seed)
            good = fits(answer, wanted)
            sampled, samples = sampled + good, samples + 1
            if not good:
                show(good, f"0.7 seed {seed}", question, answer)
    for turns, wanted in CONVERSATIONS:
        answer = converse(model, turns)
        good = fits(answer, wanted)
        passed, total = passed + good, total + 1
        show(good, f"{len(turns)} turns", " / ".join(turns), answer)
    for prompt in PROMPTS:
        show(True, "completion", prompt, model.complete(prompt))

    print(f"\ngreedy {passed}/{total} (of these, fresh {fresh}/{2 * len(FRESH)}), temperature 0.7 {sampled}/{samples}")
    return 0 if passed >= args.least * total else 1


if __name__ == "__main__":
    raise SystemExit(main())
