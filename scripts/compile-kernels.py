#!/usr/bin/env python3
"""Checks the machine code of every listed specialisation of the kernels: against the rules of
kernels/machine-code.toml, and against the figures of kernels/machine-code.csv, which have to be the same. With --update
it writes the figures instead.

The list is tmp/specialisations.json in cargo's target folder. `cargo test --test kernel_compile` writes it, and makes
the cubins in it with NVRTC, as at a start on a GPU machine. What has no cubin is compiled with nvcc; with --nvcc all
are.

Compiling and disassembling take minutes, so --update also writes kernels/machine-code.sha256: a hash of the sources of
all kernels, the compilers' versions, the rules, the figures, and the scripts that check them. With --is-checked nothing
is checked: the exit status says whether the hash of the list is still this one. No machine code is needed for that.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from machine_code import blocks_per_sm, read_sass

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")

KEY = ["kernel", "type", "head_dim", "codes", "arch"]
# The macros that say which codes a KV cache or a matrix has.
CODES = {"KV_CODES": "", "BITS": "bits=", "SCALE_GROUP": "group=", "HAS_MINIMUM": "minimum=", "FP8_WEIGHTS": "fp8="}
# Of the figures of a key's specialisations the table has the worst.
HIGHEST = ["registers", "shared_bytes", "stack_bytes", "local_accesses", "cas_loops"]
LOWEST = ["async_copies", "tensor_core_ops", "blocks_per_sm"]
COLUMNS = [*KEY, "specialisations", "threads", *HIGHEST, *LOWEST, "limited_by"]
NOT_CHECKED = """\
The kernels, compilers, rules or figures have changed since the last `scripts/compile-kernels.sh --update`, which checks
them and writes kernels/machine-code.sha256. Run it, after a change of comments too."""
# What checks, and the versions of the compilers.
CHECKERS = ["compile-kernels.py", "machine_code.py", "cuda-requirements.txt"]


class Module:
    """A specialisation of one file, compiled."""

    def __init__(self, nvcc, entry, folder):
        self.entry = entry
        self.kernels = {}
        self.error = None
        if "cubin" not in entry:
            cubin = self.compile(nvcc, Path(folder) / f"{id(entry)}.cubin")
        elif Path(entry["cubin"]).exists():
            cubin = entry["cubin"]
        else:
            cubin, self.error = None, "its cubin is missing: `cargo test --test kernel_compile` makes it"
        if cubin is not None:
            # What branches over the stack could reach, which no kernel does, would take a third of the time.
            disassemble = [Path(nvcc).with_name("nvdisasm"), "--no-dataflow", cubin]
            text = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout
            self.kernels = read_sass(text, entry["arch"])
            if not self.kernels:
                self.error = "it has no kernel"

    def compile(self, nvcc, cubin):
        """Returns the cubin; None, and sets the error, if there is a warning."""
        entry = self.entry
        # -arch=sm_90a would also make PTX, which nobody needs.
        number = entry["arch"].removeprefix("sm_")
        source = Path(entry["file"])
        compile_it = [
            nvcc,
            "-cubin",
            "-std=c++17",
            f"-gencode=arch=compute_{number},code=sm_{number}",
            *(f"-D{define}" for define in entry["defines"]),
            "-o",
            str(cubin),
            str(source if source.is_absolute() else ROOT / "kernels" / source),
        ]
        done = subprocess.run(compile_it, capture_output=True, text=True)
        log = done.stdout + done.stderr
        # ptxas only informs of products of warp groups that it makes wait for each other.
        if done.returncode != 0 or re.search(r"\bwarning\b|potential performance loss", log, re.IGNORECASE):
            self.error = log
            return None
        return cubin

    def __str__(self):
        return f"{self.entry['file']} for {self.entry['arch']}, {' '.join(self.entry['defines'])}"

    def figures(self):
        """[(key, figures)] of its kernels."""
        defines = dict(define.split("=", 1) for define in self.entry["defines"] if "=" in define)
        arch = self.entry["arch"]
        head_dim = defines.get("HEAD_DIM", "") if self.entry["file"].startswith("attention") else ""
        codes = " ".join(label + defines[macro] for macro, label in CODES.items() if macro in defines)
        for name, kernel in self.kernels.items():
            shared_bytes = kernel.static_shared_bytes + self.entry["shared_bytes"].get(name, 0)
            blocks, limit = blocks_per_sm(arch, kernel.threads, kernel.registers, shared_bytes)
            figures = vars(kernel) | {"shared_bytes": shared_bytes, "blocks_per_sm": blocks, "limited_by": limit}
            yield (name, defines.get("DTYPE", ""), head_dim, codes, arch), figures


def check_rules(rules, modules):
    """What the machine code breaks of the rules: lines of text. A rule that allows more than is needed is broken, too,
    so that an exception goes when its reason has gone."""
    broken = []
    needed = defaultdict(int)
    seen = set()
    for module in modules:
        for (name, _, _, codes, _), figures in module.figures():
            # A kernel that reads codes may have a rule of its own.
            if codes and f"{name} with codes" in rules["kernels"]:
                name += " with codes"
            seen.add(name)
            own = rules["kernels"].get(name, {})
            for field, most in (rules["all"]["most"] | own.get("most", {})).items():
                needed[name, field] = max(needed[name, field], figures[field])
                if figures[field] > most:
                    broken.append(f"{name}: {field} is {figures[field]}, at most {most} is allowed, in {module}")
            for field, least in own.get("least", {}).items():
                if figures[field] < least:
                    broken.append(f"{name}: {field} is {figures[field]}, at least {least} is needed, in {module}")
    for name, own in rules["kernels"].items():
        if name not in seen:
            broken.append(f"{name}: there is a rule for it, and no such kernel")
        if "most" in own and not own.get("reason"):
            broken.append(f"{name}: its exception gives no reason")
        for field, most in own.get("most", {}).items():
            if name in seen and needed[name, field] < most:
                broken.append(f"{name}: {field} may be {most}, and is at most {needed[name, field]}: lower the exception")
    return broken


def table_of(modules):
    """{key: row}, in the order of the list; all values are text."""
    groups = defaultdict(list)
    for module in modules:
        for key, figures in module.figures():
            groups[key].append(figures)
    table = {}
    for key, group in groups.items():
        row = dict(zip(KEY, key)) | {"specialisations": len(group), "threads": max(one["threads"] for one in group)}
        row |= {field: max(one[field] for one in group) for field in HIGHEST}
        row |= {field: min(one[field] for one in group) for field in LOWEST}
        row["limited_by"] = min(group, key=lambda one: one["blocks_per_sm"])["limited_by"]
        table[key] = {column: str(row[column]) for column in COLUMNS}
    return table


def differences(old, new):
    """Rows that were added, have gone, or have changed figures, old and new side by side: lines of text."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        name = " ".join(filter(None, key))
        if key not in new:
            lines.append(f"{name}: has gone")
        elif key not in old:
            lines.append(f"{name}: is new")
        else:
            changed = [f"{c} {old[key][c]} -> {new[key][c]}" for c in COLUMNS if old[key][c] != new[key][c]]
            lines.extend([f"{name}: {', '.join(changed)}"] if changed else [])
    return lines


