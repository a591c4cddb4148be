"""HTML that cannot be broken by what it shows: text is escaped unless it is `Html`, which only `element` makes.

    element("td", "a < b", cls="wrong")      <td class="wrong">a &lt; b</td>

Colours are few and of middle lightness, and all else is the page's own, so that light and dark pages both do. Where
a page drops the styles, as some sites do with notebooks, tables and folds still read in order.
Not here: what is shown (`swarm.show`, `swarm.show_lanes`, `swarm.show_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Markup that needs no escaping."""

    __slots__ = ()


_EMPTY = frozenset({"input", "rect", "br"})
"""Elements that have no inside."""

STYLE = Html("""<style>
.swarm-rl{font:13px/1.45 system-ui,sans-serif;max-width:64rem}
.swarm-rl{--path:#d9730d;--own:#3a87c8;--good:#2b9a66;--bad:#d64545}
.swarm-rl table{border-collapse:collapse;margin:.3rem 0;font-size:12px}
.swarm-rl table.lanes{width:100%;table-layout:auto!important}
.swarm-rl .lanes td,.swarm-rl .lanes th{white-space:nowrap}
.swarm-rl th,.swarm-rl td{border:0;border-bottom:1px solid #8883;padding:.12rem .6rem;text-align:left!important}
.swarm-rl th,.swarm-rl td{background:none;vertical-align:top}
.swarm-rl tr{background:none}
.swarm-rl th{font-weight:600;opacity:.75}
.swarm-rl td.n,.swarm-rl th.n{text-align:right!important;font-variant-numeric:tabular-nums}
.swarm-rl td.bar{width:75%;padding:.2rem 0}
.swarm-rl svg{display:block;width:100%;height:14px}
.swarm-rl .own{fill:var(--own)}.swarm-rl .wait{fill:#8885}.swarm-rl .path .own{fill:var(--path)}
.swarm-rl .path td:first-child,.swarm-rl b.path{color:var(--path)}
.swarm-rl details{margin:.15rem 0;padding-left:.4rem;border-left:2px solid #8883}
.swarm-rl summary{cursor:pointer}
.swarm-rl pre{margin:.2rem 0 .4rem;padding:.3rem .6rem;white-space:pre-wrap;overflow-wrap:anywhere}
.swarm-rl pre{font:12px/1.45 ui-monospace,monospace;background:#8881;color:inherit}
.swarm-rl pre.said{border-left:3px solid var(--own)}
.swarm-rl .wrong{color:var(--bad)}.swarm-rl .right{color:var(--good)}
.swarm-rl .soft{opacity:.7}
.swarm-rl .facts span{margin-right:1.4rem}
.swarm-rl .steps>label{display:inline-block;margin-right:.6rem;cursor:pointer}
.swarm-rl .steps input{margin:0 .2rem 0 0;vertical-align:-2px}
</style>""")


def element(name: str, /, *inside: str, **attributes: str | int) -> Html:
    """One element. An attribute `cls` is written `class`, and one that is "" is left out."""
    named = {("class" if k == "cls" else k.replace("_", "-")): str(v) for k, v in attributes.items() if v != ""}
    head = "".join(f' {k}="{escape(v)}"' for k, v in named.items())
    body = "" if name in _EMPTY else f"{join(inside)}</{name}>"
    return Html(f"<{name}{head}>{body}" if body else f"<{name}{head}/>")


def join(parts: Iterable[str]) -> Html:
    """The parts in order, each escaped unless it is `Html`."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def page(*parts: str) -> str:
    """What a notebook shows: the parts, with their styles."""
    return element("div", STYLE, *parts, cls="swarm-rl")


def fold(summary: Html, *inside: str, opened: bool = False) -> Html:
    """A part that a click opens."""
    details = element("details", element("summary", summary), *inside)
    return Html(details.replace("<details", "<details open", 1)) if opened else details


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Html:
    """A table with a heading; the columns `numbers` stand to the right."""

    def cells(kind: str, row: Sequence[str]) -> Html:
        return join(element(kind, cell, cls="n" if k in numbers else "") for k, cell in enumerate(row))

    body = [element("tr", cells("td", row)) for row in rows]
    return element("table", element("tr", cells("th", head)), *body)
