"""What stands beside the states of optimizers and schedules: the names of their classes, and of the optimizers' parameters.

A resumed run compares them with its own.  Another class is refused: its state means something else.  A state follows the names of
its parameters, which a program may define in another order.  Files of other libraries and of earlier versions have no names.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fabricamp._utils.first_rank import started_rank
from fabricamp.checkpoint.compiled_names import plain_name
from fabricamp.errors import CheckpointError
from fabricamp.optimizers import FusedOptimizer
from fabricamp.optimizers.refusals import owned_parameters
from fabricamp.precision.master_weights import module_parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fabricamp._utils.types import OptimizerFace, ParamGroup, StateDict

_LOG = logging.getLogger("fabricamp")

_BASES: Final = (object, Optimizer, FusedOptimizer, LRScheduler)
"""Classes that say nothing about a state."""
_KNOWN: Final = ("torch.", "fabricamp.", "apex.")
"""The packages whose classes have each its own rule; a class of any other may be a copy of another one, or renamed."""
_FAMILIES: Final = {
    "AdamW": "Adam",
    "FusedAdam": "Adam",
    "FusedSGD": "SGD",
    "FusedAdagrad": "Adagrad",
    "FusedMixedPrecisionLamb": "FusedLAMB",
}
"""Classes with the state of another one, which reads it."""
OPTIMIZERS: Final = "optimizer_identities"
"""The key in ``loops.fit`` of what stands beside the optimizers' states."""
SCHEDULES: Final = "lr_scheduler_identities"
"""The key in ``loops.fit`` of what stands beside the schedules' states."""
_OF_SCHEDULES: Final = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
)
"""Entries of a parameter group that its optimizer's constructor does not set."""


# -- classes -----------------------------------------------------------------------------------------------------------------------


def saved_identities(checkpoint: StateDict, key: str, number: int) -> list[StateDict]:
    """Returns what stands beside ``number`` states: empty dicts in files of other libraries and of earlier versions.

    So too if a hook has changed the number of the states.
    """
    saved: list[StateDict] = checkpoint.get("loops", {}).get("fit", {}).get(key, [])
    return saved if len(saved) == number else [{} for _ in range(number)]


def identity(part: object) -> StateDict:
    """Returns the names of the classes of an optimizer or a schedule, its own first, and the identities of what it wraps."""
    classes = [kind for kind in type(part).__mro__ if kind not in _BASES]
    if isinstance(part, Optimizer | LRScheduler):  # without mixins, which have no state of their own
        classes = [kind for kind in classes if issubclass(kind, Optimizer | LRScheduler)]
    return {
        "classes": [f"{kind.__module__}.{kind.__qualname__}" for kind in classes],
        "parts": [identity(wrapped) for wrapped in _wrapped_by(part)],
    }


def _wrapped_by(part: object) -> list[object]:
    """Returns the optimizer that a wrapper such as LARC steps, and the schedules of a SequentialLR."""
    inner = getattr(part, "_schedulers", None)
    if isinstance(inner, list | tuple):
        return list(inner)
    groups = getattr(part, "param_groups", None)
    if groups is None:
        return []
    attributes = getattr(part, "__dict__", {})
    return [value for value in attributes.values() if getattr(value, "param_groups", None) is groups]


def _short(identity: StateDict) -> str:
    """Returns the name of the class, without its module and with what it wraps."""
    name = str(identity["classes"][0]).rpartition(".")[2]
    parts = ", ".join(_short(part) for part in identity["parts"])
    return f"{name}({parts})" if parts else name


def _is_same(saved: StateDict, own: StateDict) -> bool | None:
    """Whether two identities have one state: one class, a subclass of the other, or one family; None: that is not known."""
    names = [str(name).rpartition(".")[2] for name in saved["classes"]]
    own_names = [str(name).rpartition(".")[2] for name in own["classes"]]
    if len(saved["parts"]) != len(own["parts"]):
        return False
    for part, own_part in zip(saved["parts"], own["parts"], strict=True):
        same = _is_same(part, own_part)
        if not same:
            return same
    if names[0] in own_names or own_names[0] in names:
        return True
    family = _family(saved)
    own_family = _family(own)
    if family and own_family:
        return family == own_family
    return None


