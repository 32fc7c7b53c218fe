"""FP8 as a level: O4 or O5, with the products of large linear layers in FP8."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from fabricamp.arguments.checks import check_choice
from fabricamp.errors import ConfigError
from fabricamp.precision.float8_gather import Float8Gather
from fabricamp.precision.float8_linears import RECIPES, Choice, change, change_back, choose
from fabricamp.precision.level import OptLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from fabricamp.precision.float8_linears import Recipe
    from fabricamp.strategies.base import Strategy

_OLDEST: Final = (0, 17)
_INSTALL: Final = f"torchao>={_OLDEST[0]}.{_OLDEST[1]}"
_HOPPER: Final = (9, 0)
_NAMES: Final = {"O4": "fp8-mixed", "O5": "fp8"}


class Float8(OptLevel):
    """O4 or O5 in bf16, with the products of large linear layers in FP8, by torchao.

    Weights, masters, gradients and checkpoints are those of the base level; only the operands of a product are rounded to FP8, with
    scales of the values at hand.  The layers are plain ``nn.Linear`` again after a run.  A GPU has to be a Hopper or newer, and the
    layers compiled (``Trainer(compile="blocks")``) to be faster than in bf16.  On a CPU the products are emulated, for tests.

    Left in bf16: heads (the last linear layer, layers called ``head`` or ``*_head``), a linear layer that takes the input, layers
    too small to be faster, sizes that 16 does not divide, subclasses of ``nn.Linear``, and layers with hooks, parametrisations,
    shared parameters or adapters; and each call with a number of rows that 16 does not divide.

    Args:
        recipe: the scales of the operands: "tensorwise", one each; "rowwise", one a row; "rowwise_with_gw_hp", one a row, and the
            gradients of weights in bf16.
        skip: names or patterns of layers that stay in bf16, as in ``named_modules()``; a module's name stands for all its layers.
        include: names or patterns of layers to take though they are heads, first or small.
        base: "O4" (fp32 weights, autocast) or "O5" (bf16 weights, fp32 masters).
        all_gather: ``strategy="fsdp"`` gathers the weights of these layers in FP8, half the bytes of bf16; their products have the
            same bits.  For "tensorwise" alone.  Within a step these weights are torchao's ``Float8TrainingTensor``.

    Raises:
        ConfigError: for wrong values, without a torchao that fits this torch, on a GPU before Hopper, or if the strategy gathers no
            weights in FP8.

    Example:
        >>> Float8("rowwise", skip=["decoder.*.gate"], base="O4").name  # doctest: +SKIP
        'fp8-mixed'
    """

    def __init__(
        self,
        recipe: Recipe = "tensorwise",
        *,
        skip: Sequence[str] = (),
        include: Sequence[str] = (),
        base: Literal["O4", "O5"] = "O5",
        all_gather: bool = False,
    ) -> None:
        check_choice("recipe", recipe, RECIPES)
        check_choice("base", base, tuple(_NAMES))
        check_choice("all_gather", all_gather, (False, True))
        if all_gather and recipe != "tensorwise":
            raise ConfigError(
                f"Float8({recipe!r}, all_gather=True) is not offered, as a gathered weight has one scale; give 'tensorwise', or "
                "leave all_gather out"
            )
        super().__init__(base)
        self.name = _NAMES[base]
        self.recipe = recipe
        self.skip = _patterns("skip", skip)
        self.include = _patterns("include", include)
        self.all_gather = all_gather
        self._choice: Choice | None = None
        self._gather: Float8Gather | None = None
        _check_torchao(self.name)

    def check_device(self, device_type: str) -> None:
        """Raises :class:`ConfigError` if devices of ``device_type`` ("cpu" or "cuda") have no FP8 products."""
        super().check_device(device_type)
        if device_type == "cpu":
            return
        if device_type != "cuda":
            raise ConfigError(
                f"precision {self.name!r} on {device_type!r}, which has no FP8 products; use {self.level.name!r}"
            )
        if torch.version.hip is not None:
            raise ConfigError(
                f"precision {self.name!r} needs an NVIDIA GPU, and this torch is for AMD; use {self.level.name!r}"
            )
        # The card of this run is not known before the module is on it, and cards of one machine may differ.
        cards = range(torch.cuda.device_count())
        if cards:
            self._check_card(max(cards, key=torch.cuda.get_device_capability))

    def check_strategy(self, strategy: Strategy) -> None:
        """Raises :class:`ConfigError` if weights are to be gathered in FP8 and ``strategy`` does not do so."""
        reason = strategy.sharding.refuses_float8_gather() if self.all_gather else ""
        if reason:
            raise ConfigError(f"Float8(all_gather=True) with strategy={strategy.name!r}: {reason}")

    def _check_card(self, card: torch.device | int) -> None:
        if torch.cuda.get_device_capability(card) < _HOPPER:
            raise ConfigError(
                f"precision {self.name!r} needs a GPU with FP8 products (Hopper or newer), and "
                f"{torch.cuda.get_device_name(card)} is older; use {self.level.name!r}"
            )

    def _convert(self, module: nn.Module) -> None:
        super()._convert(module)
        if self._device.type == "cuda":
            self._check_card(self._device)
        self._choice = choose(module, self.recipe, skip=self.skip, include=self.include)
        change(self._choice.layers, self.recipe, emulate=self._device.type == "cpu")
        if self.all_gather:
            self._gather = Float8Gather(self._choice.layers)

    def _restore(self) -> None:
        if self._gather is not None:
            self._gather.take_off()
            self._gather = None
        if self._choice is not None:
            change_back(self._choice.layers)
            self._choice = None
        super()._restore()

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs the user's step as the base level does."""
        gather = self._gather
        if gather is None:
            return super().forward(step, *args)
        gather.forget()
        with gather.keeping():
            return super().forward(step, *args)

    def backward(
        self, loss: Tensor, loss_id: int = 0, run: Callable[..., Any] = Tensor.backward, **options: Any
    ) -> None:
        """Runs ``run(loss, **options)`` as the base level does."""
        gather = self._gather
        if gather is None:
            super().backward(loss, loss_id, run, **options)
            return
        with gather.keeping():
            super().backward(loss, loss_id, run, **options)

    def notes(self) -> list[str]:
        """Returns which layers have FP8 products."""
        if self._choice is None:
            return []
        lines = [self._choice.line(self.recipe)]
        if self._gather is not None:
            lines.append(self._gather.line(len(self._choice.layers)))
        if self._device.type == "cpu":
            lines.append("float8 on a CPU: the products are emulated in fp32, for tests")
        return lines

    def slowness(self, *, compiled: bool) -> str:
        """Returns a line if a GPU's products are slow because nothing is ``compiled``."""
        if compiled or self._device.type == "cpu" or self._choice is None or not self._choice.layers:
            return super().slowness(compiled=compiled)
        return (
            f"float8 without torch.compile is slower than {self.level.name}: give Trainer(compile='blocks'), or "
            f"precision={self.level.name!r}"
        )


def _check_torchao(precision: str) -> None:
    """Raises :class:`ConfigError` if torchao is missing, too old, or cannot be imported with this torch."""
    needs = f"precision {precision!r} needs the package torchao"
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{needs}: pip install torchao")
    try:
        torchao = importlib.import_module("torchao")
        importlib.import_module("torchao.float8")
    except Exception as error:
        # What a version of torchao raises that does not fit this torch depends on both.
        raise ConfigError(
            f"{needs}, and its import fails with torch {torch.__version__} ({type(error).__name__}: {error}); "
            f'pip install --upgrade "{_INSTALL}"'
        ) from error
    number = re.match(r"(\d+)\.(\d+)", torchao.__version__)
    if number is not None and tuple(map(int, number.groups())) < _OLDEST:
        raise ConfigError(
            f"{needs}, {_OLDEST[0]}.{_OLDEST[1]} or newer, and {torchao.__version__} is installed; "
            f'pip install --upgrade "{_INSTALL}"'
        )


def _patterns(name: str, value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value):
        raise ConfigError(
            f"Float8({name}={value!r}) is not allowed; give a list of names or patterns, such as ['*.mlp']"
        )
    return tuple(value)
