"""Trial runs that leave no trace; each one is a separate session, and works with any precision and strategy."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabricamp.data import leaves_of
from fabricamp.data.position import generators_of, isolate
from fabricamp.engine.ending import leave_interrupted
from fabricamp.engine.session import KINDS, LOADERS
from fabricamp.errors import ConfigError
from fabricamp.rng import isolate_rng
from fabricamp.state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp.callbacks.base import Callback
    from fabricamp.engine.run_parts import RunParts
    from fabricamp.engine.session import Session
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

Guard = Callable[[Callable[[], Any]], bool]
"""A function that calls its argument, and returns whether the call completed; it may also raise."""


@contextlib.contextmanager
def leaving_no_trace(trainer: Trainer, module: TrainingModule, *callbacks: Callback) -> Iterator[None]:
    """Runs trials with only these callbacks in this block; restores module, generators and Trainer afterwards."""
    with _module_restored(module), trainer._runner.isolated(module, callbacks), isolate_rng():
        yield


def train(
    trainer: Trainer,
    module: TrainingModule,
    source: GivenData,
    steps: int,
    *,
    prepare: Callable[[RunParts], None] | None = None,
    within: Guard,
) -> None:
    """Trains ``steps`` updates from the beginning; ``prepare`` gets the run's parts once the optimizers exist."""
    with _session(trainer, module, source) as session, isolate(generators_of(leaves_of(session.data.train_loader))):
        if prepare is not None:
            prepare(session)
        # Change the settings only now: configure_optimizers must see those of the real run.
        settings = session.settings
        settings.max_steps = steps
        settings.max_epochs = -1
        settings.min_steps = 0
        settings.min_epochs = 0
        settings.max_time = None
        settings.limit_val_batches = 0
        settings.num_sanity_val_steps = 0
        settings.val_check_interval = 1.0
        settings.check_val_every_n_epoch = 1
        settings.cuda_graph = settings.cuda_graph and settings.cuda_graph.one_by_one()  # the host checks each step
        loop = session.fit_loop()
        session.metrics.watch = None  # a search for a learning rate goes on until the loss is lost
        completed = within(loop.run)
        if not session.agreement.came_late() and completed:
            loop.end()


def evaluate(trainer: Trainer, module: TrainingModule, source: GivenData, steps: int, *, within: Guard) -> None:
    """Validates, tests or predicts (by ``source.fn``) ``steps`` batches of each loader."""
    kind = LOADERS[KINDS[source.fn]]
    with _session(trainer, module, source) as session:
        setattr(session.settings, f"limit_{kind}_batches", steps)
        leaves = [one for loader in session.data.evaluation_loaders(kind) for one in leaves_of(loader)]
        with isolate(generators_of(leaves)):
            within(session.evaluate)


@contextlib.contextmanager
def _session(trainer: Trainer, module: TrainingModule, source: GivenData) -> Iterator[Session]:
    """Yields an opened session for one trial, with new counters; raises KeyboardInterrupt afterwards if it was interrupted."""
    if trainer.strategy.membership.heals:
        raise ConfigError(
            f"a search for a batch size or a learning rate with strategy {trainer.strategy.name!r} is not offered: each group "
            "would find its own; search with 'single'"
        )
    trainer.state = RunState()
    runner = trainer._runner
    with runner.runs(source.fn), runner.session_of(source.fn, module, source) as session:
        session.run_summary.is_trial = True
        session.attach()
        session.open(None, None)
        yield session
    leave_interrupted(trainer)
    if trainer.state.interrupted:
        raise KeyboardInterrupt(trainer.state.stop_request.interruption)


# -- restoring the module ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _module_restored(module: nn.Module) -> Iterator[None]:
    """Restores the module at the end of the block: weights, buffers, modes, states of metrics, plain attributes.

    The saved tensors are in host memory.  Objects are restored in place: references from optimizers and hooks stay valid.
    """
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ConfigError(
            f"the parameter {lazy} has no shape yet, so it could not be given back; run the module on a batch first"
        )
    content = _ModuleContent(module)
    try:
        yield
    finally:
        content.restore()


class _ModuleContent:
    """Saved content of a module, its submodules, and the collections and tensors in them."""

    def __init__(self, module: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # by id; the reference keeps the id valid
        waiting: list[Any] = [module]
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting += self._save(value)

    def restore(self) -> None:
        """Restores the saved content."""
        for undo in self._undo:
            undo()

    def _save(self, value: object) -> list[Any]:
        """Saves one object; returns the objects in it, which are still to be saved."""
        if isinstance(value, nn.Module):
            return [vars(value)]
        if isinstance(value, Tensor):
            self._save_tensor(value)
            return []
        if isinstance(value, dict):
            return self._save_dict(value)
        if isinstance(value, list | set | deque):
            return self._save_items(value)
        return list(value) if isinstance(value, tuple) else []

    def _save_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.is_inference():  # no values, or not changeable
            return
        values = tensor.detach().to("cpu", copy=True)
        leaf = tensor.is_leaf
        requires_grad = tensor.requires_grad
        grad = tensor.grad if leaf else None

        def undo() -> None:
            now = tensor.detach()
            if now.shape != values.shape or now.dtype != values.dtype:
                tensor.data = values.to(now.device)
            elif not torch.equal(now.cpu(), values):
                tensor.data.copy_(values)
            if leaf:
                tensor.requires_grad_(requires_grad)
                tensor.grad = grad

        self._undo.append(undo)

    def _save_dict(self, table: dict[Any, Any]) -> list[Any]:
        content = dict(table)

        def undo() -> None:
            same = table.keys() == content.keys() and all(table[key] is value for key, value in content.items())
            if not same:
                dict.clear(table)
                dict.update(table, content)

        self._undo.append(undo)
        return list(content.values())

    def _save_items(self, items: Any) -> list[Any]:
        content = list(items)

        def undo() -> None:
            items.clear()
            (items.update if isinstance(items, set) else items.extend)(content)

        self._undo.append(undo)
        return content
