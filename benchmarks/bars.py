"""Bars with names and values as a picture, for the scripts that draw results."""

from __future__ import annotations

OTHERS, OURS = "#9a9a9a", "#1f77b4"
WIDTH, SHOWN_WIDTH, TOP, NAME, BAR, GAP = 480, 600, 34, 18, 16, 8
SIDE, VALUE = 8, 70
"""The margins, and the room for a value behind the longest bar."""


def drawn(title, unit, bars, *, digits=1):
    """The bars, pairs of name and value, from above, each below its name: a telephone shows them without shrinking the words.

    Those whose names begin with "fabricamp" have another colour.
    """
    scale = (WIDTH - SIDE - VALUE) / max(value for _, value in bars)
    height = TOP + len(bars) * (NAME + BAR + GAP)
    size = f'width="{SHOWN_WIDTH}" viewBox="0 0 {WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{SIDE}" y="20" fill="#444444">{unit}</text>',
    ]
    for number, (name, value) in enumerate(bars):
        y = TOP + number * (NAME + BAR + GAP)
        length = value * scale
        colour = OURS if name.startswith("fabricamp") else OTHERS
        parts.append(f'<text x="{SIDE}" y="{y + 13}">{name}</text>')
        parts.append(f'<rect x="{SIDE}" y="{y + NAME}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{SIDE + length + 6:.1f}" y="{y + NAME + 13}">{value:,.{digits}f}</text>')
    return "\n".join([*parts, "</svg>", ""])
