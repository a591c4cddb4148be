"""Conversations as token ids, append-only: renders prompts and observations, reads turns back.

    layout ──▶ fixed words, foreign text ──▶ ids
               markers are one token each    letters alone

Ids of earlier turns are never made again from text. Markers enter as ids of the template; text from pages, users and
other agents goes through an encoder that knows no added token, so a page that contains `<|im_end|>` is only letters.
Letters that touch are encoded together: a conversation without foreign markers has the very ids that the family's
published template gives. `chat_of` finds a checkpoint's family.

Not here: the loop, what a call means, and the layouts (`swarm.chat_hermes`, `swarm.chat_xml`, `swarm.chat_gemma`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from swarm.chat_family import layout_of
from swarm.chat_hermes import QWEN3, TERSE
from swarm.chat_layout import Fixed, Layout, Parts, read_turn
from swarm.types import ToolCall, ToolSpec, Turn

__all__ = ["Chat", "HermesChat", "chat_of"]

_CUTS = 1 << 10
"""How many fixed texts keep their ids. A layout has a dozen; the calls of the embedded model come on top."""


class Chat:
    """A `ChatFormat` over a fast tokenizer: `Chat(tokenizer, GEMMA3).observe(["a page"], "[left 3]", closed=True)`.

    `cache`: how many texts keep their ids, since the same page is read in many rollouts. Raises ValueError for a
    tokenizer that lacks a marker of the layout, or that makes one out of letters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, layout: Layout, *, cache: int = 1 << 16) -> None:
        self.tokenizer = tokenizer
        self.layout = layout
        self._full: Tokenizer = tokenizer.backend_tokenizer
        self._markers = _markers(self._full, layout)
        plain = _without_added_tokens(self._full)
        self._plain_ids = _cached(plain, cache)
        self._cuts: dict[str, tuple[str, tuple[int, ...], str]] = {}
        self._end = self._markers[layout.end]
        self._stop = tuple(dict.fromkeys(i for i in (self._end, tokenizer.eos_token_id) if isinstance(i, int)))
        self._spelled = tuple(tag for tag in layout.response if tag not in self._markers)
        forged = [m for m, i in self._markers.items() if i in plain.encode(m, add_special_tokens=False).ids]
        if forged:
            raise ValueError(f"tokenizer makes the token {forged[0]} out of letters, want letters to stay letters")

    @property
    def stop(self) -> tuple[int, ...]:
        """The end of a turn, and the tokenizer's end of sequence where that is another token."""
        return self._stop

    def encode(self, text: str) -> list[int]:
        """Ids of foreign text, without any added token: what it spells out stays letters."""
        return list(self._plain_ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, markers included; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    def prompt(self, system: str, tools: Sequence[ToolSpec], user: str) -> list[int]:
        """See `ChatFormat`. An empty `system` is none."""
        return self._ids(self.layout.opening(system, tools, user))

    def observe(self, results: Sequence[str], note: str, *, closed: bool) -> list[int]:
        """See `ChatFormat`. One newline at the end of a result is dropped: the marker brings its own.

        Where the tags around a result are no tokens, a result that spells one out has its `<` written `&lt;`.
        """
        shown = [text.removesuffix("\n") for text in results]
        for tag in self._spelled:
            shown = [text.replace(tag, tag.replace("<", "&lt;")) for text in shown]
        ids = self._ids(self.layout.observed(shown, note))
        return ids if closed else [self._end, *ids]

    def clipped(self, text: str, tokens: int) -> str:
        """See `ChatFormat`. A character that is cut through is left out."""
        ids = self._plain_ids(text)
        return text if len(ids) <= tokens else self.decode(ids[:tokens]).rstrip("\ufffd")

    def encode_turn(self, content: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """The ids with which a policy says this, end-of-turn id included: `parse` gives it back.

        For scripted policies and demonstrations. `content` comes back without outer white space,
        must not spell out a tool call and not begin with a thought. Raises ValueError for a call that the layout's
        form cannot say.
        """
        return [*self._ids(self.layout.spoken(content, calls)), self._end]

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Turn:
        """Reads a sampled turn; what does not parse becomes a reason in `malformed`, never an exception.

        `tools`: their schemas type the arguments where the layout writes them as bare text.
        """
        said = ids[:-1] if ids and ids[-1] in self._stop else ids
        return read_turn(self.decode(said), self.layout.read, tools)

    def _ids(self, parts: Parts) -> list[int]:
        cuts, plain_ids = self._cuts, self._plain_ids
        ids: list[int] = []
        letters = ""
        for part in parts:
            if part.__class__ is not Fixed:
                letters = letters + part if letters else part
                continue
            cut = cuts.get(part)
            before, between, after = self._cut(part) if cut is None else cut
            if before:
                letters += before
            if between:
                if letters:
                    ids += plain_ids(letters)
                ids += between
                letters = after
        if letters:
            ids += plain_ids(letters)
        return ids

    def _cut(self, fixed: str) -> tuple[str, tuple[int, ...], str]:
        """The letters before its first marker, the ids from there to its last one, the letters after; kept."""
        # Of markers that begin alike the longest counts, as in a tokenizer.
        present = sorted((m for m in self._markers if m in fixed), key=len, reverse=True)
        found = list(re.finditer("|".join(map(re.escape, present)), fixed)) if present else []
        cut: tuple[str, tuple[int, ...], str] = (str(fixed), (), "")
        if found:
            between: list[int] = []
            at = found[0].start()
            for marker in found:
                between += (*self._plain_ids(fixed[at : marker.start()]), self._markers[marker[0]])
                at = marker.end()
            cut = (fixed[: found[0].start()], tuple(between), fixed[at:])
        if len(self._cuts) < _CUTS:
            self._cuts[fixed] = cut
        return cut


class HermesChat(Chat):
    """ChatML turns and JSON calls: `HermesChat(tokenizer)`, laid out like Qwen3.

    `terse_tools` is the layout of the embedded model, which shows the tools by name only: all that a model with
    built-in knowledge of them needs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, terse_tools: bool = False, cache: int = 1 << 16) -> None:
        super().__init__(tokenizer, TERSE if terse_tools else QWEN3, cache=cache)


def chat_of(tokenizer: PreTrainedTokenizerFast) -> Chat:
    """The chat format of the tokenizer's family: `chat_of(AutoTokenizer.from_pretrained(checkpoint))`.

    Raises ValueError if it is of none that is known here (see `swarm.chat_family`).
    """
    return Chat(tokenizer, layout_of(tokenizer))


def _markers(tokenizer: Tokenizer, layout: Layout) -> dict[str, int]:
    """Text and id of each marker: the special tokens, and what else the layout names and the tokenizer has."""
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    found = {m: tokenizer.token_to_id(m) for m in (*special, *layout.needs, *layout.markers)}
    lacking = [m for m in layout.needs if found[m] is None]
    if lacking:
        raise ValueError(f"tokenizer has no {lacking[0]} token, want {' '.join(layout.needs)} as for {layout.name}")
    return {marker: i for marker, i in found.items() if i is not None}


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    plain = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain


def _cached(tokenizer: Tokenizer, size: int) -> Callable[[str], tuple[int, ...]]:
    @lru_cache(maxsize=size)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
