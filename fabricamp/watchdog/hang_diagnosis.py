"""The diagnosis of a hang from the heartbeats of all ranks: which rank holds the others up, where each waits, and the stacks."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from fabricamp.watchdog.heartbeat import DATA, ELSEWHERE, ENDED, SAVING, STARTING, WAITING, Heartbeat

_SUSPICION = (DATA, STARTING, ELSEWHERE, SAVING, ENDED, WAITING)
"""Activities of a main thread, the most suspicious first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Which rank holds up the run, which rank reports it before exiting, and the report."""

    rank: int
    reporter: int
    text: str
    stack: str


def judge(heartbeats: Sequence[Heartbeat], silent: set[int], seconds: float) -> Diagnosis | None:
    """Returns which rank holds up a run in which no rank made progress for ``seconds``; None if no rank waits for another.

    ``silent`` are the ranks without new heartbeats.  The last running rank, if it works rather than waits, holds up nobody.
    """
    running = [heartbeat for heartbeat in heartbeats if not heartbeat.ended]
    talking = [heartbeat for heartbeat in running if heartbeat.rank not in silent]
    if not talking or (len(running) == 1 and not talking[0].waits):
        return None
    sites = collections.Counter(heartbeat.innermost_line for heartbeat in talking)

    def innocence(heartbeat: Heartbeat) -> tuple[bool, int, int, int]:
        # A silent rank first; then by activity; then a rank that waits where few others do.
        talks = heartbeat.rank not in silent
        return talks, _SUSPICION.index(heartbeat.activity), sites[heartbeat.innermost_line], heartbeat.rank

    culprit = min(heartbeats, key=innocence)
    reporter = culprit if culprit in talking else talking[0]
    others = [heartbeat for heartbeat in heartbeats if heartbeat is not culprit]
    described = [culprit, *others[:15]]  # the message has to stay readable
    lines = [heartbeat.describe(silent=heartbeat.rank in silent) for heartbeat in described]
    because = f"probably because of rank {culprit.rank}"
    if culprit.waits and culprit.rank not in silent:
        because = _why_all_wait(culprit, sites)
    text = (
        f"no rank has made progress for {seconds:.0f} s, {because}:\n  "
        + "\n  ".join(lines)
        + "\nif a step may take this long, give the strategy a longer timeout, as in DDP(timeout=3600)"
    )
    shown = [heartbeat for heartbeat in (culprit, *talking) if heartbeat.stack]
    # By rank, as the culprit may be among the talking ranks too.
    stacks = {heartbeat.rank: f"stack of rank {heartbeat.rank}:\n{heartbeat.stack}" for heartbeat in shown[:4]}
    return Diagnosis(rank=culprit.rank, reporter=reporter.rank, text=text, stack="\n".join(stacks.values()))


def _why_all_wait(culprit: Heartbeat, sites: collections.Counter[str]) -> str:
    """Returns the explanation if all ranks wait: whether they wait at the same code, else which rank seems to differ."""
    if len(sites) == 1:
        return "and all wait at the same place: the network or a GPU between them hangs"
    odd = f"probably rank {culprit.rank}" if len(set(sites.values())) > 1 else "the stacks show where each waits"
    return f"because they wait for each other at different places: one has skipped an exchange, or makes an extra one ({odd})"
