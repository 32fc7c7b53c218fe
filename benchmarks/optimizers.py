"""Compares the optimizer step and the complete update with torch's: share of the copy bandwidth, GPU ms, wall ms, host us.

    python benchmarks/optimizers.py [--sets resnet50,gpt2,gpt-1.3b] [--only adam] [--rows "update O5"]
        [--out results.json] [--cpu]

GPU ms: events around steps that were queued after a sleeping kernel, so launch gaps do not count.  Wall ms: steps back to
back, as in a loop.  Host us: the time to queue a step while the GPU sleeps (a step that waits for the GPU shows "waits").
Share: the bandwidth of the necessary bytes in the GPU time, divided by that of a large device-to-device copy in the same run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import platform
import re
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fabricamp import ops
from fabricamp.ops import bridge
from fabricamp.ops.table import THREADS, Table
from fabricamp.optimizers import LARC, FusedAdagrad, FusedAdam, FusedLAMB, FusedLion, FusedNovoGrad, FusedSGD
from fabricamp.precision import Clip, OptLevel
from fabricamp.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def resnet50() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, inside, 1, 1), (width, width, 3, 3), (width * 4, width, 1, 1)]
            if block == 0:
                convolutions.append((width * 4, inside, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            inside = width * 4
    return [*shapes, (1000, 2048), (1000,)]


def gpt(layers: int, width: int, positions: int = 1024, words: int = 50257) -> list[tuple[int, ...]]:
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(words, width), (positions, width), *block * layers, (width,), (width,)]


SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet50": resnet50,
    "gpt2": lambda: gpt(12, 768),
    "gpt-1.3b": lambda: gpt(24, 2048, 2048),
    "1000 tensors": lambda: [(256, 256)] * 1000,
}


# Bytes per parameter above the step's own floor.  O1 reads its gradients twice.  O2 and O5 do so in half, and write a half copy.
EXTRA = {"O1": 4, "O2": 2, "O5": 2}


EIGHT_BITS: dict[str, Any] = {"masters": "remainder", "state": "8bit"}
PLAIN = "O5 ours, remainder and int8, evenly spaced"
"""The row of a kernel with codes that cost nothing to compute, so that the time of codes and that of bytes are told apart."""


class PlainRule(ops.AdamRule):
    """Adam's kernel with evenly spaced codes: no option of fabricamp, since small values become 0."""

    @classmethod
    def launch(cls, table: Table, steering: ops.Steering) -> None:
        """Updates every row of ``table``."""
        kernel, struct = plain_kernel(table)
        kernel(table.chunks, THREADS, struct, *steering.arguments())


@functools.cache
def plain_kernel(table: Table) -> tuple[bridge.Kernel, Any]:
    text = bridge.source("adam", tuple(table._kinds))
    bodies = {
        "float value_of(int code)": "return code / (LEVELS == 7 ? 127.f : 255.f);",
        "unsigned code_of(float share)": "return __float_as_uint(fmaf(share, LEVELS == 7 ? 127.f : 255.f, 8388608.f));",
    }
    for head, body in bodies.items():
        text, count = re.subn(
            rf"({re.escape(head)}) {{.*?^}}", rf"\1 {{ {body} }}", text, flags=re.DOTALL | re.MULTILINE
        )
        assert count == 1, head
    compiled = bridge.COMPILERS["cuda"](text, "adam", table.device)
    return bridge.Kernel(compiled, table.device, bridge.parameter_types(text, "adam")), table._as_struct()


class PlainAdam(FusedAdam):
    """AdamW with :class:`PlainRule`."""

    rule = PlainRule


class Case(NamedTuple):
    """One optimizer: ours, torch's (called with ``foreach`` or ``fused``), and ``floor``, the bytes per parameter of an fp32 step.

    ``extra`` are the additional bytes of a complete update, if the step itself reads each gradient once; None for a row that is not
    an optimizer and has a step only.
    """

    ours: Callable[..., Any]
    torchs: Callable[..., Any] | None
    fused: bool
    floor: int
    extra: dict[str, int] | None = EXTRA
    compact: tuple[tuple[str, Callable[..., Any], int], ...] = ()
    """Rows of the complete update with other masters and states: name (its level first), optimizer, and bytes per parameter."""


