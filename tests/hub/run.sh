#!/usr/bin/env bash
# The hub's cache shared with Python's huggingface_hub, and how fast a large file comes: bash tests/hub/run.sh, with nvfp4 in
# $NVFP4_BUILD (target/release if unset). The other tests of this folder are Rust's (main.rs).
#
# Installs huggingface_hub with pip into target/hub; where that cannot be had, its tests are SKIPPED, or fail if NVFP4_REQUIRE
# names hub. The large file has NVFP4_HUB_BYTES (200 MB, or 500 MB where NVFP4_LONG is set), and comes at NVFP4_HUB_RATIO of curl's
# rate at least: 0.2, as the time that a file takes in memory varies threefold on small virtual machines. The bar, 0.8, is measured with
# 5000000000 bytes. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

readonly python_package=huggingface_hub==2.4.0

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
target=$(mkdir -p "${CARGO_TARGET_DIR:-target}/hub" && cd "${CARGO_TARGET_DIR:-target}/hub" && pwd) || exit 1
bytes=${NVFP4_HUB_BYTES:-$([ -n "${NVFP4_LONG-}" ] && echo 500000000 || echo 200000000)}
ratio=${NVFP4_HUB_RATIO:-0.2}
export HF_HUB_DISABLE_XET=1 HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_UPDATE_CHECK=1

install_python() {
    "$target/venv/bin/python" -c 'import huggingface_hub' 2>/dev/null && return
    rm -rf "$target/venv"
    python3 -m venv "$target/venv" && "$target/venv/bin/pip" install --quiet --disable-pip-version-check "$python_package"
}

make_models() {
    cp -r tests/golden/model/qwen3_tied "$work/model" && mkdir "$work/large" && echo '{}' >"$work/large/config.json" &&
        head -c "$bytes" /dev/urandom >"$work/large/model.safetensors" || return 1
    echo "{\"repos\": {\"org/model\": {\"main\": \"$work/model\"}, \"org/large\": {\"main\": \"$work/large\"}}}" >"$work/config"
}

# requests [PATTERN]: how many requests the hub has seen since it last forgot, and forgets them.
requests() {
    curl -s "$HF_ENDPOINT/-/log" | grep -o '"path": "[^"]*"' | grep -c "${1-}"
    curl -s -X DELETE "$HF_ENDPOINT/-/log" >/dev/null
}

python() { "$target/venv/bin/python" "$@"; }

# A model that Python fetched is not fetched again, whether Python asked for the repository or for its files.
python_first() {
    export HF_HOME=$work/$1
    local fetch=$2
    python -c "import huggingface_hub as h; $fetch" || return 1
    requests >/dev/null
    "$build/nvfp4" pull org/model --json >"$work/pulled" || return 1
    [ "$(requests)" = 1 ] && grep -q '"fetched_bytes":0' "$work/pulled" &&
        HF_HUB_OFFLINE=1 "$build/nvfp4" inspect org/model
}

# A model that we fetched is found by Python without a network, and not fetched again with one.
python_second() {
    export HF_HOME=$work/ours
    "$build/nvfp4" pull org/model || return 1
    requests >/dev/null
    HF_HUB_OFFLINE=1 python -c "
import huggingface_hub as h
for name in ('config.json', 'tokenizer.json', 'model.safetensors'):
    assert open(h.hf_hub_download('org/model', name), 'rb').read() == open('$work/model/' + name, 'rb').read(), name
" || return 1
    [ "$(requests)" = 0 ] || return 1
    python -c "import huggingface_hub as h; h.snapshot_download('org/model', allow_patterns=['config.json', '*.safetensors'])" &&
        [ "$(requests '/repos/\|resolve-cache')" = "$(ls "$work/model" | grep -c expected)" ]
}

# Python's own look at the cache finds nothing wrong with it.
python_scans() {
    HF_HOME=$work/ours python -c "
import huggingface_hub as h
cache = h.scan_cache_dir()
assert not cache.warnings, cache.warnings
assert [r.repo_id for r in cache.repos] == ['org/model'], cache
"
}

# seconds COMMAND...: how long it takes.
seconds() {
    local start
    start=$(date +%s%N)
    "$@" >/dev/null || return 1
    echo $(($(date +%s%N) - start))
}

# The median of five, in turn: a file by curl, and a model by pull, which hashes it besides. curl's file is on the disk, too,
# before the clock stops.
speed() {
    local i address theirs=() ours=()
    address=$(curl -s -o /dev/null -w '%{redirect_url}' "$HF_ENDPOINT/org/large/resolve/main/model.safetensors")
    for i in 1 2 3 4 5; do
        theirs+=("$(seconds sh -c "curl -s '$address' -o '$work/curled' && sync '$work/curled'")") || return 1
        rm "$work/curled"
        export HF_HOME=$work/speed
        ours+=("$(seconds /usr/bin/env python3 tests/hub/peak.py "$work/peak" "$build/nvfp4" pull org/large)") || return 1
        [ $i -eq 5 ] || rm -rf "$work/speed"
    done
    cmp "$work/speed/hub/models--org--large/snapshots/"*/model.safetensors "$work/large/model.safetensors" || return 1
    python3 - "$bytes" "$ratio" "${theirs[*]}" "${ours[*]}" "$(cat "$work/peak")" <<'PYTHON'
import statistics, sys

size = int(sys.argv[1])
print("seconds:", *(" ".join(f"{int(t) / 1e9:.2f}" for t in times.split()) + ";" for times in sys.argv[3:5]))
curl, pull = (size / statistics.median(map(int, times.split())) for times in sys.argv[3:5])
peak = int(sys.argv[5])
print(f"{size / 1e9:.1f} GB: curl {curl:.2f} GB/s, nvfp4 pull {pull:.2f} GB/s ({pull / curl:.2f}), {peak / 1e6:.0f} MB of memory")
sys.exit(pull < float(sys.argv[2]) * curl or peak > 100e6)
PYTHON
}

for tool in python3 curl; do
    command -v $tool >/dev/null || { skip "all" "$tool is missing" hub; finish; }
done
make_models && start_hub "$work/config" || exit 1
if again install_python; then
    check "a snapshot of Python's" python_first snapshot "h.snapshot_download('org/model')"
    check "files of Python's" python_first files \
        "[h.hf_hub_download('org/model', n) for n in ('config.json', 'generation_config.json', 'tokenizer.json', 'model.safetensors')]"
    check "Python finds ours" python_second
    check "Python's look at the cache" python_scans
else
    skip "the cache shared with Python" "$python_package could not be had" hub
fi
check "speed and memory" speed
cat "$work/log"
finish
