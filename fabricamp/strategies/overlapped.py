"""Overlaps the all-reduce of gradients with backward: a bucket leaves as soon as its last gradient is there."""

from __future__ import annotations

import functools
import operator
import weakref
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabricamp.errors import DistributedError
from fabricamp.nn import SyncBatchNorm
from fabricamp.ops.peer_memory import timeout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from fabricamp.gradients.flat import FlatGradients, Gradients, Message

_grad: Final = operator.attrgetter("grad")
_MOST_GROUPS: Final = 8


class Lane(NamedTuple):
    """What carries every n-th message: a process group (None: the default one), and a stream beside torch's current one."""

    group: dist.ProcessGroup | None
    stream: torch.cuda.Stream | None


def lanes_for(
    count: int,
    communicators: tuple[Sequence[Any], Sequence[Any]] | None,
    device: torch.device,
    *,
    default: bool,
) -> list[Lane]:
    """Returns ``count`` lanes of ``communicators`` (groups, streams), or of their own; every rank calls it.

    ``default`` lets the first one have the default group: where nothing else uses that in backward, such as layers that exchange
    statistics, or another module's messages.  Ranks whose backwards reach different parameters send messages at different moments
    of it, and one's message would meet another's statistics.
    """
    if communicators is not None:
        groups, streams = communicators
        return [Lane(group, stream) for group, stream in zip(groups, streams, strict=True)]
    cuda = device.type == "cuda"
    return [
        Lane(None if default and not number else _groups.lend(device), torch.cuda.Stream(device) if cuda else None)
        for number in range(count)
    ]


def exchanges_statistics(module: nn.Module) -> bool:
    """Returns whether layers of ``module`` use the default group in backward."""
    return any(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in module.modules())


class _Groups:
    """Groups of all ranks beside the default one, lent in turn: modules that come and go shall not leave a communicator each."""

    def __init__(self) -> None:
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._groups: list[dist.ProcessGroup] = []
        self._lent = 0

    def lend(self, device: torch.device) -> dist.ProcessGroup:
        """Returns the next one, which waits for a slow rank as long as the default group does; every rank calls it."""
        world = dist.group.WORLD
        assert world is not None, "init_process_group comes first"
        if self._world is None or self._world() is not world:
            groups: list[dist.ProcessGroup] = []
            # Their threads end with the groups, which have to be gone before the interpreter is.
            self._world, self._lent = weakref.ref(world, lambda _: groups.clear()), 0
            self._groups = groups
        if len(self._groups) < _MOST_GROUPS:
            self._groups.append(cast("dist.ProcessGroup", dist.new_group(timeout=timeout_of(world, device))))
        self._lent += 1
        return self._groups[(self._lent - 1) % _MOST_GROUPS]


_groups: Final = _Groups()


class Local:
    """The context of micro-batches whose gradients stay local."""

    on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


class Overlap:
    """Sends the messages of ``flat``, in their order, from hooks on gradients.

    In its first backward it only learns in which order gradients come; from then on it listens to the last one of each message
    alone, which sends all that is complete by then.  What is not, is sent by :meth:`finish`: every rank sends every message once,
    so none waits in vain.

    ``local`` None: :meth:`begin` announces each backward that counts; else all count but those within ``local``.
    """

    def __init__(self, flat: FlatGradients, lanes: Sequence[Lane], local: Local | None = None) -> None:
        self.flat = flat
        self._lanes = lanes
        self._local = local
        self._next = 0
        self._sent: list[list[tuple[Tensor | None, int]]] = []
        self._arrived: dict[int, int] = {}  # in which order
        self._repeated: set[int] = set()  # those that come several times: re-entrant checkpointing does that
        self._counts = False  # listens to all for good: gradients that grow do not show by themselves that they have
        self._handles: dict[int, RemovableHandle] = {}
        self._listens = self._learns = True
        self.runs = False
        """Whether a backward has begun whose messages are not all received."""
        self.behind = 0
        """How many messages of the last backward did not leave before its end."""
        self._listen()

    def begin(self, first: Tensor | None = None) -> None:
        """Called as a backward begins, or by its ``first`` gradient."""
        if self.runs:  # a second one through the same loss: what it adds is found to be late
            return
        self.runs, self._next = True, 0
        self._arrived.clear()
        self._sent.clear()
        if self._counts or self._listens:
            return
        members = [member for message in self.flat.messages for member in message.members if member is not first]
        if any(member.grad is not None for member in members):
            self._counts = True
            self._listen()

    def finish(self) -> Gradients:
        """Sends what could not be sent before, waits (the device, not the host) for all, and returns what has arrived."""
        messages = self.flat.messages
        self._check_late()
        self.runs, self.behind = False, len(messages) - self._next
        for message in messages[self._next :]:
            self._send(message)
        gradients = self.flat.receive()
        for lane in self._lanes:
            if lane.stream is not None:
                torch.cuda.current_stream(lane.stream.device).wait_stream(lane.stream)
        if self._learns:
            self._learns = False
            if not self._counts:
                self._listen_to_last()
        elif self.behind and not (self.flat.missing or self._repeated or self._counts):
            self._listen()  # gradients come in another order than they did
        self._sent.clear()
        return gradients

    def detach(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _listen(self) -> None:
        """Listens to all parameters, in the next backward to learn."""
        self._listens = self._learns = True
        for message in self.flat.messages:
            for index, member in zip(message.indices, message.members, strict=True):
                if index not in self._handles:
                    hook = functools.partial(self._arrive, index)
                    self._handles[index] = member.register_post_accumulate_grad_hook(hook)

    def _listen_to_last(self) -> None:
        """Listens to the parameter of each message whose gradient came last, and to the very first."""
        self._listens = False
        kept = {max(message.indices, key=lambda index: self._arrived.get(index, -1)) for message in self.flat.messages}
        if self._local is not None:
            kept |= set(list(self._arrived)[:1])
        for index in [index for index in self._handles if index not in kept]:
            self._handles.pop(index).remove()

    def _arrive(self, index: int, parameter: Tensor) -> None:
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
        messages = self.flat.messages
        while self._next < len(messages) and self._is_complete(messages[self._next]):
            self._send(messages[self._next])

    def _is_complete(self, message: Message) -> bool:
        if self._repeated and not self._repeated.isdisjoint(message.indices):
            return False
        if self._listens:
            return all(map(self._arrived.__contains__, message.indices))
        return all(map(operator.is_not, map(_grad, message.members), repeat(None)))

    def _send(self, message: Message) -> None:
        lane = self._lanes[self._next % len(self._lanes)]
        self._next += 1
        if lane.stream is None:
            self.flat.send(message, lane.group)
        else:
            lane.stream.wait_stream(torch.cuda.current_stream(lane.stream.device))
            with torch.cuda.stream(lane.stream):
                self.flat.send(message, lane.group)
        if self.runs:
            gradients = map(_grad, message.members)
            self._sent.append([(one, 0 if one is None else one._version) for one in gradients])

    def _check_late(self) -> None:
        """Raises where a gradient has grown since it was sent: its message left with a part of it."""
        for message, sent in zip(self.flat.messages, self._sent, strict=False):
            for member, (gradient, version) in zip(message.members, sent, strict=True):
                if member.grad is not gradient or (gradient is not None and gradient._version != version):
                    raise DistributedError(
                        f"the gradient of a parameter of shape {tuple(member.shape)} was changed after its message had left: by a "
                        "hook, or a second backward before the exchange has ended; exchange after backward instead "
                        "(delay_allreduce=True, without message_size and triggers)"
                    )
