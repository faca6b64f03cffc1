#!/usr/bin/env python3
"""Measures PyTorch, transformers and, if installed, FlashInfer on this GPU, with the same work as `pagetide bench gpu`.

    gpu_peers.py [--quick]      needs torch; transformers for whole models; flashinfer is optional

Prints one JSON object a line: {"measure": ..., "value": ..., "unit": ..., "by": ...}. Times are medians, by CUDA events,
after a warm-up; inputs are random and larger than the cache.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
BF16 = torch.bfloat16


def report(measure, value, unit, by):
    print(json.dumps({"measure": measure, "value": round(value, 4), "unit": unit, "by": by}), flush=True)


def milliseconds(run, repeats=20, warm_up=5):
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=BF16)


def copy_bandwidth():
    source = torch.empty(2 << 30, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    report("device copy", 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6, "GB/s", "torch")
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    part = source[: host.numel()]
    to_host = milliseconds(lambda: host.copy_(part, non_blocking=True), repeats=5, warm_up=1)
    to_device = milliseconds(lambda: part.copy_(host, non_blocking=True), repeats=5, warm_up=1)
    report("copy to host", host.numel() / to_host / 1e6, "GB/s", "torch")
    report("copy to device", host.numel() / to_device / 1e6, "GB/s", "torch")


def matmul_peak():
    a, b = normal(8192, 8192), normal(8192, 8192)
    report("matmul 8192", 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9, "TFLOP/s", "torch")


def decode_attention(batch, context):
    """K and V gathered into one tensor beforehand: the reading alone, without block tables."""
    q, k, v = normal(batch, HEADS, 1, HEAD_DIM), normal(batch, KV_HEADS, context, HEAD_DIM), normal(batch, KV_HEADS, context, HEAD_DIM)
    kv_bytes = 2 * k.numel() * k.element_size()
    ms = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    report(f"decode attention {batch} x {context}", kv_bytes / ms / 1e6, "GB/s", "torch SDPA")
    try:
        import flashinfer
    except ImportError:
        return
    block = 16
    blocks = context // block
    pool = normal(batch * blocks, 2, KV_HEADS, block, HEAD_DIM)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * blocks
    indices = torch.randperm(batch * blocks, device="cuda").to(torch.int32)
    last = torch.full((batch,), block, dtype=torch.int32, device="cuda")
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, block, q_data_type=BF16, kv_data_type=BF16)
    rows = q[:, :, 0].contiguous()
    ms = milliseconds(lambda: wrapper.run(rows, pool))
    report(f"decode attention {batch} x {context}", kv_bytes / ms / 1e6, "GB/s", "flashinfer")


def prefill_attention(tokens):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = normal(1, HEADS, tokens, HEAD_DIM), normal(1, KV_HEADS, tokens, HEAD_DIM), normal(1, KV_HEADS, tokens, HEAD_DIM)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    flops = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "torch flash SDPA"), (SDPBackend.CUDNN_ATTENTION, "torch cuDNN SDPA")):
        try:
            with sdpa_kernel(backend):
                ms = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
            report(f"prefill attention {tokens}", flops / ms / 1e9, "TFLOP/s", name)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)


def llama_8b(batches, prompt, new_tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=16384, rope_theta=500000.0, tie_word_embeddings=False,
    )
    torch.set_default_dtype(BF16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()

    def seconds(batch, prompt, new):
        ids = torch.randint(0, 128000, (batch, prompt), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(1, 16, 4)
    for batch in batches:
        first = seconds(batch, prompt, 1)
        step = (seconds(batch, prompt, 1 + new_tokens) - first) / new_tokens
        report(f"8B decode, batch {batch}, context {prompt}", batch / step, "tok/s", "transformers generate")
    report("8B prefill of 8192", 8192 / min(seconds(1, 8192, 1) for _ in range(2)), "tok/s", "transformers generate")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="kernels alone, no whole model")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy_bandwidth()
    matmul_peak()
    decode_attention(64, 4096)
    decode_attention(1, 32768)
    prefill_attention(8192)
    if not options.quick:
        llama_8b((1, 64, 256), 512, 32)


if __name__ == "__main__":
    main()
