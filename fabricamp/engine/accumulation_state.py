"""The accumulation in progress when a checkpoint is written: its gradients are saved, so nothing is replayed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.checkpoint.record import Section
from fabricamp.checkpoint.shards import full_gradient, sharded_gradients
from fabricamp.ops.shards import is_shard, local

if TYPE_CHECKING:
    from torch import Tensor

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

    def repeated_batches(self) -> int:
        """Returns how many micro-batches a resumed run has to repeat: those of an accumulation whose gradients cannot be saved.

        Of an accumulation that was carried over from another epoch, only the micro-batches of this epoch.
        """
        return 0 if self._is_saved() else min(self._state.open_batches, self._state.batch_idx)

    def _is_saved(self) -> bool:
        return self.update is not None and self.update.window_state() is not None

    def take_stepped(self) -> bool:
        """Returns, once, whether the run was cut between a step and the work that follows it."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def save(self) -> dict[str, Any]:
        """Returns the gradients, stacked over the ranks, with the accumulation's counters; every rank has to call it."""
        update = self.update
        weights = update.weights if update is not None else None
        return {
            **({} if weights is None else {"loops.fit.loss_reference": weights.reference.cpu()}),
            **({"loops.fit.failed": True} if self._state.failed else {}),
            "loops.fit.stepped": update is not None and update.stepped,
            "loops.fit.open_batches": self._state.open_batches if self._is_saved() else 0,
            "loops.fit.window": _gathered(self._module, update, self._strategy) if update is not None else None,
        }

    def restore(self, checkpoint: dict[str, Any], path: str) -> None:
        """Restores the accumulation; warns if that is impossible.  Other libraries' files have none."""
        loop = checkpoint.get("loops", {}).get("fit", {})
        self._stepped = bool(loop.get("stepped"))
        if loop.get("failed") and self._strategy.rank == 0:
            _LOG.warning(
                "the checkpoint was written when an exception ended the run: the run continues after the last complete "
                "micro-batch, but what a step, a validation or hooks had changed by then stays, so it need not equal a run without "
                "the exception"
            )
        if self.update is not None:
            self.update.reference = loop.get("loss_reference")
        if loop.get("window") is None:
            return
        assert self.update is not None
        window = loop["window"]
        if self._strategy.checkpoint_form == "folder":
            window = _for_shards(checkpoint, path, self._module, self._strategy)
        problem = _given_back(window, self._module, self.update, self._strategy)
        self._state.open_batches = 0 if problem else int(loop["open_batches"])
        if problem and self._strategy.rank == 0:
            _LOG.warning(
                "the checkpoint was written within an accumulation step, and the gradients of its %s micro-batches "
                "are left out: %s",
                loop["open_batches"], problem,
            )  # fmt: skip


def _gathered(module: TrainingModule, update: Update, strategy: Strategy) -> dict[str, Any] | None:
    """Returns the gradients of the accumulation in progress, stacked over the ranks; None if there is none."""
    window = update.window_state()
    if window is None:
        return None
    whole, parameters = strategy.whole_gradients(), dict(module.named_parameters())
    if whole:
        return {
            **window,
            "gradients": whole,
            "held": strategy.all_gather_object(sorted(whole)),
            "tensors": [_stacked(tensor, strategy) for tensor in window["tensors"]],
        }
    held = [name for name, parameter in parameters.items() if parameter.grad is not None]
    everywhere = strategy.all_gather_object(held)
    wanted = {name for names in everywhere for name in names}
    gradients = {}
    for name, parameter in parameters.items():
        if name in wanted:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # Sharded gradients are averaged over the ranks already.
            gradients[name] = own.detach() if is_shard(own) else _stacked(own.detach(), strategy)
    return {
        **window,
        **_of_shards(gradients),
        "gradients": gradients,
        "held": everywhere,
        "tensors": [_stacked(tensor, strategy) for tensor in window["tensors"]],
    }


