"""Compiled code that is kept in a folder and found again, by torch's ``save_cache_artifacts`` and ``load_cache_artifacts``.

A file has a line of JSON (what the code was made for, and the checksum of the rest), and what torch gave.  Loading puts that into
the caches of torch on this machine.  torch decides by its own key which of it fits a function; what is not there is compiled.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp._utils.files import create
from fabricamp.errors import without_address
from fabricamp.torch_private import Lookups, cache_lookups

if TYPE_CHECKING:
    from torch import nn

    from fabricamp._utils.types import Batch, Output, Step
    from fabricamp.compilation import Compile
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")

_FORMAT: Final = 1
_FOLDER: Final = "compiled_code"
"""The folder in ``default_root_dir``, for ``Compile(cache=True)``."""
_LONGEST_LINE: Final = 1 << 16
"""Bytes that are read of a file in search of the end of its first line."""


class CompiledCode:
    """The file of one module's code for one device: loaded before the first compilation, written after the last one.

    Nothing here is asked of other ranks.  On a CPU all ranks of a machine read one file, and the first of them writes it.
    """

    def __init__(self, options: Compile, part: str, module: nn.Module, *, trainer: Trainer) -> None:
        given = options.cache
        assert given is not False
        folder = Path(trainer.default_root_dir, _FOLDER) if given is True else Path(os.fspath(given)).expanduser()
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        # torch's code for a GPU has its number.
        name = device.type if device.type == "cpu" else f"{device.type}-{device.index or 0}"
        self.path = folder / f"{type(module).__name__}-{name}.code"
        self._writes = device.type != "cpu" or trainer.local_rank == 0
        self._speaks = trainer.is_global_zero
        self._facts = {**_facts_of(device), "options": _shown(part, options), "code": _code_of(module)}
        self._loaded = False
        self._before = Lookups(0, 0)

    def load(self) -> None:
        """Hands the file's code to torch's caches on this machine; says why not if the file is stale or damaged."""
        self._before = cache_lookups()
        try:
            content = self._read()
            if content is None:
                return
            _hand_over(content)
            self._loaded = True
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file costs a compilation
            self._say(f"{self.path} cannot be read ({error}); its code is compiled anew", logging.WARNING)

    def _read(self) -> bytes | None:
        """Returns what torch is given; None if there is no file or a stale one.  Raises ValueError for a damaged one.

        torch has a checksum too, and would log a traceback.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return None
        with file:
            header = json.loads(file.readline(_LONGEST_LINE))
            if stale := self._stale(header):
                self._say(f"the code in {self.path} is stale: {stale}; it is compiled anew, and replaced")
                return None
            content = file.read()
        if len(content) != header["bytes"] or hashlib.sha256(content).hexdigest() != header["sha256"]:
            raise ValueError("its checksum is another one")
        return content

    def _stale(self, header: dict[str, Any]) -> str:
        """Returns in which facts the file differs; empty if in none."""
        if header.get("format") != _FORMAT:
            return f"format {header.get('format')}, here {_FORMAT}"
        kept = header["facts"]
        differing = [name for name in {**kept, **self._facts} if kept.get(name) != self._facts.get(name)]
        return ", ".join(_differs(name, kept.get(name), self._facts.get(name)) for name in differing)

    def watching(self, step: Step) -> Step:
        """Returns ``step``, before whose next call after a compilation the file is written: a backward is compiled after it."""
        seen = cache_lookups()

        def run(*batch: Batch) -> Output:
            nonlocal seen
            if (now := cache_lookups()) != seen:
                seen = now
                self.save()
            return step(*batch)

        return run

    def save(self) -> None:
        """Writes what torch has compiled and found so far, if that is more than the file has; says what was not found."""
        found = cache_lookups() - self._before
        if found == Lookups(0, 0):
            return
        self._before = cache_lookups()
        if found.missed and self._loaded:
            self._say(
                f"{found.missed} of {found.missed + found.hit} functions were not in {self.path}: torch's key also holds shapes, "
                "strides, dtypes and settings; they were compiled, and are kept now"
            )
        if not self._writes or (self._loaded and not found.missed):
            return
        try:
            kept = torch.compiler.save_cache_artifacts()
            if kept is None:
                self._say(
                    "torch gives no code to keep: its caches are off (TORCHINDUCTOR_FORCE_DISABLE_CACHES and its like)"
                )
                return
            self._write(kept[0])
            self._loaded = True
            self._say(f"the compiled code is kept in {self.path} ({len(kept[0]) / 1e6:.1f} MB)")
        except Exception as error:  # noqa: BLE001 - a full disk, or code of torch's that does not pickle, ends no fit
            self._say(f"the compiled code cannot be kept in {self.path}: {error}", logging.WARNING)

    def _write(self, content: bytes) -> None:
        header = {
            "format": _FORMAT,
            "facts": self._facts,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f".{self.path.name}.{platform.node()}.{os.getpid()}.partial")
        try:
            with create(unfinished) as file:
                file.write(json.dumps(header).encode() + b"\n")
                file.write(content)
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _say(self, line: str, level: int = logging.INFO) -> None:
        if self._speaks or (self._writes and level == logging.WARNING):
            _LOG.log(level, "compile: %s", line)


def _hand_over(content: bytes) -> None:
    """Puts ``content`` into torch's caches on this machine; raises ValueError if torch cannot read it."""
    if torch.compiler.load_cache_artifacts(content) is None:
        raise ValueError("torch cannot read it")


def _facts_of(device: torch.device) -> dict[str, Any]:
    """Returns what compiled code depends on, beside the network: versions, card, and settings of torch that are in its key."""
    from fabricamp import __version__  # of the package that imports this file

    on_card = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "triton": getattr(sys.modules.get("triton"), "__version__", ""),
        "python": platform.python_version(),
        "fabricamp": __version__,
        "cuda": torch.version.cuda or "",
        "card": torch.cuda.get_device_name(device) if on_card else _processor(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _shown(part: str, options: Compile) -> str:
    return ", ".join(
        [part, *(f"{name}={without_address(value)}" for name, value in sorted(options.for_torch().items()))]
    )


def _code_of(module: nn.Module) -> str:
    """Returns a checksum of the source of the classes of ``module`` and of those within it, without torch's."""
    classes = {kind for one in module.modules() for kind in type(one).__mro__}
    own = [kind for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins", "fabricamp")]
    texts = sorted(f"{kind.__module__}.{kind.__qualname__}\n{_source_of(kind)}" for kind in own)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # of a notebook, or made by a function
        return ""


def _differs(name: str, kept: object, here: object) -> str:
    if name == "code":
        return "the source of the module has changed"
    return f"{name} {kept}, here {here}"
