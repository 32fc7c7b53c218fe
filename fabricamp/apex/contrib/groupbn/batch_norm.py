"""apex's NHWC BatchNorm, through SyncBatchNorm."""

from __future__ import annotations

import torch.distributed as dist

from fabricamp.nn import SyncBatchNorm, create_syncbn_process_group


class BatchNorm2d_NHWC(SyncBatchNorm):  # noqa: N801  # apex's name
    """BatchNorm of (N, H, W, C) over groups of ``bn_group`` ranks; adds the ``z`` of a call, and ``fuse_relu`` applies a ReLU.

    ``max_cta_per_sm``, ``cta_launch_margin`` and ``multi_stream`` have no effect.
    """

    def __init__(
        self,
        num_features: int,
        fuse_relu: bool = False,
        bn_group: int = 1,
        max_cta_per_sm: int = 2,
        cta_launch_margin: int = 12,
        multi_stream: bool = False,
    ) -> None:
        # Without torch.distributed the rank is alone anyway.
        group = create_syncbn_process_group(bn_group) if dist.is_initialized() else None
        super().__init__(num_features, process_group=group, channel_last=True, fuse_relu=fuse_relu)