def _given_back(window: dict[str, Any], module: TrainingModule, update: Update, strategy: Strategy) -> str:
    """Restores the accumulation on this rank; returns why that is impossible, or an empty string.

    With another number of ranks, each gets the mean of all saved ranks: the average over the ranks is the same then.
    """
    same_ranks = len(window["held"]) == strategy.world_size
    own = strategy.rank if same_ranks else None
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    gradients = window["gradients"]
    if window.get("whole"):
        parameters = strategy.places_of_whole_gradients()
    elif not window.get("sharded"):
        gradients = {name: _unstacked(stacked, own) for name, stacked in gradients.items()}
    for name, gradient in gradients.items():
        if name not in parameters or parameters[name].shape != gradient.shape:
            return f"it has a gradient of {name}, and this module no such parameter"
    if problem := update.load_window_state({**window, "tensors": [_unstacked(one, own) for one in window["tensors"]]}):
        return problem
    held = window["held"][strategy.rank] if same_ranks else gradients
    strategy.note_window(begun=True)
    if window.get("whole"):
        strategy.take_whole_gradients(gradients)
        return ""
    for name in held:
        parameter = parameters[name]
        parameter.grad = copied = gradients[name].to(parameter.device, copy=True)
        if is_shard(copied):
            copied._local_tensor = at_offset(local(copied), window.get("offsets", {}).get(name, 0))
    return ""


def _of_shards(gradients: dict[str, Any]) -> dict[str, Any]:
    """Returns the memory offsets of sharded gradients: torch lays shards one after the other, without aligning each.

    Kernels sum unaligned memory in another order, so a resumed run puts the shards at the same offsets.
    """
    offsets = {name: local(one).data_ptr() % _ALIGNMENT for name, one in gradients.items() if is_shard(one)}
    return {"sharded": True, "offsets": offsets} if offsets else {}


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """Returns a copy of ``tensor`` that begins ``offset`` bytes after a multiple of 16."""
    start = offset // tensor.element_size()
    memory = torch.empty(start + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return memory[start:].view(tensor.shape).copy_(tensor)


def _for_shards(checkpoint: dict[str, Any], path: str, module: TrainingModule, strategy: Strategy) -> dict[str, Any]:
    """Returns the accumulation of ``checkpoint`` with gradients for a sharded module, averaged over the ranks that wrote them.

    Full gradients, which parameters do not hold as shards yet, stay each rank's own if the number of ranks is the same.
    """
    fit = checkpoint["loops"]["fit"]
    window = fit["window"]
    if not window.get("sharded"):
        stored = any(one.is_meta for one in window["gradients"].values())
        places = strategy.places_of_whole_gradients() if len(window["held"]) == strategy.world_size else {}
        if stored and places:
            return {**window, "gradients": sharded_gradients(checkpoint, path, places), "whole": True}
        averaged = {}
        for name, stacked in window["gradients"].items():
            averaged[name] = _unstacked(full_gradient(checkpoint, path, name, stacked), None)
        window = {**window, "gradients": averaged, "sharded": True, "held": [sorted(averaged)] * len(window["held"])}
        checkpoint = {**checkpoint, "loops": {"fit": {**fit, "window": window}}}
    return {**window, "gradients": sharded_gradients(checkpoint, path, dict(module.named_parameters()))}


def _stacked(tensor: Tensor, strategy: Strategy) -> Tensor:
    """Returns every rank's ``tensor``, stacked in a new first dimension; in host memory if there are several ranks."""
    return tensor.unsqueeze(0) if strategy.world_size == 1 else strategy.all_gather(tensor).cpu()


def _unstacked(stacked: Tensor, rank: int | None) -> Tensor:
    """Returns one rank's tensor, or the mean of all if ``rank`` is None; for integers, which have no mean, rank 0's."""
    if rank is not None or not stacked.is_floating_point():
        return stacked[rank or 0]
    return stacked.float().mean(0).to(stacked.dtype) if stacked.dtype != torch.float64 else stacked.mean(0)
