#!/usr/bin/env python3
"""Writes tests/data/cute_layouts.json: where CUTLASS's CuTe says that mma, ldmatrix and wgmma have their operands. Its
headers come with flashinfer-python (requirements.txt); CUDA's, with nvcc.

    make_cute_layouts.py FOLDER OF nvidia/cu13
"""

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent.parent / "tests/data/cute_layouts.json"


def main():
    data = Path(sysconfig.get_paths()["purelib"]) / "flashinfer/data"
    includes = [data / "cutlass/include", data / "cccl/libcudacxx/include", Path(sys.argv[1]) / "include"]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "cute_layouts"
        # CuTe gives 0 for addresses of shared memory on the host, where assertions are off.
        options = ["-std=c++17", "-DNDEBUG", "-w", *(f"-I{path}" for path in includes)]
        subprocess.run(["c++", *options, "-o", program, HERE / "cute_layouts.cpp"], check=True)
        facts = json.loads(subprocess.run([program], check=True, capture_output=True, text=True).stderr)
    # A list a line.
    text = re.sub(r"\[[^\]]*\]", lambda match: " ".join(match[0].split()), json.dumps(facts, indent=1))
    TARGET.write_text(text + "\n")


if __name__ == "__main__":
    main()
