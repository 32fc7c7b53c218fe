"""What a module's own method draws, seeded by the name of the tensor that gets it; and which tensors the method writes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fabricamp.errors import ConfigError
from fabricamp.torch_private import TorchDispatchMode, storage_key, written_arguments

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


class MissingValuesError(ConfigError):
    """A method computes values of a tensor from one that has none yet, on the meta device."""


class _Draws:
    """What :class:`SeededDraws` does; apart from it, as torch imports its compiler for a mode's own ``__torch_dispatch__``."""

    def __init__(
        self, seed: int, owner: str, names: Mapping[int, str], kept: Collection[int], device: torch.device
    ) -> None:
        super().__init__()
        self.written: set[int] = set()
        """The keys of tensors with values that were written to, but for those that keep theirs."""
        self._seed = seed
        self._owner = owner
        self._names = names
        self._kept = kept
        self._device = device
        self._draws: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        form = _form(func)
        if form.draws:
            self._seed_draw(args, kwargs)
        if not form.written:
            return func(*args, **kwargs)
        if form.in_place and args[0].is_meta:  # most calls: those on other modules, which have no values
            return args[0]
        originals: dict[int, Tensor] = {}
        args = [self._instead(one, originals) if at in form.written else one for at, one in enumerate(args)]
        kwargs = {key: self._instead(one, originals) if key in form.written else one for key, one in kwargs.items()}
        written = [one for at, one in [*enumerate(args), *kwargs.items()] if at in form.written]
        real = [tensor for tensor in _tensors(written) if not tensor.is_meta]
        if real:
            _check_values(self._owner, func, form, [*args, *kwargs.values()], {id(tensor) for tensor in real})
        self.written.update(storage_key(tensor) for tensor in real if id(tensor) not in originals)
        result = func(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            return type(result)(originals.get(id(one), one) for one in result)
        return originals.get(id(result), result)

    def _instead(self, value: Any, originals: dict[int, Tensor]) -> Any:
        """Returns ``value`` with copies of the tensors that keep their values; ``originals`` has these by the copy's id."""
        if isinstance(value, (list, tuple)):
            return [self._instead(one, originals) for one in value]
        if not isinstance(value, Tensor) or value.is_meta or storage_key(value) not in self._kept:
            return value
        copy = value.clone()
        originals[id(copy)] = value
        return copy

    def _seed_draw(self, args: Any, kwargs: dict[str, Any]) -> None:
        first = next(_tensors(args), None)
        name = None if first is None else self._names.get(storage_key(first))
        if first is None or name is None:
            place = ("drawn by", self._owner, 0)
        else:
            place = ("of", name, int(first.storage_offset()))
        number = self._draws[place]
        self._draws[place] += 1
        if first is not None and first.is_meta:
            return
        generator: torch.Generator | None = kwargs.get("generator")
        if generator is None:
            seed_devices(number_of(self._seed, *place, number), self._device)
        else:
            seed = number_of(generator.initial_seed(), *place, number)
            kwargs["generator"] = torch.Generator(generator.device).manual_seed(seed)


class SeededDraws(_Draws, TorchDispatchMode):
    """A mode of torch in which each random operation is seeded, and some tensors keep their values.

    The numbers depend on the seed, on the name of the tensor that they are written to, on where in it, and on how often that was
    written before: not on what else is drawn, and not on whether other tensors are on the meta device.  Where numbers go to a
    tensor without a name, their place is ``owner``, and how many such draws it made before.

    Args:
        seed: any integer.
        owner: the module and method that draw.
        names: the names of tensors, by :func:`~fabricamp.torch_private.storage_key`.
        kept: the keys of tensors that are not changed by what is written to them.
        device: the device of the values.
    """


def number_of(*parts: int | str) -> int:
    """Returns a seed for torch from numbers and texts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def seed_devices(seed: int, device: torch.device) -> None:
    """Seeds torch's generators of the host and of ``device``."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _generator_of(device).manual_seed(seed)


@contextlib.contextmanager
def own_generators(device: torch.device) -> Iterator[None]:
    """A context that restores the generators of Python, NumPy, torch's host and ``device`` at its end."""
    import numpy as np

    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = _generator_of(device).get_state() if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if on_device is not None:
            _generator_of(device).set_state(on_device)


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds the generators of Python, NumPy, torch's host and ``device``."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_devices(seed, device)


def _generator_of(device: torch.device) -> torch.Generator:
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


class _Form(NamedTuple):
    """Which arguments of an operation it writes to, by position and by name; and whether it draws random numbers."""

    written: frozenset[int | str]
    draws: bool
    in_place: bool
    """Whether it writes to its first argument alone, and returns it."""
    is_list: bool
    """Whether it is several operations in one, each on an entry of its lists."""


@functools.cache
def _form(func: Any) -> _Form:
    name, written = written_arguments(func)
    is_list = name.startswith("_foreach_")
    in_place = name.endswith("_") and not name.startswith("_") and written == {0, "self"}
    return _Form(written, torch.Tag.nondeterministic_seeded in func.tags, in_place, is_list)


def _check_values(owner: str, func: Any, form: _Form, arguments: Sequence[Any], written: Collection[int]) -> None:
    """Raises :class:`MissingValuesError` if a tensor with values is written from one without: torch may leave it out in silence."""
    together: Iterable[Sequence[Any]] = [arguments]
    if form.is_list:
        lists = [one for one in arguments if isinstance(one, (list, tuple)) and next(_tensors(one), None) is not None]
        others = [one for one in arguments if isinstance(one, Tensor)]
        together = ([*entries, *others] for entries in zip(*lists, strict=True))
    for one in together:
        tensors = list(_tensors(one))
        if any(tensor.is_meta for tensor in tensors) and any(id(tensor) in written for tensor in tensors):
            raise MissingValuesError(
                f"{owner} computes what it writes to a tensor ({func}) from one on the meta device, without values"
            )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
