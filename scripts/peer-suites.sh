#!/usr/bin/env bash
# Runs the tests of a server that vLLM, llama.cpp and SGLang have, against pagetide, and says what passes.
#
#     scripts/peer-suites.sh [vllm|llama.cpp|sglang] [--quick] [--binary PATH] [--report] [--write]
#
# --quick runs the tests that have to pass, all but one slow one, and fails if one does not. --report prints the last
# run again.
# --write also writes the results of all three to docs/compatibility.md.
# The tests come from the package index into target/peer-suites; nothing of theirs is kept in the repository.
# scripts/peer_suites/lists says which tests do not pass, and why. docs/compatibility.md has the results.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=target/peer-suites/venv
requirements=scripts/peer_suites/requirements.txt
scripts/make-venv.sh "$venv" "$requirements"
exec "$venv/bin/python" scripts/peer_suites/run.py "$@"
