"""Static batches with generate of Hugging Face transformers. Reads the work from stdin, writes a line for each batch size.

Prompts are padded on the left to the longest of their batch, and every sequence runs for as long as the longest output.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

work = json.load(sys.stdin)
torch.manual_seed(0)
torch.set_num_threads(work["threads"])
model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.bfloat16).eval()
vocabulary = model.config.vocab_size


def generate(lengths):
    prompt = max(prompt for prompt, _ in lengths)
    output = max(output for _, output in lengths)
    ids = torch.randint(10, vocabulary, (len(lengths), prompt))
    mask = torch.ones_like(ids)
    for row, (own, _) in enumerate(lengths):
        mask[row, : prompt - own] = 0
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=output, min_new_tokens=output, do_sample=False, pad_token_id=0
        )


generate([(8, 2)])
for batch in work["batches"]:
    started = time.perf_counter()
    done = 0
    for first in range(0, len(work["lengths"]), batch):
        part = work["lengths"][first : first + batch]
        generate(part)
        done += sum(output for _, output in part)
        if time.perf_counter() - started > work["seconds"]:
            break
    seconds = time.perf_counter() - started
    print(json.dumps({"batch": batch, "requests": min(first + batch, len(work["lengths"])), "output_tokens": done, "seconds": seconds}), flush=True)
