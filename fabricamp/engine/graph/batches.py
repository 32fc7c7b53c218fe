"""Batches for graphs: the key that selects a graph, the tensors of a batch, copies of them, and placeholders.

A graph gets the *view* of a batch: the batch with a :class:`HookEntry` in place of each entry that only hooks read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fabricamp._utils.containers import tensors_within, with_parts
from fabricamp.errors import ConfigError, NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabricamp._utils.types import Batch, Output

_TENSORS: Final = {Tensor}
_STRIDED: Final = {torch.strided}
_layout: Final = attrgetter("layout")
_PLAIN: Final = (bool, int, float, str, bytes, type(None))


class Role(NamedTuple):
    """The role of a micro-batch in its accumulation of ``accumulate`` micro-batches; each role has a separate graph."""

    accumulate: int
    opens: bool
    closes: bool

    @property
    def in_words(self) -> str:
        """The role in words, to follow "batches" in a message; empty without accumulation."""
        if self.accumulate == 1:
            return ""
        if self.closes:
            does = "end"
        elif self.opens:
            does = "begin"
        else:
            does = "continue"
        return f" that {does} an accumulation of {self.accumulate}"


Key: TypeAlias = tuple[Hashable, Role]
"""The key of a graph: the signature of its batches, and their role."""


def signature(batch: Batch) -> Hashable:
    """Returns a hashable key, equal for batches of the same graph: structure, values, and of tensors shape, dtype and strides.

    Strides are included because torch multiplies a transposed tensor by another kernel, which may round differently.
    """
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided:
            raise NotCapturableError(
                f"the batch holds a tensor of layout {batch.layout}, which has no strides; give dense tensors"
            )
        return batch.shape, batch.dtype, batch.stride()
    if (
        (type(batch) is tuple or type(batch) is list)
        and set(map(type, batch)) == _TENSORS
        and set(map(_layout, batch)) == _STRIDED
    ):
        # The usual form, as below but without a call per tensor.
        return type(batch), tuple([(one.shape, one.dtype, one.stride()) for one in batch])
    if isinstance(batch, list | tuple):
        return type(batch), tuple([signature(one) for one in batch])
    if isinstance(batch, Mapping):
        return type(batch), tuple([(key, signature(value)) for key, value in batch.items()])
    if isinstance(batch, _PLAIN):
        return type(batch), batch
    if isinstance(batch, HookEntry):
        return HookEntry
    raise NotCapturableError(
        f"the batch holds a {type(batch).__name__}, whose tensors cannot be found; give tensors in tuples, lists and dicts"
    )


def tensors_of(batch: Batch) -> list[Tensor]:
    """Returns the tensors of a batch, in the order of its :func:`signature`."""
    # The usual form: a third of the time.
    if (type(batch) is tuple or type(batch) is list) and set(map(type, batch)) == _TENSORS:
        return list(batch)
    return list(tensors_within(batch))


def copied(outputs: Output) -> Output:
    """Returns ``outputs`` with copies of its tensors, since each replay overwrites the tensors of the capture."""
    if isinstance(outputs, Tensor):
        return outputs.clone()
    if type(outputs) is dict:  # a fast path for the outputs of a step: half the time
        return {key: copied(value) for key, value in outputs.items()}
    return with_parts(outputs, copied)


def constants_of(batch: Batch, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yields the values of a batch that are constants of its graph, each with its path in the batch, such as ``batch['name']``.

    A list of such values counts as one value, a tuple: loaders collect the samples' names in such a list.
    """
    if isinstance(batch, list | tuple) and batch and all(isinstance(part, _PLAIN) for part in batch):
        yield path, tuple(batch)
    elif isinstance(batch, list | tuple):
        for number, part in enumerate(batch):
            yield from constants_of(part, f"{path}[{number}]")
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from constants_of(part, f"{path}[{key!r}]")
    elif isinstance(batch, _PLAIN):
        yield path, batch


