"""Draws docs/architecture.svg: the floors of src/ as tests/layers.rs has them, and on each its rooms with their files.

    python3 docs/architecture.py            # writes the drawing
    python3 docs/architecture.py --check    # fails if it is not what the code says

Needs nothing but Python.
"""

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DRAWING = ROOT / "docs" / "architecture.svg"

# Pixels, and colours that a light and a dark page leave readable.
WIDTH, MARGIN, GAP, PAD = 840, 8, 10, 12
NAME, LINE, CHARACTER = 18, 15, 6.3
COLOUR, STROKE, NAMES, FILES = "#7d8bb0", "#7d8bb0", "#3f76d9", "#7a828c"


def floors():
    """The rooms that there are, from the highest floor to the lowest."""
    table = re.search(r"const FLOORS: .*?= &\[(.*?)\];", (ROOT / "tests/layers.rs").read_text(), re.S)
    if not table:
        sys.exit("tests/layers.rs has no table FLOORS")
    rooms = {}
    for room, floor in re.findall(r'\("(\w+)", (\d+)\)', table[1]):
        if (ROOT / "src" / room).is_dir():
            rooms.setdefault(int(floor), []).append(room)
    return [rooms[floor] for floor in sorted(rooms, reverse=True)]


def files(room):
    """The files and rooms within a room."""
    inside = (ROOT / "src" / room).iterdir()
    names = [path.stem + ("/" if path.is_dir() else "") for path in inside if path.is_dir() or path.suffix == ".rs"]
    return sorted(name for name in names if name not in ("mod", "tests", "tests/"))


def wrapped(words, width):
    lines = [""]
    for word in words:
        longer = f"{lines[-1]}  {word}".strip()
        if len(longer) * CHARACTER <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def text(x, y, what, colour, size, weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}">{escape(what)}</text>'


def drawing():
    parts, y = [], MARGIN
    for number, rooms in enumerate(floors()):
        # A room is as wide as it has files, within bounds.
        weights = [min(max(len(files(room)), 5), 16) for room in rooms]
        free = WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)
        widths = [free * weight / sum(weights) for weight in weights]
        lines = [wrapped(files(room), width - 2 * PAD) for room, width in zip(rooms, widths)]
        height = PAD + NAME + LINE * max(map(len, lines)) + PAD - 4
        if number:
            x = WIDTH / 2
            parts.append(f'<path d="M{x} {y - GAP - 8} v10 m-4 -4 l4 4 l4 -4" fill="none" stroke="{STROKE}" stroke-width="1.5"/>')
        x = MARGIN
        for room, width, of_room in zip(rooms, widths, lines):
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="6" fill="{COLOUR}" fill-opacity="0.12" stroke="{STROKE}"/>')
            parts.append(text(x + PAD, y + PAD + 10, room, NAMES, 15, "bold"))
            for i, line in enumerate(of_room):
                parts.append(text(x + PAD, y + PAD + NAME + 10 + i * LINE, line, FILES, 11.5))
            x += width + GAP
        y += height + GAP + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
            'font-family="system-ui, sans-serif" role="img">',
            "<title>The rooms of src/ by floor: what is above may import what is below</title>",
            *parts,
            "</svg>",
            "",
        ]
    )


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    made = drawing()
    if not sys.argv[1:]:
        DRAWING.write_text(made)
    elif not DRAWING.exists() or DRAWING.read_text() != made:
        sys.exit("docs/architecture.svg is not what the code says: python3 docs/architecture.py")


if __name__ == "__main__":
    main()
