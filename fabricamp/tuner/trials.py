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
    from fabricamp.engine.session import Session
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


# ~~~ from tuner.keeping: Saves a module before trial runs, and restores it afterwards.


@contextlib.contextmanager
def module_kept(module: nn.Module) -> Iterator[None]:
    """Restores the module at the end of the block: weights, buffers, modes, states of metrics, plain attributes.

    The saved tensors are in host memory.  Objects are restored in place: references from optimizers and hooks stay valid.
    """
    lazy = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ConfigError(
            f"the parameter {lazy} has no shape yet, so it could not be given back; run the module on a batch first"
        )
    kept = _Kept(module)
    try:
        yield
    finally:
        kept.give_back()


class _Kept:
    """Saved content of a module, its submodules, and the collections and tensors in them."""

    def __init__(self, module: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}  # by id; the reference keeps the id valid
        waiting: list[Any] = [module]
        while waiting:
            one = waiting.pop()
            if id(one) not in self._seen:
                self._seen[id(one)] = one
                waiting += self._keep(one)

    def give_back(self) -> None:
        """Restores the saved content."""
        for undo in self._undo:
            undo()

    def _keep(self, one: Any) -> list[Any]:
        """Saves one object; returns the objects in it, which are still to be saved."""
        if isinstance(one, nn.Module):
            return [vars(one)]
        if isinstance(one, Tensor):
            self._keep_tensor(one)
            return []
        if isinstance(one, dict):
            return self._keep_dict(one)
        if isinstance(one, list | set | deque):
            return self._keep_items(one)
        return list(one) if isinstance(one, tuple) else []

    def _keep_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.is_inference():  # no values, or not changeable
            return
        values, leaf, requires_grad = tensor.detach().to("cpu", copy=True), tensor.is_leaf, tensor.requires_grad
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

    def _keep_dict(self, one: dict[Any, Any]) -> list[Any]:
        content = dict(one)

        def undo() -> None:
            same = one.keys() == content.keys() and all(one[key] is value for key, value in content.items())
            if not same:
                dict.clear(one)
                dict.update(one, content)

        self._undo.append(undo)
        return list(content.values())

    def _keep_items(self, one: Any) -> list[Any]:
        content = list(one)

        def undo() -> None:
            one.clear()
            (one.update if isinstance(one, set) else one.extend)(content)

        self._undo.append(undo)
        return content


Guard = Callable[[Callable[[], Any]], bool]
"""Calls its argument; returns whether the call completed, or raises."""


@contextlib.contextmanager
def leaving_no_trace(trainer: Trainer, module: TrainingModule, *callbacks: Callback) -> Iterator[None]:
    """Runs trials with only these callbacks in this block; restores module, generators and Trainer afterwards."""
    with module_kept(module), trainer._runner.isolated(module, callbacks), isolate_rng():
        yield


def train(
    trainer: Trainer,
    module: TrainingModule,
    source: GivenData,
    steps: int,
    *,
    prepare: Callable[[Session], None] | None = None,
    within: Guard,
) -> None:
    """Trains ``steps`` updates from the beginning; ``prepare`` gets the session once the optimizers exist."""
    with _session(trainer, module, source) as session, isolate(generators_of(leaves_of(session.data.train_loader))):
        if prepare is not None:
            prepare(session)
        # Change the settings only now: configure_optimizers must see those of the real run.
        settings = session.settings
        settings.max_steps, settings.max_epochs, settings.min_steps, settings.min_epochs = steps, -1, 0, 0
        settings.max_time, settings.limit_val_batches, settings.num_sanity_val_steps = None, 0, 0
        settings.val_check_interval, settings.check_val_every_n_epoch = 1.0, 1
        settings.cuda_graph = settings.cuda_graph and settings.cuda_graph.one_by_one()  # the host checks each step
        loop = session.fit_loop()
        whole = within(loop.run)
        if not session.agreement.came_late() and whole:
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
    if trainer.strategy.heals:
        raise ConfigError(
            f"a search for a batch size or a learning rate with strategy {trainer.strategy.name!r} is not offered: each group "
            "would find its own; search with 'single'"
        )
    trainer.state = RunState()
    with trainer._runner.session_of(source.fn, module, source) as session:
        session.attach()
        session.open(None, None)
        yield session
    leave_interrupted(trainer)
    if trainer.state.interrupted:
        raise KeyboardInterrupt(trainer.state.interruption)
