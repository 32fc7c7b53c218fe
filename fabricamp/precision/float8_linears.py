"""Linear layers with FP8 products: which layers of a module get them, and the change of these layers and back.

A layer is changed by its class alone: it stays the same object, with its parameters, hooks and attributes.  The class is torchao's
``Float8Linear``, a subclass of ``nn.Linear``, which casts weight, input and gradient to FP8 for its three products.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from fabricamp.errors import ConfigError, nearest
from fabricamp.ops.shards import any_shard, is_shard
from fabricamp.precision.casting import convertible_modules, own_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Recipe: TypeAlias = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
RECIPES: Final[tuple[str, ...]] = get_args(Recipe)

MULTIPLE: Final = 16
"""The FP8 products of GPUs take sizes that are multiples of this number."""

SMALLEST: Final = {"tensorwise": 2048, "rowwise": 4096, "rowwise_with_gw_hp": 4096}
"""The least number of inputs and of outputs of a layer that is taken, by recipe: from this width on compiled blocks of a
transformer were faster than in bf16 on an H100, with 8192 tokens (``benchmarks/fp8_linears.py``)."""


# -- which layers ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Choice:
    """The linear layers of a module that get FP8 products, and the number of the others by reason."""

    layers: list[nn.Linear]
    others: Counter[str]
    flops: float
    """The share of the chosen layers in the FLOPs of all linear layers, each called once a token."""

    def line(self, recipe: str) -> str:
        """Returns a line for the summary of a run."""
        count = len(self.layers) + self.others.total()
        line = f"float8 ({recipe}): {len(self.layers)} of {count} linear layers, {self.flops:.0%} of their FLOPs"
        if self.others:
            line += f"; in bf16: {', '.join(f'{number} {reason}' for reason, number in self.others.items())}"
        return line


def choose(root: nn.Module, recipe: str, *, skip: Sequence[str] = (), include: Sequence[str] = ()) -> Choice:
    """Returns the linear layers of ``root`` that get FP8 products by ``recipe``.

    ``skip`` and ``include`` are names or patterns.  Raises :class:`ConfigError` if one of them names no linear layer, or if an
    included layer cannot have FP8 products.
    """
    names = {id(layer): name for name, layer in root.named_modules() if isinstance(layer, nn.Linear)}
    layers = {name: layer for name, layer in root.named_modules() if isinstance(layer, nn.Linear)}
    _check_patterns("skip", skip, layers)
    _check_patterns("include", include, layers)
    converted = set(map(id, convertible_modules(root, keep_batchnorm_fp32=True)))
    obstacles = _Obstacles(root, converted)
    ends = _Ends(root, list(layers.values()), converted)
    chosen = []
    others: Counter[str] = Counter()
    for name, layer in layers.items():
        reason = obstacles.of(name, layer)
        if _matches(name, skip):
            reason = "in skip"
        elif _matches(name, include):
            if reason:
                raise ConfigError(
                    f"Float8(include=...) names {names[id(layer)]}, which cannot have FP8 products: it is counted as "
                    f"'{reason}'; leave it out"
                )
        elif not reason:
            reason = ends.of(name, layer)
            if not reason and min(layer.in_features, layer.out_features) < SMALLEST[recipe]:
                reason = "too small to be faster"
        if reason:
            others[reason] += 1
        else:
            chosen.append(layer)
    total = sum(map(_products, layers.values()))
    return Choice(chosen, others, sum(map(_products, chosen)) / max(1, total))


def _products(layer: nn.Linear) -> int:
    return layer.in_features * layer.out_features


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether ``name`` is one of ``patterns``, or below a module with such a name."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def _check_patterns(argument: str, patterns: Sequence[str], names: Sequence[str] | dict[str, nn.Linear]) -> None:
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            raise ConfigError(
                f"Float8({argument}=...): {pattern!r} matches no linear layer{nearest(pattern, names)}; give names as those of "
                "named_modules(), of layers or modules that hold some, or patterns such as '*.mlp'"
            )


class _Obstacles:
    """What keeps a linear layer from having FP8 products at all."""

    def __init__(self, root: nn.Module, converted: set[int]) -> None:
        self._converted = converted
        modules = [module for _, module in root.named_modules(remove_duplicate=False)]
        self._places = Counter(map(id, modules))
        unique = {id(module): module for module in modules}.values()
        self._owners = Counter(id(tensor) for module in unique for tensor in own_tensors(module))
        self._adapters = {
            id(child)
            for module in unique
            if _is_adapter(module)
            for child in module.modules()
            if isinstance(child, nn.Linear)
        }

    def of(self, name: str, layer: nn.Linear) -> str:
        """Returns the reason for a layer; an empty string if there is none."""
        if is_parametrized(layer):
            return "parametrised"
        if _is_unit_of_fsdp(layer):
            return "that are units of FSDP"
        if type(layer) is not nn.Linear:
            # Its forward may be another one, or nobody calls it: nn.MultiheadAttention only reads the weights of its own.
            return "of a subclass"
        if "forward" in vars(layer):
            return "with a forward of their own"
        if type(layer.weight.data) is not Tensor and not is_shard(layer.weight.data):
            # Such as the quantised weights of other packages.
            return "with weights of another class"
        if _is_hooked(layer):
            # A hook may replace the weight before a call, as torch's pruning and its older weight_norm do.
            return "with hooks"
        if self._places[id(layer)] > 1 or any(self._owners[id(tensor)] > 1 for tensor in own_tensors(layer)):
            return "shared"
        if id(layer) in self._adapters:
            return "in adapters"
        if not name:
            return "that is the module itself"
        if id(layer) not in self._converted or layer.weight.dtype is torch.float64:
            return "outside of the level"
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            return f"with sizes that {MULTIPLE} does not divide"
        return ""


def _is_hooked(layer: nn.Module) -> bool:
    # A hook of this package's boundaries is in another table until the first call.
    after = [hook for hook in layer._forward_hooks.values() if not _reads_output_alone(hook)]
    return bool(after or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _reads_output_alone(hook: Any) -> bool:
    """Returns whether ``hook`` is the one by which ``strategy="fsdp"`` refuses second-order gradients."""
    return isinstance(hook, functools.partial) and hook.func.__module__ == "fabricamp.strategies.fsdp_units"


def _is_adapter(module: nn.Module) -> bool:
    """Returns whether ``module`` wraps a layer, as LoRA does; PEFT's adapters have the wrapped layer as ``base_layer``."""
    return isinstance(getattr(module, "base_layer", None), nn.Linear)


