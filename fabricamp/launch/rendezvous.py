"""The rendezvous of a single machine's agent: a store on a free port, which the ranks share."""

from __future__ import annotations

import uuid

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fabricamp.torch_private import TCPStore

_ADDRESS = "127.0.0.1"  # a numeric address: there may be no name service


class OneMachine(RendezvousHandler):
    """A rendezvous of a single agent, which waits for nobody.

    torch's own ("c10d") searches all loaded modules for the name of each method that it calls (``inspect.stack``): that takes
    seconds in a process with many imports and a deep stack, such as a notebook.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the store, and rank 0 of 1 for this agent."""
        # Port 0 lets the system choose a free port: concurrent runs do not clash.
        self._store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, self._store.port))

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect to this store instead of opening their own."""
        return True

    def get_backend(self) -> str:
        """Returns a name for torch's records."""
        return "one_machine"

    def get_run_id(self) -> str:
        """Returns an id that no other run has."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Returns 0: nobody joins later."""
        return 0

    def is_closed(self) -> bool:
        """Returns whether the store was released: the run is over."""
        return self._store is None

    def set_closed(self) -> None:
        """Releases the store."""
        self._store = None

    def shutdown(self) -> bool:
        """Releases the store and returns True; there is nothing else to close."""
        self.set_closed()
        return True
