"""Finds parameters that several submodules share, and shares them again."""

from __future__ import annotations

import operator

from torch import nn


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Returns lists of paths, one list for each parameter that has several paths."""
    paths: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(parameter, []).append(name)
    return [names for names in paths.values() if len(names) > 1]


def set_shared_parameters(module: nn.Module, shared_params: list[list[str]]) -> nn.Module:
    """For each list, sets the parameter at the first path at the other paths too; returns ``module``."""
    for first, *others in shared_params:
        parameter = operator.attrgetter(first)(module)
        for path in others:
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, parameter)
    return module