def _is_unit_of_fsdp(layer: nn.Linear) -> bool:
    """Returns whether the strategy has made ``layer`` a unit, and with that given it a class of its own."""
    if type(layer) is nn.Linear or not any_shard(own_tensors(layer)):
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(layer, FSDPModule)


class _Ends:
    """Which linear layers are the first layer of a network, or its head: their rounding costs most accuracy."""

    def __init__(self, root: nn.Module, layers: Sequence[nn.Linear], converted: set[int]) -> None:
        # Losses and metrics have layers of their own, which are no part of the network.
        inside = [layer for layer in layers if id(layer) in converted]
        # A frozen copy, such as a teacher, may come after the network that is trained: both have a head.
        trained = [layer for layer in inside if layer.weight.requires_grad]
        self._heads = {id(group[-1]) for group in (inside, trained) if group}
        self._heads.update(map(id, _output_layers(root)))
        leaves = [
            module for module in root.modules() if id(module) in converted and next(module.children(), None) is None
        ]
        # Norms and activations may come before; with an embedding or a convolution before them, no linear layer is the first.
        self._first = next((leaf for leaf in leaves if any(tensor.ndim > 1 for tensor in leaf.parameters())), None)

    def of(self, name: str, layer: nn.Linear) -> str:
        """Returns "head", "first", or an empty string."""
        last_part = name.rpartition(".")[2]
        named_head = last_part == "head" or last_part.endswith("_head")
        if named_head or id(layer) in self._heads:
            return "head"
        return "first" if layer is self._first else ""


