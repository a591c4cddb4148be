"""The verifiers of a run by name, the judge on an engine of its own; and the tasks that they fit.

Not here: what they do (`rewards.verifiers`, `rewards.judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from recipes.engines import Engines
from recipes.grid.judging import JUDGED, Judging
from recipes.named import resolve
from recipes.session import load_tokenizer
from rewards.judge import Hybrid, Judge
from rewards.verifiers import RULES
from swarm.chat import chat_of
from swarm.checkpoint import frozen_ref
from swarm.types import Sampling, Task
from swarm.verdicts import Verifier

_MORE = (1, 4, 16)
"""How many times the wanted tasks are looked through for those that fit."""


class MisfitError(ValueError):
    """What was asked for does not fit the tasks or the recipe; the message is one line for the user."""


async def verifiers_of(names: Iterable[str], judging: Judging, engines: Engines) -> dict[str, Verifier]:
    """The verifiers of these names; the judge's engine is opened if one of them needs it.

    Raises ValueError for a name that there is not or that needs a judge where there is none, CheckpointError and
    EngineError where the judge cannot be served.
    """
    names = tuple(names)
    judge = await judge_of(judging, engines) if set(names) & set(JUDGED) else None
    return {name: _verifier(name, judging, judge) for name in names}


async def judge_of(judging: Judging, engines: Engines) -> Judge:
    """The judge, its engine open. Raises as `verifiers_of` does."""
    if judging.checkpoint is None:
        raise ValueError(f"judge: {judging.lacks('judge')}")
    ref = frozen_ref(resolve(str(judging.checkpoint)))
    engine = await engines.serve(ref, judging.engine, stays=True)
    chat = chat_of(load_tokenizer(ref.path))
    return Judge(
        engine=engine,
        chat=chat,
        rubric=judging.asked(),
        sampling=Sampling(judging.turn_tokens, judging.temperature, stop=chat.stop),
        context=judging.context,
        answer_tokens=judging.answer_tokens,
        attempts=judging.attempts,
        seconds=judging.seconds,
    )


def _verifier(name: str, judging: Judging, judge: Judge | None) -> Verifier:
    if judge is None or name not in JUDGED:
        if name not in RULES:
            raise ValueError(f"verifier {name!r}, want one of {', '.join((*RULES, *JUDGED))}")
        return RULES[name]
    return judge if name == "judge" else Hybrid((RULES[judging.rule], 1 - judging.weight), (judge, judging.weight))


def fitting(
    source: str, draw: Callable[[int], Sequence[Task]], n: int, verifiers: Mapping[str, Verifier]
) -> list[Task]:
    """The first n of a source's tasks that all verifiers fit; `draw(m)` gives its first m.

    Raises MisfitError, naming the verifier, where one fits none of the first n, or all fit too few.
    """
    looked: Sequence[Task] = ()
    misfit, kept = "", list[Task]()
    for times in _MORE:
        looked = draw(n * times)
        whys = [_why(task, verifiers) for task in looked]
        kept = [task for task, why in zip(looked, whys, strict=True) if not why]
        if len(kept) >= n:
            return kept[:n]
        misfit = next(why for why in whys if why)
        if not kept:
            break
    raise MisfitError(f"{misfit}; {len(kept)} of {len(looked)} tasks from {source} fit, want {n}")


def _why(task: Task, verifiers: Mapping[str, Verifier]) -> str:
    found = ((name, verifier.fits(task)) for name, verifier in verifiers.items())
    return next((f"verifier {name} does not fit task {task.id}: {why}" for name, why in found if why), "")
