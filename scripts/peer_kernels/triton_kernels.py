"""Compiles Triton kernels of SGLang and Liger Kernel for a named GPU, which Triton does without one. The modules that
hold them import torch and the rest of their packages, in whose place there are empty stand-ins: only the kernels are
used.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import struct
import sys
from unittest.mock import MagicMock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ptx_text import parameter_sizes


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for the packages of the kernels, and for torch."""

    PACKAGES = {"sglang", "liger_kernel", "torch", "torch_npu", "deep_gemm"}

    def find_spec(self, name, path=None, target=None):
        is_ours = name.partition(".")[0] in self.PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, module):
        pass


def load(path, name):
    """The module of one file."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case:
    """A launch, with what it is given. Buffers get addresses that stand for device memory."""

    FIRST, APART = 0x7A0000000000, 1 << 32

    def __init__(self, name, reference, **numbers):
        self.name, self.reference, self.numbers = name, reference, numbers
        self.buffers = []
        self.launches = []

    def buffer(self, name, type, shape, content="random"):
        address = self.FIRST + len(self.buffers) * self.APART
        self.buffers.append({"name": name, "type": type, "shape": shape, "address": address, "content": content})
        return (type, address)

    def launch(self, function, target, grid, args, constants, options):
        """`args`: {parameter: buffer or (type, number)}, in any order; the other parameters are in `constants`."""
        names = [name for name in function.arg_names if name in args]
        missing = set(function.arg_names) - set(args) - set(constants)
        assert not missing, f"{self.name}: no value for {missing}"
        of_pointers = {"i32": "*i32"} | {kind: f"*{kind if kind != 'f16' else 'fp16'}" for kind in ["f16", "bf16"]}
        of_pointers["f32"] = "*fp32"
        is_buffer = lambda name: args[name][1] >= self.FIRST if isinstance(args[name][1], int) else False
        signature = {
            name: "constexpr"
            if name not in args
            else of_pointers[args[name][0]]
            if is_buffer(name)
            else {"f32": "fp32"}.get(args[name][0], args[name][0])
            for name in function.arg_names
        }
        # As Triton's launcher finds it at run time.
        aligned = {
            (function.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in names
            if isinstance(args[name][1], int) and args[name][1] % 16 == 0
        }
        constexprs = {(function.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(function, signature, constexprs, aligned)
        compiled = triton.compile(source, target=target, options=options)
        ptx = compiled.asm["ptx"]
        (entry, sizes), = parameter_sizes(ptx).items()
        pack = {"i32": "<i", "i64": "<q", "f32": "<f"}
        params = [struct.pack("<Q" if is_buffer(name) else pack[args[name][0]], args[name][1]).hex() for name in names]
        # Scratch memory of its own, which these kernels do not use.
        params += ["00" * 8] * (len(sizes) - len(params))
        assert [len(param) // 2 for param in params] == sizes, f"{self.name}: {sizes}"
        self.launches.append(
            {
                "kernel": entry,
                "grid": grid,
                "block": [32 * compiled.metadata.num_warps, 1, 1],
                "shared_bytes": compiled.metadata.shared,
                "params": params,
            }
        )
        return ptx


def matmul(wheels, target, dtype, m, n, k):
    """SGLang's batch-invariant product: out = a · bᵀ for b: [n, k]."""
    module = load(wheels / "sglang/srt/batch_invariant_ops/batch_invariant_ops.py", "batch_invariant_ops")
    case = Case("", "matmul", m=m, n=n, k=k)
    args = {
        "a_ptr": case.buffer("a", dtype, [m, k]),
        "b_ptr": case.buffer("b", dtype, [n, k]),
        "c_ptr": case.buffer("out", dtype, [m, n], "zero"),
        **{name: ("i32", value) for name, value in [("M", m), ("N", n), ("K", k)]},
        "stride_am": ("i32", k),
        "stride_bn": ("i32", k),
        "stride_cm": ("i32", n),
    }
    block_m, block_n, block_k = 64, 64, 32
    programs = 3
    constants = {
        "bias_ptr": None,
        "stride_ak": 1,
        "stride_bk": 1,
        "stride_cn": 1,
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": 8,
        "NUM_SMS": programs,
        **{name: False for name in ["A_LARGE", "B_LARGE", "C_LARGE", "HAS_BIAS"]},
    }
    ptx = case.launch(
        module.matmul_kernel_persistent, target, [programs, 1, 1], args, constants, {"num_warps": 4, "num_stages": 3}
    )
    return case, ptx