def _output_layers(root: nn.Module) -> Iterator[nn.Module]:
    """Yields what models of transformers name as their output layers."""
    for module in root.modules():
        methods: list[Any] = [getattr(module, f"get_{end}_embeddings", None) for end in ("input", "output")]
        # Models of transformers have both methods; one of them alone is the user's, with arguments and effects of its own.
        if not all(map(callable, methods)):
            continue
        try:
            output = methods[1]()
        except NotImplementedError:
            # transformers raises it for architectures that name no embeddings.
            continue
        if isinstance(output, nn.Module):
            yield output


# -- their class -------------------------------------------------------------------------------------------------------------------


class Float8Products(nn.Linear):
    """What the classes of changed layers have in common; a copy or a pickle of such a layer is a plain ``nn.Linear``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Code that makes a layer of the class of another one gives nn.Linear's arguments; torchao's class needs a config.
        nn.Linear.__init__(self, *args, **options)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name of it
        """Returns the layer's output, by FP8 products if their sizes allow it."""
        # The product for the weight's gradient sums over the rows of the input, so 16 has to divide their number too.
        rows = input.numel() // self.in_features
        if not rows or rows % MULTIPLE:
            return self._product(input)
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))  # noqa: A001 - torchao casts on GPUs alone
        elif self.weight.dtype is torch.float32:
            # The user has switched autocast off for code that needs fp32.
            return self._product(input)
        output: Tensor = super().forward(input)
        return output

    def _product(self, input: Tensor) -> Tensor:  # noqa: A002
        """Returns the layer's output by a product in the dtype of its weight."""
        weight: Any = self.weight
        if hasattr(type(weight), "to_original_precision"):
            # FSDP has gathered the weight in FP8.
            return F.linear(input, weight.to_original_precision(), self.bias)
        return nn.Linear.forward(self, input)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # By protocol 1: pickle refuses to build an object of another class by the function of later protocols.
        reduced: Any = super().__reduce_ex__(1)
        build, (_, *arguments), *others = reduced
        return build, (nn.Linear, *arguments), *others


@functools.cache
def float8_class(recipe: str, *, emulate: bool) -> type[nn.Linear]:
    """Returns the class of layers with FP8 products by ``recipe``; ``emulate`` computes them in fp32, on any device."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    plain = nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta")
    attributes = set(vars(plain))
    made = convert_to_float8_training(plain, config=config)
    # Settings of torchao's object: as attributes of the class they need no place in the layers.
    settings = {name: value for name, value in vars(made).items() if name not in attributes}
    return type("Float8Linear", (Float8Products, type(made)), settings)


def change(layers: Sequence[nn.Linear], recipe: str, *, emulate: bool) -> None:
    """Gives ``layers`` FP8 products."""
    # torchao asks for autocast's dtype by a deprecated function, in each forward.
    warnings.filterwarnings("ignore", r"torch\.get_autocast_gpu_dtype\(\) is deprecated", DeprecationWarning)
    float8 = float8_class(recipe, emulate=emulate)
    for layer in layers:
        layer.__class__ = float8


def change_back(layers: Sequence[nn.Module]) -> None:
    """Makes plain linear layers of those that :func:`change` has changed."""
    for layer in layers:
        if isinstance(layer, Float8Products):
            _give_class(layer, nn.Linear)


def _give_class(layer: Any, kind: type[nn.Linear]) -> None:
    if "parametrizations" in layer._modules:
        # torch has put a class of this layer's own, with a property per parametrised tensor, over the class of the layer.
        type(layer).__bases__ = (kind,)
    else:
        layer.__class__ = kind


def _given_class(layer: nn.Module) -> Any:
    return type(layer).__base__ if "parametrizations" in layer._modules else type(layer)


@contextlib.contextmanager
def plain_linears(root: nn.Module) -> Iterator[None]:
    """A context in which all linear layers of ``root`` are plain, for exports."""
    changed = [(module, _given_class(module)) for module in root.modules() if isinstance(module, Float8Products)]
    change_back([module for module, _ in changed])
    try:
        yield
    finally:
        for module, float8 in changed:
            _give_class(module, float8)
