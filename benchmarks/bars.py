"""Bars with names and values as a picture, for the scripts that draw results."""

from __future__ import annotations

OTHERS, OURS = "#9a9a9a", "#1f77b4"
WIDTH, TOP, BAR, GAP = 720, 34, 20, 8


def drawn(title, unit, bars, *, digits=1, left=270, right=70):
    """The bars, pairs of name and value, from above; those whose names begin with "fabricamp" have another colour."""
    scale = (WIDTH - left - right) / max(value for _, value in bars)
    height = TOP + len(bars) * (BAR + GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20" fill="#444444">{unit}</text>',
    ]
    for number, (name, value) in enumerate(bars):
        y = TOP + number * (BAR + GAP)
        length = value * scale
        colour = OURS if name.startswith("fabricamp") else OTHERS
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 15}">{value:,.{digits}f}</text>')
    return "\n".join([*parts, "</svg>", ""])
