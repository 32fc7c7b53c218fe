"""First values of parameters and buffers that were built on the meta device: which tensors get them, and from which methods.

In this order: what a run asks for; :class:`FirstValues`, which gives memory to tensors; the methods that fill it.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabricamp.errors import ConfigError
from fabricamp.ops.shards import is_shard
from fabricamp.strategies.seeded_draws import SeededDraws, number_of, own_generators, seed_all
from fabricamp.strategies.unused_parameters import listed
from fabricamp.torch_private import storage_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from fabricamp.strategies.base import Strategy

_METHODS: Final = ("init_weights", "reset_parameters", "_reset_parameters")
"""What fills a module, in this order; the last is torch's name for it in MultiheadAttention and Transformer."""
_PIECE: Final = 2**22
_DONE: Final = "_is_hf_initialized"
"""transformers marks modules and tensors that have their values so, and leaves them out afterwards."""


def fill_module(module: nn.Module, strategy: Strategy) -> None:
    """Gives meta tensors their first values on the strategy's device; raises :class:`ConfigError` with the names of those left.

    Every rank calls it.
    """
    lazy = [name for name, tensor in _named_tensors(module) if tensor.is_meta and is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"{listed(lazy)} of {type(module).__name__} have no shape yet, and are on the meta device; give the layers their "
            "sizes, or build them on the CPU"
        )
    missing = any(_is_missing(tensor) for _, tensor in _named_tensors(module))
    if not missing and strategy.world_size == 1:
        return
    first_values = FirstValues.together(module, strategy)
    if missing:
        first_values.fill(list(module.modules()))
        refuse_unfilled(first_values.unfilled, type(module).__name__)


def leave_meta(module: nn.Module, loaded: Collection[str] = ()) -> list[str]:
    """Moves tensors of ``module`` from the meta device to host memory and fills them; returns the names of unfilled ones.

    Those that are in ``loaded``, by any of their names, get memory alone.
    """
    aliases: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(module):
        aliases.setdefault(id(tensor), []).append(name)
    wanted = [names[0] for names in aliases.values() if not any(name in loaded for name in names)]
    first_values = FirstValues(module, torch.device("cpu"), torch.initial_seed(), wanted)
    first_values.fill(list(module.modules()))
    return first_values.unfilled


def refuse_unfilled(names: Sequence[str], module_class: str) -> None:
    """Raises :class:`ConfigError` if there are ``names`` of tensors without values."""
    if names:
        raise ConfigError(
            f"{listed(names)} of {module_class} were built on the meta device, and no module gives them values: "
            "write reset_parameters(self), or init_weights(self), in the class that owns them, or give ckpt_path"
        )


def digest_of(tensor: Tensor) -> Tensor:
    """Returns a number, where ``tensor`` lies, that differs if any of its bits does, or their order (int64, scalar)."""
    flat = tensor.detach().reshape(-1)
    in_words = not any(number * flat.itemsize % 4 for number in (flat.numel(), flat.storage_offset()))
    bits = flat.view(torch.int32 if in_words else torch.uint8)
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    longest = max(min(_PIECE, bits.numel()), 1)
    weights = torch.arange(1, 2 * longest, 2, dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits.split(_PIECE)):
        digest += (piece * weights[: piece.numel()]).sum() * (2 * number + 1)
    return digest


class _Place(NamedTuple):
    """An entry in a module's table of parameters or buffers."""

    module: nn.Module
    table: Literal["_parameters", "_buffers"]
    key: str

    @property
    def entries(self) -> dict[str, Tensor | None]:
        """The table."""
        found: dict[str, Tensor | None] = vars(self.module)[self.table]
        return found

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that is there now."""
        return self.entries.get(self.key)

    def put(self, tensor: Tensor) -> None:
        """Replaces the tensor."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.entries[self.key] = tensor
        else:  # recurrent layers have a list of their parameters too
            setattr(self.module, self.key, tensor)


