"""BatchNorm with statistics over the batches of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fabricamp.errors import ConfigError
from fabricamp.ops.batch_norm.exchange import BatchNormExchange
from fabricamp.ops.batch_norm.sync_batch_norm import sync_batch_norm
from fabricamp.torch_private import AnyBatchNorm


class SyncBatchNorm(AnyBatchNorm):
    """Batch normalisation over the batches of all ranks of ``process_group`` (None: all ranks), as BatchNorm over the joined batch.

    Inputs are (N, C) or (N, C, ...) in any memory format; with ``channel_last`` the last dimension is the channels.  Ranks may
    have different numbers of samples.  ``forward(input, z)`` adds the residual ``z``; ``fuse_relu`` then applies a ReLU; both in
    training and in evaluation.  Parameters, buffers and state dict are BatchNorm's.  In training without ``torch.distributed``
    the layer is a BatchNorm; in evaluation there is no communication.  Gradients of weight and bias are those of this rank's
    batch; a data-parallel wrapper averages them.

    ``exchange``: how ranks exchange statistics: "peer" (inside a kernel, between GPUs that write each other's memory),
    "collective", or None: the environment variable ``FABRICAMP_SYNCBN_EXCHANGE`` decides, else the faster one that works.

    >>> layer = SyncBatchNorm(8, fuse_relu=True)
    >>> layer(torch.randn(4, 8, 5, 5)).min().item()
    0.0
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        *,
        exchange: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu
        self._exchange = BatchNormExchange(num_features, process_group, exchange)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of ranks with joint statistics; None: all ranks."""
        return self._exchange.group

    @property
    def exchanges(self) -> dict[str, str]:
        """How ranks exchange statistics and why, by device; empty before the first batch."""
        return self._exchange.known_routes()

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's name
        """Returns ``input`` normalised, times weight, plus bias, plus ``z``; then through a ReLU if ``fuse_relu`` is set."""
        if not self.training:
            return self._evaluated(input, z)
        running = None
        if self.track_running_stats:  # may be switched off temporarily, as in BatchNorm: the values then stay
            running_mean = self.running_mean
            running_var = self.running_var
            if running_mean is not None and running_var is not None:
                running = (running_mean, running_var, self.num_batches_tracked)
        return sync_batch_norm(
            input,
            self.weight,
            self.bias,
            running,
            z=z,
            # Without running values momentum has no effect.
            momentum=0.0 if running is None else self.momentum,
            eps=self.eps,
            relu=self.fuse_relu,
            channel_last=self.channel_last or input.dim() == 2,
            exchange=self._exchange,
        )

    def _evaluated(self, x: Tensor, z: Tensor | None) -> Tensor:
        """Returns the output in evaluation: by the running values, or without them by this rank's own batch."""
        self._check_input_dim(x)
        if z is not None and (z.shape, z.dtype) != (x.shape, x.dtype):  # training refuses the same
            raise ConfigError(
                f"the residual z of a SyncBatchNorm is {z.dtype} {tuple(z.shape)}; it has to be as the input: {x.dtype} "
                f"{tuple(x.shape)}"
            )
        if self.channel_last:
            x = x.movedim(-1, 1)
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.running_mean is None and self.running_var is None,
            0.0,
            self.eps,
        )
        if self.channel_last:
            y = y.movedim(1, -1)
        if z is not None:
            y = y + z
        return y.relu() if self.fuse_relu else y

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        if input.dim() < 2:
            raise ConfigError(f"SyncBatchNorm takes (N, C) or (N, C, ...), not an input of {input.dim()} dimensions")

    def extra_repr(self) -> str:
        """Returns BatchNorm's options, and those of this class that are set."""
        more = [name for name in ("channel_last", "fuse_relu") if getattr(self, name)]
        return ", ".join([super().extra_repr(), *[f"{name}=True" for name in more]])  # type: ignore[no-untyped-call]