class Average:
    """An exponential moving average of parameters with an optimizer's ``step``: by our operation, or by torch's."""

    def __init__(self, own: list[nn.Parameter], *, foreach: bool = False) -> None:
        self.own = [one.detach() for one in own]
        self.averages = [one.clone() for one in self.own]
        self.foreach = foreach

    def step(self) -> None:
        """Updates the averages."""
        if self.foreach:
            torch._foreach_lerp_(self.averages, self.own, 1 - 0.999)
        else:
            ops.ema(self.own, self.averages, 0.999)


# Each entry is an optimizer; the code below is the same for all of them.
CASES: dict[str, Case] = {
    "adam": Case(
        ours=lambda p: FusedAdam(p, lr=1e-4, weight_decay=0.01),
        torchs=lambda p, **how: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.01, **how),
        fused=True,
        floor=28,  # reads p, g, m, v; writes p, m, v
        compact=(
            # Reads g twice, p, m, v; writes p, m, v; weights and gradients are fp32.
            ("O4 ours", lambda p: FusedAdam(p, lr=1e-4, weight_decay=0.01), 32),
            ("O4 ours, bf16", lambda p: FusedAdam(p, lr=1e-4, weight_decay=0.01, state="bf16"), 24),
            # Reads g twice, and p, r, m, v; writes p, r, m, v.
            ("O5 ours, remainder", lambda p: FusedAdam(p, lr=1e-4, weight_decay=0.01, masters="remainder"), 28),
            (
                "O5 ours, remainder and bf16",
                lambda p: FusedAdam(p, lr=1e-4, weight_decay=0.01, masters="remainder", state="bf16"),
                20,
            ),
            # And a scale of each state per 256 elements.
            ("O4 ours, 8bit", lambda p: FusedAdam(p, lr=1e-4, weight_decay=0.01, state="8bit"), 20),
            ("O5 ours, remainder and 8bit", lambda p: FusedAdam(p, lr=1e-4, weight_decay=0.01, **EIGHT_BITS), 16),
            (PLAIN, lambda p: PlainAdam(p, lr=1e-4, weight_decay=0.01, **EIGHT_BITS), 16),
        ),
    ),
    "lamb": Case(
        ours=lambda p: FusedLAMB(p, lr=1e-4),
        torchs=None,
        fused=False,
        floor=44,  # reads g for the norm of all; reads p, g, m, v, writes m, v; reads p, m, v, writes p
        extra={"O1": 0, "O2": -2, "O5": -2},  # the update's statistics replace the first read of g
    ),
    "novograd": Case(
        ours=lambda p: FusedNovoGrad(p, lr=1e-4, weight_decay=0.01),
        torchs=None,
        fused=False,
        floor=24,  # reads g for the norms; reads p, g, m, writes p, m
        extra={
            "O1": 4,
            "O2": 0,
            "O5": 0,
        },  # statistics read g again; at O2 g is half, and a half copy is written
    ),
    "sgd": Case(
        ours=lambda p: FusedSGD(p, lr=1e-4, momentum=0.9, weight_decay=0.01),
        torchs=lambda p, **how: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=0.01, **how),
        fused=True,
        floor=20,  # reads p, g, m; writes p, m
        # Reads g twice, p, r, m; writes p, r, m.
        compact=(
            (
                "O5 ours, remainder and 8bit",
                lambda p: FusedSGD(p, lr=1e-4, momentum=0.9, weight_decay=0.01, **EIGHT_BITS),
                14,
            ),
        ),
    ),
    "adagrad": Case(
        ours=lambda p: FusedAdagrad(p, lr=1e-4, weight_decay=0.01),
        torchs=lambda p, **how: torch.optim.Adagrad(p, lr=1e-4, weight_decay=0.01, **how),
        fused=False,  # torch's fused Adagrad is not measured on CUDA
        floor=20,  # reads p, g, sum; writes p, sum
    ),
    "lion": Case(
        ours=lambda p: FusedLion(p, lr=1e-4, weight_decay=0.01),
        torchs=None,
        fused=False,
        floor=20,  # reads p, g, m; writes p, m
        compact=(
            ("O5 ours, remainder and 8bit", lambda p: FusedLion(p, lr=1e-4, weight_decay=0.01, **EIGHT_BITS), 14),
        ),
    ),
    "larc": Case(
        ours=lambda p: LARC(FusedSGD(p, lr=1e-4, momentum=0.9, weight_decay=0.01)),
        torchs=None,
        fused=False,
        floor=40,  # reads p, g for the norms; reads p, g, writes g; then SGD
        # Before LARC the gradients are written: reads g for statistics, reads g and writes it in fp32; at O2 and O5 g is half,
        # and afterwards masters are read and half weights written.
        extra={"O1": 12, "O2": 14, "O5": 14},
    ),
    "ema": Case(
        ours=Average,
        torchs=Average,
        fused=False,
        floor=12,  # reads p, average; writes average
        extra=None,
    ),
}


