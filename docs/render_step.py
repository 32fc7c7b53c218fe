"""Traces one steady step and renders the lines that it executes as docs/step.md: ``python docs/render_step.py``.

Two sections need no GPU.  The replay of a CUDA graph needs one: where there is none, its section stays as it is.
"""

from __future__ import annotations

import linecache
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch._dynamo  # which pytest has loaded too; until it is, `_utils/without_compiler.py` calls torch's own functions
from torch import nn

import fabricamp
from fabricamp import Trainer, TrainingModule
from fabricamp.optimizers import FusedAdam

PAGE = Path(__file__).with_name("step.md")
PACKAGE = str(Path(fabricamp.__file__).parent) + os.sep
WARM_UP = 40
HEAD = """# A step, line by line

`python docs/render_step.py` makes this page: it trains a linear layer for {steps} steps and traces the next one, from the loop's
line that gets the batch to the one that gets the next. Shown are the lines of fabricamp that are executed, in their order, each
below the function that it is in; a call is one level further in. torch's compiler is loaded: in a process without it some calls of
torch's optimizers pass through `_utils/without_compiler.py` first. Why they are there:
[the way of a gradient](architecture.md#the-way-of-a-gradient).
"""
SECTIONS = {
    "Full precision": "`Trainer()`, torch's SGD, one process.",
    "O2 with delayed_ddp": '`Trainer(strategy="delayed_ddp", precision="O2", gradient_clip_val=1.0)`, FusedAdam, rank 0 of two on '
    "CPUs, where torch references (`ops/reference.py`) stand in for the kernels.",
    "A replay": '`Trainer(precision="O2", gradient_clip_val=1.0, cuda_graph=True)`, FusedAdam, on a GPU.',
}


class Line(NamedTuple):
    """An executed line: how many calls deep, its function, and its text."""

    depth: int
    code: CodeType
    number: int


class Tracer:
    """Notes the package's lines between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def start(self) -> None:
        """Starts in this thread, also in the functions that are being called."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                frame.f_trace = self._note
            frame = frame.f_back
        sys.settrace(self._enter)

    def stop(self) -> None:
        """Stops in this thread."""
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._note if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _note(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.lines.append(Line(_depth(frame), frame.f_code, frame.f_lineno))
        return self._note


def _depth(frame: FrameType) -> int:
    """Returns how many functions of the package are being called."""
    depth = 0
    current: FrameType | None = frame
    while current is not None:
        depth += current.f_code.co_filename.startswith(PACKAGE)
        current = current.f_back
    return depth


class Net(TrainingModule):
    """One layer and its optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 2)
        self.kind = kind

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return self.kind(self.parameters(), lr=0.1)


class Batches:
    """Batches, of which one step is traced: no hook does so, as a step without hooks calls none."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __len__(self) -> int:
        return 2 * WARM_UP

    def __iter__(self) -> Any:
        for number in range(2 * WARM_UP):
            # The feed is one batch ahead on a GPU; the loop's own lines begin and end a step.
            if number == WARM_UP:
                self.tracer.start()
            elif number == WARM_UP + 2:
                self.tracer.stop()
            yield torch.ones(3, 4)


def traced(kind: type[torch.optim.Optimizer], **options: Any) -> list[Line]:
    """Returns the lines of one step of the loop."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        trainer = Trainer(
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **options,
        )
        trainer.fit(Net(kind), Batches(tracer))
    heads = [
        index
        for index, line in enumerate(tracer.lines)
        if line.code.co_qualname == "TrainingLoop._run_epoch" and "in state.batches" in _text(line)
    ]
    return tracer.lines[heads[0] : heads[1]]


def _text(line: Line) -> str:
    return linecache.getline(line.code.co_filename, line.number).rstrip()


def listing(lines: list[Line]) -> str:
    """Returns the lines as text, each call one level further in and under the name of its function."""
    text = []
    last: tuple[int, CodeType] | None = None
    lowest = min(line.depth for line in lines)
    for line in lines:
        indent = "  " * (line.depth - lowest)
        if last != (line.depth, line.code) and (last is None or line.depth >= last[0]):
            file = line.code.co_filename.removeprefix(PACKAGE)
            text.append(f"{indent}-- {line.code.co_qualname} ({file})")
        text.append(f"{indent}{_text(line).strip()}")
        last = line.depth, line.code
    return "\n".join(text)


def section(name: str, lines: list[Line]) -> str:
    """Returns a section of the page."""
    files = len({line.code.co_filename for line in lines})
    versions = f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
    return f"## {name}\n\n{SECTIONS[name]} {len(lines)} lines in {files} files ({versions}).\n\n```text\n{listing(lines)}\n```\n"


def of_full_precision() -> list[Line]:
    """Returns the lines of a step in full precision."""
    return traced(torch.optim.SGD, accelerator="cpu")


def of_rank() -> list[Line]:
    """Returns the lines of a step at O2 under delayed_ddp; called on each of two ranks."""
    return traced(
        FusedAdam, accelerator="cpu", devices=2, strategy="delayed_ddp", precision="O2", gradient_clip_val=1.0
    )


def of_replay() -> list[Line]:
    """Returns the lines of a step that is the replay of a CUDA graph."""
    return traced(FusedAdam, accelerator="gpu", devices=1, precision="O2", gradient_clip_val=1.0, cuda_graph=True)


def of_ranks() -> str:
    """Returns the section of two ranks, each a process that runs this script."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(  # noqa: S603 - this script
                [sys.executable, __file__, folder],
                env={**os.environ, **where, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            )
            for rank in "01"
        ]
        exit_codes = [rank.wait(timeout=120) for rank in ranks]
        if any(exit_codes):
            raise RuntimeError("a rank failed")
        return Path(folder, "section0").read_text()


def sections(page: str) -> dict[str, str]:
    """Returns the sections of a page by name."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part.strip() + "\n" for part in parts}


def render(page: str) -> str:
    """Returns the new page; without a GPU with the replay of the old one."""
    parts = sections(page)
    parts["Full precision"] = section("Full precision", of_full_precision())
    parts["O2 with delayed_ddp"] = of_ranks()
    if torch.cuda.is_available():
        parts["A replay"] = section("A replay", of_replay())
    return "\n".join([HEAD.format(steps=WARM_UP), *(parts[name] for name in SECTIONS if name in parts)])


if __name__ == "__main__" and len(sys.argv) == 2:
    Path(sys.argv[1], f"section{os.environ['RANK']}").write_text(section("O2 with delayed_ddp", of_rank()))
elif __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text() if PAGE.exists() else ""))
