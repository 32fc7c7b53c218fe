"""Trial runs that leave no trace; each one is a separate session, and works with any precision and strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fabricamp.data import leaves_of
from fabricamp.data.position import generators_of, isolate
from fabricamp.engine.ending import leave_interrupted
from fabricamp.engine.session import KINDS, LOADERS
from fabricamp.errors import ConfigError
from fabricamp.rng import isolate_rng
from fabricamp.state import RunState
from fabricamp.tuner.keeping import module_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricamp.callbacks.base import Callback
    from fabricamp.engine.session import Session
    from fabricamp.engine.source import GivenData
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

Guard = Callable[[Callable[[], Any]], bool]
"""Calls its argument; returns whether the call completed, or raises."""


@contextlib.contextmanager
def leaving_no_trace(trainer: Trainer, module: TrainingModule, *callbacks: Callback) -> Iterator[None]:
    """Runs trials with only these callbacks in this block; restores module, generators and Trainer afterwards."""
    with module_kept(module), trainer._runner.apart(module, callbacks), isolate_rng():
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
