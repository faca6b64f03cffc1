#!/usr/bin/env bash
# The software bill of materials of a release, as CycloneDX: every crate that is linked into the program, with its
# version, its source, its checksum and its licence.
#
#     scripts/sbom.sh [FILE]        (default: target/pagetide.cdx.json)
#
# From Cargo.lock alone, so of the same commit it is the same but for its serial number and time. It needs a Rust
# toolchain, and installs cargo-cyclonedx where it is not there.
set -euo pipefail
cd "$(dirname "$0")/.."

file=${1:-target/pagetide.cdx.json}
command -v cargo-cyclonedx >/dev/null || cargo install --locked cargo-cyclonedx
target=$(rustc -vV | sed -n 's/^host: //p')
# It writes beside each manifest of the workspace.
name=pagetide-sbom-$$
trap 'find . -name "$name.json" -not -path "./target/*" -delete' EXIT
cargo cyclonedx --quiet --format json --spec-version 1.5 --target "$target" --override-filename "$name"
mkdir -p "$(dirname "$file")"
# Where it was built is nobody's business.
sed -i "s|path+file://$PWD|path+file:///pagetide|g" "$name.json"
mv "$name.json" "$file"
echo "$file: $(grep -c '"bom-ref": "registry+' "$file") crates"
