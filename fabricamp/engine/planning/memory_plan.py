"""``Trainer.plan`` and ``fabricamp plan``: how much of a GPU's memory a fit takes, and what would make it fit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from fabricamp._utils.containers import tensors_within
from fabricamp.engine.compiled_calls import repeated_blocks
from fabricamp.engine.out_of_memory import MemoryUse, Word, helping_words, shown
from fabricamp.engine.planning.allocator import CachingAllocator
from fabricamp.engine.planning.cards import Card, card_of
from fabricamp.engine.planning.compiled import CompiledBlocks
from fabricamp.engine.planning.tracing import NEEDS_VALUES, FakeTensor, FakeTensorMode, Recorder, as_on_a_gpu
from fabricamp.engine.update import with_index
from fabricamp.errors import ConfigError
from fabricamp.hooks import call_hook
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.optimizers.state_sizes import states_of, temporaries_of
from fabricamp.precision import level
from fabricamp.precision.base import Precision
from fabricamp.precision.casting import cast_tensors
from fabricamp.rng import isolate_rng
from fabricamp.state import Scope, TrainerFn
from fabricamp.strategies.base import Strategy
from fabricamp.torch_private import TorchDispatchMode, storage_key, without_dispatch_modes

if TYPE_CHECKING:
    from fabricamp.compilation import Compile
    from fabricamp.engine.session import Session
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_CONTEXT: Final = 600 * 2**20
"""What CUDA and its libraries take of a card, outside of torch's allocator."""
_LATER: Final = 2**40
"""Added to the numbers of a further micro-batch's storages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of one GPU in a fit, in bytes, as torch counts it: :meth:`Trainer.plan` makes it.

    ``peak_allocated`` and ``peak_reserved`` are what ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved`` will say, and
    ``parts`` says what the allocated peak is made of.  ``words`` would take less, with about how much less, largest first.

    Example:
        >>> plan = MemoryPlan(card="L4", memory=2**34, peak_allocated=2**30, peak_reserved=2**31, parts={"weights": 2**30})
        >>> plan.fits
        True
    """

    card: str
    memory: int
    peak_allocated: int
    peak_reserved: int
    parts: dict[str, int]
    largest: list[tuple[str, int]] = field(default_factory=list)
    """The largest tensors of the step at its peak: operation, shape and dtype; bytes."""
    words: list[Word] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the figures leave out or only estimate."""

    @property
    def fits(self) -> bool:
        """Whether the card has this memory, beside what CUDA itself takes."""
        return self.peak_reserved + _CONTEXT <= self.memory

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        peaks = f"{shown(self.peak_allocated)} allocated, {shown(self.peak_reserved)} reserved"
        lines = [
            f"Planned peak: {peaks}: {verdict} on {self.card} ({shown(self.memory)})",
            "of it: " + ", ".join(f"{name} {shown(size)}" for name, size in self.parts.items() if size),
        ]
        if self.largest:
            lines.append("largest in the step: " + "; ".join(f"{name} ({shown(size)})" for name, size in self.largest))
        if self.words:
            words = "; ".join(f"{word.text} (about {shown(word.saves)} less)" for word in self.words)
            lines.append(f"{'what would take less' if self.fits else 'what would make it fit'}: {words}")
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as plain values, for JSON."""
        return {
            "card": self.card,
            "memory": self.memory,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "fits": self.fits,
            "parts": dict(self.parts),
            "largest": [list(one) for one in self.largest],
            "words": [word._asdict() for word in self.words],
            "notes": list(self.notes),
        }


def plan_memory(trainer: Trainer, module: TrainingModule, source: GivenData, card: str | None = None) -> MemoryPlan:
    """Returns the memory of a fit of ``module`` on ``card``; the module, the Trainer and the generators stay as they are.

    Raises :class:`ConfigError` for a card that is not known, and for a step that cannot run without values.
    """
    chosen = card_of(card)
    if not module.automatic_optimization:
        raise ConfigError(
            "plan: automatic_optimization=False: a training_step that steps optimizers itself needs values"
        )
    world_size = max(trainer.world_size, trainer._runner.num_processes)
    strategy = trainer.strategy
    graph = trainer._runner.settings.cuda_graph is not None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _as_single_on_cpu(trainer, module) as compiled, isolate_rng(), _left_as_it_is(module):
        _take_memory_away(module, mode)
        with (
            _real_scales(),
            mode,
            _Unedited() as unedited,
            trainer._runner.session_of(TrainerFn.FITTING, module, source) as session,
        ):
            session.run_summary.is_trial = True

            def configure(*, filled_later: bool) -> None:  # noqa: ARG001 - as the session's own, which gives first values
                session.precision.forward(partial(call_hook, module, "configure_model"))
                _take_memory_away(module, mode)

            session._configure_model = configure  # type: ignore[method-assign]
            session.attach()
            session.open(None, None)
            traced = _Traced(session, mode, compiled, unedited)
    plan = _placed(traced, chosen, strategy, world_size, graph=graph)
    if (activations := trainer._runner.settings.activations) != traced.settings.activations:
        plan.notes.append(f"{activations}: what waits in host memory, or is the compiler's choice, is counted as kept")
    return plan