def _family(identity: StateDict) -> str:
    """Returns the name of the rule that the class is or derives from; empty for a class that no known package defines."""
    for name in identity["classes"]:
        if name.startswith(_KNOWN):
            short = str(name).rpartition(".")[2]
            return _FAMILIES.get(short, short)
    return ""


def check_class(what: str, saved: StateDict, part: object, path: str, *, alike: bool) -> None:
    """Raises :class:`CheckpointError` if ``part`` is of another class than the optimizer or schedule whose state ``path`` holds.

    ``what`` is its name in messages, as in "optimizer 0".  ``alike``: whether the two states have one form, which decides about a
    class that is not known: it may have another name now.
    """
    own = identity(part)
    same = _is_same(saved, own)
    there = _short(saved)
    if same is None and alike:
        _say(f"{what} is {_short(own)}, and {path} has the state of {there}, of the same form: it is loaded")
    elif not same:
        raise CheckpointError(
            f"{path} holds the state of {there}, and {what} of configure_optimizers is {_short(own)}, which cannot go on from it; "
            f"return {there}, or begin a new run with the weights: load_from_checkpoint(...) and fit without ckpt_path"
        )


def same_options(optimizer: OptimizerFace, state: StateDict) -> bool:
    """Whether the groups of ``state`` have the options of the optimizer's own."""
    own = [group.keys() - _OF_SCHEDULES for group in optimizer.param_groups]
    return own == [group.keys() - _OF_SCHEDULES for group in state.get("param_groups", ())]


# -- weight decay ------------------------------------------------------------------------------------------------------------------


def decouples(optimizer: OptimizerFace) -> list[bool]:
    """Returns for each group whether weight decay is apart from the gradient: what AdamW has of its own beside Adam."""
    mode = getattr(optimizer, "adam_w_mode", getattr(optimizer, "adagrad_w_mode", None))
    return [
        bool(group.get("decoupled_weight_decay", False) if mode is None else mode) for group in optimizer.param_groups
    ]


def keep_weight_decay(optimizer: OptimizerFace, number: int, saved: Sequence[bool], own: Sequence[bool]) -> None:
    """Lets the class of the program, not that of the file, say how weight decay acts; a line tells where that differs.

    ``saved`` and ``own`` are what :func:`decouples` returned for the file's optimizer, and here before its state was loaded.
    """
    if list(saved) == list(own) or _family(identity(optimizer)) not in ("Adam", "Adagrad"):
        return
    for group, decoupled in zip(optimizer.param_groups, own, strict=True):
        if "decoupled_weight_decay" in group:
            group["decoupled_weight_decay"] = decoupled
    decays = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
    if any(decays):
        there, here = ("AdamW's", "Adam's") if saved[0] else ("Adam's", "AdamW's")
        _say(
            f"optimizer {number} is {type(optimizer).__name__}: its weight decay of {max(decays):g} acts as {here} from here on, "
            f"and acted as {there} in the run that wrote the checkpoint"
        )


def refuse_lost_options(optimizer: OptimizerFace, number: int, state: StateDict, path: str) -> None:
    """Raises :class:`CheckpointError` if the state was trained without bias correction, and the optimizer always corrects it."""
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=False):
        if "bias_correction" not in own and not group.get("bias_correction", True):
            raise CheckpointError(
                f"{path} was trained with bias_correction=False, which optimizer {number} ({type(optimizer).__name__}) does not "
                "have; return the class that wrote it"
            )


# -- parameters --------------------------------------------------------------------------------------------------------------------


