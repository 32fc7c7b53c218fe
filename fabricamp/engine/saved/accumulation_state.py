"""A gradient accumulation in progress when a checkpoint is written: its gradients are saved, and no batch is read again.

Where gradients cannot be saved (within a micro-batch), or a run cannot go on with them (another level, another number of
micro-batches per step), a resumed run reads its micro-batches again: :class:`AccumulationState` says how many, and
:class:`~fabricamp.engine.saved.resume.ResumePoint` begins before them.

In a checkpoint: ``gradients`` by parameter, each stacked over the ranks or sharded; ``params_with_grad``, for each rank the
names of the parameters with a gradient; ``tensors``, what the update keeps beside ``.grad``, stacked over the ranks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch

from fabricamp.checkpoint.record import Section
from fabricamp.checkpoint.shard_loading import full_gradient, sharded_gradients
from fabricamp.ops.shards import is_shard, local
from fabricamp.ops.tensors import HALF_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp._utils.types import StateDict
    from fabricamp.engine.update import Update
    from fabricamp.module import TrainingModule
    from fabricamp.state import RunState
    from fabricamp.strategies.base import Strategy

_ALIGNMENT: Final = 16
"""Bytes that kernels load at once."""
_LOG = logging.getLogger("fabricamp")


class AccumulationState(Section):
    """Saves and restores the accumulation in progress; ``update`` is set while the loop runs, as gradients exist only then."""

    name = "open window"

    def __init__(self, module: TrainingModule, state: RunState, strategy: Strategy) -> None:
        self.update: Update | None = None
        self._module = module
        self._state = state
        self._strategy = strategy
        self._stepped = False
        self.must_repeat = False
        """In a resumed run: whether it cannot go on with the gradients in the checkpoint, and repeats their micro-batches."""

    def repeated_batches(self) -> int:
        """Returns how many micro-batches a resumed run has to repeat: those of an accumulation whose gradients cannot be saved."""
        return 0 if self._is_saved() else self._batches_of_epoch()

    def saved_batches(self) -> int:
        """Returns the number of micro-batches whose gradients are saved, which a resumed run repeats if it cannot use them."""
        return self._batches_of_epoch() if self._is_saved() else 0

    def _batches_of_epoch(self) -> int:
        """Returns the number of micro-batches of the accumulation in progress, without those carried over from another epoch."""
        return min(self._state.open_batches, self._state.batch_idx)

    def _is_saved(self) -> bool:
        return self.update is not None and self.update.accumulation_state() is not None

    def take_stepped(self) -> bool:
        """Returns, once, whether the run was cut between a step and the work that follows it."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def save(self) -> StateDict:
        """Returns the gradients, stacked over the ranks, with the accumulation's counters; every rank has to call it."""
        update = self.update
        content: StateDict = {}
        if update is not None and update.weights is not None:
            content["loops.fit.loss_reference"] = update.weights.reference.cpu()
        if self._state.failed:
            content["loops.fit.failed"] = True
        content["loops.fit.stepped"] = update is not None and update.stepped
        content["loops.fit.open_batches"] = self._state.open_batches if self._is_saved() else 0
        content["loops.fit.accumulation"] = None
        if update is not None:
            content["loops.fit.accumulation"] = _gathered(self._module, update, self._strategy)
        return content

    def restore(self, checkpoint: StateDict, path: str) -> None:
        """Restores the accumulation, or sets ``must_repeat``.  Files of other libraries contain no accumulation."""
        loop = checkpoint.get("loops", {}).get("fit", {})
        self._stepped = bool(loop.get("stepped"))
        if loop.get("failed") and self._strategy.rank == 0:
            _LOG.warning(
                "the checkpoint was written when an exception ended the run: the run continues after the last complete "
                "micro-batch, but changes that a step, a validation or hooks had made by then remain, and its results may differ "
                "from those of a run without the exception"
            )
        if self.update is not None:
            self.update.reference = loop.get("loss_reference")
        if loop.get("accumulation") is None:
            return
        assert self.update is not None
        accumulation = loop["accumulation"]
        if self._strategy.sharding.shards:
            accumulation = _for_shards(checkpoint, path, self._module, self._strategy)
        problem = self.update.changed_order(checkpoint)
        if not problem:
            problem = _restored(accumulation, self._module, self.update, self._strategy)
        self._state.open_batches = 0 if problem else int(loop["open_batches"])
        if problem:
            self.must_repeat = True
            self._tell(problem, int(loop["open_batches"]), int(loop["batch_idx"]))

    def _tell(self, problem: str, batches: int, batches_of_epoch: int) -> None:
        """Tells what happens to the ``batches`` micro-batches of an accumulation with which this run cannot go on."""
        if self._strategy.rank != 0:
            return
        if batches == 0:  # manual optimization: which micro-batches gave these gradients is not known
            _LOG.warning(
                "the checkpoint has gradients that training_step kept for a later step; they are dropped: %s", problem
            )
            return
        dropped = ""
        if batches > batches_of_epoch:  # carried over
            dropped = ", except those of the epoch before: their gradients are dropped"
        _LOG.warning(
            "the checkpoint was written within an accumulation step, and its gradients do not fit this run (%s): "
            "the micro-batches of the step are computed again%s",
            problem, dropped,
        )  # fmt: skip


# -- saving ------------------------------------------------------------------------------------------------------------------------


