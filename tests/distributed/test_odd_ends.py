"""A rank that leaves with exit code 0, has fewer batches than the others, or is stopped: named with its place, in time."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, IterableDataset

from fabricamp.errors import DistributedError
from fabricamp.strategies import DDP
from tests.distributed.ranks import side_by_side
from tests.distributed.scripts import end, finish, start
from tests.kill.attempts import import_everything
from tests.small import Classifier, data, loader, quiet_trainer

SECONDS = 12


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


class Uneven(IterableDataset):
    """Five batches of two for rank 1, eight for the others, each its own; no length."""

    def __init__(self, ranks_data):
        self.data = ranks_data

    def __iter__(self):
        rank = int(os.environ["RANK"])
        return iter([self.data[index - rank] for index in range(10 if rank == 1 else 16)])


class Odd(Classifier):
    """Rank 1 ends in its sixth step, in one of these ways."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.global_rank == 1:
            if self.what == "_exit":
                os._exit(0)
            if self.what == "exit":
                sys.exit(0)
            if self.what == "stop":
                Path("stopped").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def train(what, timeout=SECONDS, **options):
    trainer = quiet_trainer(strategy=DDP(timeout=timeout), max_epochs=2, num_sanity_val_steps=0, **options)
    trainer.fit(
        Odd(what), DataLoader(Uneven(data(16)), batch_size=2) if what == "uneven" else loader(64, 2), loader(4, 2)
    )


PLACE = r"in fit at step {0} \(epoch 0, batch {0}\)"
TOLD = {
    "_exit": [
        "rank 1 ended early with exit code 0",
        r"before that: the process of rank 1 ended, last seen in fit at step \d",
    ],
    "exit": ["rank 1 ended early with exit code 0", rf"rank 1 failed {PLACE.format(5)}.*: SystemExit: 0"],
    "uneven": [
        "rank 1 has come to the end of its loader after 5 batches of epoch 0, and rank 0 has more and waits in the next one",
        rf"rank 0: {PLACE.format(5)}",
        r"rank 1: in fit at step 5 \(epoch 0, batch 4\)",  # a batch is counted behind the exchange
        "limit_train_batches=5",
    ],
    "stop": [
        "because of rank 1 as it seems",
        r"rank 1 gives no sign of life \(its process is stopped: by SIGSTOP, Ctrl-Z or a debugger\); last seen in fit at step \d",
        rf"rank 0: {PLACE.format(5)}.*, waiting for the other ranks",
    ],
}


# What says it all, and has to stand before any traceback.
SENTENCES = {
    "_exit": r"rank 1 ended early with exit code 0|the process of rank 1 ended, last seen in fit at step \d.*; then this",
    "exit": r"rank 1 ended early with exit code 0|rank 1 failed in fit at step 5|SystemExit: 0",
    "uneven": r"rank 1 has come to the end of its loader after 5 batches of epoch 0",
    "stop": r"because of rank 1 as it seems",
}


def check_order(what, told):
    """The sentence comes before tracebacks and stacks, and before what Gloo or torch say of it."""
    sentence = re.search(SENTENCES[what], told)
    assert sentence, told
    others = re.search(r"Traceback|stack of rank|Connection closed|terminated|ChildFailedError", told)
    assert others is None or sentence.start() < others.start(), told


def check(what):
    began = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        train(what, devices=2, start_method="fork")
    told = str(caught.value)
    for part in TOLD[what]:
        assert re.search(part, told), told
    check_order(what, told)
    assert "takes too much memory" not in told
    # The patience, and what a busy machine takes; the starter would wait for 30 seconds more.
    assert time.monotonic() - began < SECONDS + 12


def test_each_is_named():
    side_by_side(*(partial(check, what) for what in TOLD))


SCRIPT = """
import sys
from tests.distributed.test_odd_ends import train

if __name__ == "__main__":
    train(sys.argv[1], timeout=24, devices="auto")  # what is imported on first use takes its time, too
"""


@pytest.mark.slow
def test_it_is_named_under_torchrun(tmp_path):
    """Where the messages of torchrun itself are not ours."""
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py")
    for pair in (("_exit", "uneven"), ("exit", "stop")):
        runs = {what: start(tmp_path, *torchrun, what) for what in pair}
        for what, process in runs.items():
            try:
                code, _, err = finish(process, timeout=100)
            finally:
                end(process)
            assert code == 1, err
            parts = [part for part in TOLD[what] if "ended early" not in part]  # what only our starter knows
            for part in parts:
                assert re.search(part, err), err
            # What the failed rank itself says, and what torchrun makes of its record.
            own, _, summary = err.partition("ChildFailedError")
            check_order(what, summary.partition("Root Cause")[2])
            if what == "uneven":
                check_order(what, own)
    # torchrun itself would wait for 30 seconds more.
    assert time.time() - (tmp_path / "stopped").stat().st_mtime < 24 + 10
