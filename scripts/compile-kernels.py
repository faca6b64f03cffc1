#!/usr/bin/env python3
"""Compiles every listed specialisation of the kernels with nvcc, as an ahead-of-time build would, and prints a table of
their registers and shared memory. Fails if one does not compile, gives a warning, or has an attention kernel that spills.

The list is target/tmp/specialisations.json, which `cargo test --test kernel_compile` writes.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
STATIC = re.compile(r"(\d+) bytes smem")


def read_ptxas(log):
    """What `-Xptxas -v` says of each kernel: {name: {stack, spills, registers, static}}."""
    kernels = {}
    name = None
    for line in log.splitlines():
        if match := ENTRY.search(line):
            name = match[1]
            kernels[name] = {"stack": 0, "spills": 0, "registers": 0, "static": 0}
        elif name is None:
            continue
        elif match := SPILLS.search(line):
            stack, stores, loads = map(int, match.groups())
            kernels[name]["stack"] = stack
            kernels[name]["spills"] = stores + loads
        elif match := USED.search(line):
            kernels[name]["registers"] = int(match[1])
            if match := STATIC.search(line):
                kernels[name]["static"] = int(match[1])
    return kernels


def compile_one(nvcc, entry, folder):
    """(entry, kernels, error)"""
    # -arch=sm_90a would also make PTX, which nobody needs.
    number = entry["arch"].removeprefix("sm_")
    command = [
        nvcc,
        "-cubin",
        "-std=c++17",
        f"-gencode=arch=compute_{number},code=sm_{number}",
        "-Xptxas=-v,-warn-spills",
        *(f"-D{define}" for define in entry["defines"]),
        "-o",
        str(Path(folder) / f"{id(entry)}.cubin"),
        str(ROOT / "kernels" / entry["file"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    kernels = read_ptxas(log)
    error = None
    if done.returncode != 0:
        error = log
    elif not kernels:
        error = f"no kernel in:\n{log}"
    elif spilling := [name for name in kernels if "attention" in name and kernels[name]["spills"] > 0]:
        error = f"spills: {', '.join(spilling)}\n{log}"
    elif re.search(r"\bwarning\b", log, re.IGNORECASE):
        error = log
    return entry, kernels, error


def span(numbers):
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def print_table(results):
    """One row for each kernel, type and head size, over all that they were specialised by besides."""
    rows = defaultdict(list)
    for entry, kernels, _ in results:
        defines = dict(define.split("=", 1) for define in entry["defines"])
        is_attention = entry["file"].startswith("attention")
        for name, kernel in kernels.items():
            key = (
                entry["file"],
                name,
                entry["arch"],
                defines.get("DTYPE", "–"),
                int(defines["HEAD_DIM"]) if is_attention else "any" if "HEAD_DIM" in defines else "–",
            )
            rows[key].append((kernel, entry["shared_bytes"].get(name, 0)))
    print("| kernel | architecture | type | head size | registers | shared memory, KiB | spilled bytes |")
    print("|---|---|---|---|---|---|---|")
    for (_, name, arch, dtype, head_dim), kernels in rows.items():
        registers = span([kernel["registers"] for kernel, _ in kernels])
        shared = max(kernel["static"] + dynamic for kernel, dynamic in kernels)
        spills = span([kernel["spills"] for kernel, _ in kernels])
        print(f"| `{name}` | {arch} | {dtype} | {head_dim} | {registers} | {shared / 1024:.1f} | {spills} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nvcc", help="the compiler, of CUDA 12.8 or newer")
    parser.add_argument("--list", type=Path, default=ROOT / "target/tmp/specialisations.json")
    parser.add_argument("--jobs", type=int, default=cpu_count())
    options = parser.parse_args()
    entries = json.loads(options.list.read_text())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda entry: compile_one(options.nvcc, entry, folder), entries))
    errors = [(entry, error) for entry, _, error in results if error]
    for entry, error in errors:
        print(f"{entry['file']} for {entry['arch']}, {' '.join(entry['defines'])}:\n{error}\n", file=sys.stderr)
    print_table(results)
    print(f"\n{len(entries)} modules, {len(errors)} with errors")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
