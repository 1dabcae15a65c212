"""Environment variables, engine arguments and calls that all uses of vLLM share.

The calls raise when vLLM's processes die.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from rayloop.core.failures import ConfigError, WorkerLost
from rayloop.engines.generation.vllm_worker import OWNER, VllmWorker, adapter
from rayloop.engines.settings import PICTURES_GIB, VllmEngineSettings

TESTED = SpecifierSet("==0.32.*")
"""Releases of vLLM that work.

The contract tests run with 0.32.0 on CPUs, and rayloop[gpu] installs 0.32.0.
"""
LIVENESS_INTERVAL_S = 1.0
"""Time between two checks, by a call that waits for vLLM, that vLLM's processes are alive."""


def prepare(settings: VllmEngineSettings, folder: str) -> None:
    """Set the environment that vLLM and its processes read.

    Sockets and temporary files are in ``folder``. Raises ConfigError when vLLM is missing or of an
    untested version.
    """
    if settings.extra.get("enforce_eager"):
        # enforce_eager alone leaves functions that torch
        # compiles at the first request, for half a minute.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ |= {
        # CUDA cannot be used after a fork, and a lock that another thread held stays locked there.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": folder,
        "TMPDIR": folder,
        OWNER: str(os.getpid()),
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # vLLM would bind its threads to cores, and several engines of a machine to the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # FlashInfer's sampler is compiled at its first use, by a nvcc that may be missing.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        from vllm import __version__ as installed
    except ImportError as error:
        raise ConfigError(
            f"engine kind vllm needs vLLM {TESTED}: {error}. Install rayloop[gpu]"
        ) from error
    if installed not in TESTED:
        raise ConfigError(
            f"engine kind vllm: vLLM {installed} is installed, rayloop knows {TESTED}. Install"
            " rayloop[gpu]"
        )


def versions() -> dict[str, str]:
    """Return the versions of vLLM and of xgrammar, which makes replies follow a schema."""
    from vllm import __version__ as installed

    installed_versions = {"vllm": installed}
    with suppress(PackageNotFoundError):
        installed_versions["xgrammar"] = version("xgrammar")
    return installed_versions


def common_arguments(model: str, settings: VllmEngineSettings) -> dict[str, Any]:
    """Return arguments of ``AsyncEngineArgs``; ``settings.extra`` overrides them."""
    # By default vLLM starts several workers through Ray when its own process is in a placement
    # group, as every actor of a run is: it would want bundles of one GPU each, and a Ray that its
    # engine process has not joined.
    several = settings.receivers > 1
    return {
        "model": model,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": "mp" if several else "uni",
        "max_model_len": settings.max_model_len,
        "gpu_memory_utilization": settings.memory_fraction,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "max_num_seqs": settings.max_sequences,
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": PICTURES_GIB,
        "trust_remote_code": False,
        # Otherwise generation_config.json changes sampling defaults, and log-probs with them.
        "generation_config": "vllm",
        "worker_extension_cls": f"{VllmWorker.__module__}.{VllmWorker.__qualname__}",
        "disable_log_stats": True,
    }


def profiler(folder: str) -> Any:
    """Return the settings of vLLM's profiler, which costs nothing until it is started.

    Its files are below ``folder``.
    """
    from vllm.config import ProfilerConfig

    return ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=folder,
        torch_profiler_with_stack=False,
        ignore_frontend=True,
    )


async def answered(llm: Any, call: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a call to vLLM.

    Raises WorkerLost when vLLM fails, or dies and leaves the call unanswered.
    """
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LIVENESS_INTERVAL_S)
            if not task.done():
                alive(llm)
        return task.result()
    except (EngineDeadError, EngineGenerateError) as error:
        raise WorkerLost(f"vLLM failed: {error.__cause__ or error!r}") from error
    except Exception as error:
        # A bare Exception comes from vLLM's engine process.
        if type(error) is not Exception:
            raise
        raise WorkerLost(f"vLLM failed: {error}") from error
    finally:
        task.cancel()


class VllmLoad:
    """Waiting requests and cache use after the scheduler's last step.

    Has the methods of vLLM's ``stat_loggers``.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self.cache = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
        """Take the numbers of a step."""
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs
            self.cache = scheduler_stats.kv_cache_usage

    def log(self, *state: Any) -> None:
        """Does nothing."""

    log_engine_initialized = log
    record_sleep_state = log


def start(arguments: Mapping[str, Any], loggers: Sequence[Any] | None = None) -> Any:
    """Return an ``AsyncLLM``.

    The usage lets vLLM choose the tokens of a step by device: 16,384 from 70 GiB on, except on an
    A100, else 8,192.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS, stat_loggers=loggers
    )


async def output(
    llm: Any, prompt: Mapping[str, Any], parameters: Any, number: str, *, adapted: bool = False
) -> Any:
    """Return vLLM's output for the request ``number``; ``adapted``: with its adapters.

    Raises WorkerLost as ``answered`` does.
    """
    lora_request = adapter() if adapted else None

    async def last() -> Any:
        async for answer in llm.generate(prompt, parameters, number, lora_request=lora_request):
            latest = answer.outputs[0]
        return latest

    return await answered(llm, last())


def stat_loggers(load: VllmLoad, name: str | None) -> list[Any]:
    """Return ``load``; with ``name`` also a logger that sends vLLM's metrics to Ray's.

    They have ``name`` as label ``model_name``.
    """
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    loggers: list[Any] = [lambda config, index: load]
    if name:
        loggers.append(RayPrometheusStatLogger)
    return loggers


def alive(llm: Any) -> None:
    """Raise WorkerLost when vLLM's processes are dead."""
    if llm.errored:
        raise WorkerLost("vLLM's engine process has died")