def attention(wheels, target, dtype, lengths, heads, kv_heads, head_dim, causal):
    """SGLang's fused attention over packed sequences, as it launches it."""
    module = load(wheels / "sglang/kernels/ops/attention/prefill_attention.py", "prefill_attention")
    case = Case(
        "",
        "packed_attention",
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=0.12,
        causal=int(causal),
    )
    rows = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    block = 64
    args = {
        "Q": case.buffer("q", dtype, [rows, heads, head_dim]),
        "K": case.buffer("k", dtype, [rows, kv_heads, head_dim]),
        "V": case.buffer("v", dtype, [rows, kv_heads, head_dim]),
        "sm_scale": ("f32", 0.12),
        "B_Start_Loc": case.buffer("starts", "i32", [len(lengths)], starts),
        "B_Seqlen": case.buffer("lengths", "i32", [len(lengths)], lengths),
        "Out": case.buffer("o", dtype, [rows, heads, head_dim], "zero"),
        **{f"stride_{name}bs": ("i32", heads * head_dim) for name in "qo"},
        **{f"stride_{name}bs": ("i32", kv_heads * head_dim) for name in "kv"},
        **{f"stride_{name}h": ("i32", head_dim) for name in "qkvo"},
    }
    constants = {
        "kv_group_num": heads // kv_heads,
        "BLOCK_M": block,
        "BLOCK_DMODEL": head_dim,
        "BLOCK_N": block,
        "IS_CAUSAL": causal,
        "Lk": head_dim,
    }
    grid = [len(lengths), heads, -(-max(lengths) // block)]
    ptx = case.launch(module._fwd_kernel, target, grid, args, constants, {"num_warps": 4, "num_stages": 1})
    return case, ptx


def softmax(wheels, target, dtype, rows, cols):
    """Liger Kernel's softmax of rows that fit one block."""
    module = load(wheels / "liger_kernel/ops/softmax.py", "liger_softmax")
    case = Case("", "softmax", rows=rows, cols=cols)
    args = {
        "Y_ptr": case.buffer("out", dtype, [rows, cols], "zero"),
        "Y_row_stride": ("i32", cols),
        "X_ptr": case.buffer("x", dtype, [rows, cols]),
        "X_row_stride": ("i32", cols),
        "n_cols": ("i32", cols),
    }
    constants = {"BLOCK_SIZE": triton.next_power_of_2(cols)}
    function = module._softmax_single_block_forward_kernel
    return case, case.launch(function, target, [rows, 1, 1], args, constants, {"num_warps": 4})


def layer_norm(wheels, target, dtype, rows, cols):
    """Liger Kernel's layer norm."""
    module = load(wheels / "liger_kernel/ops/layer_norm.py", "liger_layer_norm")
    case = Case("", "layer_norm", rows=rows, cols=cols, eps=1e-5)
    args = {
        "Y_ptr": case.buffer("out", dtype, [rows, cols], "zero"),
        "X_ptr": case.buffer("x", dtype, [rows, cols]),
        "W_ptr": case.buffer("weight", dtype, [cols]),
        "B_ptr": case.buffer("bias", dtype, [cols]),
        "Mean_ptr": case.buffer("mean", "f32", [rows], "zero"),
        "RSTD_ptr": case.buffer("rstd", "f32", [rows], "zero"),
        "Y_row_stride": ("i32", cols),
        "X_row_stride": ("i32", cols),
        "n_cols": ("i32", cols),
        "eps": ("f32", 1e-5),
    }
    strides = {f"{name}_row_stride": 1 for name in ["W", "B", "Mean", "RSTD"]}
    constants = {**strides, "BLOCK_SIZE": triton.next_power_of_2(cols)}
    function = module._layer_norm_forward_kernel
    return case, case.launch(function, target, [rows, 1, 1], args, constants, {"num_warps": 4})


def cases(wheels, arch):
    """[(case, ptx)] for compute capability 80 or 90."""
    target = GPUTarget("cuda", arch, 32)
    made = {
        "matmul_bf16": lambda: matmul(wheels, target, "bf16", 100, 96, 80),
        "matmul_f16": lambda: matmul(wheels, target, "f16", 64, 128, 64),
        "attention_causal": lambda: attention(wheels, target, "bf16", [70, 1, 33], 4, 2, 64, True),
        "attention_full": lambda: attention(wheels, target, "f16", [65], 2, 1, 32, False),
        "softmax": lambda: softmax(wheels, target, "f32", 5, 777),
        "layer_norm": lambda: layer_norm(wheels, target, "bf16", 3, 300),
    }
    sys.meta_path.insert(0, StandIns())
    try:
        for name, make in made.items():
            case, ptx = make()
            case.name = f"triton_{name}"
            yield case, ptx
    finally:
        sys.meta_path.pop(0)
