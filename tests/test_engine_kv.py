"""The block tree: what is found again, what is shared, what is evicted. Blocks of 4 tokens."""

from __future__ import annotations

import random

from swarm.engine.kv import BlockTree, Chain


def opened(tree: BlockTree, ids: list[int], limit: int | None = None) -> Chain:
    chain = tree.open(ids, limit or len(ids))
    assert chain is not None
    return chain


def visit(tree: BlockTree, ids: list[int]) -> Chain:
    chain = opened(tree, ids)
    tree.close(chain, ids, len(ids))
    return chain


def test_a_grown_conversation_finds_all_of_its_tokens_and_copies_nothing():
    tree = BlockTree(8, 4)
    visit(tree, [1, 2, 3, 4, 5, 6])
    chain = opened(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (chain.cached, chain.copy, len(chain.blocks)) == (6, None, 3)


def test_the_last_id_is_always_left_to_compute():
    tree = BlockTree(8, 4)
    visit(tree, [1, 2, 3, 4, 5, 6])
    assert opened(tree, [1, 2, 3, 4, 5, 6]).cached == 5


def test_a_common_prefix_shares_its_full_blocks():
    tree = BlockTree(8, 4)
    a = visit(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    b = opened(tree, [1, 2, 3, 4, 5, 6, 7, 8, 30, 31])
    assert b.cached == 8
    assert b.blocks[:2] == a.blocks[:2]
    assert b.blocks[2] != a.blocks[2]


def test_part_of_a_partial_block_is_copied_and_the_original_stays_known():
    tree = BlockTree(8, 4)
    a = visit(tree, [1, 2, 3, 4, 5, 6, 7])
    b = opened(tree, [1, 2, 3, 4, 5, 6, 30, 31])
    assert b.copy == (a.blocks[1], b.blocks[1], 2)
    assert opened(tree, [1, 2, 3, 4, 5, 6, 7, 8]).cached == 7


def test_there_is_no_room_for_a_chain_while_others_hold_the_blocks():
    tree = BlockTree(3, 4)
    held = opened(tree, [1, 2, 3, 4, 5])
    assert tree.open([9] * 5, 8) is None
    tree.close(held, [1, 2, 3, 4, 5], 5)
    assert tree.open([9] * 5, 8) is not None


def test_the_least_recently_used_goes_first_and_tails_before_their_prefix():
    tree = BlockTree(4, 4)
    visit(tree, [1, 2, 3, 4, 5])
    visit(tree, [6, 7, 8, 9, 10])
    visit(tree, [11])
    assert opened(tree, [6, 7, 8, 9, 10, 11]).cached == 5
    tree = BlockTree(4, 4)
    visit(tree, [1, 2, 3, 4, 5])
    visit(tree, [6, 7, 8, 9, 10])
    visit(tree, [11])
    assert opened(tree, [1, 2, 3, 4, 5, 6]).cached == 4


def test_a_cancelled_chain_is_known_only_as_far_as_it_was_computed():
    tree = BlockTree(8, 4)
    tree.close(opened(tree, [1, 2, 3, 4, 5, 6, 7]), [1, 2, 3, 4, 5, 6, 7], 5)
    assert opened(tree, [1, 2, 3, 4, 5, 6, 7]).cached == 5


def test_no_block_is_lost_or_given_twice_whatever_happens():
    rng, tree = random.Random(0), BlockTree(12, 4)
    open_chains: list[tuple[Chain, list[int]]] = []
    for _ in range(2000):
        if open_chains and rng.random() < 0.5:
            chain, ids = open_chains.pop(rng.randrange(len(open_chains)))
            tree.close(chain, ids, rng.randint(chain.cached, len(ids)))
            continue
        ids = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        chain = tree.open(ids, len(ids))
        if chain is not None:
            open_chains.append((chain, ids))
            assert not any(chain.own & other.own for other, _ in open_chains[:-1])
            tree.file(chain, ids, rng.randint(chain.cached, len(ids)) if chain.cached else 0)
    for chain, ids in open_chains:
        tree.close(chain, ids, len(ids))
    assert tree.available == 12


def test_cleared_nothing_is_known():
    tree = BlockTree(8, 4)
    visit(tree, [1, 2, 3, 4, 5])
    tree.clear()
    assert opened(tree, [1, 2, 3, 4, 5, 6]).cached == 0
