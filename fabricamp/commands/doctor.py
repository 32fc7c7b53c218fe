"""Checks the machine: the installed packages, whether they work together, and how to fix problems."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

Status = Literal["ok", "not here", "broken"]
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
CUPY_PACKAGES = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")


class Check(NamedTuple):
    """The result of one check; ``not here`` is optional for a run, ``broken`` has to be fixed."""

    name: str
    found: str
    status: Status = "ok"
    cure: str = ""


def examine() -> list[Check]:
    """Returns the results of all checks; needs no GPU, and changes nothing."""
    cuda = check_cuda()
    checks = [check_python(), check_torch(torch.__version__), cuda]
    if cuda.status == "not here":  # its row also covers the checks that need a GPU
        return [*checks, check_exchange(), *check_packages()]
    checks += [*check_gpus(), *check_links(), check_exchange()]
    return [*checks, check_cupy(_installed(CUPY_PACKAGES), torch.version.cuda), *check_kernels(), *check_packages()]


def show(checks: Sequence[Check]) -> None:
    """Prints one table: a row for each check, with the cure if something is wrong."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "not here": "dim", "broken": "bold red"}
    console = Console()
    table = Table("check", "found", "status", title="fabricamp doctor")
    if any(check.cure for check in checks):
        table.add_column("cure")
    for check in checks:
        # As Text: in markup, the name of an extra in brackets would be parsed as a style and disappear.
        texts = [Text(check.name), Text(check.found), Text(check.status, colours[check.status]), Text(check.cure)]
        table.add_row(*texts[: len(table.columns)])
    console.print(table)
    count = sum(check.status == "broken" for check in checks)
    console.print(f"{count} broken; what to do is in the table" if count else "nothing is broken")


def check_python() -> Check:
    """Checks whether the interpreter is new enough."""
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Check("Python", found, "broken", "make a virtual environment with Python 3.11 or newer")
    return Check("Python", found)


def check_torch(version: str) -> Check:
    """Checks whether torch is new enough, and names its build."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    numbers = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        return Check("torch", f"{version} ({build})", "broken", "pip install --upgrade 'torch>=2.11'")
    return Check("torch", f"{version} ({build} build)")


def check_cuda() -> Check:
    """Checks whether the driver and torch's build work together."""
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    version = driver.splitlines()[0] if driver else ""
    if torch.cuda.is_available():
        return Check("CUDA", f"{torch.version.cuda}, driver {version or 'unknown'}")
    if version and torch.version.cuda is None:
        return Check(
            "CUDA", f"driver {version}, but torch is the CPU build", "broken", "install a CUDA build of torch (pip)"
        )
    if version and os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return Check(
            "GPU",
            f"hidden by CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}: runs use the CPU",
            "not here",
        )
    if version:
        cure = f"update the driver to one for CUDA {torch.version.cuda}, or check CUDA_VISIBLE_DEVICES"
        return Check("CUDA", f"driver {version}, but torch {torch.version.cuda} finds no GPU", "broken", cure)
    return Check("GPU", "none: everything runs on the CPU, by torch's own operations", "not here")


def check_gpus() -> list[Check]:
    """Checks for each GPU whether this torch has code for it."""
    checks = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}"
        try:
            torch.ones(1, dtype=torch.float32, device=f"cuda:{index}").add_(1).cpu()
        except RuntimeError as error:
            cure = "end the other processes that use it, or install a torch build with code for this card"
            checks.append(Check(f"GPU {index}", f"{found}: {_first_line(error)}", "broken", cure))
        else:
            checks.append(Check(f"GPU {index}", found))
    return checks


def check_links() -> list[Check]:
    """Reports how the GPUs of this machine are linked."""
    count = torch.cuda.device_count()
    if count < 2:
        return [] if count == 0 else [Check("links", "one GPU: nothing to link")]
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    direct = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    kinds = sorted(_link_kinds(_nvidia_smi("topo", "-m"), count))
    found = f"{len(direct)} of {len(pairs)} pairs directly" + (f" ({', '.join(kinds)})" if kinds else "")
    others = (
        "" if len(direct) == len(pairs) else "; the others exchange through the host: slower, with the same results"
    )
    return [Check("links", found + others)]


