"""What makes a resumed run equal to one that was never cut: each rank's moment between two micro-batches, saved and given back.

A moment is everything that is not weights, optimizers and counters: random numbers, the place in the data, logged values that
are not published yet, and the gradients of a window that is still open.  These gradients are saved as they are, so a run that
was cut within a window goes on within it: nothing is replayed that buffers (BatchNorm), hooks or generators have seen already,
and a window's beginning costs training nothing, since no copy of the state there has to be kept.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.data import move_to_device
from fabricamp.metrics.saving import find_objects, load_objects, save_objects
from fabricamp.rng import capture_rng, restore_rng
from fabricamp.state import Scope

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.data import Feed
    from fabricamp.metrics import Metrics
    from fabricamp.module import TrainingModule
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy
    from fabricamp.update import Update

__all__ = ["Moments"]

_LOG = logging.getLogger("fabricamp")
_CPU = torch.device("cpu")


class Moments:
    """The moments of one fit on this rank: what a checkpoint takes of the present one, and how a resumed run gets back to it."""

    def __init__(self, module: TrainingModule, state: RunState, metrics: Metrics, strategy: Strategy) -> None:
        self._module = module
        self._state = state
        self._metrics = metrics
        self._strategy = strategy
        self._feed: Feed | None = None
        self._update: Update | None = None
        self._before_validation: _BeforeValidation | None = None
        self._cut: dict[str, Any] | None = None
        self._stepped = False
        self._rng: dict[str, Any] | None = None
        self.resumed = False
        """Whether the run goes on from a checkpoint and has not got to its first batch yet."""

    # -- saving ------------------------------------------------------------------------------------------------------------------

    def begin(self, feed: Feed, update: Update) -> None:
        """Takes the parts that come to be with the loop."""
        self._feed, self._update = feed, update

    def end(self) -> None:
        """After the run: gradients are gone, so a window that is open is repeated by whoever goes on."""
        self._update = None

    def begin_validation(self) -> None:
        """Before a validation within fit."""
        self._before_validation = _BeforeValidation(self._module)

    def end_validation(self, *, cut_short: bool) -> None:
        """After it; one that was cut short is as if it had not begun."""
        if cut_short and self._before_validation is not None:
            self._metrics.clear_evaluation()
            self._before_validation.restore(self._module)
        self._before_validation = None

    def note_cut(self) -> None:
        """Keeps the present moment where training stops within an epoch: the hooks at its end publish and clear what goes on."""
        self._cut = self._present()

    def repeated_batches(self) -> int:
        """How many micro-batches a run that goes on from here has to repeat: those of a window whose gradients cannot be saved."""
        window = self._update.window_state() if self._update is not None else None
        return self._state.open_batches if window is None else 0

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Adds the moments of all ranks; every rank calls it."""
        state, update = self._state, self._update
        own = self._cut or self._present()
        if self._feed is not None:
            batches = 0 if state.epoch_ended else state.batch_idx - self.repeated_batches()
            own["data"] = self._feed.state_dict(batches)
        strategy = self._strategy
        own["buffers"] = _differing_buffers(self._module, strategy)
        ranks = [own] if strategy.world_size == 1 else strategy.all_gather_object(move_to_device(own, _CPU))
        checkpoint["rng"] = [rank["rng"] for rank in ranks]
        checkpoint["data"]["position"] = [rank.get("data", {}) for rank in ranks]
        checkpoint["loops"]["fit"].update(
            stepped=update is not None and update.stepped,
            open_batches=state.open_batches - self.repeated_batches(),
            window=_gather_window(self._module, update, strategy) if update is not None else None,
            metrics=[rank["metrics"] for rank in ranks],
            objects=[rank["objects"] for rank in ranks],
            buffers=[rank["buffers"] for rank in ranks],
        )

    def _present(self) -> dict[str, Any]:
        """This rank's moment; within a validation that is not over, the one before it."""
        unfinished = self._before_validation if self._state.scope is not Scope.NOWHERE else None
        objects = find_objects(self._module)
        return {
            "rng": capture_rng() if unfinished is None else unfinished.rng,
            "metrics": self._metrics.state_dict(objects),
            "objects": save_objects(objects if unfinished is None else unfinished.used(objects)),
        }

    # -- going on ----------------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Brings the run to where ``checkpoint`` was written, but for the generators; says what cannot be as it was there."""
        loop, ranks = checkpoint.get("loops", {}).get("fit", {}), len(checkpoint.get("rng", []))
        assert self._feed is not None
        assert self._update is not None
        if ranks == 0:
            return  # another library's file: only counters
        strategy, state = self._strategy, self._state
        chosen = _ranks_for(strategy, ranks)
        objects = find_objects(self._module)
        load_objects(objects, [loop["objects"][rank] for rank in chosen])
        self._metrics.load_state_dict([loop["metrics"][rank] for rank in chosen], loop["metrics"][0], objects)
        if strategy.world_size == ranks:
            _restore_buffers(self._module, loop["buffers"][strategy.rank])
        position = checkpoint["data"]["position"][min(strategy.rank, ranks - 1)]
        if position:
            state.batch_idx = self._feed.load_state_dict(position)
        problem = ""
        if loop["window"] is not None:
            problem = _restore_window(loop["window"], self._module, self._update, strategy)
            state.open_batches = 0 if problem else int(loop["open_batches"])
        self._rng = checkpoint["rng"][strategy.rank] if strategy.rank < ranks else None
        self._stepped = bool(loop["stepped"])
        self.resumed = True
        if strategy.rank == 0:
            _tell(ranks, strategy.world_size, f"{loop['open_batches']} micro-batches: {problem}" if problem else "")
            _tell_of_reading(self._feed, state.batch_idx)

    def take_up(self) -> bool:
        """Restores the generators, once; returns whether the step before the cut is still to be followed by what follows steps."""
        self.resumed = False
        rng, self._rng = self._rng, None
        if rng is not None:
            restore_rng(rng)
        stepped, self._stepped = self._stepped, False
        return stepped