@contextlib.contextmanager
def _real_scales() -> Iterator[None]:
    """Lets loss scales have their values: the host reads some of them as NumPy arrays."""
    make = level.scale_for

    def scale_for(*arguments: Any) -> Any:
        with without_dispatch_modes():
            return make(*arguments)

    level.scale_for = scale_for  # type: ignore[assignment]
    try:
        yield
    finally:
        level.scale_for = make


class _Unedited(TorchDispatchMode):
    """Tells a precision, which compares half weights with their masters at the ends of a session, that they are equal."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.holds = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns True for a comparison of tensors without values; runs all else."""
        if self.holds and func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


class _WithoutMemory(Strategy):
    """One process, whose module is on its device already."""

    def place_module(self, module: nn.Module) -> None:
        """Leaves the module as it is."""


@contextlib.contextmanager
def _as_single_on_cpu(trainer: Trainer, module: nn.Module) -> Iterator[Compile | None]:
    """Makes the Trainer one of a single process on the host, without callbacks and loggers; yields what it was to compile."""
    strategy = trainer.strategy
    device_type = trainer.device_type
    runner = trainer._runner
    with runner.isolated(cast("TrainingModule", module), []):
        settings = runner.settings
        settings.cuda_graph = None
        compiled = settings.compile
        settings.compile = None
        if settings.activations is not None:
            settings.activations = settings.activations.on_the_device()
        settings.enable_autolog_hparams = False
        trainer.strategy, trainer.device_type = _WithoutMemory(), "cpu"
        runner.environment, runner.launches, runner.around = trainer.strategy.environment, False, None
        try:
            yield compiled
        finally:
            trainer.strategy, trainer.device_type = strategy, device_type


@contextlib.contextmanager
def _left_as_it_is(module: nn.Module) -> Iterator[None]:
    """Puts all attributes of all submodules back at the end: weights, buffers, hooks, and what ``configure_model`` has built."""
    before = [
        (one, {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(one).items()})
        for one in module.modules()
    ]
    try:
        yield
    finally:
        for one, attributes in before:
            vars(one).clear()
            vars(one).update(attributes)


