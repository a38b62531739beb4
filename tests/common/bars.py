"""What tests of whole models share: running the command, and the bars for memory and for starting."""

import json
import os
import subprocess
import sys
import time

passed = failed = 0


def expect(held, what):
    """Counts one test, and says what did not hold."""
    global passed, failed
    if held:
        passed += 1
    else:
        failed += 1
        print(f"FAILED: {what}")


def close():
    """Prints the summary that tests/run.sh reads, and ends the process."""
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(1 if failed else 0)


def nvfp4(program, *arguments):
    """What a subcommand prints as JSON, the most memory its process occupied, in bytes, and the seconds it took."""
    begin = time.monotonic()
    process = subprocess.Popen([program, *map(str, arguments), "--json"], stdout=subprocess.PIPE)
    with process.stdout:
        out = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"nvfp4 {' '.join(map(str, arguments))}: exit code {process.returncode}")
    return json.loads(out), used.ru_maxrss * (1 if sys.platform == "darwin" else 1024), seconds


def check_memory(program, model, *arguments):
    """Weights, keys and values, a fifth of them and 100 MB are what `nvfp4 run` may occupy. Call it while this process is
    small: a child's peak starts with what its parent occupied."""
    got, resident, _ = nvfp4(program, "run", "--model", model, "--raw", "--ignore-stops", *arguments)
    memory, weights = got["memory"], got["model"]["weight_bytes"]
    needed = weights + memory["kv_bytes"]
    bar = 1.2 * needed + 100e6
    line = (
        f"{model.name}: {resident / 1e6:.1f} MB resident at most, {memory['peak_bytes'] / 1e6:.1f} MB by the library's account; "
        f"weights {weights / 1e6:.1f}, keys and values {memory['kv_bytes'] / 1e6:.1f}, bar {bar / 1e6:.1f}"
    )
    print(line)
    expect(resident <= bar, line)
    # Code, tokenizer and pages of the file are not in the account; all else is.
    expect(needed <= memory["peak_bytes"] <= resident <= memory["peak_bytes"] + 100e6, line)


def check_start(program, model, bar):
    """From the start of the process to the end of one that gave its first token, the best of five. Shared machines can be
    several times slower for a while, so only four times the bar fails."""
    seconds = min(nvfp4(program, "run", "--model", model, "--prompt", "Hello", "--max-tokens", 1)[2] for _ in range(5))
    line = f"{model.name}: first token after {seconds:.2f} s, bar {bar:.0f} s"
    print(line)
    expect(seconds <= 4 * bar, line)