def _gathered(module: TrainingModule, update: Update, strategy: Strategy) -> StateDict | None:
    """Returns the gradients of the accumulation in progress, stacked over the ranks; None if there is none."""
    accumulation = update.accumulation_state()
    if accumulation is None:
        return None
    whole = strategy.sharding.whole_gradients()
    if whole:  # full gradients that are not scattered to shards yet: each rank has its own, outside of .grad
        return {
            **accumulation,
            "gradients": whole,
            "params_with_grad": strategy.all_gather_object(sorted(whole)),
            "tensors": [_stacked(tensor, strategy) for tensor in accumulation["tensors"]],
        }
    parameters = dict(module.named_parameters())
    own_names = [name for name, parameter in parameters.items() if parameter.grad is not None]
    params_with_grad = strategy.all_gather_object(own_names)
    on_any_rank = {name for names in params_with_grad for name in names}
    gradients = {}
    for name, parameter in parameters.items():
        if name in on_any_rank:  # on all ranks alike: stacking is a collective
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            # Sharded gradients are averaged over the ranks already.
            gradients[name] = own if is_shard(own) else _stacked(own, strategy)
    return {
        **accumulation,
        **_offsets_of_shards(gradients),
        "gradients": gradients,
        "params_with_grad": params_with_grad,
        "tensors": [_stacked(tensor, strategy) for tensor in accumulation["tensors"]],
    }


def _offsets_of_shards(gradients: StateDict) -> StateDict:
    """Returns the memory offsets of sharded gradients: torch lays shards one after the other, without aligning each.

    Kernels sum unaligned memory in another order, so a resumed run puts the shards at the same offsets.
    """
    offsets = {}
    for name, gradient in gradients.items():
        if is_shard(gradient):
            offsets[name] = local(gradient).data_ptr() % _ALIGNMENT
    return {"sharded": True, "offsets": offsets} if offsets else {}


def _stacked(tensor: Tensor, strategy: Strategy) -> Tensor:
    """Returns every rank's ``tensor``, stacked in a new first dimension; in host memory if there are several ranks."""
    return tensor.unsqueeze(0) if strategy.world_size == 1 else strategy.all_gather(tensor).cpu()


# -- restoring ---------------------------------------------------------------------------------------------------------------------


def _for_shards(checkpoint: StateDict, path: str, module: TrainingModule, strategy: Strategy) -> StateDict:
    """Returns the accumulation of ``checkpoint`` with gradients for a sharded module, averaged over the ranks that wrote them.

    Full gradients that are not scattered to shards yet stay each rank's own if the number of ranks is the same.
    """
    fit = checkpoint["loops"]["fit"]
    accumulation = fit["accumulation"]
    if not accumulation.get("sharded"):
        ranks = len(accumulation["params_with_grad"])
        # Gradients on the meta device have their values in the folder's shards, not in the file that was read.
        in_shards = any(gradient.is_meta for gradient in accumulation["gradients"].values())
        whole = strategy.sharding.places_of_whole_gradients() if ranks == strategy.world_size else {}
        if in_shards and whole:
            return {**accumulation, "gradients": sharded_gradients(checkpoint, path, whole), "whole": True}
        averaged = {}
        for name, stacked in accumulation["gradients"].items():
            averaged[name] = _unstacked(full_gradient(checkpoint, path, name, stacked), None)
        accumulation = {
            **accumulation,
            "gradients": averaged,
            "sharded": True,
            "params_with_grad": [sorted(averaged)] * ranks,
        }
        checkpoint = {**checkpoint, "loops": {"fit": {**fit, "accumulation": accumulation}}}
    return {**accumulation, "gradients": sharded_gradients(checkpoint, path, dict(module.named_parameters()))}


def _restored(accumulation: StateDict, module: TrainingModule, update: Update, strategy: Strategy) -> str:
    """Restores the accumulation on this rank; returns why that is impossible, or an empty string.

    With another number of ranks, each rank gets the mean over the saved ranks, which preserves the average over all ranks.
    """
    same_ranks = len(accumulation["params_with_grad"]) == strategy.world_size
    rank = strategy.rank if same_ranks else None
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    gradients = accumulation["gradients"]
    if accumulation.get("whole"):
        parameters = strategy.sharding.places_of_whole_gradients()
    elif not accumulation.get("sharded"):
        gradients = {name: _unstacked(stacked, rank) for name, stacked in gradients.items()}
    for name, gradient in gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            return f"it has a gradient of {name}, and this module has no parameter of this name and shape"
    tensors = [_unstacked(stacked, rank) for stacked in accumulation["tensors"]]
    problem = update.load_accumulation_state({**accumulation, "tensors": tensors})
    if problem:
        return problem
    strategy.note_window(begun=True)
    if accumulation.get("whole"):
        strategy.sharding.take_whole_gradients(gradients)
        return ""
    names = accumulation["params_with_grad"][strategy.rank] if same_ranks else gradients
    offsets = accumulation.get("offsets", {})
    for name in names:
        parameter = parameters[name]
        copied = gradients[name].to(parameter.device, copy=True)
        parameter.grad = copied
        if is_shard(copied):
            copied._local_tensor = at_offset(local(copied), offsets.get(name, 0))
    update.note_restored_gradients(accumulation)
    return ""


def _unstacked(stacked: Tensor, rank: int | None) -> Tensor:
    """Returns one rank's tensor, or the mean of all if ``rank`` is None; for integers, which have no mean, rank 0's."""
    if rank is not None or not (stacked.is_floating_point() or stacked.is_complex()):
        return stacked[rank or 0]
    if stacked.dtype not in HALF_DTYPES:
        return stacked.mean(0)
    return stacked.float().mean(0).to(stacked.dtype)


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """Returns a copy of ``tensor`` that begins ``offset`` bytes after a multiple of 16."""
    start = offset // tensor.element_size()
    memory = torch.empty(start + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return memory[start:].view(tensor.shape).copy_(tensor)
