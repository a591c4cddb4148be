"""Sampled tokens, coloured by a number that each of them has: a log-probability, an advantage, a value, a ratio.

    Tokens(pieces, advantage_N, "advantage")       orange above `middle`, blue below, paler near it

The number stands in the tooltip of each token, and the ends of the scale in the legend.
Not here: where the numbers come from (`swarm.rl.signals`, `swarm.rl.credit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.show_html import Html, element, join, page

_LEVELS = 9
_ABOVE, _BELOW = "217 115 13", "58 135 200"


@dataclass(frozen=True, slots=True)
class Tokens:
    """One number a piece of text: `Tokens(["a", "b"], [0.5, -1.0], "advantage")`.

    Colours are strongest at `reach` from `middle` and beyond, by default the farthest number. Raises ValueError where
    there are not as many numbers as pieces.
    """

    pieces: Sequence[str]
    values: Sequence[float]
    name: str
    middle: float = 0.0
    reach: float = 0.0

    def __post_init__(self) -> None:
        if len(self.pieces) != len(self.values):
            raise ValueError(f"tokens: {len(self.values)} numbers for {len(self.pieces)} pieces, want one each")

    def __repr__(self) -> str:
        low, high = min(self.values, default=0.0), max(self.values, default=0.0)
        return f"{self.name} of {len(self.pieces)} tokens, from {low:+.3f} to {high:+.3f}"

    def _repr_html_(self) -> str:
        reach = self.reach or max((abs(x - self.middle) for x in self.values), default=0.0) or 1.0
        tokens = [_token(p, x, (x - self.middle) / reach) for p, x in zip(self.pieces, self.values, strict=True)]
        return page(_STYLE, self._legend(reach), element("pre", *tokens, cls="tokens"))

    def _legend(self, reach: float) -> Html:
        ends = sorted({self.middle, *(f(self.values, default=self.middle) for f in (min, max))})
        scale = [element("i", f" {x:.3g} ", cls=_level((x - self.middle) / reach)) for x in ends]
        return element("div", element("b", self.name), " ", *scale, cls="tokens")


def _token(piece: str, value: float, at: float) -> Html:
    return element("i", piece, cls=_level(at), title=f"{value:+.4f}")


def _level(at: float) -> str:
    """A class from `b9` over "" to `a9`, by a number that is cut off at -1 and 1; none for what is no number."""
    if at != at:
        return "none"
    n = min(_LEVELS, round(abs(at) * _LEVELS))
    return f"{'a' if at > 0 else 'b'}{n}" if n else ""


def _rules() -> str:
    return "".join(
        f".swarm-rl .tokens .{side}{n}{{background:rgb({rgb} / {0.65 * n / _LEVELS:.2f})}}"
        for side, rgb in (("a", _ABOVE), ("b", _BELOW))
        for n in range(1, _LEVELS + 1)
    )


_STYLE = join(
    [
        Html("<style>.swarm-rl .tokens i{font-style:normal}.swarm-rl .tokens .none{opacity:.5}"),
        Html(_rules() + "</style>"),
    ]
)
