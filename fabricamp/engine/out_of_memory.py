"""Errors of memory: which ones they are, how one is forgotten so that its memory is free again, and what it is told with.

:func:`note_of` says what filled the memory, and which words of the Trainer and the optimizer would help most
(:func:`helping_words`).
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fabricamp.engine.compiled_calls import repeated_blocks
from fabricamp.ops.shards import local
from fabricamp.optimizers import FusedAdam, FusedLion, FusedOptimizer, FusedSGD
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.level import OptLevel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from fabricamp.engine.run_parts import RunParts
    from fabricamp.strategies.base import Strategy

_WORDS: Final = ("out of memory", "cublas_status_alloc_failed", "defaultcpuallocator: can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` says that memory, of a device or of the host, was not enough."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)


def drop_frames(error: BaseException) -> None:
    """Drops the variables of all frames that ``error`` has passed, with the graph and the activations that they hold."""
    for one in _chain(error):
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
    gc.collect()  # cycles between an error and a frame, or within the user's objects


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]


# -- what an error is told with ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device, by what they are for."""

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    states: int = 0
    buffers: int = 0
    others: int = 0
    """Activations, and whatever else a step holds."""

    @property
    def kept(self) -> int:
        """What stays from step to step."""
        return self.weights + self.gradients + self.masters + self.states + self.buffers

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("weights", "gradients", "masters", "states", "buffers")}
        texts = [f"{name} {shown(size)}" for name, size in parts.items() if size]
        return ", ".join([*texts, f"activations and others {shown(self.others)}"] if self.others else texts)


class Word(NamedTuple):
    """What to write, and about how many bytes that would save."""

    text: str
    saves: int


def shown(size: float) -> str:
    """Returns a number of bytes as text."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def kept_memory(parts: RunParts) -> MemoryUse:
    """Returns what stays from step to step, as it is now."""
    module = parts.module
    own = list(module.parameters())
    known = {id(one) for one in own}
    updated = [one for optimizer in parts.optimizers for one in owned_parameters(optimizer)]
    masters = {id(one): one for one in updated if id(one) not in known}
    states = [
        value
        for optimizer in parts.optimizers
        for state in getattr(optimizer, "state", {}).values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, Tensor)
    ]
    remainders = [
        one
        for optimizer in parts.optimizers
        if isinstance(optimizer, FusedOptimizer)
        for one in optimizer.remainders.values()
    ]
    sums = [one for step in parts.optimizer_steps for one in step.memory().tensors]
    gradients = [one.grad for one in own if one.grad is not None]
    return MemoryUse(
        weights=_bytes(own),
        gradients=_bytes([*gradients, *sums]),
        masters=_bytes([*masters.values(), *remainders]),
        states=_bytes(states),
        buffers=_bytes(module.buffers()),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in map(local, tensors) if not is_lazy(one))


def helping_words(
    parts: RunParts, use: MemoryUse, logits: int = 0, *, strategy: Strategy | None = None, world_size: int | None = None
) -> list[Word]:
    """Returns what would take less memory than ``use``, by how much it saves; ``logits``: bytes of logits among the activations.

    ``strategy`` and ``world_size`` are those of the run, or of a run that is only planned.
    """
    words = []
    settings = parts.settings
    strategy = strategy or parts.strategy
    world_size = strategy.world_size if world_size is None else world_size
    precision = parts.precision
    level = precision.level.name if isinstance(precision, OptLevel) else precision.name
    if use.others:
        accumulate = settings.accumulate_grad_batches
        batch = f"accumulate_grad_batches={2 * accumulate} with half the batch size"
        if settings.on_out_of_memory == "raise" and not strategy.refuses_parts():
            batch = f'on_out_of_memory="halve" (or {batch})'
        words.append(Word(batch, (use.others + logits) // 2))
        if level in ("O0", "32-true"):
            words.append(Word('precision="O4"', use.others * 2 // 5))
        if settings.activations is None and repeated_blocks(parts.module):
            words.append(Word('activations="recompute"', use.others * 3 // 5))
    if logits:
        words.append(Word("FusedLinearCrossEntropy as the head", logits * 7 // 8))
    takes = (FusedAdam, FusedLion, FusedSGD)
    compact = [one for one in parts.optimizers if isinstance(one, takes) and one.state_format == "fp32"]
    torchs = [one for one in parts.optimizers if isinstance(one, torch.optim.Adam | torch.optim.AdamW)]
    count = sum(one.numel() for optimizer in (*compact, *torchs) for one in owned_parameters(optimizer))
    if count:
        name = "FusedAdam" if torchs else type(compact[0]).__name__
        expected = max(use.states, 8 * count if torchs or name == "FusedAdam" else 4 * count)
        words.append(Word(f'{name}(..., state="8bit")', expected * 3 // 4))
        if level == "O5" and use.masters >= 4 * count:
            words.append(Word(f'{name}(..., masters="remainder")', use.masters // 2))
    if world_size > 1 and not strategy.sharding.shards:
        processes = f" on {world_size} GPUs" if strategy.world_size == 1 else ""
        words.append(Word(f'strategy="fsdp"{processes}', use.kept * (world_size - 1) // world_size))
    return sorted(words, key=lambda one: -one.saves)


def note_of(error: BaseException, parts: RunParts) -> str:
    """Returns what filled the memory when ``error`` was raised, and what helps most; empty for other errors."""
    if not is_out_of_memory(error):
        return ""
    device = parts.strategy.device
    use = kept_memory(parts)
    sentences = []
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        peak = torch.cuda.max_memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
        use.others = max(peak - use.kept, 0)
        sentences.append(f"{shown(allocated)} were allocated, {shown(peak)} at the peak so far, of {shown(total)}")
    largest = _largest(error, parts)
    tensors = sum(size for _, size in largest)
    use.others = use.others or tensors
    sentences.append(f"kept from step to step: {use}" if use.others == 0 else f"by what it is for: {use}")
    if largest:
        named = "; ".join(f"{name} ({shown(size)})" for name, size in largest)
        sentences.append(f"the largest tensors: {named}")
    words = helping_words(parts, use)[:2]
    if words:
        helps = " and ".join(f"{word.text} (about {shown(word.saves)} less)" for word in words)
        sentences.append(f"what helps most: {helps}; `fabricamp help memory` has the others")
    return "; ".join(sentences)


def _largest(error: BaseException, parts: RunParts, number: int = 3) -> list[tuple[str, int]]:
    """Returns the largest tensors that have a name: parameters, and variables of the frames that ``error`` has passed."""
    found: dict[int, tuple[str, int]] = {}
    for name, one in parts.module.named_parameters():
        size = _bytes([one])
        found[id(one)] = (f"{name} {_form(one)}", size)
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        for name, value in list(frame.f_locals.items()):
            if isinstance(value, Tensor):
                found.setdefault(id(value), (f"{name} {_form(value)} in {frame.f_code.co_name}", _bytes([value])))
        trace = trace.tb_next
    return sorted(found.values(), key=lambda one: -one[1])[:number]


def _form(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
