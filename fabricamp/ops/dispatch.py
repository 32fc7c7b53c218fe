"""Kernel or torch, by measurement: where torch's own operation is faster for a width and dtype, torch runs.

A table says it for each kind of card (its compute capability): the package brings those of the cards that were measured, and
``fabricamp doctor --measure`` writes one for the card at hand.  Without a table torch runs.  A norm of a small input is torch's
too where steps run eagerly: a kernel takes the host longer.
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
"""What a table decides about, and the op's public name; every other op is a kernel wherever kernels run."""

_MEASURE: Final = "`fabricamp doctor --measure` compares them on this card"

Runner = Literal["cupy", "torch"]
Bands = list[tuple[int, Runner]]
"""Widths from which on something runs, ascending; below the first torch does."""

Card = dict[str, Any]
"""What one card's measurement found: ``{"measured": text, "choices": {op: {dtype: bands}}}``."""

Mode = Literal["eager", "graph"]
"""Whether the host's time is weighed beside the GPU's, or the GPU's alone."""

_WORTH_THE_HOST: Final = 4 * 2**20
"""Elements of a norm's input from which its kernel runs in eager steps too.

For a million elements the kernels save 2 (RMSNorm, width 768) to 8 us (LayerNorm) of an H200, forward and backward, in fp32 not
more than in half precision, and cost a quiet host 24 us, whatever the size.
"""


class Settings(NamedTuple):
    """All that a choice depends on beside operands, card and tables; answers are kept with this."""

    forced: Runner | None = None
    """What runs, whatever the tables say."""
    mode: Mode = "eager"
    forgotten: int = 0
    """How often the tables were."""


settings = Settings()
"""One for the process, as the tables are."""


def chosen(op: str, dtype: torch.dtype | None, width: int, device: torch.device) -> bool:
    """Returns whether ``op`` over rows of ``width`` elements runs as a kernel on ``device``; else torch runs.

    ``dtype`` is that of input, parameters and output, or None where they differ.  The answer serves forward and backward.
    """
    if not runs_kernels(device):
        return False
    if settings.forced is not None:
        return settings.forced == "cupy"
    return device.type != "cuda" or _choice(op, dtype, width, device)


def worth_the_host(elements: int) -> bool:
    """Returns whether a norm of so many ``elements`` of input may be a kernel where torch has one operation for it.

    Asked beside :func:`chosen`; by size and mode alone, so that no result depends on how busy a host is.
    """
    return settings.forced is not None or settings.mode == "graph" or elements >= _WORTH_THE_HOST


def set_kernel_choice(mode: Mode) -> None:
    """Sets whether norms of small inputs are kernels in this process: ``"graph"``, or not: ``"eager"``, as it is from the start.

    A kernel takes the host longer than torch's operation does, and the GPU less.  So below 4.2 million elements of input torch's
    runs in eager steps, and a loop that captures its steps as a CUDA graph says ``"graph"`` before the first one.  The Trainer
    says so in a run with ``cuda_graph``.

    >>> set_kernel_choice("eager")
    """
    global settings  # noqa: PLW0603
    if mode not in get_args(Mode):
        raise ConfigError(f"set_kernel_choice({mode!r}) is not known (known: {', '.join(map(repr, get_args(Mode)))})")
    settings = settings._replace(mode=mode)


# torch.compile takes the answer as it stands: it is known from constants, and needs no tracing.
chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]


def torch_alone() -> bool:
    """Returns whether what looks on knows torch's own operations alone: torch.func, forward derivatives, torch.jit.trace."""
    return functorch_active() or forward_derivative_level() >= 0 or tracing_state() is not None


torch_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_batch(gradient: torch.Tensor) -> bool:
    """Returns whether ``gradient`` stands for several: ``torch.autograd.grad(is_grads_batched=True)``, vectorized Jacobians."""
    return is_batched_gradient(gradient) or functorch_active()


def recorded() -> bool:
    """Returns whether what looks on has to see a registered operation: a compiler, make_fx, fake tensors, any dispatch mode."""
    return torch.compiler.is_compiling() or dispatch_modes() > 0


@functools.lru_cache(maxsize=4096)
def _choice(op: str, dtype: torch.dtype | None, width: int, device: torch.device) -> bool:
    card = _card(capability(device))
    return card is not None and runner(bands_of(card, op, dtype), width) == "cupy"


def runner(bands: Bands, width: int) -> Runner:
    """Returns what ``bands`` say for ``width``."""
    found: Runner = "torch"
    for start, name in bands:
        if width >= start:
            found = name
    return found


def bands_of(card: Card, op: str, dtype: torch.dtype | None) -> Bands:
    """Returns the bands of ``op`` for ``dtype`` (None: mixed); none where they were not measured."""
    found: Bands = card["choices"].get(op, {}).get(name_of(dtype), [])
    return found


