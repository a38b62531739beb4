#!/usr/bin/env bash
# What release/try.sh runs in a bare root, with a wheel and a model beside it: bash try-wheel.sh WHEEL
set -euo pipefail
cd "$(dirname "$0")"
wheel=$1

step() { printf '   %s\n' "$*"; }

# Nothing of a checkout is found instead.
unset NVFP4_LIB_PATH PYTHONPATH LD_LIBRARY_PATH
python3 -m venv environment
environment/bin/python -m pip install --quiet --disable-pip-version-check --no-index "./$wheel"
step "$wheel: installed by $(environment/bin/python --version)"

cd environment
bin/python -m nvfp4 --version
bin/python -m nvfp4 diagnose | bin/python -c 'import json, sys; print(json.load(sys.stdin)["backends"]["cpu"]["device"])'
bin/python - ../verse-10m <<'END'
import os
import sys

import nvfp4

assert nvfp4.native.lib.path == os.path.join(os.path.dirname(nvfp4.__file__), "libNVFP4.so"), nvfp4.native.lib.path
model = nvfp4.Model(sys.argv[1], device="cpu")
session = model.session()
session.prefill(model.tokenizer.encode("HAMLET."))
text = session.generate(temperature=0, max_tokens=24).text
print(text)
assert "And I will tell you, sir, I will not be a man." in text, text
END
step "the package: a known answer"
echo "HAMLET." | bin/python -m nvfp4 chat ../verse-10m --device cpu --max-tokens 8 --temperature 0 >said
[ "$(wc -c <said)" -gt 8 ]
cat said
step "python -m nvfp4 chat: an answer"
