"""``Trainer(on_out_of_memory="halve")``: a micro-batch that does not fit into memory is run in parts.

:class:`HalvingUpdate` tries a micro-batch; if forward or backward runs out of memory it undoes what they have done, cuts the
micro-batch in two, and runs the halves one after the other into the same gradients, which it may have to cut again.  Their losses
are weighted by samples; those given as (sum, weight) by themselves.  Hooks, counters and the update see one micro-batch.

A rank does this by itself: strategies exchange nothing before all backwards of a step are done
(``Strategy.exchange_after_backward``), so that the others wait in the exchange, whatever number of parts each of them runs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fabricamp._utils.containers import tensors_within
from fabricamp.data.cutting import NotCuttableError, cut, samples_in
from fabricamp.engine.out_of_memory import drop_frames, is_out_of_memory
from fabricamp.engine.update import Update
from fabricamp.errors import ConfigError
from fabricamp.metrics.undo import LogUndo
from fabricamp.ops.digests import digests
from fabricamp.optimizers.closures import demands_closure
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.rng import capture_rng, restore_rng, snapshot_rng
from fabricamp.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from fabricamp._utils.types import Batch, Output
    from fabricamp.engine.loop import FitParts
    from fabricamp.engine.update import LossWeights
    from fabricamp.strategies.base import Strategy
    from fabricamp.trainer.arguments import Settings

_LOG = logging.getLogger("fabricamp")
_NAME: Final = 'on_out_of_memory="halve"'


def check_halving(settings: Settings, strategy: Strategy) -> None:
    """Raises :class:`ConfigError` if the Trainer's other arguments rule out that a micro-batch is run in parts."""
    if settings.on_out_of_memory != "halve":
        return
    if settings.cuda_graph is not None:
        raise ConfigError(
            f"{_NAME} with cuda_graph: a replay takes no memory, and the memory of a capture is an error; leave one of them out"
        )
    if refusal := strategy.refuses_parts():
        raise ConfigError(f"{_NAME}: {refusal}")


@dataclass(slots=True, eq=False)
class _Part:
    """Some samples of a micro-batch: all of them have a ``share`` of 1, and ``samples`` None until they are counted."""

    batch: Batch
    share: float = 1.0
    samples: int | None = None
    start: int = 0
    """The number of its first sample in ``whole``, the micro-batch; None: it is all of it."""
    whole: _Part | None = None


