"""Checks the content of a checkpoint before writing: plain values only, which load without running code."""

from __future__ import annotations

import collections
import hashlib

import torch
from torch import Tensor, nn

from fabricamp.errors import CheckpointError

PRIVATE = "private"
"""The key that marks a checkpoint as readable by its owner only."""

VALUES = frozenset(
    {bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout},
)
_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter})
_SEQUENCES = frozenset({list, tuple, set})
TENSORS = frozenset({Tensor, nn.Parameter})


def check_content(value: object, name: str = "checkpoint", *, stored: bool = False) -> None:
    """Raises :class:`CheckpointError` with key path and type of a value that ``torch.load(weights_only=True)`` could not load.

    ``stored`` allows tensors on the meta device, which stand for tensors stored elsewhere.
    """
    tensors_in(value, name, stored=stored)


def tensors_in(value: object, name: str = "checkpoint", *, stored: bool = False) -> list[Tensor]:
    """Returns every tensor in ``value`` once; raises as :func:`check_content` does."""
    seen: set[int] = set()
    tensors: list[Tensor] = []
    waiting: list[tuple[str, object]] = [(name, value)]
    while waiting:
        path, item = waiting.pop()
        if type(item) in VALUES or id(item) in seen:
            continue
        seen.add(id(item))
        waiting.extend(_parts(path, item, stored=stored))
        if isinstance(item, Tensor):
            tensors.append(item)
    return tensors


def structure(value: object) -> str:
    """Returns a digest of keys, plain values, and the tensors' shapes and dtypes, equal before writing and after reading.

    The file's own checksums cover the tensors' values.  Raises :class:`CheckpointError` if ``value`` is nested too deeply.
    """
    try:
        return _digest(value, {}).hex()
    except RecursionError:
        raise CheckpointError(
            "it holds lists or dicts within each other, deeper than Python can follow; flatten them"
        ) from None


def _digest(value: object, known: dict[int, bytes]) -> bytes:
    if id(value) in known:
        return known[id(value)]
    words: list[bytes] = [type(value).__name__.encode()]
    if isinstance(value, Tensor):
        words.append(f"{value.dtype}{tuple(value.shape)}".encode())
    elif isinstance(value, dict):
        known[id(value)] = b"within itself"
        words += [_digest(part, known) for item in value.items() for part in item]
    elif isinstance(value, list | tuple) and type(value) in _SEQUENCES:
        known[id(value)] = b"within itself"
        words += [_digest(part, known) for part in value]
    elif isinstance(value, set):
        words += sorted(_digest(part, known) for part in value)
    else:
        words.append(repr(value).encode("utf-8", "surrogatepass"))
    digest = hashlib.blake2b(b"|".join(words), digest_size=16).digest()
    if isinstance(value, dict | list | tuple):
        known[id(value)] = digest
    return digest


def _parts(path: str, item: object, *, stored: bool) -> list[tuple[str, object]]:
    """Returns the values inside ``item`` that are still to be checked; raises if ``item`` itself could not be loaded."""
    kind = type(item)
    if kind in _MAPPINGS:
        assert isinstance(item, dict)
        inside = [(f"{path}[{key!r}]", part) for key, part in item.items()]
        inside += [(f"{path} (its key {key!r})", key) for key in item]
        return inside + _attributes(path, item)
    if kind in _SEQUENCES:
        assert isinstance(item, list | tuple | set)
        return [(f"{path}[{index}]", part) for index, part in enumerate(item)]
    if kind in TENSORS:
        assert isinstance(item, Tensor)
        if item.is_meta and not stored:
            raise CheckpointError(
                f"{path} is a tensor on the meta device, which has no values to save; materialise it first"
            )
        return _attributes(path, item)
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, strings, None, and lists, tuples "
        "and dicts of these, so that it loads without running code. Convert it (float(x), str(x), x.tolist()), or leave it out "
        "(save_hyperparameters(ignore=[...]), state_dict, on_save_checkpoint)"
    )


def _attributes(path: str, item: object) -> list[tuple[str, object]]:
    """Returns the attributes of a tensor or OrderedDict (such as ``state_dict()._metadata``), which are pickled with it."""
    return [(f"{path}.{name}", part) for name, part in getattr(item, "__dict__", {}).items()]
