"""Resuming with another number of processes: each process keeps its accumulation, or a step keeps its number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from fabricamp.checkpoint.record import Section
from fabricamp.cuda_graph import check_cuda_graph
from fabricamp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.engine.run_parts import RunParts
    from fabricamp.engine.session import Session
    from fabricamp.engine.source import DataSource
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings

KEEP_GLOBAL_BATCH: Final = "keep_global_batch"
_SHOWN: Final = 4
"""How many possible numbers of processes an error names."""


class StepSize(NamedTuple):
    """The factors of the number of samples in a step."""

    accumulated: int
    processes: int
    batch_sizes: list[int]
    """The batch sizes of the loaders that are combined to one batch."""

    def __str__(self) -> str:
        batches = " and ".join(map(str, self.batch_sizes))
        sizes = " and ".join(str(size * self.accumulated * self.processes) for size in self.batch_sizes)
        return f"{self.accumulated} micro-batch(es) x {self.processes} process(es) x batches of {batches} = {sizes} samples"


@dataclass
class StepSizes(Section):
    """Saves a :class:`StepSize`, for a run that is resumed with other numbers."""

    name = "samples of a step"

    settings: Settings
    strategy: Strategy
    data: DataSource

    def save(self) -> StateDict:
        """Returns the numbers; None if the loader's batch size is unknown."""
        sizes = self.data.batch_sizes
        now = StepSize(self.settings.accumulate_grad_batches, self.strategy.data_ranks, sizes or [])
        return {"loops.fit.step_size": now._asdict() if sizes else None}

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Does nothing: :func:`keep_samples_of_a_step` reads the numbers before optimizers are made."""


def keep_samples_of_a_step(session: Session) -> None:
    """Under ``on_world_change="keep_global_batch"`` sets ``accumulate_grad_batches`` to keep the checkpoint's samples per step.

    Called before optimizers are made.  Raises :class:`ConfigError` if no number of micro-batches does that, and, also without a
    checkpoint, if the samples of a step cannot be known.
    """
    settings = session.settings
    if settings.on_world_change != KEEP_GLOBAL_BATCH:
        return
    here = _known_here(session, session.data)
    if session.checkpoint is None:
        return
    before = _of_checkpoint(session.checkpoint, str(session.trainer.ckpt_path))
    accumulate = micro_batches(before, here)
    if accumulate != settings.accumulate_grad_batches:
        settings.accumulate_grad_batches = accumulate
        check_cuda_graph(settings, session.strategy.device.type, session.strategy)
        session.run_summary.say(f"{here._replace(accumulated=accumulate)} a step; before: {before}")
    if accumulate != before.accumulated:
        _scale_accumulation(session.checkpoint["loops"]["fit"], before.accumulated, accumulate)


def _known_here(parts: RunParts, data: DataSource) -> StepSize:
    """Returns the step size given by the Trainer's arguments and the loader."""
    settings = parts.settings
    if not parts.module.automatic_optimization:
        raise ConfigError(
            f"on_world_change={KEEP_GLOBAL_BATCH!r} changes accumulate_grad_batches, which works with automatic optimization only; "
            "leave it out, and accumulate in training_step"
        )
    if settings.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            f"on_world_change={KEEP_GLOBAL_BATCH!r} needs batches of one size, and reload_dataloaders_every_n_epochs="
            f"{settings.reload_dataloaders_every_n_epochs} may change it; leave one of them out"
        )
    _ = data.train_loader  # creates the loader, so that batch_sizes knows it
    sizes = data.batch_sizes
    if sizes is None:
        raise ConfigError(
            f"on_world_change={KEEP_GLOBAL_BATCH!r} needs the number of samples in a batch, and the train loader has no "
            "batch_size; give torch's DataLoader with batch_size, or on_world_change='keep_per_rank'"
        )
    return StepSize(settings.accumulate_grad_batches, parts.strategy.data_ranks, sizes)


def _of_checkpoint(checkpoint: StateDict, path: str) -> StepSize:
    saved = checkpoint.get("loops", {}).get("fit", {}).get("step_size")
    if saved is None:
        raise ConfigError(
            f"on_world_change={KEEP_GLOBAL_BATCH!r}: {path} does not hold the number of samples in its steps (its loader had no "
            "batch_size, or another program wrote it); set accumulate_grad_batches, and on_world_change='keep_per_rank'"
        )
    try:
        before = StepSize(int(saved["accumulated"]), int(saved["processes"]), [*map(int, saved["batch_sizes"])])
    except (KeyError, TypeError, ValueError):
        before = StepSize(0, 0, [])
    if not before.batch_sizes or min(before.accumulated, before.processes, *before.batch_sizes) < 1:
        raise CheckpointError(f"{path}: its loops.fit.step_size is {saved!r}; it is damaged: use an older checkpoint")
    return before


def micro_batches(before: StepSize, here: StepSize) -> int:
    """Returns how many micro-batches give a step as many samples as before."""
    number = _number(before, here, here.processes)
    if number:
        return number
    most = before.accumulated * before.processes * max(before.batch_sizes)
    possible = (processes for processes in range(1, most + 1) if _number(before, here, processes))
    near = sorted(sorted(possible, key=lambda processes: abs(processes - here.processes))[:_SHOWN])
    cure = f"start {' or '.join(map(str, near))} process(es), or " if near else ""
    batches = " and ".join(map(str, here.batch_sizes))
    raise ConfigError(
        f"on_world_change={KEEP_GLOBAL_BATCH!r}: a step of the checkpoint is {before}, and no number of micro-batches of "
        f"{here.processes} process(es) x batches of {batches} makes as many; {cure}change the loader's batch_size, or give "
        "on_world_change='keep_per_rank'"
    )


def _number(before: StepSize, here: StepSize, processes: int) -> int:
    """Returns how many micro-batches per process give ``processes`` the samples of a step before; 0 if no integer does."""
    if len(before.batch_sizes) != len(here.batch_sizes):
        return 0
    samples = [before.accumulated * before.processes * size for size in before.batch_sizes]
    quotients = [divmod(number, processes * size) for number, size in zip(samples, here.batch_sizes, strict=True)]
    micro_batches, _ = quotients[0]
    # The same number for each of the combined loaders, and no remainder.
    return micro_batches if set(quotients) == {(micro_batches, 0)} else 0


def _scale_accumulation(loop: StateDict, before: int, now: int) -> None:
    """Converts the saved accumulation's count of micro-batches to the present number per step, if that gives an integer.

    A loss is divided by the number per step, so the gradients, averaged over the ranks, are of the same fraction of a step.
    """
    accumulation = loop.get("accumulation")
    scaled = loop.get("open_batches", 0) * now
    if accumulation is None or accumulation.get("weighted") or scaled % before:
        return
    loop["open_batches"] = scaled // before
    loop["accumulation"] = {**accumulation, "accumulate": now}
