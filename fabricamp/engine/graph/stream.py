"""The stream of a run whose steps are to be captured."""

from __future__ import annotations

from typing import Final

import torch

from fabricamp.ops.bridge import runs_kernels

_FREE: Final[dict[torch.device, list[torch.cuda.Stream]]] = {}


def _lend_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream that nobody else has until it is among the free ones again.

    Those of earlier runs first: cuBLAS keeps a workspace for each stream that it was on, for good.  None of torch's 32, which are
    dealt out in turn: what another thread does on the stream of a capture would break it.
    """
    free = _FREE.get(device)
    if free:
        return free.pop()
    if not runs_kernels(device):  # there is no CuPy
        return torch.cuda.Stream(device)
    from cupy.cuda import Device, runtime

    with Device(device.index):
        return torch.cuda.ExternalStream(runtime.streamCreateWithFlags(runtime.streamNonBlocking), device)


class SideStream:
    """Torch's current stream from here on, until :meth:`leave`.

    No capture is possible on the default stream, and AccumulateGrad nodes keep the stream of their first use: so torch's
    DistributedDataParallel, which makes them, is made on it too.  Captures and replays are on it alike: what a capture writes for
    random generators would else have no order to what the first replay writes there.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _lend_stream(device)
        self._outer = torch.cuda.current_stream(device)
        self.stream.wait_stream(self._outer)
        torch.cuda.set_stream(self.stream)

    def leave(self, *, wait: bool) -> None:
        """Goes back to the stream that was current before; ``wait``: it waits for this one, which others may have then."""
        torch.cuda.set_stream(self._outer)
        if wait:
            self._outer.wait_stream(self.stream)
            _FREE.setdefault(self.stream.device, []).append(self.stream)
