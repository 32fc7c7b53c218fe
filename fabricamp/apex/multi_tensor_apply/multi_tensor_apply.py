"""apex's class that calls functions of ``amp_C``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``; it is always available, because no extension is needed.

    >>> import torch
    >>> from fabricamp.apex._extensions import amp_C
    >>> weights, flag = [torch.ones(2)], torch.zeros(1, dtype=torch.int32)
    >>> MultiTensorApply(65536)(amp_C.multi_tensor_scale, flag, [weights, weights], 2.0)
    >>> weights
    [tensor([2., 2.])]
    """

    available: ClassVar[bool] = True
    import_err: ClassVar[ImportError | None] = None
    warned: ClassVar[bool] = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing: there is no extension that could be missing."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        """Returns the result of ``op``."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
