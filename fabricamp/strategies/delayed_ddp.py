"""Data parallel with apex's delayed all-reduce: gradients are averaged after backward in flat buffers, which the update reads.

In this order: the options; a run's module (:meth:`~DelayedDDP.wrap_module`); the exchange of a step, from
:meth:`~DelayedDDP.reduce_gradients` down; the flat buffers that it uses.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, ClassVar

import torch

from fabricamp.arguments.checks import check_flag, check_number
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.gradients.flat import IN_PLACE, FlatGradients, Gradients
from fabricamp.strategies.ddp import AfterBroadcast
from fabricamp.strategies.exchange import (
    DEFAULT_BUCKET_MB,
    Exchange,
    checked_communicators,
    checked_transport,
    checked_triggers,
    indices_of_triggers,
    marked,
)
from fabricamp.strategies.overlapped_allreduce import Lane, LaneSums, Local, Overlap, exchanges_statistics, lanes_for
from fabricamp.strategies.process_group import ProcessGroupStrategy
from fabricamp.strategies.unused_parameters import UnusedParamsReport, listed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from fabricamp._utils.types import Step
    from fabricamp.gradients.memory import GradientMemory

_MOST_LISTS = 8
"""Lists of parameters whose flat buffers are kept: manual optimization exchanges those of each optimizer by themselves."""


class DelayedDDP(ProcessGroupStrategy):
    """Every process holds the full module; gradients are averaged after backward, by one collective per dtype.

    ``message_size`` or ``allreduce_trigger_params`` select the overlapped mode: gradients are sent in messages during backward,
    the fp32 sums of an accumulation at O2 and O5 after the last one.
    If a rank's backward leaves out parameters, that rank waits for the others' flags; fabricamp's fused optimizers avoid this
    wait.

    Args:
        delay_allreduce: False selects the overlapped mode; None: the other options select the mode.
        message_size: a message is sent as soon as it holds at least this number of elements.
        allreduce_trigger_params: a message is sent as soon as one of these parameters (or names) has its gradient.
        num_allreduce_streams: number of streams that send messages in turn, in overlapped mode.
        allreduce_communicators: your own (process groups, streams) for the messages.
        retain_allreduce_buffers: leaves averaged gradients in ``.grad``, as views of ``allreduce_buffers``; those of an
            accumulation at O2 and O5, whose sums are fp32, in ``allreduce_buffers`` alone.
        allreduce_always_fp32: exchanges half gradients in fp32.
        allreduce_dtype: the dtype in which gradients are exchanged.
        gradient_average: False sums the gradients instead of averaging them.
        gradient_predivide_factor: half gradients are divided by it before the sum; None: by the number of ranks.
        broadcast_buffers: broadcasts rank 0's buffers with each exchange.
        prof: marks the exchange for profilers (NVTX).
        timeout: seconds (or a timedelta) that a rank waits for the others; None is half an hour.

    Example:
        >>> DelayedDDP(allreduce_dtype=torch.bfloat16, timeout=600).name
        'delayed_ddp'
    """

    name: ClassVar[str] = "delayed_ddp"
    asks_for_parameters: ClassVar[bool] = True

    def __init__(
        self,
        *,
        delay_allreduce: bool | None = None,
        message_size: int | None = None,
        allreduce_trigger_params: Sequence[Tensor | str] | None = None,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[ProcessGroup], Sequence[torch.cuda.Stream]] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        allreduce_dtype: torch.dtype | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float | None = None,
        broadcast_buffers: bool = True,
        prof: bool = False,
        timeout: float | timedelta | None = None,
    ) -> None:
        super().__init__(timeout=timeout)
        self.message_size = None if message_size is None else check_number("message_size", message_size, least=1)
        self.allreduce_trigger_params = checked_triggers(allreduce_trigger_params)
        self.num_allreduce_streams = check_number("num_allreduce_streams", num_allreduce_streams, least=1)
        self.allreduce_communicators = checked_communicators(allreduce_communicators, self.num_allreduce_streams)
        self.retain_allreduce_buffers = check_flag("retain_allreduce_buffers", retain_allreduce_buffers)
        self.broadcast_buffers = check_flag("broadcast_buffers", broadcast_buffers)
        self.prof = check_flag("prof", prof)
        self.transport = checked_transport(
            allreduce_dtype,
            always_fp32=allreduce_always_fp32,
            average=gradient_average,
            predivide=gradient_predivide_factor,
        )
        self.averages_gradients = self.transport.average
        self.delay_allreduce = self._checked_mode(delay_allreduce)
        self._forget()

    def _checked_mode(self, delay_allreduce: object) -> bool:
        """Returns whether gradients are exchanged after backward; raises :class:`ConfigError` if the options contradict that."""
        overlapped = self.message_size is not None or bool(self.allreduce_trigger_params)
        if delay_allreduce is not None:
            delayed = check_flag("delay_allreduce", delay_allreduce)
            if delayed and overlapped:
                raise ConfigError(
                    "delay_allreduce=True exchanges after backward, and message_size or allreduce_trigger_params while it runs; "
                    "give one of them"
                )
            if not (delayed or overlapped):
                raise ConfigError(
                    "delay_allreduce=False exchanges while backward runs, in messages of message_size elements (apex's were of "
                    "10_000_000) or by allreduce_trigger_params; give one of these"
                )
        if not overlapped and (self.num_allreduce_streams > 1 or self.allreduce_communicators is not None):
            raise ConfigError(
                "num_allreduce_streams and allreduce_communicators carry the messages of the overlapped mode; give message_size "
                "or allreduce_trigger_params too, or leave them out"
            )
        return not overlapped

    def _forget(self) -> None:
        """Sets what belongs to a run to its state before the first run."""
        self._module: nn.Module | None = None
        self._automatic = True
        # By id of the parameter; all as at the start of the epoch.
        self._names: dict[int, str] = {}
        self._order: dict[int, int] = {}
        self._frozen: set[int] = set()
        self._trainable: list[str] = []
        # The exchange: one pair for each list of parameters, by their ids.
        self._flats: dict[tuple[int, ...], tuple[FlatGradients, UnusedParamsReport]] = {}
        self._local = Local()
        self._overlap: Overlap | None = None
        self._lanes: list[Lane] = []
        # The exchange of fp32 sums of micro-batches: by which lanes, where messages end, and copies that stay after the update.
        self._lane_sums: LaneSums | None = None
        self._triggers: frozenset[int] = frozenset()
        self._retained: list[Tensor] = []
        # The module whose buffers are broadcast with each exchange.
        self._shared: nn.Module | None = None
        self._exchange_of_buffers = Exchange(1, DEFAULT_BUCKET_MB)

    # -- a run's module ----------------------------------------------------------------------------------------------------------

    def wrap_module(self, module: nn.Module, step: Step, *, automatic: bool, accumulates: bool = False) -> Step:
        """Returns the callable for training: ``step``, or in manual optimization a step that first broadcasts the buffers."""
        if not (automatic or self.delay_allreduce):
            raise ConfigError(
                "DelayedDDP(message_size or allreduce_trigger_params) with automatic_optimization=False: gradients that are "
                "exchanged during backward belong to one optimizer and one backward; leave them out: each step then exchanges "
                "its own gradients"
            )
        # A second broadcast: since the first one, optimizers and hooks may have changed weights differently on each rank.
        self.share_module(module)
        self._release()
        self._automatic = automatic
        self._take_module(module)
        if self.world_size == 1:
            return step
        if not self.delay_allreduce:
            self._lanes = lanes_for(
                self.num_allreduce_streams,
                self.allreduce_communicators,
                self.device,
                default=not exchanges_statistics(module),
            )
            self._lane_sums = LaneSums(self._lanes)
        if not self.broadcast_buffers or next(module.buffers(), None) is None:
            return step
        if not automatic:
            # A step then has any number of exchanges, so the buffers are broadcast once, before it.
            return AfterBroadcast(step, module, self._exchange_of_buffers)
        self._shared = module
        return step

    def rewrap_module(self, step: Step) -> Step:
        """Lays the buffers out again if parameters were frozen or unfrozen on any rank; returns ``step``."""
        if self._module is None or self.world_size == 1:
            return step
        changed = _trainable(self._module) != self._trainable
        if self.reduce(torch.tensor(changed, dtype=torch.bool, device="cpu"), "max").item():
            self.check_same_module(self._module)
            self._take_module(self._module)
        return step

    def _take_module(self, module: nn.Module) -> None:
        """Notes the module's parameters, with their order and which are frozen; drops buffers of the earlier ones."""
        named = list(module.named_parameters())
        parameters = [parameter for _, parameter in named]
        triggers = indices_of_triggers(self.allreduce_trigger_params, module, parameters)  # unknown names fail here
        self._triggers = frozenset(id(parameters[index]) for index in triggers)
        self._module = module
        self._trainable = _trainable(module)
        self._frozen = {id(parameter) for _, parameter in named if not parameter.requires_grad}
        self._order = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self._names = {id(parameter): name for name, parameter in named}
        self._drop_flats()

    def refuses_graph(self) -> str:
        """Returns an empty string: all exchanges can be captured."""
        return ""

    def refuses_parts(self) -> str:
        """Returns why a rank cannot run a micro-batch in parts: the overlapped mode sends gradients during backward."""
        if self.delay_allreduce:
            return ""
        return (
            "DelayedDDP(message_size or allreduce_trigger_params) sends gradients during backward, while one rank may have to run "
            "it again; leave them out"
        )

    def teardown(self) -> None:
        """Drops buffers and hooks, and destroys the process group if :meth:`setup_environment` made it."""
        self._release()
        super().teardown()

    def _release(self) -> None:
        self._drop_flats()
        self._forget()

    # -- the exchange of a step --------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that keeps gradients local, for every micro-batch of a step except the last."""
        return self._local

    def reduce_gradients(self, memory: GradientMemory | None = None) -> Gradients:
        """Averages a step's gradients, or completes their exchange; returns the gradients for the update.

        Without ``memory`` it averages the gradients of the full module, into ``.grad``.
        """
        if self.world_size == 1:
            return super().reduce_gradients(memory)
        if memory is not None and memory.flat is not None:
            with self._marked():
                gradients = self._average_sums(memory)
        else:
            gradients = self._average(None if memory is None else memory.parameters)
        # After the gradients: ranks may send messages at different times in backward, and the order of collectives has to agree.
        if self._shared is not None:
            self._exchange_of_buffers.broadcast(list(self._shared.buffers()))
        return gradients

    def _marked(self) -> AbstractContextManager[object]:
        return marked("exchange of gradients", self.device) if self.prof else contextlib.nullcontext()

    def _average_sums(self, memory: GradientMemory) -> Gradients:
        """Averages the precision's fp32 sums of micro-batches: in the messages of the overlapped mode, after the last backward."""
        gradients = memory.sum_over_ranks(
            self.transport,
            self.world_size,
            update_divides=not self.retain_allreduce_buffers,
            through=self._lane_sums,
            message_size=self.message_size or math.inf,
            triggers=self._triggers,
        )
        if self.retain_allreduce_buffers:
            assert memory.flat is not None
            values = [message.values for message in memory.flat.messages]
            if [one.shape for one in self._retained] != [one.shape for one in values]:
                self._retained = [torch.empty_like(one) for one in values]
            torch._foreach_copy_(self._retained, values)  # the update clears the sums
        return gradients

    def _average(self, parameters: Sequence[Tensor] | None) -> Gradients:
        """Averages each ``.grad``; None: of the module's parameters, with the averages in ``.grad`` again."""
        assert self._module is not None, "wrap_module comes first"
        averaged = list(self._module.parameters()) if parameters is None else parameters
        key = tuple(map(id, averaged))
        laid_out = self._flats.get(key)
        if laid_out is None:
            laid_out = self._lay_out(averaged)
            self._flats[key] = laid_out
        flat, report = laid_out
        if flat.frozen:
            self._check_frozen(flat)
        with self._marked():
            gradients = self._exchange(flat, report)
        if parameters is None or self.retain_allreduce_buffers:
            flat.write_back(gradients)
            return IN_PLACE
        return gradients

    def _exchange(self, flat: FlatGradients, report: UnusedParamsReport) -> Gradients:
        overlap = self._overlap
        if overlap is not None and overlap.flat is flat and overlap.runs:
            # Backward has sent most messages already.
            gradients = overlap.finish()
            if flat.missing and overlap.behind:
                report.tell_of_delay(flat.missing, overlap.behind)
            return gradients
        gradients = flat.exchange()
        report.look()
        if flat.missing:
            report.note(flat.present, flat.missing)
        if overlap is None and not self.delay_allreduce:
            # Only now, because the flat buffers are laid out in the first exchange.
            self._overlap = Overlap(flat, self._lanes, self._local)
        return gradients

    def _check_frozen(self, flat: FlatGradients) -> None:
        unfrozen = [self._names.get(id(one), "a parameter") for one in flat.frozen if one.requires_grad]
        if unfrozen:
            raise DistributedError(
                f"{listed(unfrozen)} got requires_grad=True in the middle of an epoch, and delayed_ddp does not exchange their "
                "gradients yet; unfreeze at the start of an epoch (on_train_epoch_start)"
            )

    # -- the flat buffers --------------------------------------------------------------------------------------------------------

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """The flat tensors with the gradients of the last update; empty unless ``retain_allreduce_buffers`` is set."""
        if not self.retain_allreduce_buffers:
            return []
        if self._retained:
            return self._retained
        return [message.result for flat, _ in self._flats.values() for message in flat.messages]

    def _lay_out(self, parameters: Sequence[Tensor]) -> tuple[FlatGradients, UnusedParamsReport]:
        """Returns the flat buffers for the gradients of ``parameters``, and the report on those that backward leaves out."""
        module = self._module
        assert module is not None, "wrap_module comes first"
        if self._overlap is not None and self._overlap.runs:
            self._overlap.finish()  # another rank may have sent messages already, so this rank has to send them too
        if self._automatic or len(self._flats) >= _MOST_LISTS:
            self._drop_flats()
        order = self._order
        # As at the start of the epoch: manual optimization toggles requires_grad within a step.
        frozen_elsewhere = (id(one) for one in parameters if id(one) not in order and not one.requires_grad)
        flat = FlatGradients(
            parameters,
            self.transport,
            self.world_size,
            message_size=self.message_size or math.inf,
            triggers=indices_of_triggers(self.allreduce_trigger_params, module, parameters),
            key=lambda index: order.get(id(parameters[index]), -1),
            frozen={*self._frozen, *frozen_elsewhere},
        )
        names = [self._names.get(id(one), f"{tuple(one.shape)}") for one in parameters]
        return flat, UnusedParamsReport(names, self.rank)

    def _drop_flats(self) -> None:
        if self._overlap is not None:
            self._overlap.detach()
        self._overlap = None
        self._flats.clear()


def _trainable(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]
