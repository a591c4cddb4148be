# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeArgument=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
"""TRL's GRPOTrainer on the workload: rollouts injected through `rollout_func`, observations masked by `env_mask`.

Micro-batches of 8 sequences, two optimizer steps of 32 an update, no gradient checkpointing, log-probabilities
computed again (TRL does that where generation and optimizer steps do not line up). An update is the time from
one call of `rollout_func` to the next. Not here: other trainers.
"""

from __future__ import annotations

import tempfile
import warnings
from itertools import pairwise
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks.process import Time, lists, measure, now
from benchmarks.workload import SEQUENCES, VOCAB, model_config, sequences

MICRO = 8
GROUP = 8


def tokenizer() -> PreTrainedTokenizerFast:
    """A word an id; nothing is measured with it, TRL decodes completions for its logs."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="w2")


def injected() -> dict[str, list[Any]]:
    batch = sequences()
    return {
        "prompt_ids": [list(s.ids[: s.prompt]) for s in batch],
        "completion_ids": [list(s.ids[s.prompt :]) for s in batch],
        "env_mask": [[int(x) for x in s.sampled[s.prompt :]] for s in batch],
        "logprobs": [[-6.9] * (len(s.ids) - s.prompt) for s in batch],
    }


def trl(model: str, bf16: bool, repeats: int) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    began: list[Time] = []
    rollouts = injected()

    def rollout_func(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        began.append(now())
        return {name: list(x) for name, x in rollouts.items()}

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [k % 5 / 4 for k in range(len(completions))]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=bf16, per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=SEQUENCES // MICRO // 2, steps_per_generation=SEQUENCES // MICRO,
            num_generations=GROUP, max_completion_length=1024, gradient_checkpointing=False, beta=0.0,
            max_steps=2 * (repeats + 1), learning_rate=1e-6, save_strategy="no", report_to="none",
            logging_strategy="no", disable_tqdm=True, shuffle_dataset=False,
        )  # fmt: skip
        data = Dataset.from_list([{"prompt": f"w{k + 2}"} for k in range(SEQUENCES // GROUP)])
        policy = Qwen3ForCausalLM(model_config(model))
        GRPOTrainer(
            policy, reward, args=config, train_dataset=data, processing_class=tokenizer(), rollout_func=rollout_func
        ).train()
    began.append(now())
    return lists([b - a for a, b in pairwise(began[1:])])


if __name__ == "__main__":
    measure({"trl": trl})
