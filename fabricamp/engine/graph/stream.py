"""The stream of a fit whose steps are to be captured."""

from __future__ import annotations

import torch


class SideStream:
    """Torch's current stream from here on, until :meth:`leave`.

    No capture is possible on the default stream, and AccumulateGrad nodes keep the stream of their first use: so torch's
    DistributedDataParallel, which makes them, is made on it too.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._outer = torch.cuda.current_stream(device)
        self.stream.wait_stream(self._outer)
        torch.cuda.set_stream(self.stream)

    def leave(self, *, wait: bool) -> None:
        """Goes back to the stream that was current before; ``wait``: it waits for this one."""
        if wait:
            self._outer.wait_stream(self.stream)
        torch.cuda.set_stream(self._outer)
