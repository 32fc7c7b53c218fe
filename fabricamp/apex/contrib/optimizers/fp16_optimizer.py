"""The FP16_Optimizer of apex.contrib: the class of ``apex.fp16_utils`` with another ``zero_grad``."""

from __future__ import annotations

from typing import Any

from fabricamp.apex import fp16_utils


class FP16_Optimizer(fp16_utils.FP16_Optimizer):  # noqa: N801  # apex's name
    """:class:`fabricamp.apex.fp16_utils.FP16_Optimizer` around any optimizer; sets gradients to None, and does not zero them."""

    def zero_grad(self, set_grads_to_None: bool = True) -> Any:  # noqa: N803  # apex's name
        """Sets the gradients to None, or zeroes them."""
        return super().zero_grad(set_grads_to_None)