class _BeforeValidation:
    """What a validation changes, as it was before."""

    def __init__(self, module: TrainingModule) -> None:
        self.rng = capture_rng()
        self._used = {name for name, metric in find_objects(module).items() if metric.update_count}

    def used(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Those of the torchmetrics ``objects`` that had seen something before."""
        return {name: metric for name, metric in objects.items() if name in self._used}

    def restore(self, module: TrainingModule) -> None:
        """Undoes what was done of the validation."""
        restore_rng(self.rng)
        for name, metric in find_objects(module).items():
            if name not in self._used:
                metric.reset()


def _differing_buffers(module: TrainingModule, strategy: Strategy) -> dict[str, Tensor]:
    """Returns the buffers that are not rank 0's here (BatchNorm's running values until they are shared again), on the host."""
    if strategy.world_size == 1:
        return {}
    buffers = {name: buffer.detach().cpu().contiguous() for name, buffer in module.named_buffers()}
    own = {name: _digest(buffer) for name, buffer in buffers.items()}
    first = strategy.broadcast(own)
    return {name: buffer for name, buffer in buffers.items() if own[name] != first.get(name)}


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


@torch.no_grad()
def _restore_buffers(module: TrainingModule, saved: dict[str, Tensor]) -> None:
    buffers = dict(module.named_buffers())
    for name, value in saved.items():
        buffers[name].copy_(value)


def _gather_window(module: TrainingModule, update: Update, strategy: Strategy) -> dict[str, Any] | None:
    """Returns the gradients of the open window, stacked over the ranks; None where no window is open."""
    window = update.window_state()
    if window is None:
        return None
    parameters = dict(module.named_parameters())
    held = [name for name, parameter in parameters.items() if parameter.grad is not None]
    everywhere = strategy.all_gather_object(held)
    wanted = {name for names in everywhere for name in names}
    gradients = {}
    for name, parameter in parameters.items():
        if name in wanted:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = _stacked(own.detach(), strategy)
    return {
        **window,
        "gradients": gradients,
        "held": everywhere,
        "tensors": [_stacked(tensor, strategy) for tensor in window["tensors"]],
    }


def _restore_window(window: dict[str, Any], module: TrainingModule, update: Update, strategy: Strategy) -> str:
    """Gives the open window back to this rank; returns why that cannot be, or an empty string.

    Another number of ranks gets the mean of all: what the average over the ranks makes of it is the same.
    """
    same_ranks = len(window["held"]) == strategy.world_size
    own = strategy.rank if same_ranks else None
    parameters = dict(module.named_parameters())
    gradients = {name: _unstacked(stacked, own) for name, stacked in window["gradients"].items()}
    for name, gradient in gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            return f"it has a gradient of {name}, and this module no such parameter"
    if problem := update.load_window_state({**window, "tensors": [_unstacked(one, own) for one in window["tensors"]]}):
        return problem
    held = window["held"][strategy.rank] if same_ranks else gradients
    strategy.resume_window()
    for name in held:
        parameter = parameters[name]
        parameter.grad = gradients[name].to(parameter.device, copy=True)
    return ""


def _ranks_for(strategy: Strategy, ranks: int) -> list[int]:
    """Whose logged values this rank goes on with: its own, or rank 0 with everybody's where their number is another."""
    if strategy.world_size == ranks:
        return [strategy.rank]
    return list(range(ranks)) if strategy.rank == 0 else []


def _tell(before: int, now: int, left_out: str) -> None:
    if before != now:
        _LOG.warning(
            "fabricamp: the checkpoint was written by %d process%s and is resumed by %d: data goes on in the same order behind the "
            "same sample; the batch of all processes together, random numbers and the rounding of sums cannot be the same",
            before, "" if before == 1 else "es", now,
        )  # fmt: skip
    if left_out:
        _LOG.warning(
            "fabricamp: the checkpoint was written within an accumulation window, whose gradients are left out, of %s",
            left_out,
        )


def _tell_of_reading(feed: Feed, batch_idx: int) -> None:
    if batch_idx and feed.read_past:
        _LOG.warning(
            "fabricamp: %s is read from its beginning to come to batch %d, and goes on exactly if it draws nothing on the way; "
            "torch's DataLoader with its default sampler begins anywhere, as does what has state_dict and load_state_dict",
            ", ".join(sorted(set(feed.read_past))), batch_idx,
        )  # fmt: skip


def _stacked(tensor: Tensor, strategy: Strategy) -> Tensor:
    """``tensor`` of every rank, behind a new first dimension; in host memory where there are several."""
    return tensor.unsqueeze(0) if strategy.world_size == 1 else strategy.all_gather(tensor).cpu()


def _unstacked(stacked: Tensor, rank: int | None) -> Tensor:
    """One rank's tensor, or the mean of all; of integers, which have no mean, rank 0's."""
    if rank is not None or not stacked.is_floating_point():
        return stacked[rank or 0]
    return stacked.float().mean(0).to(stacked.dtype) if stacked.dtype != torch.float64 else stacked.mean(0)