def check_exchange() -> Check:
    """Checks the communication backends for gradients: Gloo and NCCL."""
    if not torch.distributed.is_available():
        return Check("exchange", "torch without torch.distributed", "broken", "install the usual build of torch (pip)")
    found = ["Gloo"] if torch.distributed.is_gloo_available() else []
    if torch.distributed.is_nccl_available() and torch.cuda.is_available():
        found.append("NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version()))
    elif torch.cuda.is_available():
        return Check("exchange", "GPUs, but torch has no NCCL", "broken", "install the usual CUDA build of torch (pip)")
    return Check("exchange", ", ".join(found) or "none", "ok" if found else "broken")


def check_cupy(packages: dict[str, str], torch_cuda: str | None) -> Check:
    """Checks whether CuPy is installed exactly once, for torch's CUDA version, and can compile."""
    major = (torch_cuda or "").split(".")[0]
    install = f"pip install cupy-cuda{major}x"
    found = ", ".join(f"{name} {version}" for name, version in packages.items()) or "not installed"
    if not major or not torch.cuda.is_available():
        return Check("CuPy", f"{found}; not used without a GPU", "ok" if packages else "not here")
    if not packages:
        return Check("CuPy", f"{found}: torch's slower operations are used", "not here", install)
    if len(packages) > 1:
        names = " ".join(packages)
        return Check("CuPy", f"{found}: they overwrite each other", "broken", f"pip uninstall -y {names}; {install}")
    (name,) = packages
    if name not in {"cupy", f"cupy-cuda{major}x"}:
        cure = f"pip uninstall -y {name}; {install}"
        return Check("CuPy", f"{found}, but torch uses CUDA {torch_cuda}", "broken", cure)
    failure = _cupy_failure()
    if failure:
        return Check("CuPy", f"{found}: {failure}", "broken", f"pip install --force-reinstall {name}")
    return Check("CuPy", f"{found}, compiles and runs")


def check_kernels() -> list[Check]:
    """Reports which backend each op uses and why; on GPUs that run kernels, checks that each kernel file compiles."""
    from fabricamp import ops
    from fabricamp.ops import bridge

    checks = [Check(f"ops.{name}", str(choice)) for name, choice in ops.backend().items()]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if bridge.runs_kernels(device):
            checks += [check_kernel(file, device) for file in bridge.kernel_files()]
    return checks


def check_kernel(file: str, device: torch.device) -> Check:
    """Checks whether one kernel file compiles; the first time takes seconds, later CuPy has it cached on disk."""
    from fabricamp.ops import bridge

    name = f"kernel {file}.cu"
    try:
        bridge.check_compiles(file, device)
    except (RuntimeError, OSError) as error:
        cure = (
            f"delete CuPy's kernel cache (rm -r {os.environ.get('CUPY_CACHE_DIR', '~/.cupy/kernel_cache')}); if it stays, "
            f"pip install --force-reinstall cupy-cuda{(torch.version.cuda or '').split('.')[0]}x"
        )
        return Check(name, f"{device}: {_first_line(error)}", "broken", cure)
    return Check(name, f"compiles for {device}")


def measure() -> list[Check]:
    """Times kernels against torch's operations on each kind of GPU here, and writes the table that selects the backends."""
    from fabricamp.ops import bridge, dispatch
    from fabricamp.ops.measure import measure_card

    kinds = {
        dispatch.capability(device): device
        for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        if bridge.runs_kernels(device)
    }
    file = dispatch.user_file()
    for name, device in kinds.items():
        dispatch.write(file, name, measure_card(device))
    if not kinds:
        return [Check("measurement", "no GPU that kernels run on", "not here", "a GPU and CuPy")]
    return [Check("measurement", f"{file} says what runs on cards of compute capability {', '.join(kinds)}")]


def check_packages() -> list[Check]:
    """Checks the packages that fabricamp requires, and those that the examples use."""
    checks = []
    for name in ("tensorboard", "omegaconf", "rich", "scikit-learn"):
        version = _installed((name,)).get(name)
        if version is not None:
            checks.append(Check(name, version))
        elif name == "scikit-learn":
            checks.append(Check(name, "not installed", "not here", f"for the examples: pip install {name}"))
        else:
            checks.append(Check(name, "not installed", "broken", f"pip install {name}"))
    return checks


def _installed(names: Iterable[str]) -> dict[str, str]:
    """Returns the version of each package that is installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cupy_failure() -> str:
    """Compiles and runs a kernel of one line on the first GPU; returns what went wrong."""
    try:
        import cupy

        source = 'extern "C" __global__ void one(float* x) { x[0] = 1.0f; }'
        with cupy.cuda.Device(0):
            value = torch.zeros(1, dtype=torch.float32, device="cuda:0")
            cupy.RawKernel(source, "one")((1,), (1,), (value.data_ptr(),))
            cupy.cuda.get_current_stream().synchronize()
    except (ImportError, RuntimeError, OSError) as error:
        return _first_line(error)
    return "" if value.item() == 1.0 else "a kernel ran without effect"


def _nvidia_smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi; empty if it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _link_kinds(topology: str, count: int) -> set[str]:
    """Returns the link types between GPUs (NV18, PIX, SYS, ...) in the output of ``nvidia-smi topo -m``."""
    rows = [line.split() for line in topology.splitlines() if line.startswith("GPU")]
    return {word for row in rows for word in row[1 : 1 + count] if word != "X"}


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