# -- entries that only hooks read --------------------------------------------------------------------------------------------------


def view_of(batch: Batch, entries: Sequence[tuple[str | int, ...]], *, skips_missing: bool = False) -> Batch:
    """Returns ``batch`` with a :class:`HookEntry` in place of each entry; ``batch`` itself if there are none.

    Raises :class:`ConfigError` for an entry that the batch lacks, unless ``skips_missing``.
    """
    view = batch
    for entry in entries:
        try:
            view = _replaced(view, entry, entry)
        except LookupError as error:
            if skips_missing:
                continue
            raise ConfigError(
                f"CudaGraph(hook_entries=...) names {_shown(entry)}, and the batch has no such entry (it is {_form(batch)}); give "
                "the index of a tuple's entry, the key of a dict's, or a tuple of these for an entry within an entry"
            ) from error
    return view


def _replaced(value: Any, entry: tuple[str | int, ...], rest: tuple[str | int, ...]) -> Any:
    """Returns ``value`` with a :class:`HookEntry` at the path ``rest``; raises LookupError if there is nothing."""
    key = rest[0]
    parts: dict[Any, Any] = {}
    if isinstance(value, list | tuple):
        parts = dict(enumerate(value))
        if isinstance(key, int) and key < 0:
            key += len(value)
    elif isinstance(value, Mapping):
        parts = dict(value)
    if key not in parts:
        raise LookupError(key)
    parts[key] = HookEntry(entry) if len(rest) == 1 else _replaced(parts[key], entry, rest[1:])
    remaining = iter(parts.values())
    return with_parts(value, lambda _: next(remaining))


def _shown(entry: tuple[str | int, ...]) -> str:
    return repr(entry[0] if len(entry) == 1 else entry)


def _form(batch: Batch) -> str:
    """Returns the class of a batch with the number of its entries, or their keys."""
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} with the keys {', '.join(map(repr, batch))}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


# -- placeholders ------------------------------------------------------------------------------------------------------------------


class BatchIndex:
    """A placeholder for ``batch_idx`` in a captured step; it may be passed on, but raises when it is used."""

    STANDS_FOR: ClassVar = "batch_idx, which stays constant in a captured step"
    CURE: ClassVar = "count on the device, or leave it out"

    def __init__(self, step: str = "training_step") -> None:
        self._step = step

    def _refuse(self, *_: object) -> Any:
        raise NotCapturableError(f"{self._step} uses {self.STANDS_FOR}; {self.CURE}")

    __bool__ = __int__ = __index__ = __float__ = __str__ = __format__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __and__ = __rand__ = (
        _refuse
    )


class HookEntry:
    """A placeholder in a captured step for an entry of the batch that only hooks read; it may be passed on, but not used."""

    STANDS_FOR: ClassVar = "an entry of the batch that CudaGraph(hook_entries=...) leaves to the hooks"
    CURE: ClassVar = "take the entry out of hook_entries, or read it in a hook after the batch"

    def __init__(self, entry: tuple[str | int, ...]) -> None:
        self._entry = entry

    def _refuse(self, *_: object) -> Any:
        raise NotCapturableError(f"the step uses {_shown(self._entry)}, {self.STANDS_FOR}; {self.CURE}")

    # What Python offers for every object; other uses raise an error that names this class.
    __bool__ = __str__ = __format__ = __hash__ = __eq__ = __ne__ = _refuse


PLACEHOLDERS: Final = (BatchIndex, HookEntry)


def refuse_placeholders(outputs: Output) -> Output:
    """Returns a step's ``outputs``; raises :class:`NotCapturableError` if hooks would get a placeholder among them."""
    if isinstance(outputs, PLACEHOLDERS):
        raise NotCapturableError(
            f"the step returns {outputs.STANDS_FOR}; hooks have it, so leave it out of the outputs"
        )
    return with_parts(outputs, refuse_placeholders)
