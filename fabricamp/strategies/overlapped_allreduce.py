"""Overlaps the all-reduce of gradients with backward: a message is sent as soon as its last gradient is ready.

First the lanes (process groups and streams) that messages are sent through, then the hooks that send them.
"""

from __future__ import annotations

import functools
import operator
import weakref
from itertools import repeat
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabricamp.errors import DistributedError
from fabricamp.gradients.buckets import RankSums
from fabricamp.nn import SyncBatchNorm
from fabricamp.ops.peer_memory import timeout_of
from fabricamp.torch_private import stream_in_use

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from fabricamp.gradients.flat import FlatGradients, Gradients, Message

_grad: Final = operator.attrgetter("grad")
_MOST_GROUPS: Final = 8


class Lane:
    """Sends every n-th message: through a process group (None: the default one), on a side stream (None on a CPU)."""

    def __init__(self, group: dist.ProcessGroup | None, stream: torch.cuda.Stream | None) -> None:
        self.group = group
        self.stream = stream
        if stream is not None:
            self._device = stream.device
            self._ready = torch.cuda.Event()  # kept, because a new event for each message takes longer

    def send(self, flat: FlatGradients, message: Message, gradients: Sequence[Tensor | None]) -> None:
        """Fills ``message`` with its ``gradients`` and starts its all-reduce."""
        if self.stream is None:
            flat.send(message, gradients, self.group)
            return
        # The message reads gradients that the current stream computes.
        self._ready.record(stream_in_use(self._device))
        self.stream.wait_event(self._ready)
        with self.stream:
            # The all-reduce runs on the side stream itself; an asynchronous one would take a third stream and more host time.
            flat.send(message, gradients, self.group, wait=True)

    def sum(self, values: Tensor, through: RankSums) -> None:
        """Starts the all-reduce of ``values``, which the current stream computes."""
        if self.stream is None:
            through.start(values, self.group)
            return
        self._ready.record(stream_in_use(self._device))
        self.stream.wait_event(self._ready)
        with self.stream:
            through.start(values, self.group, wait=True)

    def wait(self) -> None:
        """Makes the current stream wait for the messages on the side stream."""
        if self.stream is not None:
            stream_in_use(self._device).wait_stream(self.stream)


class LaneSums(RankSums):
    """Sums tensors over the ranks, each in place, by the lanes in turn."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        super().__init__()
        self._lanes = lanes

    def run(self, flats: Iterable[Tensor], *, alone: bool = False) -> None:
        """Sends each of ``flats`` through the next lane as soon as it is yielded, then waits for all."""
        for number, flat in enumerate(flats):
            self._lanes[number % len(self._lanes)].sum(flat, self)
        for lane in self._lanes:
            lane.wait()
        self.wait()


def lanes_for(
    count: int,
    communicators: tuple[Sequence[dist.ProcessGroup], Sequence[torch.cuda.Stream]] | None,
    device: torch.device,
    *,
    default: bool,
) -> list[Lane]:
    """Returns ``count`` lanes with the given ``communicators`` (groups, streams), or with new ones; every rank calls it.

    ``default`` gives the first lane the default group.  That is safe only if nothing else uses this group in backward, such as
    layers that exchange statistics or another module's messages.  Ranks with different used parameters send their messages at
    different points of backward, so one rank's message would pair with another rank's statistics.
    """
    if communicators is not None:
        groups, streams = communicators
        return [Lane(group, stream) for group, stream in zip(groups, streams, strict=True)]
    cuda = device.type == "cuda"
    lanes = []
    for number in range(count):
        group = None if default and number == 0 else _groups.lend(device)
        lanes.append(Lane(group, torch.cuda.Stream(device) if cuda else None))
    return lanes


def exchanges_statistics(module: nn.Module) -> bool:
    """Returns whether layers of ``module`` use the default group in backward."""
    return any(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in module.modules())


class _Groups:
    """A pool of process groups beside the default one, used in turn, so that a new module does not need new communicators."""

    def __init__(self) -> None:
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._lent = 0

    def lend(self, device: torch.device) -> dist.ProcessGroup:
        """Returns the next group, with the default group's timeout; every rank calls it."""
        world = dist.group.WORLD
        assert world is not None, "init_process_group comes first"
        if self._world is None or self._world() is not world:
            groups: list[dist.ProcessGroup] = []
            # The groups own threads, which have to end before the interpreter does: drop them with the default group.
            self._world = weakref.ref(world, lambda _: groups.clear())
            self._groups = groups
            self._lent = 0
        if len(self._groups) < _MOST_GROUPS:
            self._groups.append(cast("dist.ProcessGroup", dist.new_group(timeout=timeout_of(world, device))))
        self._lent += 1
        return self._groups[(self._lent - 1) % _MOST_GROUPS]


_groups: Final = _Groups()


class Local:
    """The context for micro-batches with local gradients."""

    on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


