"""Chooses between kernel and torch by measurement: torch runs if its own operation is faster for a width and dtype.

There is one table per compute capability.  The package contains the tables of the cards that were measured, and
``fabricamp doctor --measure`` writes one for the installed card.  Without a table torch runs.  In eager steps torch also runs the
norms of small inputs, because a kernel costs more host time.

In order: the choice of an op, the settings of the process that override it, the transforms and observers that need torch's own
operations, the files with the tables, and the report of the choices (:func:`backend`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import torch

from fabricamp.errors import ConfigError
from fabricamp.ops import bridge
from fabricamp.ops.batch_norm.exchange import exchange_on
from fabricamp.ops.bridge import Backend, runs_kernels
from fabricamp.torch_private import (
    dispatch_modes,
    forward_derivative_level,
    functorch_active,
    is_batched_gradient,
    tracing_state,
)

SHIPPED: Final = Path(__file__).parent / "dispatch.json"
MEASURED: Final = {"layer_norm": "layer_norm", "rms_norm": "rms_norm", "cross_entropy": "fused_cross_entropy"}
"""The ops that a table decides about, with their public names; every other op is a kernel wherever kernels run."""

_MEASURE: Final = "`fabricamp doctor --measure` compares them on this card"

Runner = Literal["cupy", "torch"]
Bands = list[tuple[int, Runner]]
"""Pairs of the first width of a band and its runner, ascending; below the first band torch runs."""

Card = dict[str, Any]
"""The measurements of one card: ``{"measured": text, "choices": {op: {dtype: bands}}}``."""

Mode = Literal["eager", "graph"]
"""Whether a choice counts the time of host and GPU ("eager"), or of the GPU only ("graph")."""

_WORTH_THE_HOST: Final = 4 * 2**20
"""Elements of a norm's input from which its kernel also runs in eager steps.

For a million elements, forward and backward together, the kernels save 2 us (RMSNorm, width 768) to 8 us (LayerNorm) of an H200;
in fp32 they save no more than in half precision.  They cost an otherwise idle host 24 us, independent of the size.
"""


class ChoiceSettings(NamedTuple):
    """The process-wide settings that a choice depends on, besides operands, card and tables; part of the key of cached choices."""

    forced: Runner | None = None
    """The runner that overrides the tables."""
    mode: Mode = "eager"
    forgotten: int = 0
    """How often :func:`forget` was called."""


settings = ChoiceSettings()
"""The settings of this process; the tables are per process too."""


def chosen(op: str, dtype: torch.dtype | None, width: int, device: torch.device) -> bool:
    """Returns whether ``op`` over rows of ``width`` elements runs as a kernel on ``device``; else torch runs.

    ``dtype``: that of input, parameters and output, or None if they differ.  The answer holds for forward and backward.
    """
    if not runs_kernels(device):
        return False
    if settings.forced is not None:
        return settings.forced == "cupy"
    return device.type != "cuda" or _choice(op, dtype, width, device)


# torch.compile takes the answer as a constant, without tracing: it depends on constants only.
chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def worth_the_host(elements: int) -> bool:
    """Returns whether a norm may be a kernel for an input of this many ``elements``, if torch has one operation for the norm.

    Used in addition to :func:`chosen`.  Depends on size and mode only, so that no result depends on how busy a host is.
    """
    return settings.forced is not None or settings.mode == "graph" or elements >= _WORTH_THE_HOST


@functools.lru_cache(maxsize=4096)
def _choice(op: str, dtype: torch.dtype | None, width: int, device: torch.device) -> bool:
    card = _card(capability(device))
    return card is not None and runner(bands_of(card, op, dtype), width) == "cupy"


def runner(bands: Bands, width: int) -> Runner:
    """Returns the runner of the band that contains ``width``."""
    runner: Runner = "torch"
    for start, name in bands:
        if width >= start:
            runner = name
    return runner


def bands_of(card: Card, op: str, dtype: torch.dtype | None) -> Bands:
    """Returns the bands of ``op`` for ``dtype`` (None: mixed); an empty list if they were not measured."""
    bands: Bands = card["choices"].get(op, {}).get(name_of(dtype), [])
    return bands


def name_of(dtype: torch.dtype | None) -> str:
    """Returns the name of ``dtype`` in the tables; None stands for several dtypes in one call."""
    return "mixed" if dtype is None else str(dtype).removeprefix("torch.")


def capability(device: torch.device) -> str:
    """Returns the compute capability of a CUDA ``device`` in the form of the tables: ``"9.0"``."""
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def user_file() -> Path:
    """Returns the file that ``fabricamp doctor --measure`` writes: under ``$FABRICAMP_CACHE``, or ``~/.cache/fabricamp``."""
    folder = os.environ.get("FABRICAMP_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "fabricamp") / "dispatch.json"


def set_kernel_choice(mode: Mode) -> None:
    """Sets whether norms of small inputs run as kernels in this process: yes for ``"graph"``, no for ``"eager"`` (the default).

    A kernel takes more host time than torch's operation, and less GPU time.  In eager steps torch's operation therefore runs
    below 4.2 million elements of input.  A loop that captures its steps as a CUDA graph calls this with ``"graph"`` before the
    first step; the Trainer does so in a run with ``cuda_graph``.

    >>> set_kernel_choice("eager")
    """
    global settings  # noqa: PLW0603
    if mode not in get_args(Mode):
        raise ConfigError(f"set_kernel_choice({mode!r}) is not known (known: {', '.join(map(repr, get_args(Mode)))})")
    settings = settings._replace(mode=mode)


@contextlib.contextmanager
def always(name: Runner) -> Generator[None, None, None]:
    """Makes ``"cupy"`` or ``"torch"`` run within the context, regardless of the tables: for measurements and tests."""
    global settings  # noqa: PLW0603
    before = settings.forced
    settings = settings._replace(forced=name)
    try:
        yield
    finally:
        settings = settings._replace(forced=before)


def forget() -> None:
    """Drops the cached tables and choices, so that the next choice reads the tables again."""
    global settings  # noqa: PLW0603
    settings = settings._replace(forgotten=settings.forgotten + 1)
    _card.cache_clear()
    _choice.cache_clear()


def torch_alone() -> bool:
    """Returns whether an active transform only knows torch's own operations: torch.func, forward derivatives, torch.jit.trace."""
    return functorch_active() or forward_derivative_level() >= 0 or tracing_state() is not None


