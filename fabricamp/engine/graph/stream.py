"""The side stream of a run with captured steps."""

from __future__ import annotations

from typing import Final

import torch

from fabricamp.ops.bridge import runs_kernels

_FREE: Final[dict[torch.device, list[torch.cuda.Stream]]] = {}


def _lend_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream for exclusive use, until it is put back into ``_FREE``.

    Takes the streams of earlier runs first, since cuBLAS keeps a workspace for every stream that it ran on, for good.  Takes none
    of torch's 32 streams, which are dealt out in turn: work of another thread on the stream of a capture would break the capture.
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
    """Makes a side stream torch's current stream, until :meth:`leave`.

    The default stream cannot be captured.  AccumulateGrad nodes keep the stream of their first use, so torch's
    DistributedDataParallel, which creates them, is created on the side stream, too.  Captures and replays run on the same stream;
    else the capture's writes to the state of random generators would not be ordered before those of the first replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _lend_stream(device)
        self._outer = torch.cuda.current_stream(device)
        self.stream.wait_stream(self._outer)
        torch.cuda.set_stream(self.stream)

    def leave(self, *, wait: bool) -> None:
        """Makes the earlier stream current again; with ``wait``, that stream waits for this one, which is then free for reuse."""
        torch.cuda.set_stream(self._outer)
        if wait:
            self._outer.wait_stream(self.stream)
            _FREE.setdefault(self.stream.device, []).append(self.stream)
