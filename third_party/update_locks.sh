#!/usr/bin/env bash
# Writes requirements.lock and libtpu.lock anew from requirements.in and libtpu.in, for every
# platform and Python from 3.12 on. Pins stay where they still fit; `--upgrade` (or
# `--upgrade-package NAME`) moves them. Uses uv from PATH, or installs it into a scratch folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

uv="$(command -v uv || true)"
if [[ -z "$uv" ]]; then
  scratch="$(mktemp -d)"
  trap 'rm -rf "$scratch"' EXIT
  python3 -m venv "$scratch"
  "$scratch/bin/pip" install --quiet uv
  uv="$scratch/bin/uv"
fi

for name in requirements libtpu; do
  "$uv" pip compile "$name.in" --output-file "$name.lock" --universal --python-version 3.12 \
    --generate-hashes --no-emit-index-url --no-emit-find-links --quiet \
    --custom-compile-command third_party/update_locks.sh "$@"
done