torch_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_batch(gradient: torch.Tensor) -> bool:
    """Returns whether ``gradient`` is a batch: ``torch.autograd.grad(is_grads_batched=True)``, vectorized Jacobians."""
    return is_batched_gradient(gradient) or functorch_active()


def recorded() -> bool:
    """Returns whether an observer needs a registered operation: a compiler, make_fx, fake tensors, or any dispatch mode."""
    return torch.compiler.is_compiling() or dispatch_modes() > 0


@functools.cache
def _card(name: str) -> Card | None:
    """Returns the table of a card: the user's own if there is one, else that of the package, else None."""
    for file in (user_file(), SHIPPED):
        card: Card | None = _read(file).get(name)
        if card is not None:
            return card
    return None


def _read(file: Path) -> dict[str, Card]:
    # Not file.exists(), which raises if the home folder belongs to another user, as in some containers.
    if not os.access(file, os.R_OK):
        return {}
    try:
        cards: dict[str, Card] = json.loads(file.read_text())
        for card in cards.values():
            _check_card(card)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not a dispatch table ({error}); delete it, {_MEASURE} and writes it anew"
        ) from error
    return cards


def _check_card(card: Card) -> None:
    if not isinstance(card["measured"], str):
        raise TypeError("'measured' is not a string")
    for of_dtypes in card["choices"].values():
        for start, name in itertools.chain.from_iterable(of_dtypes.values()):
            if not isinstance(start, int) or name not in {"cupy", "torch"}:
                raise ValueError(f"[{start!r}, {name!r}] is not a pair of a width and 'cupy' or 'torch'")


def write(file: Path, name: str, card: Card) -> None:
    """Writes ``card`` into ``file`` under its compute capability ``name``; the file's other cards are kept."""
    cards = _read(file) | {name: card}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(_as_text(cards))
    temporary.replace(file)
    forget()


def _as_text(cards: dict[str, Card]) -> str:
    """Returns JSON with the bands of each dtype on one line."""
    lines = []
    for name, card in sorted(cards.items()):
        ops = []
        for op, of_dtypes in card["choices"].items():
            rows = ",\n".join(f"        {json.dumps(dtype)}: {json.dumps(bands)}" for dtype, bands in of_dtypes.items())
            ops.append(f"      {json.dumps(op)}: {{\n{rows}\n      }}")
        about = f'    "measured": {json.dumps(card["measured"])},\n    "choices": {{\n'
        lines.append(f"  {json.dumps(name)}: {{\n{about}" + ",\n".join(ops) + "\n    }\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def backend(device: torch.device | str | None = None) -> dict[str, Backend]:
    """Returns what runs each op on ``device`` (default: the first GPU, else the CPU) and why.

    >>> str(backend("cpu")["scale"])
    'torch: its tensors are on cpu'
    """
    backends = bridge.backend(device)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name, reason = backends["sync_batch_norm"]
    backends["sync_batch_norm"] = Backend(name, f"{reason}; {exchange_on(device)}")
    if device.type != "cuda" or not runs_kernels(device):
        return backends
    card = _card(capability(device))
    return backends | {public: _explained(card, op) for op, public in MEASURED.items()}


def _explained(card: Card | None, op: str) -> Backend:
    if card is None:
        return Backend("torch", f"this card was not measured; {_MEASURE}")
    parts = []
    for dtype, bands in card["choices"].get(op, {}).items():
        if any(name == "cupy" for _, name in bands):
            parts.append(f"{dtype} {_spans(bands)}")
    if not parts:
        return Backend("torch", f"faster on this card ({card['measured']})")
    if op != "cross_entropy":
        parts.append(
            f"where all has one dtype in eager steps from {_WORTH_THE_HOST / 1e6:.1f} million elements of input on"
        )
    return Backend("cupy", f"for widths {', '.join(parts)}; else torch, which is faster there ({card['measured']})")


def _spans(bands: Bands) -> str:
    ends = [*(start for start, _ in bands[1:]), None]
    spans = [(start, end) for (start, name), end in zip(bands, ends, strict=True) if name == "cupy"]
    return " and ".join(f"from {start}" if end is None else f"{start} to {end - 1}" for start, end in spans)
