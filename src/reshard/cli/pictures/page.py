"""Pages: one HTML file with its style and its few lines of script inside.

Theory. A page is an element tree of the standard library, so every text is escaped when it is
written, whatever a checkpoint calls its parameters. Style and script are constants of this module;
nothing foreign is ever put into them. The script only adds to what is readable without it: it sorts
tables, filters them, and lights up a holder. The page allows itself nothing from outside
(``Content-Security-Policy``), so it stays as it is wherever it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from reshard import __version__
from reshard.cli.pictures.colours import PAINTS
from reshard.cli.text import visible

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

MOST_ROWS = 20_000
"""Rows of a table on a page; a browser is slow with more."""

LONGEST_WORD = 96
"""Characters of a word that keeps a column as wide as it is; a longer one is broken."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: what is shown, and the number it is sorted by."""

    text: str
    number: float | None = None


def node(tag: str, *children: ET.Element | str, **attributes: str) -> ET.Element:
    """Return an element; an attribute ``klass`` is written ``class``, ``_`` as ``-``."""
    named = {
        "class" if name == "klass" else name.replace("_", "-"): visible(value)
        for name, value in attributes.items()
    }
    element = ET.Element(tag, named)
    for child in children:
        if isinstance(child, ET.Element):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + visible(child)
        else:
            element.text = (element.text or "") + visible(child)
    return element


