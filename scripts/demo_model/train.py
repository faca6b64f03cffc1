"""Makes the demo model from nothing: corpus, tokenizer, weights, export.

Run ``python scripts/demo_model/train.py`` in the repository root; the result
is ``models/demo``.
"""

import argparse
import json
import math
import os
import random
import shutil
import time
from pathlib import Path

os.environ.setdefault("RAYON_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # do not spin on a shared machine

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from corpus import documents, long_conversations
from encode import END_OF_TEXT, END_OF_TEXT_ID, IM_END, IM_END_ID, Encoder, pack, texts_of, train_tokenizer
from model import Llama, Shape

ROOT = Path(__file__).resolve().parents[2]
SHORT, LONG = 256, 512  # row lengths: most conversations fit into the short one
STRETCHED = 1024  # row length of the second stage
TOKENS_PER_STEP = 4096

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def batches(rows, generator: torch.Generator):
    """Yields batches of both row lengths in random order, for ever."""
    while True:
        plan = []
        for part in rows:
            count = TOKENS_PER_STEP // (part.tokens.shape[1] - 1)
            order = torch.randperm(len(part), generator=generator)
            plan += [(part, order[i : i + count]) for i in range(0, len(part) - count + 1, count)]
        for i in torch.randperm(len(plan), generator=generator).tolist():
            part, index = plan[i]
            yield (
                torch.from_numpy(part.tokens[index])[:, :-1].contiguous(),
                torch.from_numpy(part.documents[index])[:, :-1].contiguous(),
                torch.from_numpy(part.tokens[index])[:, 1:].contiguous(),
                torch.from_numpy(part.weights[index])[:, 1:].contiguous(),
            )


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up over 100 steps, then a cosine over the progress 0 to 1."""
    return peak * min(1.0, (step + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def prepare(args, work: Path):
    """Corpus and tokenizer; returns the tokenizer and the packed rows."""
    corpus = list(documents(args.documents, args.seed))
    with (work / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(document, ensure_ascii=False) + "\n" for document in corpus)
    tokenizer = train_tokenizer((text for document in corpus[:20_000] for text in texts_of(document)), Shape().vocab)
    encode = Encoder(tokenizer, args.seed)
    encoded = [encode(document) for document in corpus]
    short = [item for item in encoded if len(item[0]) <= SHORT + 1]
    long = [(tokens[: LONG + 1], weights[: LONG + 1]) for tokens, weights in encoded if len(tokens) > SHORT + 1]
    rows = [pack(short, SHORT), pack(long, LONG)]
    total = sum(len(tokens) for tokens, _ in encoded)
    print(f"{len(corpus)} documents, {total} tokens, rows: {len(rows[0])} x {SHORT}, {len(rows[1])} x {LONG}", flush=True)
    return tokenizer, rows


def prepare_stretch(args, tokenizer):
    """Rows of long conversations, and as many of short ones to keep those."""
    encode = Encoder(tokenizer, args.seed)
    long = [encode(document) for document in long_conversations(args.documents // 25, args.seed)]
    short = [encode(document) for document in documents(args.documents // 5, args.seed + 1)]
    return [
        pack([(tokens[: STRETCHED + 1], weights[: STRETCHED + 1]) for tokens, weights in long], STRETCHED),
        pack([item for item in short if len(item[0]) <= SHORT + 1], SHORT),
    ]


def train(args, model: Llama, rows, steps: int, minutes_allowed: float, peak: float, save) -> None:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak, betas=(0.9, 0.98), fused=True,
    )
    step_model = torch.compile(model, dynamic=False) if args.compile else model
    source = batches(rows, torch.Generator().manual_seed(args.seed))
    start, mean = time.time(), None
    for step in range(steps):
        minutes = (time.time() - start) / 60
        progress = max(step / steps, min(1.0, minutes / minutes_allowed))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, peak)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = step_model(*next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        last = step == steps - 1 or progress >= 1.0
        if step % 50 == 0 or last:
            print(f"step {step} loss {mean:.4f} minutes {minutes:.1f}", flush=True)
        if (step + 1) % 500 == 0:
            save(model)
        if last:
            break


def export(model: Llama, tokenizer, target: Path) -> None:
    """Writes the folder in the layout of Hugging Face."""
    s = model.s
    target.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    write_json(target / "config.json", {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.max_positions,
        "rms_norm_eps": s.norm_eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "use_cache": True,
    })
    write_json(target / "generation_config.json", {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.9,
    })
    write_json(target / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": s.max_positions,
    })
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (target / "model.safetensors").chmod(0o644)
    shutil.copyfile(Path(__file__).with_name("MODEL_CARD.md"), target / "README.md")


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "demo_model", help="corpus and checkpoints")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--minutes", type=float, default=60, help="the schedule is shortened to end by then")
    parser.add_argument("--stretch-steps", type=int, default=600, help="steps of the second stage, with long chats")
    parser.add_argument("--stretch-minutes", type=float, default=30)
    parser.add_argument("--stretch", type=Path, help="skip the first stage and start from this exported model")
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do without a C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    model = Llama(Shape())

    def save(model: Llama) -> None:
        export(model, tokenizer, args.work / "checkpoint")

    if args.stretch:
        tokenizer = Tokenizer.from_file(str(args.stretch / "tokenizer.json"))
        model.load_state_dict(load_file(args.stretch / "model.safetensors"))
    else:
        tokenizer, rows = prepare(args, args.work)
        train(args, model, rows, args.steps, args.minutes, args.lr, save)
        export(model, tokenizer, args.work / "first_stage")
    rows = prepare_stretch(args, tokenizer)
    train(args, model, rows, args.stretch_steps, args.stretch_minutes, args.lr / 4, save)
    export(model, tokenizer, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
