"""An agent's workspace: what short handles stand for.

A document, a table or the question itself gets a number when it is first shown, `#17`, and goes by
that from then on; a field of a document is `#17.b`. An agent writes table rows as it finds them (lines
that begin with `|` in any of its turns) and may write a handle where a value belongs; `#rows` is the
table of the rows it wrote. So long strings and large tables pass between agents by reference, and no
context has to hold them. Handles are an agent's own: a child starts with its parent's.

Not here: who may read what. A handle is only of use to an agent whose context shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field, structs

from swarm.types import Artifact, Table

_HANDLE = re.compile(r"#(\d+)(?:\.([a-zA-Z]))?")
_TABLE = re.compile(r"#(rows\b|\d+(?!\.?\w))")
_LABEL = re.compile(r"\[Doc #(\d+)\]")
_RULE = re.compile(r"^[\s|:-]+$")
ROWS = "#rows"


class Workspace(Struct, frozen=True, gc=False):
    """`items[k]` is what `#k` stands for; `items[0]` is the question.

    `roster`: name → system prompt of the subagents created; `assigned`: the prompts given out. `faded` are the
    handles that a rewritten context no longer explains: they are written out when they are met again.
    """

    items: tuple[Artifact, ...]
    rows: Table = ()
    roster: Mapping[str, str] = field(default_factory=dict[str, str])
    assigned: tuple[tuple[str, str], ...] = ()
    faded: frozenset[int] = frozenset()

    def child(self) -> Workspace:
        """The same handles, nothing written, nobody created."""
        return Workspace(self.items)

    def put(self, artifact: Artifact) -> tuple[Workspace, int]:
        """Files an artifact; one with a known url keeps its number and gains the new cells."""
        known = next((k for k, a in enumerate(self.items) if artifact.url and a.url == artifact.url), None)
        if known is None:
            return structs.replace(self, items=(*self.items, artifact)), len(self.items)
        old = self.items[known]
        merged = structs.replace(old, cells={**old.cells, **artifact.cells})
        return structs.replace(self, items=(*self.items[:known], merged, *self.items[known + 1 :])), known

    def show(self, parts: tuple[str | Artifact, ...]) -> tuple[Workspace, str]:
        """Files the artifacts among the parts, in order: a new or faded one becomes its label, a known one `#17`."""
        ws = self
        text: list[str] = []
        for part in parts:
            if isinstance(part, str):
                text.append(part)
                continue
            seen = len(ws.items)
            ws, k = ws.put(part)
            text.append(_label(k, ws.items[k]) if k == seen or k in ws.faded else f"#{k}")
            ws = structs.replace(ws, faded=ws.faded - {k}) if k in ws.faded else ws
        return ws, "".join(text)

    def forgotten(self, shown: Sequence[str]) -> Workspace:
        """The workspace after the context was rewritten: only documents that these texts label go by their number."""
        visible = {int(n) for text in shown for n in _LABEL.findall(text)}
        return structs.replace(self, faded=frozenset(range(1, len(self.items))) - visible)

    def expand(self, prompt: str) -> str:
        """A prompt for somebody else: the handles it names are written out below it, once each."""
        numbers = dict.fromkeys(int(n) for n, _ in _HANDLE.findall(prompt))
        lines = [f"#{k}: {_long_label(k, self.items[k])}" for k in numbers if k < len(self.items)]
        return "\n".join([prompt, *lines])

    def text(self, value: str) -> str:
        """A query with its handles replaced by titles: `#0` is the question's subject."""
        return _HANDLE.sub(lambda m: self._cell(m) or m[0], value)

    def url(self, value: str) -> str:
        """The address that a handle stands for; anything else is taken as an address."""
        m = _HANDLE.fullmatch(value.strip())
        k = int(m[1]) if m else len(self.items)
        return self.items[k].url if k < len(self.items) else value.strip()

    def written(self, content: str) -> Workspace:
        """The workspace after an assistant turn: table rows in its text are kept, references resolved."""
        if "|" not in content:
            return self
        new = tuple(self._row(line) for line in content.splitlines() if _is_row(line))
        return structs.replace(self, rows=self.rows + new) if new else self

    def table(self, answer: str) -> Table:
        """The rows that an answer hands in: own rows, literal ones included, and tables named by handle."""
        literal = any(_is_row(line) for line in answer.splitlines())
        prose = "\n".join(line for line in answer.splitlines() if not _is_row(line))
        named = list(dict.fromkeys(m[1] for m in _TABLE.finditer(prose)))
        if literal and "rows" not in named:
            named.insert(0, "rows")
        out: dict[tuple[str, ...], None] = {}
        for name in named:
            k = len(self.items) if name == "rows" else int(name)
            rows = self.rows if name == "rows" else self.items[k].rows if k < len(self.items) else ()
            out.update(dict.fromkeys(rows))
        return tuple(out)

    def _row(self, line: str) -> tuple[str, ...]:
        inner = line.strip().removeprefix("|").removesuffix("|")
        cells = re.split(r"(?<!\\)\|", inner)
        return tuple(_HANDLE.sub(lambda m: self._cell(m) or m[0], c.strip().replace("\\|", "|")) for c in cells)

    def _cell(self, m: re.Match[str]) -> str | None:
        k = int(m[1])
        if k >= len(self.items):
            return None
        return self.items[k].cells.get(m[2]) if m[2] else self.items[k].title


def _is_row(line: str) -> bool:
    return line.lstrip().startswith("|") and not _RULE.match(line)


def _label(k: int, a: Artifact) -> str:
    return f"[Doc #{k}]({a.url}) {a.title}" if a.url else f"#{k}: {len(a.rows)} rows"


def _long_label(k: int, a: Artifact) -> str:
    return a.cells.get("text", a.title) if k == 0 else _label(k, a)
