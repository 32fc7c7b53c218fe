"""Replica groups that may fail and return: the others continue without a dead group, and it gets their state when it returns."""

from __future__ import annotations

import hashlib
import logging
import os
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from fabricamp.arguments.checks import whole_number
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.gradients.flat import FlatGradients, Gradients, Transport
from fabricamp.strategies.base import Strategy
from fabricamp.strategies.capabilities import Membership
from fabricamp.strategies.process_group import checked_timeout, described_module
from fabricamp.strategies.quorum import Quorum, connect_torchft

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from fabricamp._utils.types import Step
    from fabricamp.gradients.memory import GradientMemory

_LOG = logging.getLogger("fabricamp")
_IN_FP32: Final = Transport(always_fp32=True)
# The environment variables of torchft's programs.
_GROUP = "REPLICA_GROUP_ID"
_GROUPS = "NUM_REPLICA_GROUPS"
_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


class FaultTolerant(Strategy, Membership):
    """Each process is a replica group of torchft; gradients are averaged over the groups that are alive.

    If a group dies, the others make the step without it and continue.  When the group is started again, it gets the state of a
    running group between two steps, and takes part in the next step.  Each group is a separate run, with its own start, folder
    and logs.  ``torchft_lighthouse`` has to run on a host that all groups can reach.  Needs ``pip install torchft``.

    Args:
        groups: the full number of groups, and the number of shares of the training data; None: ``NUM_REPLICA_GROUPS``.
        group: the index of this group, from 0; None: ``REPLICA_GROUP_ID``.
        lighthouse: the address of ``torchft_lighthouse``, such as ``"http://host:29510"``; None: ``TORCHFT_LIGHTHOUSE``.
        timeout: seconds (or a timedelta) that a sum waits for a silent group, and that running groups wait for a returning one;
            less than the lighthouse's ``--join_timeout_ms`` (60 s).
        quorum_timeout: seconds (or a timedelta) that a group waits for the others, or the remaining ones, before a step.

    Example:
        >>> FaultTolerant(groups=4, group=0, lighthouse="http://localhost:29510").train_share
        (0, 4)
    """

    name: ClassVar[str] = "fault_tolerant"
    asks_for_parameters: ClassVar[bool] = True
    averages_weights: ClassVar[bool] = False
    heals: ClassVar[bool] = True

    def __init__(
        self,
        *,
        groups: int | None = None,
        group: int | None = None,
        lighthouse: str | None = None,
        timeout: float | timedelta = 30,
        quorum_timeout: float | timedelta = 600,
    ) -> None:
        super().__init__()
        self.groups = _from_environment("groups", groups, _GROUPS, least=1)
        self.replica_group = _from_environment("group", group, _GROUP, least=0)
        if self.replica_group >= self.groups:
            raise ConfigError(
                f"FaultTolerant(group={self.replica_group}, groups={self.groups}): groups count from 0; give 0 to {self.groups - 1}"
            )
        self.lighthouse = lighthouse
        self.timeout = checked_timeout("timeout", timeout)
        self.quorum_timeout = checked_timeout("quorum_timeout", quorum_timeout)
        self._quorum: Quorum | None = None
        self._begins_together = False
        self._flat: FlatGradients | None = None
        self._before = 0

    @property
    def train_share(self) -> tuple[int, int]:
        """This group's share of the training data, as (index, number of shares)."""
        return self.replica_group, self.groups

    @property
    def participants(self) -> int:
        """Number of groups in the current step, or in the last one; 0 outside a fit."""
        return 0 if self._quorum is None else self._quorum.participants

    def refuses_graph(self) -> str:
        """Returns why steps cannot be captured as CUDA graphs, and what to do."""
        return "strategy 'fault_tolerant' agrees before each step on the groups that make it; leave cuda_graph out"

    def join(self, state: Callable[[], Tensor]) -> Tensor | None:
        """Joins the other groups; returns the state to continue from, None to keep this group's own state."""
        lighthouse = self.lighthouse or os.environ.get(_LIGHTHOUSE)
        if not lighthouse:
            raise ConfigError(
                f"FaultTolerant has to know where torchft_lighthouse runs; give lighthouse='http://HOST:29510', or set "
                f"{_LIGHTHOUSE}"
            )
        connect = partial(
            connect_torchft,
            group=self.replica_group,
            lighthouse=lighthouse,
            device=self.device,
            timeout=self.timeout,
            quorum_timeout=self.quorum_timeout,
        )
        self._quorum = Quorum(connect, self.device)
        self._quorum.state = state
        self._begins_together, received = self._quorum.join()
        self._before = self._quorum.participants
        return received

    def share_module(self, module: nn.Module) -> None:
        """Broadcasts the first group's parameters and buffers to groups that begin together.

        Raises :class:`DistributedError` if they built different modules.
        """
        if self._quorum is None or not self._begins_together or self._quorum.participants == 1:
            return
        digest = hashlib.sha256("\n".join(described_module(module)).encode()).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        first = own.clone()
        self._quorum.share([first])
        if not torch.equal(own, first):
            raise DistributedError(
                f"replica group {self.replica_group} built another module than the first one; build (and freeze) it in the same "
                "way in all of them"
            )
        self._quorum.share([*module.parameters(), *module.buffers()])

    def wrap_module(self, module: nn.Module, step: Step, *, automatic: bool, accumulates: bool = False) -> Step:
        """Returns ``step``; raises :class:`ConfigError` for a schedule that could differ between groups."""
        if any(config.reduce_on_plateau for config in getattr(self._session(), "schedulers", ())):
            raise ConfigError(
                "strategy 'fault_tolerant' with a schedule that follows a logged value: each group logs its own, and their "
                "learning rates would differ; give a schedule by steps or epochs"
            )
        # A second broadcast: since the first one, optimizers and hooks may have changed weights differently in each group.
        self.share_module(module)
        self._begins_together = False
        return step

    def begin_step(self) -> None:
        """Determines the groups of the next step, and admits groups that want to join."""
        if self._quorum is not None:
            self._quorum.begin()
            self._log_changes(self._quorum)

    def end_steps(self) -> None:
        """Waits after the last step until all groups have made it."""
        if self._quorum is None:
            return
        try:
            self._quorum.end()
        except DistributedError as error:
            _LOG.warning("replica group %d has all its steps; at the end: %s", self.replica_group, error)

    def reduce_gradients(self, memory: GradientMemory | None = None) -> Gradients:
        """Averages a step's gradients over the groups of this step; if a group fails, over the remaining ones."""
        assert memory is not None
        assert self._quorum is not None
        if memory.flat is not None:
            gradients = memory.sum_over_ranks(_IN_FP32, 1, through=self._quorum)
        else:
            flat = self._flat
            if flat is None or list(map(id, flat.parameters)) != list(map(id, memory.parameters)):
                flat = FlatGradients(memory.parameters, _IN_FP32, 1, frozen=())
                self._flat = flat
            gradients = flat.exchange(self._quorum)
        self._log_changes(self._quorum)
        return gradients

    def teardown(self) -> None:
        """Leaves the other groups, which continue."""
        quorum = self._quorum
        self._quorum = None
        self._flat = None
        if quorum is not None:
            quorum.close()
        super().teardown()

    def _log_changes(self, quorum: Quorum) -> None:
        """Logs the number of groups if it differs from that of the step before."""
        before = self._before
        if quorum.participants != before:
            self._before = quorum.participants
            _LOG.warning(
                "replica group %d: %d of %d groups make step %d; %d made the step before",
                self.replica_group, self._before, self.groups, quorum.steps, before,
            )  # fmt: skip


def _from_environment(argument: str, value: object, variable: str, *, least: int) -> int:
    """Returns ``value``, or if None the variable's value; raises :class:`ConfigError` if it is below ``least`` or no integer."""
    given: Any = os.environ.get(variable) if value is None else value
    if given is None:
        raise ConfigError(
            f"FaultTolerant({argument}=None) takes {variable}, which is not set; give {argument}, or set it"
        )
    source = f"FaultTolerant({argument}={value!r})" if value is not None else f"{variable}={given!r}"
    number = whole_number(int(given) if isinstance(given, str) and given.isdecimal() else given)
    if number is None or number < least:
        raise ConfigError(f"{source} is not allowed; give a whole number from {least}")
    return number