def page(title: str, subtitle: str, *sections: ET.Element) -> str:
    """Return a whole page as text."""
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("meta", name="color-scheme", content="light dark"),
        node("title", f"{title} · reshard"),
    )
    policy = ET.Element("meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    head.insert(1, policy)
    ET.SubElement(head, "style").text = _style()
    body = node(
        "body",
        node("header", node("h1", title), node("p", subtitle, klass="muted")),
        node("main", *sections),
        node("footer", f"made by reshard {__version__}; this file needs nothing else"),
    )
    ET.SubElement(body, "script").text = _SCRIPT
    root = node("html", head, body, lang="en")
    return "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def section(title: str, *content: ET.Element, note: str = "") -> ET.Element:
    """Return a titled part of a page."""
    told = [node("p", note, klass="muted")] if note else []
    return node("section", node("h2", title), *told, *content)


def facts(pairs: Iterable[tuple[str, object]]) -> ET.Element:
    """Return named values, those without a value left out."""
    shown = [(name, value) for name, value in pairs if value not in (None, "")]
    return node(
        "dl",
        *(node("div", node("dt", name), node("dd", str(value))) for name, value in shown),
        klass="facts",
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, filtered: bool = False
) -> ET.Element:
    """Return a table that can be sorted, and filtered when `filtered`.

    Parameters
    ----------
    columns
        Titles; ``>`` before one sets it to the right.
    rows
        Cells: anything with a ``str``, or a :class:`Cell`.
    filtered
        Whether there is a field that narrows it.
    """
    right = [title.startswith(">") for title in columns]
    head = node(
        "tr",
        *(
            node(
                "th",
                node("button", title.lstrip(">"), type="button"),
                scope="col",
                **_side(to_right),
            )
            for title, to_right in zip(columns, right, strict=True)
        ),
    )
    listed = list(rows)
    body = node("tbody", *(_row(row, right) for row in listed[:MOST_ROWS]))
    drawn = node("div", node("table", node("thead", head), body), klass="scroll")
    if len(listed) > MOST_ROWS:
        said = f"the first {MOST_ROWS:,} of {len(listed):,} rows; --json has all"
        drawn = node("div", drawn, node("p", said, klass="muted"))
    if not filtered:
        return drawn
    field = node(
        "input", type="search", placeholder="filter by any text", aria_label="filter the table"
    )
    return node("div", node("p", field, " ", node("output", "")), drawn, klass="filtered")


def _row(row: Sequence[object], right: Sequence[bool]) -> ET.Element:
    return node("tr", *(_cell(cell, to_right) for cell, to_right in zip(row, right, strict=True)))


def _cell(value: object, to_right: bool) -> ET.Element:
    if isinstance(value, ET.Element):
        return node("td", value, **_class_of(value.text or "", to_right))
    cell = value if isinstance(value, Cell) else Cell(str(value))
    sorted_by = {} if cell.number is None else {"data_sort": f"{cell.number:.17g}"}
    return node("td", cell.text, **_class_of(cell.text, to_right), **sorted_by)


def _class_of(text: str, to_right: bool) -> dict[str, str]:
    """Numbers to the right; words are broken only where one is too long for any column."""
    if max(map(len, text.split()), default=0) > LONGEST_WORD:
        return {"klass": "long"}
    return _side(to_right)


def _side(to_right: bool) -> dict[str, str]:
    return {"klass": "right"} if to_right else {}


def _style() -> str:
    light = "".join(f"--{name}:{colour.light};" for name, colour in PAINTS.items())
    dark = "".join(f"--{name}:{colour.dark};" for name, colour in PAINTS.items())
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{_RULES}"


_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:24px 28px;background:var(--paper);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
h1{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:16px;margin:30px 0 8px}
p{margin:4px 0 10px;overflow-wrap:anywhere}
.muted,footer{color:var(--muted)}
footer{margin-top:36px;border-top:1px solid var(--line);padding-top:10px;font-size:12px}
.facts{display:flex;flex-wrap:wrap;gap:8px;margin:12px 0}
.facts div{flex:1 1 auto;max-width:100%;background:var(--panel);border:1px solid var(--line);
border-radius:8px;padding:8px 12px}
dt{color:var(--muted);font-size:12px}
dd{margin:0;overflow-wrap:anywhere;font-weight:600}
.scroll{overflow:auto;max-height:70vh;border:1px solid var(--line);border-radius:8px}
.blocks{display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 20px;border:0}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{background:var(--panel);text-align:left}
thead tr:last-child th{position:sticky;top:0;z-index:2}
th button{font:inherit;font-weight:600;color:inherit;background:none;border:0;padding:6px 8px;
cursor:pointer;width:100%;text-align:inherit}
th[aria-sort=ascending] button::after{content:" ↑"}
th[aria-sort=descending] button::after{content:" ↓"}
td{padding:4px 8px;border-top:1px solid var(--line);vertical-align:top}
td code,.nowrap{white-space:nowrap}
td.long,td.long code{white-space:normal;overflow-wrap:anywhere;min-width:26ch}
.right{text-align:right;white-space:nowrap}
code,.mono{font-size:12px;
font-family:ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace}
input{font:inherit;padding:6px 10px;border:1px solid var(--line);border-radius:6px;
width:min(360px,100%);background:var(--paper);color:var(--ink)}
.picture{overflow-x:auto}
svg{max-width:100%;min-width:720px;height:auto;display:block}
.grids{display:flex;flex-wrap:wrap;gap:12px 28px}
figure{margin:0;max-width:100%}
figcaption{font-weight:600;margin:2px 0 6px;white-space:nowrap}
.grid{border-collapse:separate;border-spacing:4px;width:auto}
.grid td,.grid th{border:0;border-radius:6px;padding:3px 10px;line-height:1.35;
text-align:center;min-width:74px}
.grid b{display:block;font-size:12px}
.grid th{white-space:nowrap}
.dense td,.dense th{min-width:0;padding:2px 5px}
.grid small{display:block;color:var(--muted);font-weight:400}
.grid tbody th{position:sticky;left:0;z-index:1}
.present{background:var(--good)}.missing,.damaged,.stale{background:var(--bad)}
.absent{background:var(--panel);color:var(--muted)}
.heat td{min-width:64px;text-align:right;white-space:nowrap}
.heat thead th{vertical-align:bottom}
.heat thead span{writing-mode:vertical-rl;transform:rotate(180deg);display:inline-block;
max-height:360px;overflow-wrap:anywhere;font-size:12px;font-weight:500}
.heat tbody th{position:sticky;left:0;text-align:left;font-weight:500}
.problem{background:var(--notice);border-radius:8px;padding:8px 12px;margin:6px 0}
.healthy{background:var(--good);border-radius:8px;padding:8px 12px;margin:12px 0;font-weight:600}
.fault{border-left:4px solid var(--missing);background:var(--panel);border-radius:0 8px 8px 0;
padding:8px 12px;margin:6px 0;overflow-wrap:anywhere}
.fault b,.fault code,.fault span{display:block}
.fault code{color:var(--muted)}
.error{background:var(--bad);border-radius:8px;padding:8px 12px;margin:6px 0}
.bars{display:grid;
grid-template-columns:max-content 1fr max-content;gap:6px 12px;align-items:center}
.bars span{background:var(--panel);border-radius:4px;height:16px;overflow:hidden;display:block}
.bars i{display:block;height:100%;background:var(--muted)}
"""

_SCRIPT = """
(function () {
  function value(row, index) {
    var cell = row.cells[index];
    var number = cell.getAttribute("data-sort");
    return number === null ? cell.textContent : Number(number);
  }
  document.querySelectorAll("table:not(.grid) th button").forEach(function (button) {
    button.addEventListener("click", function () {
      var head = button.parentNode, table = head.closest("table"), body = table.tBodies[0];
      var index = Array.prototype.indexOf.call(head.parentNode.cells, head);
      var down = head.getAttribute("aria-sort") === "ascending";
      head.parentNode.querySelectorAll("th").forEach(function (other) {
        other.removeAttribute("aria-sort");
      });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      Array.prototype.slice.call(body.rows).sort(function (a, b) {
        var x = value(a, index), y = value(b, index);
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      }).forEach(function (row) { body.appendChild(row); });
    });
  });
  document.querySelectorAll(".filtered").forEach(function (part) {
    var field = part.querySelector("input"), told = part.querySelector("output");
    var rows = part.querySelector("tbody").rows;
    function apply() {
      var words = field.value.toLowerCase().split(" ").filter(Boolean), shown = 0;
      Array.prototype.forEach.call(rows, function (row) {
        var text = row.textContent.toLowerCase();
        row.hidden = !words.every(function (word) { return text.includes(word); });
        shown += row.hidden ? 0 : 1;
      });
      told.textContent = shown + " of " + rows.length + " rows";
    }
    field.addEventListener("input", apply);
    apply();
  });
  document.querySelectorAll("svg").forEach(function (drawing) {
    function light(holder) {
      drawing.classList.toggle("dimmed", holder !== null);
      drawing.querySelectorAll("g[data-holder]").forEach(function (part) {
        part.classList.toggle("lit", part.getAttribute("data-holder") === holder);
      });
    }
    drawing.addEventListener("pointerover", function (event) {
      var part = event.target.closest("g[data-holder]");
      light(part && part.getAttribute("data-holder"));
    });
    drawing.addEventListener("pointerleave", function () { light(null); });
  });
})();
"""