class HalvingUpdate(Update):
    """Updates whose micro-batches are cut in two when they run out of memory."""

    def __init__(self, parts: FitParts) -> None:
        super().__init__(parts)
        self._check(parts)
        self._too_large: list[tuple[int, float]] = []
        """Samples, and elements a sample, of parts that did not fit; larger ones are cut before they are tried."""
        self._past_backward = False
        self._is_first = True
        self._last = False
        self._parameters: list[Tensor] = []
        self._undo: _Undo | None = None
        run_backward = self._hooks.backward

        def backward(loss: Tensor) -> None:
            run_backward(loss)
            self._past_backward = True

        self._hooks = replace(self._hooks, backward=backward)
        for step in parts.optimizer_steps:
            step.hands_over = True  # the strategy exchanges after backward, and has seen none

    def _check(self, parts: FitParts) -> None:
        if self._hooks.zero_grad is not None:
            raise ConfigError(
                f"{_NAME} with {type(parts.module).__name__}.optimizer_zero_grad: gradients that it keeps cannot be told "
                "from those of a part that failed; leave the method out, and give accumulate_grad_batches"
            )
        for optimizer in parts.optimizers:
            if demands_closure(optimizer):
                raise ConfigError(
                    f"{_NAME} with {type(optimizer).__name__}, whose step runs forward and backward itself; take an optimizer that "
                    "steps once"
                )

    def begin_epoch(self, batch_idx: int) -> None:
        """Prepares for an epoch; refuses BatchNorm layers in training, whose statistics are those of a whole batch."""
        super().begin_epoch(batch_idx)
        module = self._parts.module
        for name, layer in module.named_modules():
            if isinstance(layer, AnyBatchNorm) and layer.training:
                raise ConfigError(
                    f"{_NAME} with {name!r} ({type(layer).__name__}) in training: parts of a batch have other statistics than the "
                    f"whole; leave it out, put the layer into eval(), or take GroupNorm"
                )
        owned = [one for optimizer in self._parts.optimizers for one in owned_parameters(optimizer)]
        self._parameters = list({id(one): one for one in (*module.parameters(), *owned)}.values())
        self._undo = _Undo(self._parts)

    # -- a micro-batch -----------------------------------------------------------------------------------------------------------

    def run_batch(self, batch: Batch, batch_idx: int, last: bool) -> Output:
        """Runs a micro-batch, in parts if it does not fit; returns the outputs for the hooks after it."""
        self._last = last
        ends = self.ends_accumulation(batch_idx, last)
        if ends and not self.sums:
            outputs, loss = self._run_in_parts(batch, batch_idx)
        else:
            with self._parts.strategy.no_sync():
                outputs, loss = self._run_in_parts(batch, batch_idx)
        return self.end_batch(batch, batch_idx, outputs, loss, ends=ends)

    def _run_in_parts(self, batch: Batch, batch_idx: int) -> tuple[Output, Tensor | None]:
        """Runs forward and backward of all parts; returns the outputs for hooks and the loss, of the whole micro-batch."""
        user_call = self._parts.state.user_call
        undo = self._undo
        assert undo is not None
        waiting = [_Part(batch)]
        done: list[tuple[_Part, Output, Tensor | None]] = []
        earlier = self.loss
        in_parts = False
        try:
            while waiting:
                part = waiting.pop(0)
                result = None if self._is_known_as_too_large(part) else self._try(part, batch_idx, earlier)
                if result is None:
                    if not in_parts:
                        in_parts = True
                        undo.logs.begin_parts()
                    waiting[:0] = self._halves(part)
                    continue
                outputs, loss = result
                has_loss = loss is not earlier
                earlier = loss
                if in_parts:
                    undo.logs.take_part(part.share)
                done.append((part, outputs, loss if has_loss else None))
        finally:
            user_call.batch = batch
            self.divisor = self.accumulate
        if not in_parts:
            return done[0][1], earlier
        undo.logs.join_parts()
        return self._joined_outputs(done), self._joined_loss(done, earlier)

    def _try(self, part: _Part, batch_idx: int, earlier: Tensor | None) -> tuple[Output, Tensor | None] | None:
        """Runs forward and backward of a part; None: they ran out of memory, and everything is as before.

        An error of memory is raised again, with a note, if the part cannot be cut, or if backward had ended.
        """
        undo = self._undo
        assert undo is not None
        undo.note(self.weights)
        kept = None if earlier is None or self.sums else self._take_gradients()
        self._parts.state.user_call.batch = part.batch
        self.divisor = self.accumulate if self.weights is not None or part.share == 1 else self.accumulate / part.share
        self._past_backward = False
        before = digests(self._own()) if self._is_first else None
        result: tuple[Output, Tensor | None] | None = None
        given = _marks(part.batch)
        try:
            result = self.forward_backward(part.batch, batch_idx, earlier)
        except (RuntimeError, MemoryError) as error:
            if self._past_backward or not is_out_of_memory(error):
                raise
            self._note_failure(part, error, edited=_marks(part.batch) != given)
            drop_frames(error)
        finally:
            if result is None:
                for parameter in self._parameters:
                    parameter.grad = None
            if kept is not None:
                self._give_gradients(kept)
        if result is None:
            undo.undo(self.weights)
        elif before is not None:
            self._is_first = False
            self._refuse_edits(before)
        return result

    def _take_gradients(self) -> list[Tensor | None]:
        """Takes the gradients of the accumulation so far out of ``.grad``: backward may fail after it has added to some."""
        kept = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return kept

    @torch.no_grad()
    def _give_gradients(self, kept: Sequence[Tensor | None]) -> None:
        """Adds what is in ``.grad`` to the gradients of the accumulation so far, as backward would have, and puts these back."""
        sums: list[Tensor] = []
        addends: list[Tensor] = []
        for parameter, before in zip(self._parameters, kept, strict=True):
            new = parameter.grad
            if before is None:
                continue
            if new is None:
                parameter.grad = before
            elif before.layout is torch.strided and new.layout is torch.strided:
                sums.append(before)
                addends.append(new)
                parameter.grad = before
            else:
                parameter.grad = before + new
        if sums:
            torch._foreach_add_(sums, addends)

    def _own(self) -> list[Tensor]:
        return [one.detach() for one in self._parameters if type(one) is torch.nn.Parameter and one.numel()]

    def _refuse_edits(self, before: Tensor) -> None:
        """Raises if the first micro-batch has changed parameters by itself: a part that is run again would change them again."""
        changed = (digests(self._own()) != before).any(1).tolist()
        if not any(changed):
            return
        own = [one for one in self._parameters if type(one) is torch.nn.Parameter and one.numel()]
        edited = own[changed.index(True)]
        name = next((name for name, one in self._parts.module.named_parameters() if one is edited), "a parameter")
        raise ConfigError(
            f"{_NAME}: training_step changed the parameter {name!r}, and would change it again when a batch is run in "
            "parts; change it in on_train_batch_end"
        )

    # -- what does not fit ---------------------------------------------------------------------------------------------------------

    def _is_known_as_too_large(self, part: _Part) -> bool:
        """Whether a part with as many samples, each of as many elements, or fewer, did not fit before."""
        if not self._too_large or self._training_batch_norm() is not None:
            return False
        try:
            samples = self._samples_of(part)
        except NotCuttableError:
            return False  # it may fit; if not, the error says that it cannot be cut
        each = _elements(part.batch) / samples
        return samples > 1 and any(samples >= count and each >= size for count, size in self._too_large)

    def _samples_of(self, part: _Part) -> int:
        if part.samples is None:
            part.samples = samples_in(part.batch, *self._expected_samples())
        return part.samples

    def _expected_samples(self) -> tuple[int | None, Container[int]]:
        """Returns the loader's batch size, None if it has none, and other numbers of samples that this batch may have."""
        loader = self._parts.loader
        if type(loader) is not DataLoader or loader.batch_size is None:
            return None, ()
        size = loader.batch_size
        if isinstance(loader.dataset, IterableDataset):
            return size, range(1, size)  # the last batch of any worker
        if not self._last:
            return size, ()
        try:
            return size, {len(loader.sampler) % size}  # type: ignore[arg-type]  # many have a length
        except TypeError:
            return size, range(1, size)

    def _note_failure(self, part: _Part, error: BaseException, *, edited: bool) -> None:
        """Notes the size of a part that did not fit, and says so; raises ``error`` with a note if the part cannot be cut.

        ``edited``: forward or backward have changed the batch, which is not undone.
        """
        reason = ""
        samples = 0
        try:
            samples = self._samples_of(part)
        except NotCuttableError as problem:
            reason = f"the batch cannot be cut in two: {problem}"
        if samples == 1:
            reason = "one sample alone does not fit, and cannot be cut"
        if edited:
            reason = (
                "the batch was changed in place before memory ended, and would be changed again; change a copy of it in "
                "training_step, or the batch itself in on_after_batch_transfer"
            )
        layer = self._training_batch_norm()
        if layer is not None:
            reason = f"a {type(layer).__name__} is in training, whose statistics are those of the whole batch"
        if reason:
            error.add_note(f"fabricamp: {_NAME}: {reason}")
            raise error
        each = _elements(part.batch) / samples
        self._too_large = [one for one in self._too_large if one[0] < samples or one[1] < each]
        self._too_large.append((samples, each))
        _LOG.warning(
            "out of memory on rank %d in step %d: %d samples are run as %d and %d, as later batches of this size are; %s",
            self._parts.strategy.rank,
            self._state.global_step,
            samples,
            samples - samples // 2,
            samples // 2,
            "their losses are (sum, weight)"
            if self.weights is not None
            else "their losses are weighted by samples, as is right for a mean over samples; return (sum, weight) for another",
        )

    def _training_batch_norm(self) -> torch.nn.Module | None:
        layers = self._parts.module.modules()
        return next((one for one in layers if isinstance(one, AnyBatchNorm) and one.training), None)

    def _halves(self, part: _Part) -> list[_Part]:
        samples = self._samples_of(part)
        middle = samples - samples // 2
        # Of the whole: what has one value for each of its samples may have as many as a part by chance.
        whole = part.whole or part
        of_whole = self._samples_of(whole)
        return [
            _Part(
                batch=cut(whole.batch, of_whole, part.start + start, part.start + stop),
                share=part.share * (stop - start) / samples,
                samples=stop - start,
                start=part.start + start,
                whole=whole,
            )
            for start, stop in ((0, middle), (middle, samples))
        ]

    # -- parts that are one micro-batch again ------------------------------------------------------------------------------------

    def _use_weights(self) -> LossWeights:
        """Returns the loss weights; losses with weights are not weighted by samples too."""
        weights = super()._use_weights()
        self.divisor = self.accumulate
        return weights

    def _joined_loss(
        self, done: Sequence[tuple[_Part, Output, Tensor | None]], earlier: Tensor | None
    ) -> Tensor | None:
        """Returns the loss of the whole micro-batch, for the step's status; ``earlier`` if no part had one."""
        losses = [(part.share, loss.detach()) for part, _, loss in done if loss is not None]
        if not losses:
            return earlier
        terms = [loss if self.weights is not None else loss * share for share, loss in losses]
        return torch.stack(terms).sum()

    def _joined_outputs(self, done: Sequence[tuple[_Part, Output, Tensor | None]]) -> Output:
        """Returns the outputs for hooks: tensors with samples are joined, numbers averaged, others are those of the last part."""
        if not self._hooks.wants_outputs:
            return None
        outputs: list[tuple[_Part, dict[str, Any]]] = [
            (part, output) for part, output, _ in done if isinstance(output, dict) and output
        ]
        if not outputs:
            return done[-1][1]
        joined: dict[str, Any] = {}
        for key, last in outputs[-1][1].items():
            values = [(part, output[key]) for part, output in outputs if key in output]
            joined[key] = self._joined_value(key, values, last, outputs)
        return joined

    def _joined_value(
        self, key: str, values: Sequence[tuple[_Part, Any]], last: Any, outputs: Sequence[tuple[_Part, dict[str, Any]]]
    ) -> Any:
        tensors = all(isinstance(value, Tensor) for _, value in values)
        if self.weights is not None and key == "weight":
            return sum(value for _, value in values)
        if self.weights is not None and key == "loss":
            whole = sum(output["weight"] for _, output in outputs)
            return sum(output["loss"] * output["weight"] for _, output in outputs) / whole
        if tensors and key == "loss" and self._shows_shares:  # each is a share of the accumulation's loss already
            return torch.stack([value for _, value in values]).sum()
        if tensors and all(value.ndim and len(value) == part.samples for part, value in values):
            return torch.cat([value for _, value in values])
        if tensors and all(value.ndim == 0 and value.is_floating_point() for _, value in values):
            whole_share = sum(part.share for part, _ in values)
            return torch.stack([value * (part.share / whole_share) for part, value in values]).sum()
        return last


