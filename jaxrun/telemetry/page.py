"""A self-contained HTML page: headings, tables and Plotly figures, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: #222; background: #fff;
  margin: 0 auto; padding: 1.5rem 2rem 3rem; max-width: 1180px; }
h1 { font-size: 1.45rem; margin: 0 0 .2rem; }
h2 { font-size: 1.08rem; margin: 2rem 0 .5rem; padding-bottom: .2rem; border-bottom: 1px solid #ddd; }
p { margin: .3rem 0 .6rem; max-width: 60rem; }
.dim { color: #666; }
.bad { color: #b3261e; }
.good { color: #2e7d32; }
table { border-collapse: collapse; font-size: 13px; margin: .4rem 0 .8rem; }
th { text-align: left; font-weight: 600; color: #555; border-bottom: 1px solid #bbb; padding: .25rem 1.1rem .25rem 0; vertical-align: bottom; }
td { max-width: 22rem; padding: .25rem 1.1rem .25rem 0; border-bottom: 1px solid #eee; vertical-align: top; overflow-wrap: anywhere; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }
td.k { white-space: nowrap; }
code { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
summary { cursor: pointer; color: #1f4e8c; margin: .4rem 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .55rem 1.5rem; margin: .8rem 0; }
.facts dt { font-size: 12px; color: #666; }
.facts dd { margin: 0; font-weight: 600; }
.figure { width: 100%; }
@media print {
  body { max-width: none; padding: 0; font-size: 11px; }
  h2 { break-after: avoid; }
  tr, .figure { break-inside: avoid; }
  .modebar { display: none; }
}
"""

_DRAW = """
for (const div of document.querySelectorAll(".figure")) {
  const figure = JSON.parse(document.getElementById(div.id + "-data").textContent);
  Plotly.newPlot(div, figure.data, figure.layout, {responsive: true, displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
}
"""


class Page:
    """The parts of a page, in the order in which they are added."""

    def __init__(self, title: str):
        self._title = title
        self._parts: list[str] = [f"<h1>{text(title)}</h1>"]
        self._num_figures = 0

    def heading(self, words: str) -> None:
        self._parts.append(f"<h2>{text(words)}</h2>")

    def say(self, words: str, style: str = "") -> None:
        self._parts.append(f'<p class="{style}">{text(words)}</p>')

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[int] = (), keys: Sequence[int] = ()) -> None:  # fmt: skip
        """A table; a cell is text, or (text, style).

        Args:
          numbers: columns that are set flush right. keys: those that are not broken.
        """
        self._parts.append(table(columns, rows, numbers=numbers, keys=keys))

    def facts(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """What there is to know at a glance: names and values, side by side; a value is as a cell of a table."""
        cells = []
        for name, value in pairs:
            words, style = value if isinstance(value, tuple) else (value, "")
            cells.append(f'<div><dt>{text(name)}</dt><dd class="{style}">{text(words)}</dd></div>')
        self._parts.append(f'<dl class="facts">{"".join(cells)}</dl>')

    def folded(self, summary: str, inside: str) -> None:
        """What is seen only after a click; `inside` is HTML."""
        self._parts.append(f"<details><summary>{text(summary)}</summary>{inside}</details>")

    def figure(self, figure: Mapping[str, Any]) -> None:
        """A Plotly figure: its data and layout."""
        name = f"figure-{self._num_figures}"
        self._num_figures += 1
        # Inside a script element only "</" could end it early; "<\\/" is the same string to JSON.
        data = json.dumps(figure, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
        height = figure["layout"]["height"]
        self._parts.append(
            f'<div class="figure" id="{name}" style="height:{height}px"></div>'
            f'<script type="application/json" id="{name}-data">{data}</script>'
        )

    def html(self) -> str:
        from plotly.offline import get_plotlyjs

        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{text(self._title)}</title>\n<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
            + "\n".join(self._parts)
            + f"\n<script>{_DRAW}</script>\n</body>\n</html>\n"
        )


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[int] = (), keys: Sequence[int] = ()) -> str:  # fmt: skip
    def style(i: int, more: str = "") -> str:
        names = " ".join(n for n in ("n" if i in numbers else "k" if i in keys else "", more) if n)
        return f' class="{names}"' if names else ""

    def cell(i: int, value: Any) -> str:
        words, more = value if isinstance(value, tuple) else (value, "")
        return f"<td{style(i, more)}>{text(words)}</td>"

    head = "".join(f"<th{style(i)}>{text(c)}</th>" for i, c in enumerate(columns))
    body = "".join("<tr>" + "".join(cell(i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text(words: Any) -> str:
    """Anything as HTML text; a new line stays one."""
    return html.escape(str(words)).replace("\n", "<br>")
