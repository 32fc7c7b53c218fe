"""A rank that exits with code 0, has fewer batches than the others, or is stopped: it is named with its position, in time."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import partial

import pytest
from torch.utils.data import DataLoader, IterableDataset

from fabricamp.errors import DistributedError
from fabricamp.launch import agent
from fabricamp.strategies import DDP
from fabricamp.watchdog import watch
from tests.distributed.ranks import side_by_side
from tests.distributed.scripts import end, finish, start
from tests.distributed.test_faults import Impatient
from tests.kill.attempts import import_everything
from tests.small import Classifier, data, loader, quiet_trainer

TIMEOUT = 3600.0
"""The strategy's timeout, so long that no test ends by it on a slow machine."""
STOPPED = Impatient((0, "at step 5", "waiting", "backward"))


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


class Uneven(IterableDataset):
    """Yields five batches of two on rank 1 and eight on the others, all different; has no length."""

    def __init__(self, ranks_data):
        self.data = ranks_data

    def __iter__(self):
        rank = int(os.environ["RANK"])
        return iter([self.data[index - rank] for index in range(10 if rank == 1 else 16)])


class Odd(Classifier):
    """Rank 1 exits or is stopped in its sixth step."""

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
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def train(what, **options):
    if what == "stop":
        options["callbacks"] = [STOPPED]
    trainer = quiet_trainer(strategy=DDP(timeout=TIMEOUT), max_epochs=2, num_sanity_val_steps=0, **options)
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
        "rank 1 has reached the end of its loader after 5 batches of epoch 0, and rank 0 has more and waits in the next one",
        rf"rank 0: {PLACE.format(5)}",
        r"rank 1: in fit at step 5 \(epoch 0, batch 4\)",  # a batch counts after its exchange
        "limit_train_batches=5",
    ],
    "stop": [
        "with it ended rank 1",  # rank 0 kills it, because a stopped process ignores its starter's SIGTERM
        "probably because of rank 1",
        r"rank 1 gives no sign of life \(its process is stopped: by SIGSTOP, Ctrl-Z or a debugger\); last seen in fit at step \d",
        rf"rank 0: {PLACE.format(5)}.*, waiting for the other ranks",
    ],
}


# The sentence that explains the failure; it has to come before any traceback.
SENTENCES = {
    "_exit": r"rank 1 ended early with exit code 0|the process of rank 1 ended, last seen in fit at step \d.*; then this",
    "exit": r"rank 1 ended early with exit code 0|rank 1 failed in fit at step 5|SystemExit: 0",
    "uneven": r"rank 1 has reached the end of its loader after 5 batches of epoch 0",
    "stop": r"probably because of rank 1",
}


def check_order(what, told):
    """Checks that the sentence comes before tracebacks, stacks and messages of Gloo or torch."""
    sentence = re.search(SENTENCES[what], told)
    assert sentence, told
    others = re.search(r"Traceback|stack of rank|Connection closed|terminated|ChildFailedError", told)
    assert others is None or sentence.start() < others.start(), told


def check(what):
    agent._SHUTDOWN_SECONDS = TIMEOUT
    watch._REPORT_SECONDS = 100.0
    with pytest.raises(DistributedError) as caught:
        train(what, devices=2, start_method="fork")
    told = str(caught.value)
    for part in TOLD[what]:
        assert re.search(part, told), told
    check_order(what, told)
    assert "takes too much memory" not in told


def test_each_is_named():
    side_by_side(*(partial(check, what) for what in TOLD))


SCRIPT = """
import sys
from tests.distributed.test_odd_ends import train

if __name__ == "__main__":
    train(sys.argv[1], devices="auto")
"""


@pytest.mark.slow
def test_it_is_named_under_torchrun(tmp_path):
    """Under torchrun, which prints its own messages too."""
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py")
    for pair in (("_exit", "uneven"), ("exit", "stop")):
        runs = {what: start(tmp_path, *torchrun, what) for what in pair}
        for what, process in runs.items():
            try:
                code, _, err = finish(process)
            finally:
                end(process)
            assert code == 1, err
            # Some parts are only printed by fabricamp's own starter.
            parts = [part for part in TOLD[what] if "ended early" not in part and "with it ended" not in part]
            for part in parts:
                assert re.search(part, err), err
            assert "forcefully exiting via" not in err  # torchrun itself would wait, and then kill the stopped rank
            # The failed rank's own message, and torchrun's summary of its error file.
            own, _, summary = err.partition("ChildFailedError")
            check_order(what, summary.partition("Root Cause")[2])
            if what == "uneven":
                check_order(what, own)
