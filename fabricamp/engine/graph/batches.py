"""Batches for graphs: the signature that selects a graph, the tensors of a batch, and copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from fabricamp._utils.containers import tensors_within, with_parts
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable

_FLAT: Final = (list, tuple)
_TENSORS: Final = {Tensor}
_PLAIN: Final = (bool, int, float, str, bytes, type(None))


class NotCapturableError(ConfigError):
    """The reason why a step cannot be captured, and what to change."""


def signature(batch: Any) -> Hashable:
    """Returns a hashable key, equal for batches of the same graph: structure, shapes, dtypes and all values but tensors."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, list | tuple):
        return type(batch), tuple([signature(one) for one in batch])
    if isinstance(batch, Mapping):
        return type(batch), tuple([(key, signature(value)) for key, value in batch.items()])
    if isinstance(batch, _PLAIN):
        return type(batch), batch
    raise NotCapturableError(
        f"the batch holds a {type(batch).__name__}, whose tensors cannot be found; give tensors in tuples, lists and dicts"
    )


def tensors_of(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch, in the order of its :func:`signature`."""
    if type(batch) in _FLAT and set(map(type, batch)) == _TENSORS:  # the usual form: a third of the time
        return list(batch)
    return list(tensors_within(batch))


def copied(outputs: Any) -> Any:
    """Returns ``outputs`` with copies of its tensors, since each replay overwrites the tensors of the capture."""
    if isinstance(outputs, Tensor):
        return outputs.clone()
    if type(outputs) is dict:  # a fast path for the outputs of a step: half the time
        return {key: copied(value) for key, value in outputs.items()}
    return with_parts(outputs, copied)


class BatchIndex:
    """A placeholder for ``batch_idx`` in a captured step; it may be passed on, but raises when it is used."""

    def __init__(self, step: str = "training_step") -> None:
        self._step = step

    def _refuse(self, *_: object) -> Any:
        raise NotCapturableError(
            f"{self._step} uses batch_idx, which stays constant in a captured step; count on the device, or leave it out"
        )

    __bool__ = __int__ = __index__ = __float__ = __str__ = __format__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __and__ = __rand__ = (
        _refuse
    )