class _Undo:
    """What forward and backward of a part change beside gradients: logged values, buffers, random numbers, the loss weights."""

    def __init__(self, parts: FitParts) -> None:
        self.logs = LogUndo(parts.metrics, parts.module)
        self._tables = [(one._buffers, name) for one in parts.module.modules() for name in one._buffers]
        self._buffers: list[Tensor | None] = []
        self._copies: list[Tensor | None] = [None] * len(self._tables)
        self._rng: Any = None
        self._weights: tuple[Tensor, float | None] | None = None

    @torch.no_grad()
    def note(self, weights: LossWeights | None) -> None:
        """Notes the state before a part; on a GPU it waits for nothing."""
        self._rng = snapshot_rng()
        self.logs.note()
        self._buffers = [table.get(name) for table, name in self._tables]
        sources: list[Tensor] = []
        copies: list[Tensor] = []
        for place, buffer in enumerate(self._buffers):
            copy = self._copies[place]
            if buffer is None:
                continue
            if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
                self._copies[place] = buffer.clone()
            else:
                sources.append(buffer)
                copies.append(copy)
        if sources:
            torch._foreach_copy_(copies, sources)
        self._weights = None if weights is None else (weights.total.clone(), weights.number)

    @torch.no_grad()
    def undo(self, weights: LossWeights | None) -> None:
        """Restores the noted state."""
        restore_rng(capture_rng(self._rng))
        self.logs.undo()
        for (table, name), buffer, copy in zip(self._tables, self._buffers, self._copies, strict=True):
            table[name] = buffer
            if buffer is not None and copy is not None:
                buffer.copy_(copy)
        if weights is not None:
            if self._weights is None:
                weights.forget()
            else:
                weights.total.copy_(self._weights[0])
                weights.number = self._weights[1]


def _marks(batch: Batch) -> list[tuple[int, int]]:
    """Returns which tensors a batch has, and their counters of writes: equal only if neither was changed."""
    return [(id(one), 0 if one.is_inference() else one._version) for one in tensors_within(batch)]


def _elements(batch: Batch) -> int:
    return sum(tensor.numel() for tensor in tensors_within(batch))
