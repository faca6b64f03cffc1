#!/usr/bin/env python3
"""Tests that compile-kernels.py refuses what it should: small kernels that break one rule each, and changed figures.

    scripts/test_compile_kernels.py NVCC
"""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from machine_code import blocks_per_sm

SCRIPT = Path(__file__).with_name("compile-kernels.py")
NVCC = sys.argv.pop()

RULES = "[all.most]\nstack_bytes = 0\nlocal_accesses = 0\ncas_loops = 0\n[kernels]\n"

PLAIN = """
extern "C" __global__ void __launch_bounds__(256) plain(float* x) { x[threadIdx.x] += 1.0f; }
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x) {
    float values[96];
#pragma unroll
    for (int i = 0; i < 96; i++) values[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) x[threadIdx.x * 96 + i] = values[i] * values[95 - i] + values[i * 7 % 96];
}
"""
# Shared memory has no 64-bit atomic add.
CAS_LOOP = """
extern "C" __global__ void adding(unsigned long long* x) {
    __shared__ unsigned long long sum;
    sum = 0;
    __syncthreads();
    atomicAdd(&sum, x[threadIdx.x]);
    __syncthreads();
    x[0] = sum;
}
"""
LOCK = """
extern "C" __global__ void locking(unsigned* x) {
    while (atomicCAS(x, 0u, 1u) != 0u) {}
    x[1] += 1;
    atomicExch(x, 0u);
}
"""
ONE_CAS = """
extern "C" __global__ void claiming(unsigned* x) { x[1] = atomicCAS(x, 0u, 1u); }
"""
# A product on tensor cores of what cp.async brings, and the same without either.
TENSOR_CORES = """
extern "C" __global__ void __launch_bounds__(32) multiplying(float* out, const uint4* x) {
    __shared__ uint4 a[32];
    const unsigned to = __cvta_generic_to_shared(&a[threadIdx.x]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + threadIdx.x) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    float c[4] = {};
    const uint4 v = a[threadIdx.x];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%4, %5}, "
                 "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
    out[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
"""
NO_TENSOR_CORES = """
extern "C" __global__ void __launch_bounds__(32) multiplying(float* out, const uint4* x) {
    __shared__ uint4 a[32];
    a[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    const uint4 v = a[threadIdx.x ^ 1];
    out[threadIdx.x] = __uint_as_float(v.x) * __uint_as_float(v.y) + __uint_as_float(v.z);
}
"""
NEEDS_TENSOR_CORES = '[kernels.multiplying]\nleast = { async_copies = 1, tensor_core_ops = 1, blocks_per_sm = 32 }\n'


