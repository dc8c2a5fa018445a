"""Draws the rounds of a live transfer for ``docs/live.md``.

The messages are those of a matrix of which four ranks hold rows and are to hold columns; the rounds
are those that :mod:`reshard.live.rounds` finds.
"""

from __future__ import annotations

from pathlib import Path

from reshard import compose, contiguous_split_map
from reshard.live.rounds import rounds_of

FILE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "rounds.svg"
COLUMN, ROW = 170, 44
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    'font-family="sans-serif" font-size="13">'
)
ARROW = (
    '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>'
)
INKS = ("#4c78a8", "#e07b39", "#54a24b", "#b279a2")


def picture() -> str:
    """Return the picture as SVG."""
    source = contiguous_split_map((8, 8), [2, 2, 2, 2], 0)
    target = contiguous_split_map((8, 8), [2, 2, 2, 2], 1)
    pairs = {(s.source_rank, s.target_rank) for s in compose(target, source).segments}
    rounds = rounds_of({(a, b): 1 for a, b in sorted(pairs) if a != b})
    width, height = COLUMN * len(rounds) + 20, ROW * 4 + 60
    marks = [
        HEAD.format(width=width, height=height),
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ARROW,
    ]
    for number, some in enumerate(rounds):
        marks += _column(20 + number * COLUMN, number, dict(some.pairs))
    return "\n".join([*marks, "</svg>", ""])


def _column(left: int, number: int, pairs: dict[int, int]) -> list[str]:
    marks = [f'<text x="{left + 50}" y="22" fill="#222">round {number}</text>']
    for rank, ink in enumerate(INKS):
        y = 50 + rank * ROW
        for x in (left, left + 110):
            marks.append(f'<circle cx="{x + 12}" cy="{y}" r="12" fill="{ink}"/>')
            marks.append(f'<text x="{x + 8}" y="{y + 5}" fill="#fff">{rank}</text>')
    marks += [
        f'<line x1="{left + 26}" y1="{50 + sender * ROW}" x2="{left + 96}"'
        f' y2="{50 + receiver * ROW}" stroke="#444" stroke-width="2" marker-end="url(#head)"/>'
        for sender, receiver in pairs.items()
    ]
    return marks


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
