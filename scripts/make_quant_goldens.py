#!/usr/bin/env python3
"""Makes tests/data/quant.json: weight blocks of ggml's formats, and the weights that the gguf package makes of them.

    pip install gguf==0.19.0 numpy
    python scripts/make_quant_goldens.py [--out tests/data/quant.json]

FORMAT
  blocks   the bytes of some blocks, in hexadecimal
  weights  their weights: float32, little-endian, in hexadecimal

The bytes are random, except that scales in float16 are between 0.001 and 0.1 in magnitude.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# Where a block has float16 numbers.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/quant.json")
    args = parser.parse_args()
    random = np.random.default_rng(1)
    goldens = {}
    for name, halves in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (512 // weights, size), dtype=np.uint8)
        for at in halves:
            scale = random.uniform(0.001, 0.1, len(blocks)) * random.choice([-1, 1], len(blocks))
            blocks[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
        if name == "MXFP4":
            blocks[:, 0] = random.integers(110, 130, len(blocks))
        values = gguf.quants.dequantize(blocks.reshape(1, -1), kind).astype("<f4")
        goldens[name] = {"blocks": blocks.tobytes().hex(), "weights": values.tobytes().hex()}
    args.out.write_text(json.dumps(goldens, indent=1) + "\n")


main()