class Gates(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.table = self.folder / "table.csv"

    def compile(self, kernel, rules="", *options, archs=("sm_80",), cubin=None):
        """(whether it passed, what it printed). With the name of a cubin the kernel is compiled to that first, unless
        it is only asked whether that was checked."""
        source = self.folder / "kernel.cu"
        source.write_text(kernel)
        entries = [{"arch": arch, "file": str(source), "defines": [], "shared_bytes": {}} for arch in archs]
        if cubin:
            entries[0]["cubin"] = str(self.folder / cubin)
        if cubin and "--is-checked" not in options:
            flags = ["-cubin", "-lineinfo", f"-arch={archs[0]}"]
            subprocess.run([NVCC, *flags, "-o", entries[0]["cubin"], str(source)], check=True, cwd=self.folder)
        (self.folder / "list.json").write_text(json.dumps(entries))
        (self.folder / "rules.toml").write_text(RULES + rules)
        paths = ["--list", "list.json", "--rules", "rules.toml", "--table", "table.csv", "--checked", "checked.sha256"]
        command = [sys.executable, str(SCRIPT), NVCC, *paths, *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        return done.returncode == 0, done.stdout + done.stderr

    def assert_refused(self, kernel, rules, *why, **others):
        passed, text = self.compile(kernel, rules, "--update", **others)
        self.assertFalse(passed, text)
        for part in why:
            self.assertIn(part, text)
        self.assertFalse(self.table.exists(), "--update writes nothing that breaks a rule")

    def test_spills_are_refused(self):
        self.assert_refused(SPILLING, "", "spilling: stack_bytes is ", "spilling: local_accesses is ")

    def test_compare_and_swap_loops_are_refused_on_every_architecture(self):
        for arch in ["sm_80", "sm_90a", "sm_100a"]:
            self.assert_refused(CAS_LOOP, "", "adding: cas_loops is 1, at most 0 is allowed", arch, archs=[arch])
            self.assert_refused(LOCK, "", "locking: cas_loops is 1, at most 0 is allowed", arch, archs=[arch])

    def test_one_compare_and_swap_is_no_loop(self):
        passed, text = self.compile(ONE_CAS, "", "--update", archs=["sm_80", "sm_90a", "sm_100a"])
        self.assertTrue(passed, text)

    def test_an_exception_needs_a_reason_and_ends_when_it_is_not_needed(self):
        most = "[kernels.adding]\nmost = { cas_loops = 1 }\n"
        self.assert_refused(CAS_LOOP, most, "gives no reason")
        passed, text = self.compile(CAS_LOOP, most + 'reason = "it is"\n', "--update")
        self.assertTrue(passed, text)
        self.table.unlink()
        self.assert_refused(
            PLAIN.replace("plain", "adding"), most + 'reason = "it was"\n', "cas_loops may be 1, and is at most 0"
        )
        self.assert_refused(PLAIN, most + 'reason = "it was"\n', "adding: there is a rule for it, and no such kernel")

    def test_tensor_cores_and_asynchronous_copies_are_counted(self):
        archs = ["sm_80", "sm_90a", "sm_100a"]
        passed, text = self.compile(TENSOR_CORES, NEEDS_TENSOR_CORES, "--update", archs=archs)
        self.assertTrue(passed, text)
        self.table.unlink()
        self.assert_refused(
            NO_TENSOR_CORES,
            NEEDS_TENSOR_CORES,
            "async_copies is 0, at least 1 is needed",
            "tensor_core_ops is 0, at least 1 is needed",
        )

    def test_warnings_are_refused(self):
        self.assert_refused(PLAIN.replace("x[threadIdx.x] +=", "int unused; x[threadIdx.x] +="), "", "unused")

    def test_a_changed_figure_is_shown_with_the_old_one(self):
        passed, text = self.compile(PLAIN)
        self.assertFalse(passed)
        self.assertIn("plain sm_80: is new", text)
        passed, text = self.compile(PLAIN, "", "--update")
        self.assertTrue(passed, text)
        passed, text = self.compile(PLAIN)
        self.assertTrue(passed, text)
        passed, text = self.compile(PLAIN.replace("256", "512"))
        self.assertFalse(passed)
        self.assertIn("plain sm_80: threads 256 -> 512, blocks_per_sm 8 -> 4", text)
        passed, text = self.compile(PLAIN.replace("plain", "other"))
        self.assertFalse(passed)
        self.assertIn("plain sm_80: has gone", text)
        self.assertIn("other sm_80: is new", text)

    def test_what_was_checked_is_known(self):
        def is_checked(rules="", cubin="first.cubin"):
            return self.compile(PLAIN, rules, "--is-checked", cubin=cubin)[0]

        passed, text = self.compile(PLAIN, "", "--update", cubin="first.cubin")
        self.assertTrue(passed, text)
        self.assertTrue(is_checked())
        # The name of a cubin is a hash of its sources.
        self.assertFalse(is_checked(cubin="second.cubin"))
        self.assertFalse(is_checked(rules=NEEDS_TENSOR_CORES))
        self.table.write_text(self.table.read_text().replace(",256,", ",128,"))
        self.assertFalse(is_checked())
        passed, text = self.compile(PLAIN, cubin="first.cubin")
        self.assertFalse(passed)
        self.assertIn("plain sm_80: threads 128 -> 256", text)
        # Without a hash nothing is known, and what fails writes none.
        self.assertFalse(self.compile(SPILLING, "", "--update", cubin="first.cubin")[0])
        self.table.write_text(self.table.read_text().replace(",128,", ",256,"))
        self.assertTrue(is_checked())
        (self.folder / "checked.sha256").unlink()
        self.assertFalse(is_checked())

    def test_blocks_on_a_multiprocessor(self):
        # As NVIDIA's occupancy calculator has it.
        for arch, threads, registers, shared_bytes, expected in [
            ("sm_80", 256, 32, 0, (8, "threads")),
            ("sm_80", 32, 16, 0, (32, "blocks")),
            ("sm_80", 128, 255, 0, (2, "registers")),
            ("sm_80", 128, 168, 0, (3, "registers")),
            ("sm_80", 96, 128, 0, (5, "registers")),
            ("sm_80", 128, 64, 163 << 10, (1, "shared memory")),
            ("sm_80", 128, 64, 81 << 10, (2, "shared memory")),
            ("sm_80", 128, 64, (81 << 10) + 1, (1, "shared memory")),
            ("sm_90a", 128, 64, 113 << 10, (2, "shared memory")),
            ("sm_100a", 384, 168, 0, (1, "registers")),
        ]:
            self.assertEqual(blocks_per_sm(arch, threads, registers, shared_bytes), expected)


if __name__ == "__main__":
    unittest.main()
