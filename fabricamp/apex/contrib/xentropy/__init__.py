"""Cross-entropy of logits in one pass, with label smoothing."""

from fabricamp.apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss as SoftmaxCrossEntropyLoss
