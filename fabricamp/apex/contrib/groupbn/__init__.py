"""BatchNorm over groups of ranks, channels last."""

from fabricamp.apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC as BatchNorm2d_NHWC
