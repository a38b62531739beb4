#!/usr/bin/env bash
# What release/try.sh runs in a bare root, with a wheel and a model beside it: bash try-wheel.sh WHEEL [PYTHON...]
#
# The wheel is installed into a virtual environment of the system's Python, or, where the words of a command are given that run another,
# one which has pip and starts no further program, into a folder for that.
set -euo pipefail
cd "$(dirname "$0")"
wheel=$1
python=("${@:2}")

step() { printf '   %s\n' "$*"; }

# Nothing of a checkout is found instead.
unset NVFP4_LIB_PATH PYTHONPATH LD_LIBRARY_PATH
where=()
if [ ${#python[@]} -eq 0 ]; then
    python3 -m venv environment
    python=("$PWD/environment/bin/python")
else
    where=(--target environment)
fi
"${python[@]}" -m pip install --quiet --disable-pip-version-check --no-index "${where[@]}" "./$wheel"
[ ${#where[@]} -eq 0 ] || export PYTHONPATH=$PWD/environment
step "$wheel: installed by $("${python[@]}" --version)"

cd environment
"${python[@]}" -m nvfp4 --version
"${python[@]}" -m nvfp4 diagnose | "${python[@]}" -c 'import json, sys; print(json.load(sys.stdin)["backends"]["cpu"]["device"])'
"${python[@]}" - ../verse-10m <<'END'
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
echo "HAMLET." | "${python[@]}" -m nvfp4 chat ../verse-10m --device cpu --max-tokens 8 --temperature 0 >said
[ "$(wc -c <said)" -gt 8 ]
cat said
step "python -m nvfp4 chat: an answer"
