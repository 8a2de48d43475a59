"""The report as one HTML page that opens offline: a plot of the weight of every item, the verdict and the cures."""

from __future__ import annotations

import html
import math
from typing import Any

from macrobatch.auditing.judging import Judgement

WIDTH, HEIGHT, LEFT = 960, 320, 56
LEAST, MOST = 1 / 16, 16.0  # of the plot, which is logarithmic; what lies outside is drawn at its edge
TICKS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the browser sends no request
STYLE = """
:root { color-scheme: light dark; --text: #1d2733; --soft: #5b6875; --line: #d5dbe1; --page: #ffffff;
  --good: #2b7a4b; --bad: #b3261e; --open: #8a6100; --dot: #3556a8; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa5b1; --line: #39434e; --page: #14181d;
  --good: #66c08a; --bad: #f28b82; --open: #e6b54a; --dot: #8fb0ff; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 62rem;
  margin: 0 auto; padding: 1rem; }
h1 { margin-bottom: 0; } .exact { color: var(--good); } .wrong { color: var(--bad); } .unknown { color: var(--open); }
pre, code { font-family: ui-monospace, monospace; font-size: 0.9em; } pre { overflow-x: auto; padding: 0.75rem;
  border: 1px solid var(--line); border-radius: 6px; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .one { stroke: var(--good); stroke-width: 1.5; }
circle { fill: var(--dot); opacity: 0.7; }
.off { fill: var(--bad); } table { border-collapse: collapse; width: 100%; } th, td { text-align: right;
  padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--line); } th:nth-child(2), td:nth-child(2) { text-align: left; }
.scroll { overflow-x: auto; } .soft { color: var(--soft); }
"""


def page(found: Judgement, headline: str, library: str) -> str:
    """The page. `headline`: the verdict in words; `library`: the lines of this library that cure it, or nothing."""
    escape = html.escape
    parts = [f'<h1 class="{found.verdict}">{found.verdict}</h1>', f"<p>{escape(headline)}</p>"]
    parts += [f'<p class="soft">{escape(place)}</p>' for place in found.places[:6]]
    parts += ["<h2>The weight of every item</h2>", _plot(found.windows)]
    for cause in found.causes:
        parts.append(f"<h2>{escape(cause.name)}</h2><p>{escape(cause.evidence)}</p><p>{escape(cause.cure)}</p>")
    if library:
        parts.append(f"<h2>With this library</h2><pre>{escape(library)}</pre>")
    if found.unseen:
        parts.append("<h2>What was not seen</h2><ul>")
        parts += [f"<li>{escape(problem)}</li>" for problem in found.unseen]
        parts.append("</ul>")
    parts += [f'<p class="soft">{escape(note)}</p>' for note in found.notes[:4]]
    parts += ["<h2>Windows</h2>", _table(found.windows)]
    body = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Audit: {found.verdict}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _height(weight: float) -> float:
    share = math.log(min(max(weight, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return HEIGHT - 24 - share * (HEIGHT - 40)


def _plot(windows: list[dict[str, Any]]) -> str:
    """One dot for the items of each micro-batch: windows from left to right, weights upwards."""
    lines = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="weights of items by window">']
    for tick in TICKS:
        y = _height(tick)
        kind = "one" if tick == 1 else "grid"
        lines.append(f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    room = (WIDTH - LEFT - 16) / max(len(windows), 1)
    for number, window in enumerate(windows):
        weights = window["weights"]
        for index, (weight, items) in enumerate(zip(weights, window["items"], strict=True)):
            if weight is None:
                continue
            x = LEFT + 8 + room * (number + (index + 0.5) / len(weights) * 0.8 + 0.1)
            kind = "" if abs(weight - 1) < 1e-3 else ' class="off"'
            said = f"window {number + 1}, micro-batch {index + 1}: weight {weight:.4g}, {items} items"
            lines.append(f'<circle{kind} cx="{x:.1f}" cy="{_height(weight):.1f}" r="4"><title>{said}</title></circle>')
    middle = LEFT + (WIDTH - LEFT) / 2
    lines.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">windows; 1 is exact</text></svg>')
    return "\n".join(lines)


def _table(windows: list[dict[str, Any]]) -> str:
    columns = ("window", "optimizer", "micro-batches", "items", "scale", "weights")
    rows = [f"<tr>{''.join(f'<th>{column}</th>' for column in columns)}</tr>"]
    for number, window in enumerate(windows, start=1):
        known = [w for w in window["weights"] if w is not None]
        items = [n for n in window["items"] if n is not None]
        scale = "?" if window["scale"] is None else f"{window['scale']:.4f}"
        spread = f"{min(known):.4g} to {max(known):.4g}" if known else "?"
        rows.append(
            f"<tr><td>{number}</td><td>{html.escape(window['optimizer'])}</td><td>{len(window['weights'])}</td>"
            f"<td>{sum(items) if items else '?'}</td><td>{scale}</td><td>{spread}</td></tr>"
        )
        for name, term in window.get("terms", {}).items():
            said = "?" if term["scale"] is None else f"{term['scale']:.4f}"
            rows.append(f"<tr><td></td><td>{html.escape(name)}</td><td></td><td></td><td>{said}</td><td></td></tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'
