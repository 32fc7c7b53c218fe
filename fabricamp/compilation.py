"""The options of ``Trainer(compile=...)``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from fabricamp._utils.keywords import NamesKeywords
from fabricamp.arguments.checks import check_flag
from fabricamp.errors import ConfigError, nearest

Part: TypeAlias = Literal["step", "modules", "blocks"]

_PARTS: Final[tuple[str, ...]] = get_args(Part)
_GRAPH_MODES: Final = ("reduce-overhead", "max-autotune")
"""The modes of torch.compile that turn on inductor's own CUDA graphs."""
_TIMES_KERNELS: Final = ("max_autotune", "coordinate_descent_tuning", "autotune")
"""Words in the names of inductor's options that choose kernels by their time."""


@dataclass(init=False)
class Compile(NamesKeywords):
    """Options for ``torch.compile`` in a fit: the part to compile, and the compiler's keywords.

    Args:
        part: "step" compiles ``training_step`` as a whole; "modules" compiles each module that the step calls; "blocks" compiles
            one of the repeated blocks of a network (such as the members of a ModuleList), and runs the others by the same code.
            None takes the first of them that the precision, the strategy and the way of optimization allow.
        cache: a folder in which compiled code is kept, and found by later runs on machines with the same card and versions; True
            takes "compiled_code" in the Trainer's ``default_root_dir``.  False: torch alone keeps it, on this machine
            (``TORCHINDUCTOR_CACHE_DIR``, else a temporary folder).  Files are unpickled: give a folder that you trust.
        evaluation: also compiles validation, test and predict steps; otherwise they run eagerly.
        options: keywords of ``torch.compile``.  ``dynamic`` defaults to False: otherwise torch recompiles for dynamic shapes once
            it has seen two sizes, and full batches after a short one would run other code than in a run resumed between them.  For
            the same reason inductor's option "deterministic" is on: kernels are not chosen by their time.

    Raises:
        ConfigError: for another part, a keyword that ``torch.compile`` does not have, or a cache of another backend's code.

    Example:
        >>> Compile("blocks", fullgraph=True).options["dynamic"]
        False
    """

    part: Part | None
    cache: bool | str | os.PathLike[str]
    evaluation: bool
    options: dict[str, Any]

    def __init__(
        self,
        part: Part | None = None,
        *,
        cache: bool | str | os.PathLike[str] = False,
        evaluation: bool = False,
        **options: Any,
    ) -> None:
        if part is not None and part not in _PARTS:
            raise ConfigError(
                f"Compile({part!r}) is not allowed{nearest(str(part), _PARTS)} (allowed: {', '.join(map(repr, _PARTS))}, None)"
            )
        check_flag("evaluation", evaluation, owner="Compile")
        known = [key for key in inspect.signature(torch.compile).parameters if key != "model"]
        for key in options:
            if key not in known:
                allowed = ", ".join(("part", "cache", "evaluation", *known))
                raise ConfigError(f"compile: torch.compile has no {key!r}{nearest(key, known)} (known: {allowed})")
        if options.get("mode") is not None and options.get("options") is not None:
            raise ConfigError("compile: torch.compile takes mode or options; give one of them")
        _check_cache(cache, options.get("backend", "inductor"))
        self.part = part
        self.cache = cache
        self.evaluation = evaluation
        self.options = {"dynamic": False, **options}

    def for_torch(self) -> dict[str, Any]:
        """Returns the keywords of ``torch.compile``; inductor's option "deterministic" is on, unless kernels are to be timed."""
        options = self.options
        given = options.get("options") or {}
        if options.get("backend", "inductor") != "inductor" or options.get("mode") is not None or _timed(given):
            return dict(options)
        return {**options, "options": {"deterministic": True, **given}}

    def inexact(self) -> str:
        """Returns why a resumed run may have other bits than a run that was never cut; empty if it has the same."""
        options = self.options
        if options["dynamic"] is not False:
            return f"dynamic={options['dynamic']}: which code runs depends on the sizes of earlier batches"
        mode = options.get("mode")
        if mode not in (None, "default"):
            return f"mode={mode!r}: torch chooses kernels by their time"
        if mode == "default":
            return "mode='default': torch chooses some kernels by their time; leave it out"
        given = options.get("options") or {}
        if timed := _timed(given):
            return f"options={{{timed!r}: {given[timed]!r}}}: torch chooses kernels by their time"
        if not given.get("deterministic", True):
            return "options={'deterministic': False}: torch chooses some kernels by their time"
        return ""

    def own_cuda_graphs(self) -> str:
        """Returns the option that turns on inductor's own CUDA graphs; an empty string if none does."""
        options = self.options
        if options.get("backend") == "cudagraphs":
            return "backend='cudagraphs'"
        if options.get("mode") in _GRAPH_MODES:
            return f"mode={options['mode']!r}"
        given = (options.get("options") or {}).get("triton.cudagraphs")
        if given:
            return "options={'triton.cudagraphs': True}"
        if given is None and options.get("backend", "inductor") == "inductor":
            return "TORCHINDUCTOR_CUDAGRAPHS=1" if os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1" else ""
        return ""


def _check_cache(cache: object, backend: object) -> None:
    if not isinstance(cache, bool | str | os.PathLike) or cache == "":
        raise ConfigError(f"Compile(cache={cache!r}) is not allowed; give a folder, True or False")
    if cache is not False and backend != "inductor":
        raise ConfigError(
            f"Compile(cache=..., backend={backend!r}): torch keeps code of 'inductor' alone; leave one of them out"
        )


def _timed(options: Mapping[str, Any]) -> str:
    """Returns the first of inductor's ``options`` that chooses kernels by their time; an empty string if none does."""
    return next((name for name, value in options.items() if value and any(word in name for word in _TIMES_KERNELS)), "")


def as_compile(name: str, value: Any) -> Compile | None:
    """Returns the options for the Trainer's argument ``compile``; None if nothing is compiled."""
    if isinstance(value, bool):
        return Compile() if value else None
    if isinstance(value, Compile):
        return value
    if isinstance(value, str) and value in _PARTS:
        return Compile(value)  # type: ignore[arg-type]  # one of them
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{name}={value!r} is not allowed; the keys of a dict are keywords of Compile")
        return Compile(**value)
    hint = nearest(value, _PARTS) if isinstance(value, str) else ""
    raise ConfigError(
        f"{name}={value!r} is not allowed{hint}; give True, False, 'step', 'modules', 'blocks', a Compile(...), or a dict of its "
        "keywords"
    )


def check_compile(settings: Any) -> None:
    """Raises :class:`ConfigError` if a step would be captured twice: as a CUDA graph by the Trainer, and within it by inductor."""
    if settings.compile is None or settings.cuda_graph is None:
        return
    if option := settings.compile.own_cuda_graphs():
        raise ConfigError(
            f"compile with cuda_graph: {option} makes torch capture CUDA graphs of its own, and the step is captured as a whole; "
            "leave the option out, or cuda_graph"
        )
