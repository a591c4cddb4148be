"""What the tests of the chat formats share: a small tokenizer of each family, and its template.

The tokenizers are made like the published ones (how text is cut, which markers are special), only small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
WORDS = (
    'List all airports in Ohio. The latest revision wins; café, naïve, 東京.\n\n  {"name": "see", "arguments": {}}',
    "ab abab system user assistant model tool_response <tool_call> function parameter one two [left 3] answer now\n",
    "é\n\né\n\nab",
) * 4
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")


def _fast(tokenizer: Tokenizer, template: str, **special: Any) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = (TEMPLATES / template).read_text()
    return fast


def qwen(template: str = "qwen3.jinja") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, min_frequency=2, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in QWEN_ADDED])
    return _fast(tokenizer, template, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def gemma() -> PreTrainedTokenizerFast:
    spaced = pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")
    learner = Tokenizer(BPE())
    learner.pre_tokenizer, learner.normalizer = spaced
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    trainer = BpeTrainer(vocab_size=600, min_frequency=2, show_progress=False, special_tokens=[*GEMMA_SPECIAL, *bytes_])
    learner.train_from_iterator(WORDS, trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [(a, b) for a, b in model["merges"]]
    tokenizer = Tokenizer(BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer, tokenizer.normalizer = spaced
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in GEMMA_SPECIAL])
    return _fast(tokenizer, "gemma3.jinja", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
