"""The comparison with other programs on one H200, from the figures in benches/record: prints the table of the README.

    python3 benches/compare.py            # the tables
    python3 benches/compare.py --write    # puts tables and chart where they belong: README.md, docs/performance.md and benches/compare.svg
    python3 benches/compare.py --check    # fails if they are not what the figures say

The library's own figures are those of the newest DATE-h200-qwen3-4b.json, made of what `nvfp4 bench --json` prints, and of the newest
DATE-h200-kernels.txt, which is what `cargo bench --bench cuda` prints; the others those of the newest DATE-h200-qwen3-4b-peers.json. Needs nothing but Python.
"""

import argparse
import difflib
import json
import re
import statistics
import sys
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
PERFORMANCE = HERE.parent / "docs" / "performance.md"
CHART = HERE / "compare.svg"
BEGIN, END = "<!-- benches/compare.py writes this -->", "<!-- to here -->"
OURS = "libNVFP4"

# Chart: pixels and colours. Text is grey enough for a light and a dark page.
WIDTH, NAMES, VALUES, BAR, GAP, TITLE, PANEL = 760, 150, 80, 16, 5, 22, 14
OUR_COLOUR, PEER_COLOUR, TEXT_COLOUR = "#2f6fde", "#9aa4b2", "#6e7781"


def newest(pattern):
    files = sorted((HERE / "record").glob(pattern))
    if not files:
        sys.exit(f"no {pattern} in {HERE / 'record'}")
    return files[-1].read_text()


def the_one(found, what):
    if len(found) != 1:
        sys.exit(f"{len(found)} figures for {what}: one is wanted")
    return found[0]


def run_of(own, batch, prompt_tokens):
    runs = [run for run in own["runs"] if run["batch"] == batch and run["prompt_tokens"] == prompt_tokens]
    return the_one(runs, f"batch {batch} and {prompt_tokens} tokens")


def linear(kernels, m, serving):
    """Of products of m rows, the kernels that serve them: which they are, src/cuda/linear/mod.rs decides."""
    def percent(name, kernel):
        return the_one(re.findall(rf"^{name} +{m} +{kernel}\b.* (\d+)%$", kernels, re.M), f"{name} of {m} rows")

    return ", ".join(percent(name, kernel) for name, kernel in serving) + " %"


def scaled_mm(kernels):
    percent = [100 * float(ratio) for ratio in re.findall(r"^\* chosen +4096 .* ([\d.]+)$", kernels, re.M)]
    return f"{min(percent):.0f} to {max(percent):.0f} %"


# Measures other than tokens per second: what `nvfp4 bench` and the kernels' benchmark printed.
METRICS = {
    "roofline": lambda own, kernels: f"{100 * run_of(own, 1, 128)['roofline']:.0f} %",
    "scaled_mm": lambda own, kernels: scaled_mm(kernels),
    "linear_1": lambda own, kernels: linear(kernels, 1, [("gate_up", "fused"), ("down", "fused"), ("lm_head", "fused")]),
    "linear_16": lambda own, kernels: linear(kernels, 16, [("gate_up", "fused"), ("down", "fused"), ("lm_head", "wide")]),
    "quantize": lambda own, kernels: the_one(re.findall(r"^kernel +bfloat16 +legacy .* (\d+)%$", kernels, re.M), "quantize") + " %",
    "device_memory": lambda own, kernels: f"{(own['device_mib']['most'] - own['device_mib']['of_the_bandwidth']) / 1024:.2f} GiB",
    "load": lambda own, kernels: f"{own['weight_bytes'] / statistics.median(run['load_seconds'] for run in own['runs']) / 1e9:.1f} GB/s",
}


def load():
    """Where the figures come from, and for each quantity its name and (program, figure or None) in columns."""
    own, peers = json.loads(newest("*-h200-qwen3-4b.json")), json.loads(newest("*-h200-qwen3-4b-peers.json"))
    kernels = newest("*-h200-kernels.txt")
    for measure in peers["bars"]:
        measure["figure"] = METRICS[measure["metric"]](own, kernels)
    rows = []
    for i, quantity in enumerate(peers["quantities"]):
        run = run_of(own, quantity["batch"], quantity["prompt_tokens"])
        figures = [(OURS, run[quantity["metric"]])]
        for peer in peers["peers"]:
            if len(peer["figures"]) != len(peers["quantities"]):
                sys.exit(f"{peer['name']} has {len(peer['figures'])} figures for {len(peers['quantities'])} quantities")
            figures.append((peer["name"], peer["figures"][i]))
        rows.append((quantity["name"], figures))
    return own, peers, rows


