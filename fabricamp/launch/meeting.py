"""Where the agent of one machine meets itself: a store on a free port, which the ranks share."""

from __future__ import annotations

import uuid

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fabricamp.torch_private import TCPStore

_ADDRESS = "127.0.0.1"  # a number: there may be no name service


class OneMachine(RendezvousHandler):
    """A rendezvous of a single agent, which waits for nobody.

    torch's own ("c10d") looks through all loaded modules for the name of each method it goes through (``inspect.stack``):
    seconds where a process has imported much and is deep in calls, as a notebook is.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and this agent as the first of one."""
        # Port 0 is a free one of the system's choice: runs side by side do not clash.
        self._store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, self._store.port))

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to this store instead of opening one of their own."""
        return True

    def get_backend(self) -> str:
        """A name for torch's records."""
        return "one_machine"

    def get_run_id(self) -> str:
        """What no other run has."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Nobody joins later."""
        return 0

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._store is None

    def set_closed(self) -> None:
        """Lets go of the store."""
        self._store = None

    def shutdown(self) -> bool:
        """Lets go of the store; there is nothing else to close."""
        self.set_closed()
        return True