def read_table(path):
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        # A column that the file lacks reads as empty, and so as changed.
        rows = [{column: row.get(column, "") for column in COLUMNS} for row in csv.DictReader(file)]
    return {tuple(row[column] for column in KEY): row for row in rows}


def write_table(path, table):
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.values())
    path.write_text(text.getvalue())


def fingerprint(entries, rules, table):
    """A hash of what is checked, and of what checks it. None if a cubin has no name, which is a hash of its sources."""
    if not all("cubin" in entry for entry in entries):
        return None
    hashes = hashlib.sha256()
    own = [Path(__file__).with_name(name) for name in CHECKERS]
    for path in [*own, rules, table]:
        hashes.update(path.read_bytes() if path.exists() else b"")
    for entry in entries:
        hashes.update(json.dumps(entry | {"cubin": Path(entry["cubin"]).name}, sort_keys=True).encode())
    return hashes.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nvcc", help="the compiler, of CUDA 12.8 or newer; nvdisasm lies beside it")
    parser.add_argument("--list", type=Path, default=TARGET / "tmp/specialisations.json")
    parser.add_argument("--rules", type=Path, default=ROOT / "kernels/machine-code.toml")
    parser.add_argument("--table", type=Path, default=ROOT / "kernels/machine-code.csv")
    parser.add_argument("--nvcc", action="store_true", dest="only_nvcc", help="compile all with nvcc")
    parser.add_argument("--checked", type=Path, default=ROOT / "kernels/machine-code.sha256")
    parser.add_argument("--is-checked", action="store_true", help="only say whether all of this was checked before")
    parser.add_argument("--update", action="store_true", help="write the table, and the hash of what was checked")
    parser.add_argument("--jobs", type=int, default=cpu_count())
    options = parser.parse_args()
    entries = json.loads(options.list.read_text())
    if options.only_nvcc:
        for entry in entries:
            entry.pop("cubin", None)
    if options.is_checked:
        checked = options.checked.read_text().strip() if options.checked.exists() else ""
        is_checked = fingerprint(entries, options.rules, options.table) == checked
        print(f"{len(entries)} modules were checked before" if is_checked else NOT_CHECKED)
        sys.exit(0 if is_checked else 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        modules = list(pool.map(lambda entry: Module(options.nvcc, entry, folder), entries))

    failures = [f"{module}:\n{module.error}" for module in modules if module.error]
    failures += check_rules(tomllib.loads(options.rules.read_text()), modules)
    table = table_of(modules)
    if options.update and not failures:
        write_table(options.table, table)
        if found := fingerprint(entries, options.rules, options.table):
            options.checked.write_text(f"{found}\n")
    elif not failures and (changes := differences(read_table(options.table), table)):
        # A change that is meant is written down, so that its review sees it.
        failures = [f"{options.table.name}, old -> new:", *changes, "scripts/compile-kernels.sh --update writes them"]
    print("\n".join(failures), file=sys.stderr)
    print(f"{len(modules)} modules, {len(table)} rows: {'failed' if failures else 'passed'}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