def name_of(dtype: torch.dtype | None) -> str:
    """Returns how the tables call ``dtype``; None is several of them in one call."""
    return "mixed" if dtype is None else str(dtype).removeprefix("torch.")


def capability(device: torch.device) -> str:
    """Returns the compute capability of a CUDA ``device`` as the tables call it: ``"9.0"``."""
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def user_file() -> Path:
    """Returns where ``fabricamp doctor --measure`` writes: under ``$FABRICAMP_CACHE``, or ``~/.cache/fabricamp``."""
    folder = os.environ.get("FABRICAMP_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "fabricamp") / "dispatch.json"


@functools.cache
def _card(name: str) -> Card | None:
    """The user's own table of a card goes before the one that the package brings."""
    for file in (user_file(), SHIPPED):
        found: Card | None = _read(file).get(name)
        if found is not None:
            return found
    return None


def _read(file: Path) -> dict[str, Card]:
    # Not file.exists(), which raises where the home folder is another user's, as it is in some containers.
    if not os.access(file, os.R_OK):
        return {}
    try:
        found: dict[str, Card] = json.loads(file.read_text())
        for card in found.values():
            _check_card(card)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no dispatch table ({error}); delete it, {_MEASURE} and writes it anew") from error
    return found


def _check_card(card: Card) -> None:
    if not isinstance(card["measured"], str):
        raise TypeError("'measured' is no text")
    for of_dtypes in card["choices"].values():
        for start, name in itertools.chain.from_iterable(of_dtypes.values()):
            if not isinstance(start, int) or name not in {"cupy", "torch"}:
                raise ValueError(f"[{start!r}, {name!r}] is no pair of a width and 'cupy' or 'torch'")


def write(file: Path, name: str, card: Card) -> None:
    """Puts ``card`` into ``file`` under its compute capability ``name``, beside the cards that are there."""
    known = _read(file) | {name: card}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(_as_text(known))
    beside.replace(file)
    forget()


def _as_text(cards: dict[str, Card]) -> str:
    """JSON with the bands of one dtype on one line."""
    lines = []
    for name, card in sorted(cards.items()):
        ops = []
        for op, of_dtypes in card["choices"].items():
            rows = ",\n".join(f"        {json.dumps(one)}: {json.dumps(bands)}" for one, bands in of_dtypes.items())
            ops.append(f"      {json.dumps(op)}: {{\n{rows}\n      }}")
        about = f'    "measured": {json.dumps(card["measured"])},\n    "choices": {{\n'
        lines.append(f"  {json.dumps(name)}: {{\n{about}" + ",\n".join(ops) + "\n    }\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def forget() -> None:
    """Reads the tables anew at the next question."""
    global settings  # noqa: PLW0603
    settings = settings._replace(forgotten=settings.forgotten + 1)
    _card.cache_clear()
    _choice.cache_clear()


@contextlib.contextmanager
def always(name: Runner) -> Generator[None, None, None]:
    """Within it ``"cupy"`` or ``"torch"`` runs, whatever the tables say: for measurements and tests."""
    global settings  # noqa: PLW0603
    before = settings.forced
    settings = settings._replace(forced=name)
    try:
        yield
    finally:
        settings = settings._replace(forced=before)


def backend(device: torch.device | str | None = None) -> dict[str, Backend]:
    """Returns what runs each op on ``device`` (the first GPU where there is one) and why.

    >>> str(backend("cpu")["scale"])
    'torch: its tensors are on cpu'
    """
    found = bridge.backend(device)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name, reason = found["sync_batch_norm"]
    found["sync_batch_norm"] = Backend(name, f"{reason}; {exchange_on(place)}")
    if place.type != "cuda" or not runs_kernels(place):
        return found
    card = _card(capability(place))
    return found | {public: _explained(card, op) for op, public in MEASURED.items()}


def _explained(card: Card | None, op: str) -> Backend:
    if card is None:
        return Backend("torch", f"this card was not measured; {_MEASURE}")
    parts = []
    for dtype, bands in card["choices"].get(op, {}).items():
        parts += [f"{dtype} {_spans(bands)}"] if any(name == "cupy" for _, name in bands) else []
    if not parts:
        return Backend("torch", f"faster on this card ({card['measured']})")
    if op != "cross_entropy":
        parts += [
            f"where all has one dtype in eager steps from {_WORTH_THE_HOST / 1e6:.1f} million elements of input on"
        ]
    return Backend("cupy", f"for widths {', '.join(parts)}; else torch, which is faster there ({card['measured']})")


def _spans(bands: Bands) -> str:
    ends = [*(start for start, _ in bands[1:]), None]
    spans = [(start, end) for (start, name), end in zip(bands, ends, strict=True) if name == "cupy"]
    return " and ".join(f"from {start}" if end is None else f"{start} to {end - 1}" for start, end in spans)