class Overlap:
    """Sends the messages of ``flat``, in their order, from gradient hooks.

    The first backward only records the order of the gradients.  Later only the last gradient of each message has a hook, which
    sends all messages complete at that point.  :meth:`finish` sends the others, so every rank sends every message once and none
    waits in vain.

    ``local`` None: :meth:`begin` is called for each backward to exchange; else all are exchanged except those within ``local``.
    """

    def __init__(self, flat: FlatGradients, lanes: Sequence[Lane], local: Local | None = None) -> None:
        self.flat = flat
        self._lanes = lanes
        self._local = local
        self._members = [member for message in flat.messages for member in message.members]
        self._next = 0  # index of the next message to send
        self._sent: list[tuple[list[Tensor | None], list[int]]] = []  # each sent message's gradients and their versions
        self._arrived: dict[int, int] = {}  # the order of each gradient in this backward
        self._repeated: set[int] = set()  # gradients that come several times, as in re-entrant checkpointing
        # True keeps hooks on all parameters: a .grad from an earlier backward does not show whether it was added to.
        self._counts = False
        self._handles: dict[int, RemovableHandle] = {}
        self._listens = True  # all parameters have hooks
        self._learns = True  # this backward only records the order of gradients
        self.runs = False
        """Whether a backward has begun and its messages are not all received."""
        self.behind = 0
        """Number of messages that were sent only after the end of the last backward."""
        self._listen()

    def begin(self, first: Tensor | None = None) -> None:
        """Starts the exchange of a backward; called at its begin, or by the hook of its ``first`` gradient."""
        if self.runs:  # a second backward through the same loss: _check_late finds gradients that it changes
            return
        self.runs = True
        self._next = 0
        self._arrived.clear()
        self._sent.clear()
        if self._counts or self._listens:
            return
        kept = sum(map(operator.is_not, map(_grad, self._members), repeat(None)))
        if first is not None and first.grad is not None:
            kept -= 1  # it belongs to this backward
        if kept:
            self._counts = True
            self._listen()

    def finish(self) -> Gradients:
        """Sends the remaining messages, makes the device (not the host) wait for all, and returns the received gradients."""
        messages = self.flat.messages
        self._check_late()
        self.runs = False
        self.behind = len(messages) - self._next
        for message in messages[self._next :]:
            self._send(message, message.gradients())
        for lane in self._lanes:
            lane.wait()
        gradients = self.flat.receive()
        if self._learns:
            self._learns = False
            if not self._counts:
                self._listen_to_last()
        elif self.behind and not (self.flat.missing or self._repeated or self._counts):
            self._listen()  # the order of gradients has changed: learn it again
        self._sent.clear()
        return gradients

    def detach(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _listen(self) -> None:
        """Registers hooks on all parameters, to learn the order of gradients in the next backward."""
        self._listens = True
        self._learns = True
        for message in self.flat.messages:
            for index, member in zip(message.indices, message.members, strict=True):
                if index not in self._handles:
                    hook = functools.partial(self._arrive, index)
                    self._handles[index] = member.register_post_accumulate_grad_hook(hook)

    def _listen_to_last(self) -> None:
        """Keeps the hooks of each message's last gradient, and of the first gradient of all; removes the others."""
        self._listens = False
        needed = {
            max(message.indices, key=lambda index: self._arrived.get(index, -1)) for message in self.flat.messages
        }
        if self._local is not None:
            # Nobody calls begin: the first gradient of a backward does.
            needed |= set(list(self._arrived)[:1])
        for index in [index for index in self._handles if index not in needed]:
            self._handles.pop(index).remove()

    def _arrive(self, index: int, parameter: Tensor) -> None:
        """Called by the hook of a gradient that is ready: sends all messages that are complete now."""
        if not self.runs:
            if self._local is None or self._local.on:
                return
            self.begin(parameter)
        if self._listens:
            if index in self._arrived:
                self._repeated.add(index)
            self._arrived[index] = len(self._arrived)
        if self._learns:
            return
        # Only in the order of the messages, so all ranks send them in the same order.
        messages = self.flat.messages
        while self._next < len(messages):
            message = messages[self._next]
            gradients = message.gradients()
            if not self._is_complete(message, gradients):
                return
            self._send(message, gradients)

    def _is_complete(self, message: Message, gradients: Sequence[Tensor | None]) -> bool:
        """Returns whether all ``gradients`` of ``message`` are ready."""
        # Only the end of backward shows that no further part of such a gradient comes.
        if self._repeated and not self._repeated.isdisjoint(message.indices):
            return False
        if self._listens:
            return all(map(self._arrived.__contains__, message.indices))
        return all(map(operator.is_not, gradients, repeat(None)))

    def _send(self, message: Message, gradients: list[Tensor | None]) -> None:
        """Sends ``message`` through the next lane, and records its gradients and their versions for :meth:`_check_late`."""
        lane = self._lanes[self._next % len(self._lanes)]
        self._next += 1
        lane.send(self.flat, message, gradients)
        if self.runs:
            self._sent.append((gradients, _versions(gradients)))

    def _check_late(self) -> None:
        """Raises :class:`DistributedError` if a gradient has changed since its message was sent."""
        for message, (gradients, versions) in zip(self.flat.messages, self._sent, strict=False):
            same = all(map(operator.is_, map(_grad, message.members), gradients))
            if same and _versions(gradients) == versions:
                continue
            changed = next(
                member
                for member, gradient, version in zip(message.members, gradients, versions, strict=True)
                if member.grad is not gradient or _versions([gradient]) != [version]
            )
            raise DistributedError(
                f"the gradient of a parameter of shape {tuple(changed.shape)} was changed after its message was sent: by a hook, "
                "or by a second backward before the exchange ended; exchange after backward instead (delay_allreduce=True, "
                "without message_size and triggers)"
            )


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    """Returns a number for each gradient, which each operation on it in place changes."""
    return [0 if gradient is None else gradient._version for gradient in gradients]