class Result(NamedTuple):
    """Medians of one row."""

    gpu_ms: float
    wall_ms: float
    host_us: float | None


def nothing() -> None:
    pass


def behind_a_sleep(step: Callable[[], object], prepare: Callable[[], object]) -> tuple[float, float | None]:
    """Returns GPU ms and host us (None if it waits) of a step, over two steps: a step may read the result of the last but one."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for _ in range(3):
        prepare()
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e8))
    events[0].record()
    events[1].record()
    host = 0.0
    for _ in range(2):
        prepare()
        started = time.perf_counter()
        step()
        host += time.perf_counter() - started
    waited = events[0].query()
    events[2].record()
    torch.cuda.synchronize()
    return events[1].elapsed_time(events[2]) / 2, None if waited else host / 2 * 1e6


def measure(step: Callable[[], object], repeat: int, prepare: Callable[[], object] = nothing) -> Result:
    """Times ``step``; ``prepare`` runs before each step, as backward provides gradients, and does not count as its host time."""
    for _ in range(6):
        prepare()
        step()
    asleep = [behind_a_sleep(step, prepare) for _ in range(9)]
    wall = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeat):
            prepare()
            step()
        torch.cuda.synchronize()
        wall.append((time.perf_counter() - started) / repeat * 1e3)
    host = [one for _, one in asleep if one is not None]
    gpu = statistics.median(one for one, _ in asleep)
    return Result(gpu, statistics.median(wall), statistics.median(host) if len(host) == len(asleep) else None)


def copy_bandwidth() -> float:
    """Returns the GB/s of a large device-to-device copy, counting read and written bytes."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    result = measure(lambda: target.copy_(source), 5)
    return 2 * source.numel() / result.gpu_ms / 1e6