class FirstValues:
    """Gives memory and first values to the meta tensors of ``module``, some of its modules at a time.

    Meanwhile all other modules are on the meta device; if a method needs their values, they get memory for that time.  The values
    depend on the seed, on the tensors' names and on the type of the device alone.

    Args:
        module: the root, whose names the tensors have.
        device: where values are made.
        seed: the same on every rank.
        wanted: the names of the tensors to fill; others only get memory.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int, wanted: Collection[str]) -> None:
        self._root = module
        self._device = device
        self._seed = seed
        self._modules = {submodule: name for name, submodule in module.named_modules()}  # outer before inner
        self._stand_ins: dict[_Place, Tensor] = {}
        """For each tensor one on the meta device: itself, if it is there."""
        self._missing: set[_Place] = set()
        self._names: dict[int, str] = {}  # by id of the stand-in, as modules may share a tensor
        self._given: dict[int, Tensor] = {}  # by id of the stand-in: what has its memory
        self.unfilled: list[str] = []
        """Names of the tensors that no method has filled completely."""
        self._note_tensors()
        self._fillers = _fillers_of(self._modules)
        self._wanted = [place for place in self._stand_ins if place in self._missing and self._name(place) in wanted]

    @classmethod
    def together(cls, module: nn.Module, strategy: Strategy) -> FirstValues:
        """Returns those of a run: rank 0 says what is to be filled, and with which seed.  Every rank calls it."""
        names = [name for name, tensor in _named_tensors(module) if _is_missing(tensor)]
        seed, wanted = strategy.broadcast((torch.initial_seed(), names))
        return cls(module, strategy.device, seed, wanted)

    def _note_tensors(self) -> None:
        made: dict[int, Tensor] = {}
        for name, place in _named_places(self._modules):
            tensor = place.tensor
            if tensor is None or is_lazy(tensor):
                continue
            if _is_missing(tensor):
                self._missing.add(place)
                made[id(tensor)] = tensor
            elif id(tensor) not in made:
                made[id(tensor)] = _like(tensor, torch.device("meta"))
            self._stand_ins[place] = made[id(tensor)]
            self._names.setdefault(id(made[id(tensor)]), name)

    def _name(self, place: _Place) -> str:
        return self._names[id(self._stand_ins[place])]

    @torch.no_grad()
    def fill(self, modules: Sequence[nn.Module]) -> list[Tensor]:
        """Gives memory to the meta tensors that these modules own themselves, and values to the wanted ones, which it returns."""
        own = set(modules)
        wanted = [place for place in self._wanted if place.module in own]
        if wanted:
            with own_generators(self._device):
                left = self._filled(own, wanted)
            self.unfilled += dict.fromkeys(map(self._name, left))
        memory = dict(self._given)
        for place in self._missing_of(own):
            if _is_meta(place):
                place.put(self._memory(place, memory))
            # Units may share a buffer, which is filled with the first.  They share no parameter, and its memory has to go.
            if place.table == "_buffers" and (tensor := place.tensor) is not None:
                self._given.setdefault(id(self._stand_ins[place]), tensor)
        return list({id(tensor): tensor for place in wanted if (tensor := place.tensor) is not None}.values())

    def _missing_of(self, modules: set[nn.Module]) -> list[_Place]:
        return [place for place in self._missing if place.module in modules]

    def _filled(self, own: set[nn.Module], wanted: Sequence[_Place]) -> list[_Place]:
        """Fills the wanted places of ``own``; returns those without values."""
        alone = len(wanted) == len(self._wanted)
        left: list[_Place] = []
        failure: Exception | None = None
        try:
            left = self._run(own, wanted)
        except Exception as error:
            if alone:
                raise
            failure = error.with_traceback(None)  # which holds memory
        if alone or not (failure or any(map(_is_meta, left))):
            return left
        try:
            return [place for place in self._run(own, self._wanted) if place.module in own]
        except torch.OutOfMemoryError as full:
            why = "values of others" if failure is None else f"{type(failure).__name__}: {failure!s:.300}"
            raise ConfigError(
                f"a method for first values needs tensors of several units at once ({why}), and all of "
                f"{type(self._root).__name__} does not fit on {self._device}: let the units' classes fill their own tensors, by "
                "init_weights(self) or reset_parameters(self)"
            ) from full

    def _run(self, own: set[nn.Module], wanted: Sequence[_Place]) -> list[_Place]:
        """Fills the ``wanted`` places, and restores the modules outside of ``own``; returns places without values."""
        with_all = len(wanted) == len(self._wanted)
        memory = dict(self._given)
        with _only_changed(own, self._modules), _same_data(self._stand_ins.values()):
            for place, stand_in in self._stand_ins.items():
                if place.module not in own and (not with_all or is_shard(place.tensor)):
                    place.entries[place.key] = stand_in
            for place in wanted:
                place.put(self._memory(place, memory))
            named = [(tensor, self._names[of]) for of, tensor in memory.items()]
            named += [(stand_in, self._names[id(stand_in)]) for stand_in in self._stand_ins.values()]
            new = [place for place in wanted if id(self._stand_ins[place]) not in self._given]
            scope = own if not with_all else set(self._modules)
            return _Filling(self._fillers, scope, named, self._seed, self._device).run(new, self._stand_ins)

    def _memory(self, place: _Place, known: dict[int, Tensor]) -> Tensor:
        """Returns memory for a tensor, filled with a mark; the same for those that share it."""
        stand_in = self._stand_ins[place]
        if id(stand_in) not in known:
            known[id(stand_in)] = _like(stand_in, self._device)
            known[id(stand_in)].fill_(_mark(stand_in.dtype))
        return known[id(stand_in)]


class _Filler(NamedTuple):
    """A module with methods for first values; those without arguments, as its owner calls the others."""

    name: str
    module: nn.Module
    methods: list[str]
    inside: frozenset[nn.Module]
    """The module and all within it."""


def _fillers_of(modules: Mapping[nn.Module, str]) -> list[_Filler]:
    found = []
    for module, name in modules.items():
        methods = [method for method in _METHODS if _takes_nothing(getattr(module, method, None))]
        if methods:
            found.append(_Filler(name, module, methods, frozenset(module.modules())))
    return found


class _Filling:
    """Fills places by the methods of modules.

    From outer to inner modules these are called while places below have no values; what has values keeps them.  A method that
    changes a tensor before it has values (``weight.mul_(0.1)``) is called again after the inner modules.

    Args:
        fillers: outer before inner.
        scope: the modules whose tensors the methods may replace.
        named: the tensors whose numbers go by a name, with it.
        seed: the run's.
        device: that of the values.
    """

    def __init__(
        self,
        fillers: Sequence[_Filler],
        scope: set[nn.Module],
        named: Iterable[tuple[Tensor, str]],
        seed: int,
        device: torch.device,
    ) -> None:
        self._fillers = fillers
        self._scope = scope
        # Their memory is held, because another tensor gets the key of one that is freed (``weight.data = other``).
        self._named = [(tensor.data, name) for tensor, name in named]
        self._names = {storage_key(data): name for data, name in self._named}
        self._seed = seed
        self._device = device
        self._kept: set[int] = set()
        """Keys of the tensors that have values; each of them lives as long as this object."""

    def run(self, places: Sequence[_Place], all_places: Iterable[_Place]) -> list[_Place]:
        """Fills ``places``; returns those without values.  ``all_places`` are those of all tensors."""
        left = dict.fromkeys(places)
        self._keep(place for place in all_places if place not in left)
        again: list[tuple[_Filler, str, list[_Place]]] = []
        for filler in self._fillers:
            for method in filler.methods:
                below = [place for place in left if place.module in filler.inside]
                if not below:
                    break
                written = self._call(filler, method, below)
                without = self._without_values(below, written)
                filled = [place for place in below if place not in without]
                self._keep(filled)
                for place in filled:
                    del left[place]
                changed = [place for place in without if _key(place) in written]
                if changed:
                    again.append((filler, method, changed))
        for filler, method, changed in reversed(again):
            written = self._call(filler, method, changed)
            without = self._without_values(changed, written)
            for place in changed:
                if place not in without:
                    left.pop(place, None)
        return list(left)

    def _keep(self, places: Iterable[_Place]) -> None:
        self._kept |= {key for place in places if (key := _key(place)) is not None}

    def _call(self, filler: _Filler, method: str, changing: Sequence[_Place]) -> set[int]:
        """Calls the method, by which the tensors at ``changing`` may change; returns the keys of the tensors that it wrote to."""
        for place in changing:
            vars(place.module).pop(_DONE, None)
            vars(place.tensor).pop(_DONE, None)
        owner = _joined(filler.name, method)
        seed_all(number_of(self._seed, "called", owner), self._device)
        kept = self._kept - {_key(place) for place in changing}
        draws = SeededDraws(self._seed, owner, self._names, kept, self._device)
        modules = filler.inside & self._scope
        before = {place: (tensor, tensor.data) for place in _places(modules) if (tensor := place.tensor) is not None}
        with draws:
            getattr(filler.module, method)()
        moved: dict[int, Tensor] = {}
        for place in _places(modules):
            tensor = place.tensor
            earlier, data = before.get(place, (None, None))
            if earlier is not None and data is not None and not data.is_meta and storage_key(data) in kept:
                if tensor is not earlier:
                    place.put(earlier)
                if storage_key(earlier) != storage_key(data):  # the method has replaced its .data
                    earlier.data = data
            elif tensor is None or tensor.is_meta or tensor.device == self._device:
                continue
            elif tensor is not earlier:
                place.put(moved.setdefault(id(tensor), _at(tensor, self._device)))
            elif data is not None and data.device != tensor.device:  # .data was replaced
                tensor.data = tensor.data.to(self._device)
        return draws.written

    def _without_values(self, places: Sequence[_Place], written: set[int]) -> list[_Place]:
        """Returns the places that still have the mark anywhere, or for dtypes without a nan, that have not been written to."""
        marked: dict[int, Tensor] = {}  # by key, as places may share a tensor
        for place in places:
            tensor, key = place.tensor, _key(place)
            if tensor is None or key is None or not tensor.numel():
                continue
            if _has_nan(tensor.dtype):
                marked[key] = tensor.isnan().any()
            elif key not in written and key in self._names:
                marked[key] = (tensor == _mark(tensor.dtype)).all()
        found = dict(zip(marked, torch.stack(list(marked.values())).tolist(), strict=True)) if marked else {}
        return [
            place for place in places if _is_meta(place) or ((key := _key(place)) is not None and found.get(key, False))
        ]


def _takes_nothing(method: object) -> bool:
    """Returns whether ``method`` can be called without arguments."""
    if not callable(method) or isinstance(method, nn.Module):
        return False
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # a function of C does not say
        return False
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


@contextlib.contextmanager
def _only_changed(own: set[nn.Module], modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context that restores the attributes of the other ``modules`` at its end; of all if an exception leaves it."""
    before = {module: (dict(vars(module)), *map(dict, _tables(module))) for module in modules}
    restored = set(before)
    try:
        yield
        restored -= own
    finally:
        for module in restored:
            attributes, *tables = before[module]
            vars(module).clear()
            vars(module).update(attributes)
            for table, entries in zip(_tables(module), tables, strict=True):
                table.clear()
                table.update(entries)


