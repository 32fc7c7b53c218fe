"""Names in a checkpoint whose module had other parts compiled: ``self.net = torch.compile(net)`` adds ``_orig_mod`` to names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from torch import Tensor, nn

from fabricamp._utils.types import StateDict
from fabricamp.checkpoint.left_out import LEFT_OUT
from fabricamp.checkpoint.plain import MAPPINGS

_WRAPPER: Final = "_orig_mod"
"""The attribute in which torch.compile's wrapper has the module."""

_WITH_NAMES: Final = ("state_dict", "current_model_state", "optimizer_states", "callbacks", "loops", LEFT_OUT)
"""The keys of a checkpoint with names of the module's parameters, buffers and parts."""

ON_DISK: Final = "names_on_disk"
"""The key, beside a folder's files, of the paths of renamed tensors: by the new path the one under which it was written."""


def plain_name(name: str) -> str:
    """Returns ``name`` as it is without torch.compile."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def with_names_of(checkpoint: StateDict, module: nn.Module) -> StateDict:
    """Returns ``checkpoint`` with the names of ``module``, which has other parts compiled than the module that was saved."""
    own = {
        *(name for name, _ in module.named_modules(remove_duplicate=False)),
        *(name for name, _ in module.named_parameters(remove_duplicate=False)),
        *(name for name, _ in module.named_buffers(remove_duplicate=False)),
        *module.state_dict(),
    }
    saved = checkpoint.get("state_dict")
    if not isinstance(saved, dict) or not any(_WRAPPER in str(name) for name in chain(own, saved)):
        return checkpoint
    own_names = {plain_name(name): name for name in own}

    def rename(name: str) -> str:
        return name if name in own else own_names.get(plain_name(name), name)

    result = checkpoint.copy()
    on_disk: dict[str, str] = {}
    for key in result.keys() & set(_WITH_NAMES):
        result[key] = _renamed(result[key], rename, (key, key), on_disk)
    if on_disk:
        result["shards"] = {**result["shards"], ON_DISK: on_disk}
    return result


def _renamed(value: Any, rename: Callable[[str], str], paths: tuple[str, str], on_disk: dict[str, str]) -> Any:
    """Returns ``value`` with names changed in keys and lists; ``paths`` are its own on disk and in the result."""
    before, after = paths
    if type(value) in MAPPINGS:
        keys = {key: rename(key) if isinstance(key, str) else key for key in value}
        if len(set(keys.values())) < len(keys):  # both names are there, so these are not of one module
            keys = {key: key for key in value}
        result = copy.copy(value)  # keeps the attributes that torch sets on a state dict
        result.clear()
        for key, item in value.items():
            result[keys[key]] = _renamed(item, rename, (f"{before}/{key}", f"{after}/{keys[key]}"), on_disk)
        metadata = getattr(result, "_metadata", None)  # versions of the modules, by their names
        if metadata is not None:
            result._metadata = {rename(name): versions for name, versions in metadata.items()}
        return result
    if type(value) in (list, tuple):
        return type(value)(
            rename(item)
            if isinstance(item, str)
            else _renamed(item, rename, (f"{before}/{index}", f"{after}/{index}"), on_disk)
            for index, item in enumerate(value)
        )
    if isinstance(value, Tensor) and value.is_meta and before != after:
        on_disk[after] = before
    return value
