"""``fabricamp verify``: runs a script uninterrupted, and again killed and resumed, and compares the bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp.callbacks._verification import DONE, START, VARIABLE, VerificationPlan
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Record = dict[str, dict[str, Any]]
"""The recorded lines of one rank by position (``epoch/batch``), in order."""

_FEWEST = 4
_PARTS = ("data", "rng", "state")
_CAUSES = {
    ("again", "start"): "weights are drawn without a seed; call seed_everything before the module is built",
    ("again", "data"): (
        "an order or augmentation that does not follow from a seed; call seed_everything before the loaders are made, and draw "
        "from torch, numpy or random"
    ),
    ("again", "rng"): "code before this batch drew random numbers by the time, a thread or an unordered set",
    (
        "again",
        "state",
    ): "the same weights, batch and random numbers gave different results: the step draws from its own generator, which has no "
    "seed, or an operation has no fixed order, which Trainer(deterministic=True) names",
    (
        "resumed",
        "start",
    ): "the checkpoint restores these with other values: look at on_load_checkpoint, load_state_dict and "
    "buffers that are not persistent",
    ("resumed", "data"): (
        "the data resume elsewhere: an iterable dataset or a sampler has its own position; give it state_dict and load_state_dict"
    ),
    ("resumed", "rng"): "the RNG states differ: something outside the steps consumes random numbers",
    ("resumed", "state"): (
        "the step reads state that no checkpoint holds, such as a plain attribute that changes while training: make it a "
        "buffer, or write it in on_save_checkpoint; or an operation has no fixed order (Trainer(deterministic=True) names it)"
    ),
}


class Difference(NamedTuple):
    """The first difference: the comparison, the position, the part (data, rng or state), and the names."""

    comparison: str
    position: str
    step: int
    part: str
    names: list[str]
    rank: int

    def __str__(self) -> str:
        words = {"again": "a second run from the start", "resumed": "the run that was killed and resumed"}[
            self.comparison
        ]
        when = "before its first batch" if self.part == START else f"at {_named(self.position)}, step {self.step}"
        what = ", ".join(self.names[:3])
        if len(self.names) > 3:
            what += f" and {len(self.names) - 3} more"
        rank = f" on rank {self.rank}" if self.rank else ""
        return f"not equal: {words} differs {when}{rank}: {what}\nlikely cause: {_CAUSES[self.comparison, self.part]}"


def _named(position: str) -> str:
    """Returns a position as text, batch and epoch counted from 0."""
    epoch, batch = position.split("/")
    return f"batch {batch} of epoch {epoch}"


def verify(script: Path, arguments: Sequence[str] = (), batches: int = 20) -> tuple[Difference | None, str]:
    """Returns the first difference or None, and what was compared; raises :class:`ConfigError` if the script cannot be tested."""
    if not script.is_file():
        raise ConfigError(f"{str(script)!r} is not there; give the script that calls Trainer.fit")
    if batches < _FEWEST:
        raise ConfigError(f"batches={batches}: choose {_FEWEST} or more")
    command = [sys.executable, str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="fabricamp-verify-") as name:
        straight = _run(command, VerificationPlan(f"{name}/straight", batches))
        positions = [position for position in straight[0] if position not in (START, DONE)]
        if len(positions) < _FEWEST:
            raise ConfigError(f"{script} trains on {len(positions)} batches; {_FEWEST} or more are needed")
        saved = len(positions) // 2 - 1
        save_at = positions[saved]
        kill_at = positions[saved + 2]
        killed = _run(command, VerificationPlan(f"{name}/killed", batches, save_at, kill_at))
        difference = compare("again", straight, killed)
        ranks = "1 process" if len(straight) == 1 else f"{len(straight)} processes"
        what = f"{len(positions)} batches on {ranks}, killed after {_named(kill_at)}, resumed after {_named(save_at)}"
        if difference is None:
            remaining = len(positions) - saved - 1
            checkpoint = f"{name}/killed/saved.ckpt"
            resumed = _run(command, VerificationPlan(f"{name}/resumed", remaining, resume_from=checkpoint))
            difference = compare("resumed", straight, resumed, begun_at=save_at)
    return difference, what


def compare(
    comparison: str, straight: Sequence[Record], other: Sequence[Record], begun_at: str = START
) -> Difference | None:
    """Returns the first difference of the ``other`` run, which began after ``begun_at``, from the uninterrupted run."""
    for rank, (lines, others) in enumerate(zip(straight, other, strict=True)):
        names = _differing(lines[begun_at]["state"], others[START]["state"])
        if names:
            return Difference(comparison, begun_at, 0, START, names, rank)
    for position in other[0]:
        if position in (START, DONE):
            continue
        for part in _PARTS:
            for rank, (lines, others) in enumerate(zip(straight, other, strict=True)):
                names = _differing(lines.get(position, {}).get(part, {}), others[position][part])
                if names:
                    return Difference(comparison, position, others[position]["step"], part, names, rank)
    return None


def _differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]


def _run(command: Sequence[str], plan: VerificationPlan) -> list[Record]:
    """Runs the script by the plan, and returns each rank's record."""
    folder = Path(plan.folder)
    folder.mkdir()
    environment = {**os.environ, VARIABLE: json.dumps(plan._asdict())}
    with (folder / "output").open("w") as output:
        ended = subprocess.run(  # noqa: S603 - the user's own script
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    records = []
    for number in range(len(list(folder.glob("rank*.jsonl")))):
        lines = [json.loads(line) for line in (folder / f"rank{number}.jsonl").read_text().splitlines()]
        records.append({line["at"]: line for line in lines})
    if not records or any(DONE not in one for one in records):
        with (folder / "output").open() as output:
            last = "".join(deque(output, 15))
        if not records and ended.returncode == 0:
            raise ConfigError(f"{command[1]} ended without a call of Trainer.fit; its last words:\n{last}")
        raise ConfigError(f"{command[1]} ended too early ({folder.name}); its last words:\n{last}")
    return records