def number(value):
    """Whole numbers, of five digits and more in hundreds."""
    if value is None:
        return ""
    return f"{round(value, -2 if value >= 10_000 else 0):,.0f}"


def table(own, peers, rows):
    names = [name for name, _ in rows[0][1]]
    # Whichever quantity it is, the best contender to beat.
    lines = [
        f"One H200, Qwen3-4B shape, tokens per second (decoding with 128 tokens of context, medians of {own['medians_of']}, {own['date']}, "
        f"commit {own['commit']}; the others {peers['source']}):",
        "",
        "| | " + " | ".join([*names, "to the best other"]) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for name, figures in rows:
        best = max(value for _, value in figures[1:] if value is not None)
        ratio = f"{figures[0][1] / best:.2f}x"
        lines.append("| " + " | ".join([name, *(number(value) for _, value in figures), ratio]) + " |")
    return "\n".join(lines)


def measures(own, peers):
    chart = f"../{CHART.relative_to(README.parent).as_posix()}"
    lines = [f"![Tokens per second of libNVFP4 and others, from the table of the README]({chart})", ""]
    lines += [f"On the same machine, {own['date']}:", "", f"| | {OURS} | others |", "|---|---|---|"]
    lines += [f"| {measure['name']} | {measure['figure']} | {measure['others']} |" for measure in peers["bars"]]
    return "\n".join(lines)


def text(x, y, what, anchor="start", weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{TEXT_COLOUR}">{escape(what)}</text>'


def chart(own, rows):
    """A panel for each quantity, each with a scale of its own from 0."""
    parts, y, room = [], 8, WIDTH - NAMES - VALUES
    for name, figures in rows:
        figures = [(program, value) for program, value in figures if value is not None]
        scale = room / max(value for _, value in figures)
        y += TITLE
        parts.append(text(0, y - 7, f"{name}, tokens per second", weight="bold"))
        for program, value in figures:
            colour = OUR_COLOUR if program == OURS else PEER_COLOUR
            parts.append(text(NAMES - 8, y + BAR - 4, program, "end"))
            parts.append(f'<rect x="{NAMES}" y="{y}" width="{value * scale:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            parts.append(text(NAMES + value * scale + 6, y + BAR - 4, number(value)))
            y += BAR + GAP
        y += PANEL
    parts.append(text(0, y + 4, f"One H200, Qwen3-4B shape, {own['date']}."))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12}" width="{WIDTH}" height="{y + 12}" '
            'font-family="system-ui, sans-serif" font-size="13" role="img">',
            "<title>Tokens per second of libNVFP4 and others on one H200</title>",
            *parts,
            "</svg>",
            "",
        ]
    )


def page_with(path, block):
    page = path.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        sys.exit(f"{path.name} must have one '{BEGIN}' and one '{END}'")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the pages and the chart")
    parser.add_argument("--check", action="store_true", help="fail if they differ from the figures")
    options = parser.parse_args()
    own, peers, rows = load()
    blocks = {README: table(own, peers, rows), PERFORMANCE: measures(own, peers)}
    wanted = {CHART: chart(own, rows)}
    if options.write or options.check:
        wanted |= {path: page_with(path, block) for path, block in blocks.items()}
    if options.write:
        for path, content in wanted.items():
            path.write_text(content)
    elif options.check:
        stale = 0
        for path, content in wanted.items():
            there = path.read_text() if path.exists() else ""
            stale += there != content
            sys.stdout.writelines(difflib.unified_diff(there.splitlines(True), content.splitlines(True), path.name, "the figures"))
        if stale:
            sys.exit("not what the figures say: python3 benches/compare.py --write")
    else:
        print("\n\n".join(blocks.values()))


if __name__ == "__main__":
    main()
