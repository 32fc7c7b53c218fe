"""Random number generators: seeding, saving and restoring their states bit for bit, and torch's deterministic mode."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricamp._utils.first_rank import STARTED_BY, started_rank
from fabricamp.arguments.checks import check_flag
from fabricamp.errors import ConfigError
from fabricamp.habits import habits

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict

_LOG = logging.getLogger("fabricamp")
_SEED = "FABRICAMP_GLOBAL_SEED"
_LIGHTNINGS_SEED = "PL_GLOBAL_SEED"
_WORKERS = "FABRICAMP_SEED_WORKERS"
_LIGHTNINGS_WORKERS = "PL_SEED_WORKERS"
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_LARGEST_SEED = 2**32 - 1
"""The largest seed that NumPy takes."""


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seeds Python, NumPy and torch (every device) and returns the seed; processes started later inherit it.

    Without ``seed``: the seed of an earlier call, or that of the environment variable ``PL_GLOBAL_SEED``, else 0.  With
    ``workers``, the loaders' workers get different random numbers on each rank.  Lightning's variables ``PL_GLOBAL_SEED`` and
    ``PL_SEED_WORKERS`` are set too.
    """
    seed = global_seed() if seed is None else _checked(seed, "seed_everything(seed)")
    # The script that a Trainer starts again for its ranks has said so already.
    was_said = os.environ.get(STARTED_BY) == "script" and os.environ.get(_SEED) == str(seed)
    for name in (_SEED, _LIGHTNINGS_SEED):
        os.environ[name] = str(seed)
    for name in (_WORKERS, _LIGHTNINGS_WORKERS):
        os.environ[name] = str(int(workers))
    _seed_all(seed)
    if verbose and started_rank() == 0 and not was_said:
        _LOG.info("Seed set to %d", seed)
    return seed


def global_seed() -> int:
    """Returns the seed that :func:`seed_everything` set in this process or in its parent; else 0."""
    # A program written for Lightning may set Lightning's variable itself, after a seed_everything.
    lightnings_first = habits().lightnings_seed_first and _LIGHTNINGS_SEED in os.environ
    name = _SEED if _SEED in os.environ and not lightnings_first else _LIGHTNINGS_SEED
    return _checked(os.environ.get(name, "0"), f"the environment variable {name}")


def seeds_workers() -> bool:
    """Returns whether the loaders' workers are seeded by rank."""
    return os.environ.get(_WORKERS, "1") != "0"


def seed_worker(worker_id: int, rank: int) -> None:  # noqa: ARG001 - torch passes it
    """Seeds a loader's worker, as its ``worker_init_fn``, with a seed that no worker of another rank has."""
    # torch.initial_seed() is already different for each worker and each pass, but the same on every rank.
    text = f"{torch.initial_seed()} {rank}".encode()
    _seed_all(int.from_bytes(hashlib.sha256(text).digest()[:4], "little"))


def snapshot_rng() -> tuple[Any, Any, Tensor, list[Tensor]]:
    """Returns the generators' states in the libraries' own forms, for :func:`capture_rng`; takes a tenth of its time."""
    import numpy as np

    # Uninitialised CUDA has drawn no random numbers.  Even asking for the number of GPUs would initialise it and rule out forking.
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), devices


def capture_rng(snapshot: tuple[Any, Any, Tensor, list[Tensor]] | None = None) -> dict[str, Any]:
    """Returns the states of Python's, NumPy's, torch's and every CUDA device's generator as tensors, numbers and lists.

    ``snapshot`` is an earlier result of :func:`snapshot_rng`; None: the present states.
    """
    import numpy as np

    python, numpy, cpu, cuda = snapshot_rng() if snapshot is None else snapshot
    version, internal, gauss = python
    name, keys, position, has_gauss, numpy_gauss = numpy
    return {
        "python": {
            "version": version,
            "state": torch.tensor(internal, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(numpy_gauss),
        },
        "torch": cpu,
        "cuda": cuda,
    }


def restore_rng(state: StateDict) -> None:
    """Restores the states that :func:`capture_rng` returned; states of missing devices are left out."""
    import numpy as np

    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state.cpu(), index)


@contextlib.contextmanager
def isolate_rng() -> Iterator[None]:
    """A context that restores every generator at its end."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """A context with Python, NumPy and torch (CPU) seeded from ``numbers``; restores their states at its end."""
    import numpy as np

    # Not capture_rng: this runs once per sample, and does not concern devices.
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    words = [int.from_bytes(digest[start : start + 4], "little") for start in (0, 8, 16)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.default_generator.manual_seed(words[2])
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


@contextlib.contextmanager
def deterministic_mode(mode: bool | str, benchmark: bool | None = None) -> Iterator[None]:
    """A context with torch's deterministic algorithms and cuDNN's ``benchmark``; restores the earlier settings at its end.

    ``mode`` ``"warn"`` only warns about operations without a deterministic algorithm; False leaves the algorithms as they are.
    ``benchmark`` None: off with a deterministic mode, else unchanged.
    """
    check_flag("deterministic", mode, others=("warn",))
    before = _determinism()
    cudnn_benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get(_CUBLAS)
    if mode:
        os.environ.setdefault(_CUBLAS, ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
        benchmark = bool(benchmark)
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    try:
        yield
    finally:
        if _determinism() != before:  # the call imports torch's compiler, which takes more than a second
            enabled, warn_only = before
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = cudnn_benchmark
        if workspace is None:
            os.environ.pop(_CUBLAS, None)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _seed_all(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _checked(seed: Any, name: str) -> int:
    try:
        number = int(seed)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= _LARGEST_SEED:
        raise ConfigError(f"{name}={seed!r} is not a seed; it has to be an integer from 0 to {_LARGEST_SEED}")
    return number