class Weights(nn.Module):
    """A module with parameters of the given shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(0)
        self.all = nn.ParameterList(torch.randn(s, device="cuda", generator=generator) * 0.02 for s in shapes)


def parameters(shapes: list[tuple[int, ...]], device: str = "cuda") -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for one in made:
        one.grad = torch.randn_like(one) * 1e-3
    return made


Rows = dict[str, "Callable[[], Result | None]"]
"""What measures each row; None: it cannot be measured here."""


def repeats(shapes: list[tuple[int, ...]]) -> int:
    return 50 if sum(map(torch.Size.numel, map(torch.Size, shapes))) < 5e8 else 10


def step_rows(case: Case, shapes: list[tuple[int, ...]]) -> Rows:
    def of_steps(make: Callable[..., Any], **how: bool) -> Result:
        return measure(make(parameters(shapes), **how).step, repeats(shapes))

    rows: Rows = {"ours": lambda: of_steps(case.ours)}
    if case.torchs is not None:
        rows["torch foreach"] = partial(of_steps, case.torchs, foreach=True)
        if case.fused:
            rows["torch fused"] = partial(of_steps, case.torchs, fused=True)
    return rows


def through_precision(level: str, case: Case, shapes: list[tuple[int, ...]], repeat: int) -> Result:
    """Measures statistics, finish, update and the end of the accumulation step, as the Trainer calls them."""
    module, precision = Weights(shapes), OptLevel(level)
    precision.convert_module(module)
    optimizer = case.ours(module.parameters())
    strategy = Strategy()
    precision.setup_optimizers(module, [optimizer], strategy)
    of_optimizer = precision.step_of(optimizer, strategy, Clip(1.0))
    holders = precision.gradients(optimizer).parameters
    gradients = [torch.randn_like(one) for one in holders]
    loss = torch.ones((), device="cuda")

    def backward() -> None:
        for holder, gradient in zip(holders, gradients, strict=True):
            holder.grad = gradient

    def step() -> None:
        of_optimizer.run(loss)
        of_optimizer.after()
        if precision.verdicts is not None:
            precision.verdicts.note_end()

    return measure(step, repeat, backward)


def with_grad_scaler(case: Case, shapes: list[tuple[int, ...]], repeat: int, *, clip: bool) -> Result:
    own = parameters(shapes)
    optimizer, scaler = (
        case.torchs(own, fused=True),
        torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**6),
    )
    scaler.scale(torch.ones((), device="cuda"))

    def step() -> None:
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(own, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return measure(step, repeat)


def apex_pattern(case: Case, shapes: list[tuple[int, ...]], repeat: int) -> Result:
    """Measures O2 as in apex, by torch's foreach operations: unscale into masters, check on the host, clip, step, copy back."""
    masters = parameters(shapes)
    halves = [one.detach().half() for one in masters]
    gradients = [one.grad.half() for one in masters]
    optimizer = case.torchs(masters, fused=True)

    def step() -> None:
        torch._foreach_copy_([one.grad for one in masters], gradients)
        torch._foreach_mul_([one.grad for one in masters], 1.0)
        norm = torch.nn.utils.get_total_norm([one.grad for one in masters])
        if not torch.isfinite(norm).item():
            return
        torch.nn.utils.clip_grads_with_norm_(masters, 1.0, norm)
        optimizer.step()
        torch._foreach_copy_(halves, [one.detach() for one in masters])

    return measure(step, repeat)


OTHERS = {
    # Two averages of one byte and a number per 256 elements, on fp32 weights: reads g twice, p, m, v; writes p, m, v.
    "O4 torchao AdamW8bit, clip": ("torchao.optim", "AdamW8bit"),
    "O4 bitsandbytes AdamW8bit, clip": ("bitsandbytes.optim", "AdamW8bit"),
}
OTHERS_BYTES = 20


def of_other(row: str, shapes: list[tuple[int, ...]]) -> Result | None:
    """Measures the 8-bit AdamW of another package, if it is installed, after torch's clipping."""
    package, name = OTHERS[row]
    try:
        make = getattr(importlib.import_module(package), name)
    except ImportError as error:
        print(f"{row}: not measured ({error})")
        return None
    own = parameters(shapes)
    optimizer = make(own, lr=1e-4, weight_decay=0.01)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()

    return measure(step, repeats(shapes))


def update_rows(case: Case, shapes: list[tuple[int, ...]]) -> Rows:
    if case.extra is None:
        return {}
    repeat = repeats(shapes)
    rows: Rows = {
        f"{level} ours": partial(through_precision, level, case, shapes, repeat) for level in ("O1", "O2", "O5")
    }
    for row, make, _ in case.compact:
        rows[row] = partial(through_precision, row[:2], case._replace(ours=make), shapes, repeat)
    if case is CASES["adam"]:
        rows |= {row: partial(of_other, row, shapes) for row in OTHERS}
    if case.torchs is not None and case.fused:
        rows["O1 GradScaler, clip, torch fused"] = partial(with_grad_scaler, case, shapes, repeat, clip=True)
        rows["O1 GradScaler, torch fused, no clip"] = partial(with_grad_scaler, case, shapes, repeat, clip=False)
        rows["O2 as apex, torch's operations"] = partial(apex_pattern, case, shapes, repeat)
    return rows


