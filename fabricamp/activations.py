"""The options of ``Trainer(activations=...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from torch import nn

from fabricamp._utils.keywords import NamesKeywords
from fabricamp.errors import ConfigError, nearest

Saved: TypeAlias = Literal["all", "products", "inputs"]

_SAVED: Final[tuple[str, ...]] = get_args(Saved)
_WORDS: Final = ("keep", "recompute", "offload")


@dataclass(init=False)
class Activations(NamesKeywords):
    """What the blocks of a network keep from forward to backward, and where it waits; the numbers of a step stay the same.

    Args:
        blocks: "auto" takes the blocks of ``compile="blocks"``: the outermost modules with submodules and with siblings of the same
            class, such as the members of a ModuleList.  Or a list of classes, and names of single modules as in
            ``named_modules()``.
        save: "all" keeps what backward reads; "products" keeps the results of matrix products, convolutions and attention; "inputs"
            keeps a block's inputs.  What is not kept is computed again in backward.
        offload: the share of the bytes which blocks keep that waits in host memory, from 0 to 1; tensors of 64 KiB and more.
        memory_budget: for compiled code, from 0 to 1: the compiler keeps at most this share of the bytes that it would keep by
            itself, in each compiled region, and chooses what to compute again.  None leaves it alone.

    Raises:
        ConfigError: for values out of range, and for options that do not go together.

    Example:
        >>> Activations(save="inputs", offload=1.0).save  # the inputs of blocks wait in host memory
        'inputs'
    """

    blocks: Literal["auto"] | list[type[nn.Module] | str]
    save: Saved
    offload: float
    memory_budget: float | None

    def __init__(
        self,
        blocks: Literal["auto"] | Sequence[type[nn.Module] | str] = "auto",
        *,
        save: Saved = "all",
        offload: float = 0.0,
        memory_budget: float | None = None,
    ) -> None:
        self.blocks = _checked_blocks(blocks)
        if save not in _SAVED:
            allowed = ", ".join(map(repr, _SAVED))
            raise ConfigError(
                f"Activations(save={save!r}) is not allowed{nearest(str(save), _SAVED)} (allowed: {allowed})"
            )
        self.save = save
        self.offload = _share("offload", offload)
        self.memory_budget = None if memory_budget is None else _share("memory_budget", memory_budget)
        self._check_together()

    def _check_together(self) -> None:
        if self.save == "products" and self.offload:
            raise ConfigError(
                f"Activations(save='products', offload={self.offload}) is not offered: torch keeps products in a table of its own, "
                "which nothing is moved from; give save='inputs', or leave offload out"
            )
        if self.memory_budget is not None and self.save != "all":
            raise ConfigError(
                f"Activations(save={self.save!r}, memory_budget={self.memory_budget}): with a budget the compiler chooses what is "
                "computed again; leave one of them out"
            )
        if self.blocks != "auto" and not self.changes_blocks:
            told = "memory_budget is of compiled regions" if self.memory_budget is not None else "they keep all of it"
            raise ConfigError(
                f"Activations(blocks=...) says which blocks, and {told}; give save='inputs', save='products' or offload=..., or "
                "leave blocks out"
            )

    @property
    def recomputes(self) -> bool:
        """Whether blocks compute a part of their activations again."""
        return self.save != "all"

    @property
    def changes_blocks(self) -> bool:
        """Whether anything is done to blocks: the budget is the compiler's alone."""
        return self.recomputes or self.offload > 0

    def on_the_device(self) -> Activations | None:
        """Returns the options without what is moved, and without the compiler's budget; None if nothing else is left."""
        return Activations(self.blocks, save=self.save) if self.recomputes else None


def _checked_blocks(value: object) -> Literal["auto"] | list[type[nn.Module] | str]:
    if value == "auto":
        return "auto"
    if isinstance(value, (list, tuple, set)) and value:
        given = list(value)
        if all(isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module)) for one in given):
            return given
    raise ConfigError(
        f"Activations(blocks={value!r:.200}) has to be 'auto', or a list of classes of submodules, such as blocks=[Block], and of "
        "names of single ones, such as 'net.encoder'"
    )


def _share(name: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ConfigError(f"Activations({name}={value!r}) is not allowed; give a share from 0 to 1")


def as_activations(name: str, value: Any) -> Activations | None:
    """Returns the options for the Trainer's argument ``activations``; None if all activations are kept."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        value = Activations(**value)
    if isinstance(value, Activations):
        return value if value.changes_blocks or value.memory_budget is not None else None
    if value == "keep":
        return None
    if value == "recompute":
        return Activations(save="inputs")
    if value == "offload":
        return Activations(offload=1.0)
    hint = nearest(value, _WORDS) if isinstance(value, str) else ""
    raise ConfigError(
        f"{name}={value!r} is not allowed{hint}; give 'keep', 'recompute', 'offload', an Activations(...), or a dict of its "
        "keywords"
    )
