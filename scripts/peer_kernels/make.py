#!/usr/bin/env python3
"""Compiles kernels of peers, unmodified, to PTX for sm_80 and sm_90a, without a GPU, and writes manifest.json: how each
is launched for a small case, and what it computes. The test `peers` of tests/ptx runs them on the PTX interpreter.

    make.py NVCC FOLDER
"""

import argparse
import json
import os
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton_kernels
from ptx_text import opcodes, parameter_sizes

HERE = Path(__file__).resolve().parent
WHEELS = Path(sysconfig.get_paths()["purelib"])
FUNCTION = re.compile(r"^(?:\.(?:weak|visible)\s+)?\.entry\s+(\w+)", re.MULTILINE)


def end_of_body(ptx, start):
    """Where the body ends that begins with the first brace after `start`. Inline assembly has braces of its own."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(ptx, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    raise ValueError("a function does not end")


def only(ptx, kernels):
    """The module without the entries that are not launched."""
    kept, at = [], 0
    for match in FUNCTION.finditer(ptx):
        end = end_of_body(ptx, match.end())
        kept.append(ptx[at : match.start() if match[1] not in kernels else end])
        at = end
    return "".join(kept) + ptx[at:]


def run(command, **more):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **more)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(str(part) for part in command)}\n{done.stdout}{done.stderr}")


def read_records(path):
    """Cases, from the lines that record_launches.c writes."""
    cases = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "case" in line:
            empty = {"numbers": {}, "buffers": [], "launches": []}
            cases.append({"name": line["case"], "reference": line["reference"], **empty})
        elif "number" in line:
            cases[-1]["numbers"][line["number"]] = line["value"]
        elif "buffer" in line:
            cases[-1]["buffers"].append({"name": line.pop("buffer"), **line})
        else:
            cases[-1]["launches"].append({"kernel": line.pop("launch"), **line})
    return cases


def launched_cases(name, nvcc, folder, arch):
    """Launchers of FlashInfer or CUTLASS run on the host and say how they launch; (cases, text of the module)."""
    data = WHEELS / "flashinfer/data"
    includes = [data / "include", data / "cutlass/include", data / "cutlass/tools/util/include"]
    includes += [data / "cccl" / part for part in ["libcudacxx/include", "cub", "thrust"]]
    work = folder / f"{name}_{arch}"
    work.mkdir(exist_ok=True)
    suffix = "a" if arch >= 90 else ""
    run(
        [
            nvcc,
            "-c",
            "-std=c++17",
            "-O3",
            "--expt-relaxed-constexpr",
            f"-gencode=arch=compute_{arch}{suffix},code=compute_{arch}{suffix}",
            *(f"-I{path}" for path in [HERE, *includes]),
            "--keep",
            f"--keep-dir={work}",
            "-o",
            work / f"{name}.o",
            HERE / f"{name}.cu",
        ]
    )
    run(["cc", "-O1", "-c", "-o", work / "record.o", HERE / "record_launches.c"])
    run(["c++", "-o", work / name, work / f"{name}.o", work / "record.o"])
    ptx = (work / f"{name}.ptx").read_text()
    sizes = parameter_sizes(ptx)
    (work / "kernels").write_text("".join(f"{name} {' '.join(map(str, of))}\n" for name, of in sizes.items()))
    records = work / "records"
    names = {"RECORD_TO": str(records), "RECORD_KERNELS": str(work / "kernels"), "RECORD_ARCH": str(arch)}
    run([work / name], env=os.environ | names)
    cases = read_records(records)
    launched = {launch["kernel"] for case in cases for launch in case["launches"]}
    return cases, only(ptx, launched)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nvcc", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(options.folder / "triton-cache")
    # As Triton does today; the next release wants to be told.
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    manifest, used = [], set()

    def add(case, arch, ptx, file):
        (options.folder / file).write_text(ptx)
        used.update(opcodes(ptx))
        manifest.append({"arch": arch, "ptx": file, **case})

    # CUTLASS's products use tensor copies and `wgmma`. nvcc takes a minute for each of these.
    compiled = [("flashinfer", 80), ("flashinfer", 90), ("cutlass", 90)]
    pool = ThreadPoolExecutor(os.cpu_count())
    launched = {key: pool.submit(launched_cases, key[0], options.nvcc, options.folder, key[1]) for key in compiled}
    for arch in [80, 90]:
        for case, ptx in triton_kernels.cases(WHEELS, arch):
            fields = {name: getattr(case, name) for name in ["name", "reference", "numbers", "buffers", "launches"]}
            add(fields, arch, ptx, f"{case.name}_{arch}.ptx")
    for (name, arch), made in launched.items():
        cases, ptx = made.result()
        for case in cases:
            add(case | {"name": f"{name}_{case['name']}"}, arch, ptx, f"{name}_{arch}.ptx")
    (options.folder / "manifest.json").write_text(json.dumps({"cases": manifest}, indent=1))
    (options.folder / "instructions.txt").write_text("\n".join(sorted(used)) + "\n")
    print(f"{len(manifest)} cases, {len(used)} kinds of instructions, in {options.folder}")


if __name__ == "__main__":
    main()
