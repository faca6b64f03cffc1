#!/usr/bin/env python3
"""Makes tests/data/quantize.json: weights, and the weight blocks that ggml quantises them to.

    pip install gguf==0.19.0 numpy
    python scripts/make_quantize_goldens.py --ggml libggml-base.so [--out tests/data/quantize.json]

The gguf package quantises to the formats with blocks of 32. It does not quantise to Q4_K and Q6_K, so those come from
ggml itself: `libggml-base.so` is in every build of llama.cpp, and in the wheels of llama-cpp-python. Where both can
quantise, the script compares them.

FORMAT
  weights      float32, little-endian, in hexadecimal
  FORMAT NAME  their blocks, in hexadecimal
"""

import argparse
import ctypes
import json
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = {
    "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "Q4_K": "q4_K", "Q6_K": "q6_K",
}
BLOCK = 256


def blocks():
    """Blocks of 256 weights: ordinary ones first, then those at the edges of the rules."""
    random = np.random.default_rng(7)
    ordinary = [random.normal(0, scale, BLOCK) for scale in (0.02, 0.5, 30.0)]
    heavy = random.standard_t(2, BLOCK) * 0.01
    # Many ties: multiples of a half of what Q8_0 and Q4_0 make the distance of two codes.
    ties = np.concatenate([random.integers(-254, 255, 128) / 254.0, random.integers(-16, 17, 128) / 16.0])
    ties[::32] = 1.0
    ties[128::32] = -1.0
    # Smaller than float16 can hold as a scale.
    tiny = random.normal(0, 1e-9, BLOCK)
    positive = random.uniform(0.01, 0.02, BLOCK)
    mixed = np.zeros(BLOCK)
    mixed[32:64] = 0.125
    mixed[64:96] = -0.125
    mixed[128] = 65504.0
    mixed[160:192] = random.uniform(-2, -1, 32)
    mixed[192:224] = np.tile([3.0, -3.0], 16)
    mixed[224:] = random.normal(0, 1, 32)
    zeros = np.zeros(BLOCK)
    return np.concatenate([*ordinary, heavy, ties, tiny, positive, mixed, zeros]).astype("<f4")


def of_ggml(library, name, weights):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    out = np.zeros(len(weights) // block * size, dtype=np.uint8)
    function = getattr(library, f"quantize_row_{FUNCTIONS[name]}_ref")
    function(weights.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(weights)))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/quantize.json")
    args = parser.parse_args()
    library = ctypes.CDLL(str(args.ggml))
    weights = blocks()
    goldens = {"weights": weights.tobytes().hex()}
    for name in FUNCTIONS:
        found = of_ggml(library, name, weights)
        if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0] == 32:
            assert np.array_equal(gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name]), found), name
        goldens[name] = found.tobytes().hex()
    args.out.write_text(json.dumps(goldens, indent=1) + "\n")


main()
