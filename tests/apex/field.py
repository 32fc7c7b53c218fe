"""Runs users' scripts: unchanged on GPUs, and on the CPU with device and backend replaced."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fabricamp.apex.__main__ import main
from tests.distributed.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cpu_twin", "free_port", "import_what_scripts_do", "losses", "run_script", "run_scripts", "script"]

HERE = Path(__file__).parent
SUBSTITUTIONS = [
    (r"^(\s*)torch\.cuda\.(set_device|synchronize)\(.*\)$", r"\1pass"),
    (r"\.cuda\([^()]*\)", ""),
    (r"(['\"])nccl\1", '"gloo"'),
    (r"\.to\(local_rank\)", ".to('cpu')"),
    (r"torch\.device\(f?(['\"])cuda:[^'\"]*\1\)", "torch.device('cpu')"),
    (r"device=(['\"])cuda\1", "device='cpu'"),
]
TORCHS_WRAPPER = "torch.nn.parallel import DistributedDataParallel"
DEVICES = (
    r"device_ids=\[local_rank\], output_device=local_rank, "  # torch's wrapper takes no devices for a module on the CPU
)


def script(name: str) -> Path:
    """Returns the file of a script."""
    return next(HERE.glob(f"s*/{name}.py"))


def cpu_twin(name: str) -> str:
    """Returns the text of a script with CPU tensors and Gloo, and nothing else changed."""
    text = script(name).read_text()
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    if TORCHS_WRAPPER in text:
        text = re.sub(DEVICES, "", text)
    assert not re.search(r"\bcuda\(|nccl|'cuda", text)
    return text


def run_script(name: str, folder: Path, *runs: tuple[str, ...], gpu: bool = False, ranks: int = 1) -> list[list[str]]:
    """Runs a script once for each entry of ``runs`` (its arguments), in the same processes; returns each rank's outputs."""
    return run_scripts(folder, [(name, arguments) for arguments in runs], gpu=gpu, ranks=ranks)


def run_scripts(
    folder: Path, jobs: list[tuple[str, tuple[str, ...]]], *, gpu: bool = False, ranks: int = 1
) -> list[list[str]]:
    """Runs each of ``jobs`` (a script and its arguments), all in the same processes; returns each rank's outputs.

    Each rank gets its number as from ``torch.distributed.launch``.
    """
    files = []
    for name, _ in jobs:
        file = script(name)
        if not gpu:
            file = folder / f"{name}_on_cpu.py"
            file.write_text(cpu_twin(name))
        files.append(file)
    given = [arguments for _, arguments in jobs]
    ports = [free_port() for _ in jobs]
    method, timeout = ("spawn", 280.0) if gpu else ("fork", 100.0)
    return run_ranks(_rank, ranks, files, given, ports, backend=None, start_method=method, timeout=timeout)


def _rank(files: list[Path], runs: list[tuple[str, ...]], ports: list[int]) -> list[str]:
    from fabricamp.apex import amp

    rank = os.environ["LOCAL_RANK"]
    # Each run creates a new process group with a new store.
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    printed = []
    for file, arguments, port in zip(files, runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        lines = io.StringIO()
        with contextlib.redirect_stdout(lines), _logged(lines):
            main([f"--local-rank={rank}", str(file), *arguments])
        printed.append(lines.getvalue())
        amp.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return printed


@contextlib.contextmanager
def _logged(lines: io.StringIO) -> Iterator[None]:
    """Adds fabricamp's log lines to the script's output, because pytest would capture them."""
    handler = logging.StreamHandler(lines)
    logging.getLogger("fabricamp").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("fabricamp").removeHandler(handler)


def free_port() -> int:
    """Returns a port of this machine without a listener.

    It is below the ephemeral ports: with an ephemeral port a rank that connects before the listener starts could connect to itself.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_768)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def import_what_scripts_do() -> None:
    """Imports modules that each forked process would otherwise import again."""
    import torch.nn.parallel
    import torch.utils.data.distributed

    from fabricamp.apex import optimizers

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    for kind in (torch.optim.SGD, torch.optim.Adam, optimizers.FusedAdam, optimizers.FusedLAMB):
        kind([weight], lr=0.1).step()


def losses(printed: str) -> list[float]:
    """Returns the losses in a script's output."""
    return [float(one) for one in re.findall(r"Loss (\S+)", printed)]
