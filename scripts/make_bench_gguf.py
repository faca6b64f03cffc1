#!/usr/bin/env python3
"""Writes a GGUF file with the shape of a 1B Llama model and random weights, to measure speed with.

    pip install gguf==0.19.0
    scripts/make_bench_gguf.py q4_k_m|q4_0|q8_0|bf16 FILE

Hidden 2048, 16 layers, 32 query and 8 KV heads of 64, intermediate 8192, vocabulary 32,768, tied; 1.04 B parameters.
q4_k_m chooses the type of each tensor as llama.cpp's quantizer does. The weights are about as large as those of a
trained model, so that nothing overflows. The tokenizer is SentencePiece's, with a piece for each byte.
"""

import sys

import gguf
import numpy
from gguf import GGMLQuantizationType as Type

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 2048, 16, 32, 8, 64, 8192, 32768
# The standard deviation of the weights.
SIZE = 0.02
# Bytes of a block, and where its 16-bit scales are with their values.
SCALES = {
    # The weights are d · (code - 8), d · code, d · scale · code - dmin · minimum and d · scale · (code - 32).
    Type.Q4_0: (18, {0: SIZE / 4.6}),
    Type.Q8_0: (34, {0: SIZE / 74}),
    Type.Q4_K: (144, {0: SIZE / (32 * 4.6), 2: SIZE / (32 * 4.6) * 7.5}),
    Type.Q6_K: (210, {208: SIZE / (74 * 18.5)}),
}


def random_tensor(random, rows, columns, kind):
    """The bytes of random weights, `[rows, bytes of a row]`."""
    if kind == Type.BF16:
        weights = random.standard_normal((rows, columns), dtype=numpy.float32) * numpy.float32(SIZE)
        return (weights.view(numpy.uint32) >> 16).astype(numpy.uint16).view(numpy.uint8)
    block_bytes, scales = SCALES[kind]
    blocks = rows * columns // gguf.GGML_QUANT_SIZES[kind][0]
    data = random.integers(0, 256, (blocks, block_bytes), dtype=numpy.uint8)
    for at, scale in scales.items():
        data[:, at : at + 2] = numpy.frombuffer(numpy.float16(scale).tobytes(), numpy.uint8)
    return data.reshape(rows, -1)


def has_more_bits(layer):
    """Layers whose V and down projections have Q6_K in Q4_K_M."""
    return layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2


def main(recipe, path):
    mixed = recipe == "q4_k_m"
    plain = Type.Q4_K if mixed else Type[recipe.upper()]
    better = Type.Q6_K if mixed else plain
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random 1B {recipe}")
    writer.add_block_count(LAYERS)
    writer.add_context_length(16384)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(VOCAB)
    special = ["<unk>", "<s>", "</s>"]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"▁{number:x}" for number in range(VOCAB - len(special) - len(in_bytes))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(special + in_bytes + words)
    writer.add_token_scores([0.0] * (len(special) + len(in_bytes)) + [-float(i) for i in range(len(words))])
    kinds = gguf.TokenType
    of_special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    writer.add_token_types(of_special + [kinds.BYTE] * len(in_bytes) + [kinds.NORMAL] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    random = numpy.random.default_rng(1)
    kv = KV_HEADS * HEAD_DIM
    # Embeddings that are the output matrix too have the better type.
    matrices = [("token_embd", VOCAB, HIDDEN, better)]
    norms = ["output_norm"]
    for layer in range(LAYERS):
        of_layer = better if has_more_bits(layer) else plain
        matrices += [
            (f"blk.{layer}.{name}", rows, columns, kind)
            for name, rows, columns, kind in [
                ("attn_q", HIDDEN, HIDDEN, plain),
                ("attn_k", kv, HIDDEN, plain),
                ("attn_v", kv, HIDDEN, of_layer),
                ("attn_output", HIDDEN, HIDDEN, plain),
                ("ffn_gate", INTERMEDIATE, HIDDEN, plain),
                ("ffn_up", INTERMEDIATE, HIDDEN, plain),
                ("ffn_down", HIDDEN, INTERMEDIATE, of_layer),
            ]
        ]
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for name, rows, columns, kind in matrices:
        writer.add_tensor(f"{name}.weight", random_tensor(random, rows, columns, kind), raw_dtype=kind)
    for name in norms:
        writer.add_tensor(f"{name}.weight", numpy.ones(HIDDEN, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ["q4_k_m", "q4_0", "q8_0", "bf16"]:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
