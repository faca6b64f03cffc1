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
LIMIT, BATCH = 260, 32


class Model:
    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]

    def complete(self, prompts: list[str], temperature: float = 0.0, seed: int = 0) -> list[str]:
        torch.manual_seed(seed)
        sampling = {"do_sample": False, "temperature": None, "top_p": None}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.9, "top_k": 0}
        texts = []
        for start in range(0, len(prompts), BATCH):
            inputs = self.tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.inference_mode():
                outputs = self.model.generate(
                    inputs["input_ids"], attention_mask=inputs["attention_mask"],
                    max_new_tokens=LIMIT, eos_token_id=self.ends, pad_token_id=0, **sampling,
                )[:, inputs["input_ids"].shape[1] :]
            for output in outputs.tolist():
                ended = any(token in self.ends for token in output)
                texts.append(self.tokenizer.decode(output, skip_special_tokens=True) + ("" if ended else " [no end]"))
        return texts

    def answer(self, chats: list[list[dict]], temperature: float = 0.0, seed: int = 0) -> list[str]:
        prompts = [self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        return self.complete(prompts, temperature, seed)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def fits(answer: str, wanted: str) -> bool:
    return "[no end]" not in answer and any(part in answer for part in wanted.split("|"))


def show(good: bool, label: str, question: str, answer: str) -> None:
    print(f"{'ok  ' if good else 'MISS'} {label:12} {question}\n                  -> {answer.strip()}", flush=True)


def ask(model: Model, label: str, questions, before=(), temperature=0.0, seed=0, verbose=False) -> int:
    """Asks all questions, shows the misses (or all), returns how many fit."""
    answers = model.answer([[*before, user(question)] for question, _ in questions], temperature, seed)
    passed = 0
    for (question, wanted), answer in zip(questions, answers):
        good = fits(answer, wanted)
        passed += good
        if verbose or not good:
            show(good, label, question, answer)
    return passed


def converse(model: Model, turns) -> str:
    messages, reply = [], ""
    for turn in turns:
        messages.append(user(turn))
        reply = model.answer([messages])[0]
        messages.append({"role": "assistant", "content": reply})
    return reply


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "models" / "demo")
    parser.add_argument("--seeds", type=int, default=3, help="sampled answers per question")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--least", type=float, default=0.85)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(args.folder)
    system = [{"role": "system", "content": SYSTEM}]
    table = []
    for name, questions in (("improved on", QUESTIONS), ("fresh", FRESH)):
        table.append((f"{name}, greedy", ask(model, "greedy", questions, verbose=True), len(questions)))
        table.append((f"{name}, greedy, with a system prompt", ask(model, "with system", questions, system), len(questions)))
        passed = sum(ask(model, f"seed {seed}", questions, temperature=args.temperature, seed=seed) for seed in range(args.seeds))
        table.append((f"{name}, temperature {args.temperature}", passed, args.seeds * len(questions)))
    passed = 0
    for turns, wanted in CONVERSATIONS:
        answer = converse(model, turns)
        passed += fits(answer, wanted)
        show(fits(answer, wanted), f"{len(turns)} turns", " / ".join(turns), answer)
    table.append(("conversations, greedy", passed, len(CONVERSATIONS)))
    for prompt, text in zip(PROMPTS, model.complete(list(PROMPTS))):
        show(True, "completion", prompt, text)

    print()
    for name, passed, total in table:
        print(f"{name:40} {passed:4} of {total}")
    greedy = [(passed, total) for name, passed, total in table if "greedy" in name]
    return 0 if sum(p for p, _ in greedy) >= args.least * sum(t for _, t in greedy) else 1


if __name__ == "__main__":
    raise SystemExit(main())