@contextlib.contextmanager
def _same_data(tensors: Collection[Tensor]) -> Iterator[None]:
    """A context that restores the ``.data`` of tensors at its end; ``module.to(dtype)`` replaces it."""
    before = [tensor.data for tensor in tensors]
    try:
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            if storage_key(tensor) != storage_key(data):
                tensor.data = data


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers, module._modules


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _named_places(modules: Mapping[nn.Module, str]) -> Iterator[tuple[str, _Place]]:
    # Not by named_parameters() and named_buffers(): a user's class may override these, and leave some out.
    for place in _places(modules):
        yield _joined(modules[place.module], place.key), place


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, place in _named_places({submodule: name for name, submodule in module.named_modules()}):
        if place.tensor is not None:
            yield name, place.tensor


def _places(modules: Iterable[nn.Module]) -> Iterator[_Place]:
    """Yields the places in the modules' own tables."""
    for module in modules:
        yield from (_Place(module, "_parameters", key) for key in list(module._parameters))
        yield from (_Place(module, "_buffers", key) for key in list(module._buffers))


def _is_missing(tensor: Tensor) -> bool:
    return tensor.is_meta and not is_lazy(tensor)


def _is_meta(place: _Place) -> bool:
    return place.tensor is not None and place.tensor.is_meta


def _key(place: _Place) -> int | None:
    """Returns the key of the tensor that is there now; None if it has no values."""
    tensor = place.tensor
    return None if tensor is None or tensor.is_meta or is_lazy(tensor) or is_shard(tensor) else storage_key(tensor)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the same kind without values on ``device``, with the attributes that a program has set."""
    return _same_kind(torch.empty_like(tensor, device=device), tensor)


def _at(tensor: Tensor, device: torch.device) -> Tensor:
    return _same_kind(tensor.detach().to(device), tensor)


def _same_kind(made: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _mark(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    return torch.iinfo(dtype).max
