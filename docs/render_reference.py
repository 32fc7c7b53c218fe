"""Renders the docstrings of what users call as docs/reference.md: ``python docs/render_reference.py``."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import fabricamp
from fabricamp import callbacks, errors, hooks, loggers, nn, optimizers, strategies
from fabricamp.hooks import ModuleHooks

HEAD = """# Reference

`python docs/render_reference.py` makes this page from the docstrings, which `help(fabricamp.Trainer)` and so on show too.
[Trainer](#trainer), [TrainingModule](#trainingmodule), [hooks](#order-of-hooks), [DataModule](#datamodule),
[ResidentLoader](#residentloader), [Loop](#loop), [Callback](#callback), [callbacks](#callbacks), [loggers](#loggers),
[strategies](#strategies), [Tuner](#tuner), [profilers](#profilers), [precision](#precision), [the rest](#the-rest).
"""
ENTRIES = ("fit", "validate", "test", "predict")
STEPS = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "configure_callbacks")
DATA = (
    "prepare_data",
    "setup",
    "teardown",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
UPDATE = (
    "backward",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "clip_gradients",
    "manual_backward",
    "optimizers",
    "lr_schedulers",
    "toggle_optimizer",
    "untoggle_optimizer",
    "toggled_optimizer",
)
PASSES = ("begin_epoch", "end_batch", "end_epoch", "restore_rng")
"""What the passes over a Loop's loader call."""
INSIDE = {"attach", "log"}
"""What the Trainer calls, and what has a table of its own."""


class Doc:
    """A docstring by its parts."""

    def __init__(self, thing: Any) -> None:
        text = inspect.getdoc(thing) or ""
        parts = re.split(r"^(Args|Raises|Example):\n", text, flags=re.MULTILINE)
        self.prose = prose(parts[0].split("\n>>>")[0].strip())
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        self.arguments = entries(sections.get("Args", ""))
        self.raises = entries(sections.get("Raises", ""))
        self.example = code(sections.get("Example", "") or text.partition("\n\n>>>")[1] + text.partition("\n\n>>>")[2])

    @property
    def first(self) -> str:
        """The first paragraph on one line, as a cell of a table."""
        return self.prose.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def prose(text: str) -> str:
    """Text in Markdown: ``x`` and :class:`x` become `x`."""
    return re.sub(r":(?:class|meth|func):`([^`]*)`", r"`\1`", text).replace("``", "`").replace(".  ", ". ")


def entries(section: str) -> dict[str, str]:
    """The names of an Args or Raises section, with what is said of each."""
    found = re.findall(r"^    (\S[^:\n]*): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", prose(text)) for name, text in found}


def code(section: str) -> str:
    """The lines of a doctest, without its marks and without what it prints."""
    lines = re.findall(r"^ *(?:>>>|\.\.\.)(?: (.*))?$", section, flags=re.MULTILINE)
    return "```python\n" + "\n".join(lines) + "\n```" if lines else ""


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arguments(thing: Any, doc: Doc) -> str:
    """The table name | default | meaning of a call's arguments."""
    parameters = inspect.signature(thing).parameters
    rows = []
    for name, meaning in doc.arguments.items():
        parameter = parameters.get(name.lstrip("*"))
        if name == "**unknown":
            continue
        given = parameter is not None and parameter.default is not parameter.empty
        value = parameter.default if parameter is not None and given else None
        words = value.__name__ if inspect.isfunction(value) else repr(value)
        default = f"`{words}`" if given else ""
        rows.append([f"`{name}`", default, meaning.replace("|", "\\|")])
    return table(("name", "default", "meaning"), rows) if rows else ""


def described(name: str, thing: Any, level: int = 3, *, named: bool = True, module: str = "") -> str:
    """A class or function: the line that imports it from ``module``, what it is, its arguments, what it raises, an example."""
    doc = Doc(thing)
    parts = [f"{'#' * level} {name}"] if named else []
    if module:
        parts.append(f"`from {module} import {name or thing.__name__}`")
    parts += [doc.prose, arguments(thing, doc)]
    parts += [f"Raises `{kind}` {why}" for kind, why in doc.raises.items()]
    return "\n\n".join(part for part in [*parts, doc.example] if part)


def call_of(name: str, function: Any, leave_out: tuple[str, ...] = ("self",)) -> str:
    """``name(arguments)`` as a cell."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.name not in leave_out:
            names.append(mark + parameter.name)
    return f"`{name}({', '.join(names)})`"


def public(owner: type, below: type = object) -> list[str]:
    """The names that ``owner`` adds to ``below``, in the order in which they are written."""
    known = set(dir(below))
    names = [name for base in reversed(owner.__mro__) for name in vars(base)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and name not in known]


def faces(owner: type, names: Any, leave_out: tuple[str, ...] = ("self",)) -> str:
    """The table of methods and properties by name."""
    rows = []
    for name in names:
        member = inspect.getattr_static(owner, name)
        member = getattr(owner, name) if isinstance(member, (staticmethod, classmethod)) else member
        is_call = inspect.isroutine(member)
        rows.append([call_of(name, member, leave_out) if is_call else f"`{name}`", Doc(member).first])
    return table(("name", "what it is"), [row for row in rows if row[1]])


def documented(owner: type, names: list[str]) -> list[str]:
    """Those of ``names`` that are methods, properties or the Trainer's settings; plain attributes have no docstring."""
    kinds = (property, classmethod, staticmethod)
    members = {name: inspect.getattr_static(owner, name) for name in names}
    return [
        name
        for name, member in members.items()
        if isinstance(member, kinds) or inspect.isroutine(member) or type(member).__name__ == "_Setting"
    ]


def trainer() -> list[str]:
    kind = fabricamp.Trainer
    parts = [described("Trainer", kind, 2, module="fabricamp")]
    parts += [described(f"Trainer.{name}", getattr(kind, name)) for name in ENTRIES]
    rest = [name for name in documented(kind, public(kind)) if name not in ENTRIES]
    return [*parts, "### What a Trainer shows", faces(kind, rest)]


def module() -> list[str]:
    kind = fabricamp.TrainingModule
    hook_names = [name for name in public(ModuleHooks) if name.startswith("on_")]
    moves = [name for name in public(ModuleHooks) if name not in (*hook_names, *DATA)]
    torchs = importlib.import_module("torch").nn.Module
    taken = {*STEPS, *UPDATE, *INSIDE, *public(ModuleHooks)}
    rest = [name for name in documented(kind, public(kind, torchs)) if name not in taken]
    return [
        described("TrainingModule", kind, 2, module="fabricamp"),
        "### What you write",
        faces(kind, [*STEPS, *moves, *DATA]),
        described("TrainingModule.log", kind.log),
        "### How an update is made",
        faces(kind, UPDATE),
        "### What a module shows",
        faces(kind, rest),
        "## Order of hooks",
        order(),
        "### Hooks of a module",
        "A callback has the same hooks, with `trainer, pl_module` before the arguments.",
        faces(kind, hook_names),
    ]


def order() -> str:
    """The docstring of fabricamp.hooks, whose indented blocks become code."""
    text = (inspect.getdoc(hooks) or "").partition("\n\n")[2]
    blocks = re.sub(r"::\n\n((?:    .*\n)+)", lambda found: f":\n\n```text\n{dedent(found[1])}```\n", text + "\n")
    fenced = blocks.split("```")
    return "```".join(part if index % 2 else prose(part) for index, part in enumerate(fenced)).strip()


def dedent(block: str) -> str:
    return re.sub(r"^    ", "", block, flags=re.MULTILINE)


def data() -> list[str]:
    kind = fabricamp.DataModule
    parts = [described("DataModule", kind, 2, module="fabricamp"), faces(kind, documented(kind, public(kind)))]
    return [*parts, described("ResidentLoader", fabricamp.data.ResidentLoader, 2, module="fabricamp.data")]


def own_loop() -> list[str]:
    kind = fabricamp.Loop
    shown = [name for name in documented(kind, public(kind)) if name not in PASSES]
    return [described("Loop", kind, 2, module="fabricamp"), faces(kind, shown)]


def all_callbacks() -> list[str]:
    kind = fabricamp.Callback
    own = documented(kind, [name for name in public(kind) if name not in public(ModuleHooks)])
    parts = [
        described("Callback", kind, 2, module="fabricamp"),
        "Beside the [hooks of a module](#hooks-of-a-module):",
        faces(kind, own, ("self", "trainer", "pl_module")),
        "## Callbacks",
    ]
    return parts + [
        described(name, one, module="fabricamp.callbacks") for name, one in classes(callbacks, kind) if one is not kind
    ]


def all_loggers() -> list[str]:
    kind = loggers.Logger
    parts = ["## Loggers"]
    parts += [
        described(name, one, module="fabricamp.loggers") for name, one in classes(loggers, kind) if one is not kind
    ]
    return [*parts, described("A logger of your own", kind), faces(kind, documented(kind, public(kind)))]


def all_strategies() -> list[str]:
    named = [f"`{name!r}`".replace("'", '"') for name in strategies.STRATEGIES.names()]
    kinds = [
        one for one in classes(strategies, strategies.Strategy) if one[0] not in ("Strategy", "ProcessGroupStrategy")
    ]
    parts = [
        "## Strategies",
        f"By name: {', '.join(named)}. With options:",
        *(described(name, one, module="fabricamp.strategies") for name, one in kinds),
    ]
    return [*parts, "A strategy of your own: [architecture.md](architecture.md#a-strategy)."]


def classes(part: Any, base: type) -> list[tuple[str, type]]:
    """The classes that a part exports and that derive from ``base``; other names of the same class are left out."""
    found = {name: getattr(part, name) for name in part.__all__}
    kinds = {name: one for name, one in found.items() if inspect.isclass(one) and issubclass(one, base)}
    return [(name, one) for name, one in kinds.items() if one.__name__ == name]


def searches() -> list[str]:
    from fabricamp.tuner import Tuner
    from fabricamp.tuner.lr_finder import LRFinder

    parts = ["## Tuner", described("", Tuner, named=False, module="fabricamp.tuner")]
    parts += [described(name, getattr(Tuner, name)) for name in ("lr_find", "scale_batch_size")]
    return [*parts, described("LRFinder", LRFinder), faces(LRFinder, ["suggestion", "plot"])]


def all_profilers() -> list[str]:
    from fabricamp import profilers

    kind = profilers.Profiler
    parts = ["## Profilers"]
    parts += [
        described(name, one, module="fabricamp.profilers") for name, one in classes(profilers, kind) if one is not kind
    ]
    return [*parts, described("A profiler of your own", kind), faces(kind, documented(kind, public(kind)))]


def rest() -> list[str]:
    from fabricamp import Activations, Compile, CudaGraph, OptLevel, clip_grad_norm_, runs, seed_everything

    functions = {"seed_everything": seed_everything, "clip_grad_norm_": clip_grad_norm_, "runs.plot": runs.plot}
    rows = [[call_of(name, one), Doc(one).first] for name, one in functions.items()]
    kinds = {f"{part.__name__}.{name}": getattr(part, name) for part in (optimizers, nn) for name in part.__all__}
    rows += [
        [f"`{name}`", Doc(one).first] for name, one in kinds.items() if inspect.isclass(one) or inspect.isfunction(one)
    ]
    wrong = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.FabricampError)]
    rows += [[f"`{one.__name__}`", Doc(one).first] for one in wrong]
    parts = [
        "## Precision",
        described("OptLevel", OptLevel, module="fabricamp"),
        "## The step as a CUDA graph",
        described("CudaGraph", CudaGraph, module="fabricamp"),
        "## The compiled step",
        described("Compile", Compile, module="fabricamp"),
        "## Activations",
        described("Activations", Activations, module="fabricamp"),
        "## The rest",
        table(("name", "what it is"), rows),
    ]
    return [*parts, "Functions on tensors (`fabricamp.ops`) and when a kernel runs: [kernels.md](kernels.md)."]


def render() -> str:
    parts = [
        HEAD.strip(),
        *trainer(),
        *module(),
        *data(),
        *own_loop(),
        *all_callbacks(),
        *all_loggers(),
        *all_strategies(),
    ]
    parts += [*searches(), *all_profilers(), *rest()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("reference.md").write_text(render())
