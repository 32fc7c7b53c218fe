"""Runs that try something and leave no trace: each is a session of its own, so that any precision and strategy takes part."""

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
"""Calls what it is given; returns whether it came to its end, or raises."""


@contextlib.contextmanager
def leaving_no_trace(trainer: Trainer, module: TrainingModule, *callbacks: Callback) -> Iterator[None]:
    """A context for trials with these callbacks alone: module, generators and Trainer are what they were after it."""
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
    """Trains ``steps`` updates from the beginning; ``prepare`` gets the session once the optimizers are there."""
    with _session(trainer, module, source) as session, isolate(generators_of(leaves_of(session.data.train_loader))):
        if prepare is not None:
            prepare(session)
        # Not before: configure_optimizers sees the settings of the run that is to come.
        settings = session.settings
        settings.max_steps, settings.max_epochs, settings.min_steps, settings.min_epochs = steps, -1, 0, 0
        settings.max_time, settings.limit_val_batches, settings.num_sanity_val_steps = None, 0, 0
        settings.val_check_interval, settings.check_val_every_n_epoch = 1.0, 1
        settings.cuda_graph = settings.cuda_graph and settings.cuda_graph.one_by_one()  # trials look at each step
        loop = session.fit_loop()
        whole = within(loop.run)
        if not session.agreement.came_late() and whole:
            loop.end()


def evaluate(trainer: Trainer, module: TrainingModule, source: GivenData, steps: int, *, within: Guard) -> None:
    """Validates, tests or predicts, as ``source`` is for, ``steps`` batches of each loader."""
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
