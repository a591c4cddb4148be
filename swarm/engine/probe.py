"""Whether an engine serves the weights that the learner has: what it says of its own tokens, against the model.

An update can be reported a success and be none: a matrix that was packed before, keys and values that were computed
with other weights. What training relies on is that the log-probabilities are the policy's, so that is what is asked,
through the engine's own `generate`. The prompt is the same each time, so that whatever was kept of it is used.
Not here: how weights get there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from swarm.types import Engine, EngineError, Sampling

_PROMPT = 80
_SAID = 16
_STRIDE = 7


async def verify(engine: Engine, model: nn.Module, vocab: int, version: int, bound: float) -> float:
    """The largest difference, in nats, between the engine's log-probabilities of 16 tokens and the model's.

    Raises EngineError, with the version, where it is above `bound` or no number.
    """
    prompt = [k * _STRIDE % vocab for k in range(_PROMPT)]
    said = await engine.generate(prompt, Sampling(_SAID, seed=version))
    expected = log_probabilities(model, prompt, said.ids)
    off = max(abs(a - b) for a, b in zip(said.logprobs, expected, strict=True))
    if not off <= bound:
        raise EngineError(
            f"update to version {version}: the engine's log-probabilities are {off:.3g} nats from the learner's, "
            f"want at most {bound:g} (serving.probe_bound)"
        )
    return off


def log_probabilities(model: nn.Module, prompt: Sequence[int], said: Sequence[int]) -> list[float]:
    """log π in nats, at temperature 1, of each of the tokens `said` after `prompt`."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *said]], device=device)).logits[0, len(prompt) - 1 : -1]
        logp_TV = logits_TV.float().log_softmax(-1)
    return [float(row_V[i]) for row_V, i in zip(logp_TV, said, strict=True)]
