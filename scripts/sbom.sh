#!/usr/bin/env bash
# Writes the software bill of materials of a release as CycloneDX: every crate that is linked into the program, with its
# version, source, checksum and licence.
#
#     scripts/sbom.sh [FILE]        (default: target/pagetide.cdx.json)
#
# It depends on Cargo.lock alone, so for one commit only its serial number and time differ. It needs a Rust toolchain,
# and installs cargo-cyclonedx if that is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

file=${1:-target/pagetide.cdx.json}
command -v cargo-cyclonedx >/dev/null || cargo install --locked cargo-cyclonedx
target=$(rustc -vV | sed -n 's/^host: //p')
# cargo-cyclonedx writes a file beside each manifest of the workspace.
name=pagetide-sbom-$$
trap 'find . -name "$name.json" -not -path "./target/*" -delete' EXIT
cargo cyclonedx --quiet --format json --spec-version 1.5 --target "$target" --override-filename "$name"
mkdir -p "$(dirname "$file")"
# The path of the build does not belong in the file.
sed -i "s|path+file://$PWD|path+file:///pagetide|g" "$name.json"
mv "$name.json" "$file"
echo "$file: $(grep -c '"bom-ref": "registry+' "$file") crates"