def _take_memory_away(module: nn.Module, mode: Any) -> None:
    """Replaces parameters and buffers by fake ones of the same shapes, ties included."""
    lazy = next((name for name, one in module.named_parameters() if is_lazy(one)), None)
    if lazy is not None:
        raise ConfigError(f"plan: the parameter {lazy} has no shape yet; run the module on a batch first")
    taken: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the tensor keeps its id
    for one in module.modules():
        for table in (one._parameters, one._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in taken:
                    taken[id(tensor)] = (tensor, _without_memory(tensor, mode))
                if tensor is not None:
                    table[name] = taken[id(tensor)][1]  # type: ignore[assignment]


def _without_memory(tensor: Tensor, mode: Any) -> Tensor:
    """Returns a fake tensor of the host for ``tensor``, which may be on the meta device, or fake already."""
    if tensor.device.type == "cpu" and type(tensor) is FakeTensor:
        return tensor
    with mode:
        fake: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    result: Tensor = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return result


class _Traced:
    """One training step without values: its requests, and what stays from step to step."""

    def __init__(self, session: Session, mode: Any, compiled: Compile | None, unedited: _Unedited) -> None:
        module = session.module
        self.settings = session.settings
        with without_dispatch_modes():
            batch = _first_batch(session.data.train_loader)
        self.batch = _faked(session.precision.convert_input(batch), mode)
        own = list(module.parameters())
        known = {id(one) for one in own}
        updated = [one for optimizer in session.optimizers for one in owned_parameters(optimizer)]
        buffers = _once(module.buffers())
        masters = _once(one for one in updated if id(one) not in known)
        masters += [
            one
            for optimizer in session.optimizers
            if isinstance(optimizer, FusedOptimizer)
            for one in optimizer.remainders.values()
        ]
        sums = [one for each in session.optimizers for one in session.precision.gradients(each).tensors]
        self.recorder = Recorder([*own, *buffers, *masters, *sums])
        # Sizes, now: the end of the session gives the module its own dtypes back.
        self.weights = [_size(one) for one in _once(own)]
        self.buffers = [_size(one) for one in buffers]
        self.masters = [_size(one) for one in masters]
        self.sums = [_size(one) for one in sums]
        known_states = [states_of(one) for one in session.optimizers]
        self.unknown = [
            type(one).__name__ for one, sizes in zip(session.optimizers, known_states, strict=True) if sizes is None
        ]
        self.states = [
            size
            for one, sizes in zip(session.optimizers, known_states, strict=True)
            for size in ([2 * _size(parameter) for parameter in owned_parameters(one)] if sizes is None else sizes)
        ]
        self.temporaries = [temporaries_of(one) for one in session.optimizers]
        self.unit = _largest_unit(module)
        self.parts = session
        self.batches: list[int] = []
        blocks = CompiledBlocks(self.recorder)
        self.uncompiled = blocks.uncompiled
        self.compiled = compiled is not None
        activations = self.settings.activations
        self.computes_again = activations is not None and activations.save != "all"
        # Torch's compiler keeps what is computed again apart; a trace of the block alone would not.
        if compiled is not None and not self.computes_again:
            blocks.put_on(repeated_blocks(module))
        unedited.holds = False  # the user's own comparisons need values
        try:
            self._run(session)
        finally:
            unedited.holds = True

    def _run(self, session: Session) -> None:
        module = session.module
        precision = session.precision
        state = session.state
        step = with_index(module.training_step, module.training_step)
        session.metrics.muted = True
        state.user_call.scope = Scope.TRAIN_STEP
        state.user_call.batch = self.batch
        try:
            with as_on_a_gpu(), self.recorder:
                self.batches = self.recorder.note(list(tensors_within(self.batch)), "batch")
                output: Any = precision.forward(step, self.batch, 0)
                loss = output.get("loss") if isinstance(output, dict) else output
                loss = loss[0] if isinstance(loss, tuple) else loss
                if not isinstance(loss, Tensor):
                    raise ConfigError("plan: training_step returned no loss for the first batch of the loader")
                self.forward_ends = len(self.recorder.events)
                Precision.backward(precision, loss, run=Tensor.backward)
                del loss, output
                for optimizer in session.optimizers:
                    memory = precision.gradients(optimizer)
                    if memory.flat is not None:  # added to the sums, and dropped
                        for parameter in memory.parameters:
                            parameter.grad = None
                self.recorder.end()
        except NEEDS_VALUES as error:
            raise ConfigError(
                f"plan runs training_step on tensors without values, and it needs one ({error}): a comparison, item(), or an index "
                "by a mask; measure instead: Trainer(profiler='memory')"
            ) from error
        finally:
            state.user_call.scope = Scope.NOWHERE
            state.user_call.batch = None


def _first_batch(loader: Any) -> Any:
    """Returns a batch as the loader would make it, without its workers."""
    if (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    ):
        indices = next(iter(loader.batch_sampler))
        return loader.collate_fn([loader.dataset[index] for index in indices])
    return next(iter(loader))


def _faked(value: Any, mode: Any) -> Any:
    return cast_tensors(value, mode.from_tensor, None)


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({storage_key(one): one for one in tensors}.values())


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- placed on a card ------------------------------------------------------------------------------------------------------------


class _Placement:
    """Requests of several steps, in a model of the allocator; notes what was there at the peak."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.live: dict[int, tuple[Any, int]] = {}
        self.at_peak: dict[int, int] = {}

    def keep(self, sizes: Iterable[int]) -> int:
        """Takes memory that stays; returns the bytes taken."""
        before = self.allocator.allocated
        for size in sizes:
            self.allocator.take(size)
        return self.allocator.allocated - before

    def run(self, events: Iterable[tuple[int, int]]) -> None:
        """Serves the requests of a step."""
        for number, size in events:
            if size:
                peak = self.allocator.peak_allocated
                self.live[number] = (self.allocator.take(size), size)
                if self.allocator.peak_allocated > peak:
                    self.at_peak = {key: kept for key, (_, kept) in self.live.items()}
            elif number in self.live:
                self.allocator.give(self.live.pop(number)[0])

    def run_again(self, events: Iterable[tuple[int, int]], left: set[int]) -> None:
        """Serves the requests of a further micro-batch; its gradients, those ``left`` by a step, are added to the first one's."""
        for number, size in events:
            if size and number in left:
                self.pulse([size])
            else:
                self.run([(_LATER + number, size)])

    def clear(self) -> None:
        """Gives back what a step has left: gradients, when the next one begins."""
        for block, _ in self.live.values():
            self.allocator.give(block)
        self.live.clear()

    def pulse(self, sizes: Iterable[int]) -> None:
        """Takes memory and gives it back."""
        peak = self.allocator.peak_allocated
        blocks = [self.allocator.take(size) for size in sizes]
        if self.allocator.peak_allocated > peak:
            self.at_peak = {key: kept for key, (_, kept) in self.live.items()}
        for block in blocks:
            self.allocator.give(block)


def _placed(traced: _Traced, card: Card, strategy: Strategy, world_size: int, *, graph: bool) -> MemoryPlan:
    """Returns the plan of a step on ``card``, under ``strategy`` with ``world_size`` processes."""
    notes = []
    share = 1.0
    if strategy.sharding.shards and world_size > 1:
        share = 1 / world_size
        notes.append("fsdp: shards are exact; what is gathered and exchanged for a unit is an estimate")
    placement = _Placement()
    recorder = traced.recorder
    left = _left(recorder) - set(traced.batches)
    gradient_sizes = [size for number, size in recorder.events if size and number in left]
    parts = {
        "weights": placement.keep(int(size * share) for size in traced.weights),
        "buffers": placement.keep(traced.buffers),
        "masters": placement.keep(int(size * share) for size in traced.masters),
        "gradient sums": placement.keep(int(size * share) for size in traced.sums),
    }
    if world_size > 1 and not strategy.sharding.shards:
        views = getattr(strategy, "gradient_as_bucket_view", False)
        parts["exchange of gradients"] = placement.keep([] if views or traced.sums else [sum(gradient_sizes)])
    if share < 1:
        parts["gathered units"] = placement.keep([2 * traced.unit])  # the one at work, and the next
    parts["cuBLAS workspaces"] = placement.keep([card.workspace, card.workspace])
    if traced.settings.prefetch_batches:
        sizes = [size for number, size in recorder.events if size and number in set(traced.batches)]
        parts["batches ahead"] = placement.keep(sizes * traced.settings.prefetch_batches)
    placement.run(recorder.events)
    if traced.settings.accumulates and not traced.sums:
        placement.run_again(recorder.events, left)
    parts["optimizer states"] = placement.keep(int(size * share) for size in traced.states)
    peak = placement.allocator.peak_allocated
    for sizes in traced.temporaries:
        placement.pulse(int(size * share) for size in sizes)
    updates = placement.allocator.peak_allocated > peak
    placement.clear()
    peak = placement.allocator.peak_allocated
    placement.run(recorder.events)
    if traced.settings.accumulates and not traced.sums:
        placement.run_again(recorder.events, left)
    updates = updates and placement.allocator.peak_allocated == peak
    kept = sum(parts.values())
    gradients = sum(size for number, size in placement.at_peak.items() if number in left)
    whole = placement.allocator.peak_allocated
    if share < 1:  # gradients of a unit are reduced to shards as soon as they are there
        whole = int(whole - gradients * (1 - share))
        gradients = int(gradients * share)
    parts["gradients"] = gradients
    parts["activations and others"] = max(whole - kept - gradients, 0)
    largest = sorted(
        ((recorder.what[number % _LATER], size) for number, size in placement.at_peak.items()), key=lambda one: -one[1]
    )[:3]
    notes += [f"{name}: states of twice its parameters are assumed" for name in traced.unknown]
    notes += [
        f"compile: calls of {name} could not be traced, and are planned as eager ones" for name in traced.uncompiled
    ]
    if traced.compiled and traced.computes_again:
        notes.append("compile: blocks that compute activations again are planned as eager ones")
    if graph:
        notes.append("cuda_graph: a graph's pool keeps the memory of a step; eager steps before the capture borrow it")
    if updates:
        notes.append("the peak is in the update")
    reserved = max(whole, placement.allocator.peak_reserved - (placement.allocator.peak_allocated - whole))
    use = MemoryUse(
        weights=parts["weights"],
        gradients=gradients + parts["gradient sums"],
        masters=parts["masters"],
        states=parts["optimizer states"],
        buffers=parts["buffers"],
        others=parts["activations and others"],
    )
    logits = max((size for name, size in largest if "softmax" in name or "cross_entropy" in name), default=0)
    words = helping_words(
        traced.parts, use, logits=min(logits, use.others), strategy=strategy, world_size=max(world_size, 2)
    )
    return MemoryPlan(
        card=card.name,
        memory=card.memory,
        peak_allocated=whole,
        peak_reserved=reserved,
        parts=parts,
        largest=largest,
        words=words[:4],
        notes=notes,
    )


def _left(recorder: Recorder) -> set[int]:
    """Returns the numbers of storages that a step leaves: its gradients, and its batch."""
    begun = {number for number, size in recorder.events if size}
    return begun - {number for number, size in recorder.events if not size}


def _largest_unit(module: nn.Module) -> int:
    """Returns the bytes of the largest block of a list of blocks, in the dtype of its weights; of all weights without blocks."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList | nn.Sequential)]
    units = [sum(_size(one) for one in block.parameters()) for child in lists for block in child]
    return max(units, default=sum(_size(one) for one in module.parameters()))
