"""Builds the embedded model's tokenizer: byte-level BPE with about 2,700 tokens, cut for short turns.

Every string of one to three digits is one token, numbers are grouped from the left in threes, and the
pieces of which rows, handles and documents consist are one token each. The markers and the fixed parts
of tool calls are added tokens. Any text comes back exactly.

Not here: rendering and parsing a conversation, which is `swarm.chat`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|im_end|>"

MARKERS = (
    PAD,
    END,
    "<|im_start|>system\n",
    "\n<|im_start|>user\n",
    "\n<|im_start|>assistant\n",
    "<tool_response>\n",
    "\n</tool_response>\n",
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '<tool_call>\n{"name": "access", "arguments": {"url": "',
    '<tool_call>\n{"name": "create_subagent", "arguments": {"name": "',
    '", "system_prompt": "',
    '<tool_call>\n{"name": "assign_task", "arguments": {"agent": "',
    '", "prompt": "',
    '", "page": ',
    '"}}\n</tool_call>',
    "}}\n</tool_call>",
)
"""Added tokens: matched in what the template and a policy say, never in foreign text."""

HANDLES, SHARES = 320, 40
"""`#0` … `#319` and ` p1` … ` p40` are one token each: a handle is never mistaken for a number in a value."""

PIECES = (
    *(" | N/A", " | ", " |", "| ", "#rows", " rows", " pages", " N/A", "N/A"),
    *("[Doc ", "[left ", "](w/", "]", ")", "-", " page ", " of ", ": "),
    *(f".{letter}" for letter in "abcdefghABCDEFGH"),
    *(f"#{n}" for n in range(HANDLES)),
    *(f" p{n}" for n in range(1, SHARES + 1)),
)
"""Pieces of rows, handles and documents that are one token wherever `SPLIT` isolates them."""

SPLIT = "|".join(
    (
        r"\d{1,3}",
        r" (?:\|(?: (?:N/A\b|(?=#)))?|N/A\b|(?:page|of) (?=\d)|p\d{1,2}(?![\d\p{L}])"
        r"|[\p{L}\p{M}]+|[^\s\p{L}\p{M}\p{N}\[#])",
        r"N/A\b",
        r"[\p{L}\p{M}]+",
        r"\[(?:Doc (?=#)|left (?=\d))?",
        r"\](?:\(w/(?=\d))?",
        r"\| (?=#)",
        r"#(?:rows\b|\d{1,3}(?!\d))?",
        r": (?!\p{L})",
        r"(?<=\d)\.[a-hA-H](?![\p{L}\p{N}])",
        r"[^\s\p{L}\p{M}\p{N}]",
        r"\s",
    )
)
"""Where text is cut before anything is merged. The matcher tries the alternatives one after another,
so they are few and grouped by their first character."""

TEMPLATE = """\
{%- for m in messages -%}
{%- if not (m.role in ('tool', 'user') and loop.previtem and loop.previtem.role == 'tool') -%}
{{- ('' if loop.first else '\\n') + '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}
{%- endif -%}
{{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' if m.role == 'tool' else m.content -}}
{%- if m.role == 'system' and tools -%}
{{- '\\ntools:' -}}{%- for t in tools -%}{{- ' ' + t.function.name -}}{%- endfor -%}
{%- endif -%}
{%- for c in m.tool_calls or [] -%}
{{- ('\\n' if m.content or not loop.first else '') + '<tool_call>\\n{"name": "' + c.function.name -}}
{{- '", "arguments": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{%- if not (m.role == 'tool' and loop.nextitem and loop.nextitem.role in ('tool', 'user')) -%}
{{- '<|im_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The layout of `swarm.chat` for other programs; a user message after tool results is the budget note."""


def build_tokenizer(texts: Iterable[str], vocab_size: int = 2688) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, its words learned from `texts` (pages, queries, prompts).

    Raises ValueError if `vocab_size` leaves no room for bytes, numbers, pieces and markers.
    """
    fixed = list(dict.fromkeys([*sorted(ByteLevel.alphabet()), *_digits(), *map(_as_bytes, PIECES)]))
    room = vocab_size - len(fixed) - len(MARKERS)
    if room < 0:
        raise ValueError(f"vocab_size = {vocab_size}, want at least {vocab_size - room}")
    merges = _merges(texts, room)
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*fixed, *(a + b for a, b in merges)]))}
    # ignore_merges: a piece or a number that is in the vocabulary is one token though no merge leads to it.
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    return fast


def handle_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The token of each handle: the k-th is that of `#k`."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[f"#{k}"] for k in range(HANDLES)]


def _digits() -> Iterator[str]:
    """0 … 9, 00 … 99, 000 … 999: the second group of 4,023 or 204031 may begin with a zero."""
    return (f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width))


def _as_bytes(text: str) -> str:
    """Text in the alphabet of a byte-level vocabulary."""
    ((piece, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return piece


def _merges(texts: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Up to `count` merges, learned on words alone: numbers and pieces need none."""
    split, fixed = Split(Regex(SPLIT), "isolated"), {*PIECES, *_digits()}
    words = (word for text in texts for word, _ in split.pre_tokenize_str(text) if word not in fixed)
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = _splitter()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=len(alphabet) + count, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    learner.train_from_iterator(words, trainer)
    return [(a, b) for a, b in json.loads(learner.to_str())["model"]["merges"]]


def _splitter() -> PreTokenizer:
    return Sequence([Split(Regex(SPLIT), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
