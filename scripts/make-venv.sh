#!/usr/bin/env bash
# Makes a Python environment, and makes it again when its requirements change.
#
#     scripts/make-venv.sh FOLDER REQUIREMENTS [OPTIONS FOR THE INSTALLER]
#
# uv installs in a tenth of pip's time. It does not read pip's settings, such as another package index: pip installs
# where uv cannot. Both know --no-deps, for requirements that name every package.
set -euo pipefail

venv=$1 requirements=$2
shift 2
if cmp -s "$requirements" "$venv/requirements.txt"; then
    exit
fi
rm -rf "$venv"
if ! python3 -m venv "$venv"; then
    # Debian ships pip for virtual environments in a separate package.
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root=sudo
    $as_root apt-get update -qq
    $as_root apt-get install -y -qq python3-venv
    rm -rf "$venv"
    python3 -m venv "$venv"
fi
pip_install() {
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "$@"
}
uv_install() {
    pip_install uv==0.13.9 && "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"
}
uv_install "$@" --requirement "$requirements" || pip_install "$@" --requirement "$requirements"
cp "$requirements" "$venv/requirements.txt"
