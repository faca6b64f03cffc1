#!/usr/bin/env python3
"""Makes tests/data/embeddings.json: transformers' final hidden states of the tiny models' prompts, pooled.

    pip install torch==2.13.0 transformers==5.19.0 safetensors
    python scripts/make_embedding_goldens.py [--out tests/data/embeddings.json]

embeddings[]  model, prompt (token ids), pooling (last or mean), values[hidden], of any length
"""

import argparse
import json
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
MODELS = ["llama-gqa-tied", "qwen3", "opt", "opt-post-norm", "gpt2", "gemma2"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/embeddings.json")
    args = parser.parse_args()
    embeddings = []
    for name in MODELS:
        folder = ROOT / "tests/data/models" / name
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for prompt in json.loads((folder / "golden.json").read_text())["prompts"]:
            with torch.no_grad():
                states = model(torch.tensor([prompt["tokens"]])).last_hidden_state[0]
            for pooling, values in [("last", states[-1]), ("mean", states.double().mean(dim=0))]:
                embeddings.append(
                    {
                        "model": name,
                        "prompt": prompt["tokens"],
                        "pooling": pooling,
                        "values": [float(f"{value:.7g}") for value in values.tolist()],
                    }
                )
    text = {"transformers": transformers.__version__, "torch": torch.__version__, "embeddings": embeddings}
    args.out.write_text(json.dumps(text, separators=(",", ":")) + "\n")
    print(f"{len(embeddings)} embeddings")


if __name__ == "__main__":
    main()
