"""Which cache block holds what: a tree of token blocks, with counts of use and an order of eviction.

A conversation's keys and values lie in a chain of blocks. Chains with a common prefix share its
full blocks; the last, partly filled block belongs to one chain. What nobody uses stays until its
room is needed, the least recently used first and children before parents. Matching compares the
tokens themselves, so it is exact. Not here: the keys and values (`swarm.engine.ragged`).

    root ─ [the system prompt] ─ [... question 1] ─ [turn 1, 17 tokens)
                               └ [... question 2] ─ [...
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = 0
Ids = tuple[int, ...]


@dataclass(slots=True)
class Chain:
    """The blocks of one sequence. The first `shared` of them are filed in the tree, `node` is the last filed one.

    `cached` tokens of the prompt were found, not computed. `copy` is `(source, target, tokens)` when a found
    partial block still has to be copied before use.
    """

    blocks: list[int]
    shared: int
    node: int
    cached: int
    copy: tuple[int, int, int] | None = None
    own: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Filed:
    """A block in the tree: `ids` may be fewer than a block, and then nothing hangs below it."""

    node: int
    parent: int
    ids: Ids
    users: int = 0


class BlockTree:
    """`BlockTree(count=100, size=32)`: hands out blocks 0 to 99 of 32 tokens each."""

    def __init__(self, count: int, size: int) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"block tree: {count} blocks of {size} tokens, want at least 1 of 1")
        self.count, self.size = count, size
        self.clear()

    def clear(self) -> None:
        """Forgets everything; chains handed out before are void."""
        self._free = list(range(self.count - 1, -1, -1))
        self._filed: dict[int, _Filed] = {}
        self._full: dict[tuple[int, Ids], int] = {}
        self._tails: dict[int, set[int]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nodes = ROOT

    @property
    def available(self) -> int:
        """Blocks that are free or could be evicted."""
        return len(self._free) + len(self._idle)

    def key(self, ids: Sequence[int]) -> tuple[int, Ids] | None:
        """The place in the tree of the first full block of `ids` that is not filed; None if all are."""
        node, depth, _ = self._walk(ids)
        start = depth * self.size
        part = tuple(ids[start : start + self.size])
        return (node, part) if len(part) == self.size else None

    def open(self, ids: Sequence[int], limit: int) -> Chain | None:
        """A chain with room for `limit` tokens that begins with the longest known prefix of `ids`.

        At least the last id is left to be computed. None when there is not enough room now.
        """
        known = ids[: len(ids) - 1]
        node, depth, found = self._walk(known)
        tail, match = self._tail(node, known[depth * self.size : (depth + 1) * self.size])
        taken = tail is not None and not self._filed[tail].users and match == len(self._filed[tail].ids)
        keep = {*found, tail} if tail is not None else set(found)
        needed = -(-limit // self.size) - depth - taken
        if needed > len(self._free) + sum(b not in keep for b in self._idle_up_to(needed + len(keep))):
            return None
        for b in found:
            self._use(b)
        chain = Chain(list(found), depth, node, depth * self.size + match)
        if tail is not None:
            self._idle.pop(tail, None)
            if taken:
                self._unfile(tail)
                chain.blocks.append(tail)
                chain.own.add(tail)
        for _ in range(needed):
            chain.own.add(b := self._take())
            chain.blocks.append(b)
        if tail is not None and not taken:
            chain.copy = (tail, chain.blocks[depth], match)
            if not self._filed[tail].users:
                self._idle[tail] = None
        return chain

    def file(self, chain: Chain, ids: Sequence[int], computed: int) -> None:
        """Files the chain's blocks that `computed` tokens have filled, so that others may share them."""
        while (chain.shared + 1) * self.size <= computed:
            k = chain.shared
            key = (chain.node, tuple(ids[k * self.size : (k + 1) * self.size]))
            if key in self._full:
                chain.node = self._filed[self._full[key]].node
            else:
                block = chain.blocks[k]
                chain.own.discard(block)
                self._file(block, key[0], key[1], users=1)
                self._full[key] = block
                chain.node = self._nodes
            chain.shared += 1

    def close(self, chain: Chain, ids: Sequence[int], computed: int) -> None:
        """Gives the chain back; its tokens, `computed` of them, stay known until their room is needed."""
        self.file(chain, ids, computed)
        rest = tuple(ids[chain.shared * self.size : computed])
        if rest:
            block = chain.blocks[chain.shared]
            chain.own.discard(block)
            self._file(block, chain.node, rest, users=0)
            self._tails.setdefault(chain.node, set()).add(block)
            self._idle[block] = None
        for block in reversed(chain.blocks):
            if block in chain.own:
                self._free.append(block)
            elif self._filed[block].users:
                self._drop(block)

    def _walk(self, ids: Sequence[int]) -> tuple[int, int, list[int]]:
        """Follows full blocks from the root: the last node, the depth, the blocks."""
        node, found = ROOT, list[int]()
        for start in range(0, len(ids) - self.size + 1, self.size):
            block = self._full.get((node, tuple(ids[start : start + self.size])))
            if block is None:
                break
            found.append(block)
            node = self._filed[block].node
        return node, len(found), found

    def _tail(self, node: int, ids: Sequence[int]) -> tuple[int | None, int]:
        """The partial block below a node that shares most first tokens with `ids`, and how many."""
        best, match = None, 0
        for block in self._tails.get(node, ()):
            n = _common(self._filed[block].ids, ids)
            if n > match:
                best, match = block, n
        return best, match

    def _file(self, block: int, parent: int, ids: Ids, users: int) -> None:
        self._nodes += 1
        self._filed[block] = _Filed(self._nodes, parent, ids, users)

    def _unfile(self, block: int) -> None:
        filed = self._filed.pop(block)
        if len(filed.ids) == self.size:
            del self._full[filed.parent, filed.ids]
        else:
            tails = self._tails[filed.parent]
            tails.discard(block)
            if not tails:
                del self._tails[filed.parent]

    def _use(self, block: int) -> None:
        self._filed[block].users += 1
        self._idle.pop(block, None)

    def _drop(self, block: int) -> None:
        filed = self._filed[block]
        filed.users -= 1
        if not filed.users:
            self._idle[block] = None

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._idle.popitem(last=False)
        self._unfile(block)
        return block

    def _idle_up_to(self, count: int) -> list[int]:
        """The next `count` blocks to be evicted."""
        return [b for b, _ in zip(self._idle, range(count), strict=False)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