def measured(name: str, kind: str, rows: Rows, elements: int, case: Case, bandwidth: float) -> Iterator[dict[str, Any]]:
    for row, of_row in rows.items():
        result = of_row()
        torch.cuda.empty_cache()
        if result is None:
            continue
        moved = case.floor + (case.extra or {}).get(row[:2], 0) if kind == "update" else case.floor
        moved = next(
            (own for compact, _, own in case.compact if compact == row), OTHERS_BYTES if row in OTHERS else moved
        )
        share = moved * elements / result.gpu_ms / 1e6 / bandwidth
        host = "waits" if result.host_us is None else f"{result.host_us:.0f}"
        print(
            f"{name:13} {kind:7} {row:36} {result.gpu_ms:8.3f} {result.wall_ms:8.3f} {host:>7} {share:6.0%}", flush=True
        )
        yield {"set": name, "kind": kind, "row": row, **result._asdict(), "share_of_copy": round(share, 4)}


def on_gpu(arguments: argparse.Namespace, found: dict) -> None:
    bandwidth = copy_bandwidth()
    found |= {"device": torch.cuda.get_device_name(), "copy_gb_per_s": round(bandwidth)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth:.0f} GB/s")
    print(f"{'set':13} {'kind':7} {'row':36} {'GPU ms':>8} {'wall ms':>8} {'host us':>7} {'share':>6}")
    for optimizer in arguments.only.split(","):
        case = CASES[optimizer]
        for name in arguments.sets.split(","):
            shapes = SETS[name]()
            elements = sum(torch.Size(shape).numel() for shape in shapes)
            about = {"optimizer": optimizer, "elements": elements, "tensors": len(shapes)}
            for kind, rows in (("step", step_rows(case, shapes)), ("update", update_rows(case, shapes))):
                wanted = {row: of_row for row, of_row in rows.items() if re.search(arguments.rows, f"{kind} {row}")}
                for result in measured(name, kind, wanted, elements, case, bandwidth):
                    found["rows"].append({**about, **result})
                    write(found, arguments.out)


def on_cpu(arguments: argparse.Namespace, found: dict) -> None:
    torch.set_num_threads(1)
    found |= {"device": platform.processor() or platform.machine()}
    shapes = resnet50()
    for optimizer in arguments.only.split(","):
        case = CASES[optimizer]
        steps = {"ours": case.ours(parameters(shapes, "cpu")).step}
        if case.torchs is not None:
            steps["torch foreach"] = case.torchs(parameters(shapes, "cpu"), foreach=True).step
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(9):  # alternately, so that other load on the machine affects both
            for name, step in steps.items():
                started = time.perf_counter()
                step()
                taken[name].append((time.perf_counter() - started) * 1e3)
        for name, times in taken.items():
            print(
                f"{optimizer} on a CPU, ResNet-50, one thread: {name:14} {statistics.median(times):8.1f} ms", flush=True
            )
            found["rows"].append({"optimizer": optimizer, "row": name, "ms": statistics.median(times)})
        write(found, arguments.out)


def write(found: dict, out: Path | None) -> None:
    """Writes the results; called after every row, so that an interrupted run keeps them."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="resnet50,gpt2,gpt-1.3b,1000 tensors")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--rows", default="", help="a regular expression of the rows, such as 'update O5|torchao'")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; --cpu compares with torch on the CPU")
    torch.manual_seed(0)
    found = {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    found |= {"command": " ".join(["python", *sys.argv]), "rows": []}
    (on_cpu if arguments.cpu else on_gpu)(arguments, found)


if __name__ == "__main__":
    main()