def names_of_parameters(optimizer: OptimizerFace, module: nn.Module) -> list[str]:
    """Returns the names in ``module`` of the optimizer's parameters, in the order of its groups.

    They are as without torch.compile.  A tensor with several names has the first of them by the alphabet, as the order of their
    definition may change.
    """
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        names[id(parameter)] = min(plain, names.get(id(parameter), plain))
    return [names.get(id(module_parameter(parameter)), "") for parameter in owned_parameters(optimizer)]


def saved_names(saved: StateDict) -> list[str]:
    """Returns the names of an optimizer's parameters in the file, as they are without torch.compile; empty if it has none."""
    return [plain_name(name) for name in saved.get("parameters", ())]


def given_names(groups: Sequence[ParamGroup]) -> list[str]:
    """Returns the names that torch keeps in groups that were made of ``named_parameters()``; empty if any group has none."""
    if not all("param_names" in group for group in groups):
        return []
    return [str(name) for group in groups for name in group["param_names"]]


def in_own_order(
    state: StateDict, saved: Sequence[str], optimizer: OptimizerFace, own: Sequence[str], path: str
) -> StateDict:
    """Returns an optimizer's ``state`` so that each of its parameters gets the entry that has its name in the file.

    ``saved`` and ``own`` are the names there and here, in the order of the groups.  If these are other names, a line says so, and
    entries are loaded by position.  Raises :class:`CheckpointError` if a parameter is in another group here, and these groups
    have different options, or if the state cannot be taken apart.
    """
    groups = state.get("param_groups", [])
    indices = [index for group in groups for index in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if list(saved) == list(own) or len(saved) != len(indices) or sizes != [len(group["params"]) for group in groups]:
        return state  # other numbers of parameters are load_state_dict's to refuse
    name = type(optimizer).__name__
    counts = Counter(saved)
    if counts != Counter(own) or max(counts.values()) > 1 or "" in counts:
        there, here = next(pair for pair in zip(saved, own, strict=True) if pair[0] != pair[1])
        _say(
            f"{path} has other names of the parameters of {name} ({there!r}, here {here!r}): their states are loaded by position"
        )
        return state
    if issubclass(type(optimizer), LBFGS):
        raise CheckpointError(
            f"{path} has the parameters of LBFGS in another order, and its state is one vector of all of them; define them in the "
            f"order of the file ({', '.join(saved):.200})"
        )
    _check_groups(groups, saved, own, path)
    index_of = dict(zip(saved, indices, strict=True))
    ordered = iter([index_of[one] for one in own])
    result = []
    for group, own_group in zip(groups, optimizer.param_groups, strict=True):
        changed = {**group, "params": [next(ordered) for _ in group["params"]]}
        if "param_names" in group:
            changed["param_names"] = own_group.get("param_names", group["param_names"])
        result.append(changed)
    moved = sum(one != other for one, other in zip(saved, own, strict=True))
    _say(f"{moved} parameters of {name} have another place than in {path}: their states follow their names")
    return {**state, "param_groups": result}


def has_own_order(checkpoint: StateDict, optimizers: Sequence[OptimizerFace], module: nn.Module) -> bool:
    """Whether the parameters of each optimizer have the order of the file, or other names, or none in the file."""
    identities = saved_identities(checkpoint, OPTIMIZERS, len(optimizers))
    for saved, optimizer in zip(identities, optimizers, strict=True):
        names = saved_names(saved)
        own = names_of_parameters(optimizer, module)
        if names != own and sorted(names) == sorted(own):
            return False
    return True


def _check_groups(groups: Sequence[ParamGroup], saved: Sequence[str], own: Sequence[str], path: str) -> None:
    numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
    group_there = dict(zip(saved, numbers, strict=True))
    for name, number in zip(own, numbers, strict=True):
        there = group_there[name]
        if _options(groups[there]) != _options(groups[number]):
            raise CheckpointError(
                f"{path} has the parameter {name} in group {there} of its optimizer, here it is in group {number}, and the two "
                "groups have different options there; keep the order of the groups"
            )


def _options(group: ParamGroup) -> dict[str, Any]:
    return {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _say(message: str) -> None:
    if started_rank() == 0:
        _LOG.warning("%s", message)
