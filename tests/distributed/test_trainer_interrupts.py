"""Ctrl-C in real processes: the first ends after the step with its checkpoint, the second ends at once."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

from tests.distributed.forked import start_forked
from tests.distributed.scripts import end, finish, start, wait_for_line
from tests.kill.attempts import import_everything

SCRIPT = """
import sys, threading, time
from fabricamp import Trainer
from tests.inside import session
from tests.small import Classifier, loader

what = sys.argv[1]

def note(word):
    with open(f"progress{word[0]}", "a") as file:
        file.write(word + "\\n")

def wait_until(is_so):
    while not is_so():
        time.sleep(0.01)

class Net(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            note(f"t{self.global_step}")
        time.sleep(0.03)
        if "stuck" in what and self.global_step == 3:
            wait_until(lambda: session(self.trainer).agreement.asked)
            note(f"asked {self.global_rank}")
            threading.Event().wait()  # for ever
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking and self.global_rank == 0:
            note(f"v{batch_idx}")
        if "validat" in what:
            time.sleep(0.05)
        if what == "validating" and batch_idx == 5 and not self.trainer.sanity_checking:
            wait_until(lambda: self.trainer.state.hold_evaluated < sys.maxsize)  # interrupted, and it is known where to hold
        super().validation_step(batch, batch_idx)

if __name__ == "__main__":
    devices = sys.argv[2] if sys.argv[2] == "auto" else int(sys.argv[2])
    trainer = Trainer(accelerator="cpu", devices=devices, max_epochs=10**6, logger=False, enable_progress_bar="bar" in what,
                      # in a new interpreter, DDP would import a compiler, for seconds
                      strategy="delayed_ddp" if "delayed" in what else "auto",
                      enable_model_summary=False, start_method=sys.argv[3] if sys.argv[3:] else "auto")
    if what == "validate":
        trainer.validate(Net(), loader(4000, 1))
    else:
        trainer.fit(Net(), loader(64, 4), loader(32, 1) if what == "validating" else None)
    print("after", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    import_everything(tmp_path_factory.mktemp("warm"))


@pytest.fixture
def begin(tmp_path):
    """Returns a function that starts the script in a new folder; kills processes that still run at the end of the test.

    Forked processes have imported everything already; ``start=start`` starts a new interpreter, as a shell does.
    """
    processes = []

    def run(name, *command, start=start_forked, **variables):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        processes.append(start(folder, *command, **variables))
        return processes[-1], folder

    yield run
    for process in processes:
        end(process)


def interrupt(process, folder, letter="t", number=5):
    wait_for_line(folder / f"progress{letter}", number, process=process)
    os.killpg(process.pid, signal.SIGINT)


def check_ended(process, folder, code=130):
    """Checks that the process ended without a traceback, with a checkpoint of its last step; without the signal it never ends."""
    returned, out, err = finish(process)
    assert returned == code, (out, err)
    assert "after" not in out
    assert "Traceback" not in err, err
    (said,) = re.findall(r"Interrupted at step (\d+); ckpt_path=\"last\" resumes from (.*)", err)
    steps = len((folder / "progresst").read_text().splitlines())
    assert int(said[0]) == steps
    assert torch.load(folder / said[1], weights_only=True)["global_step"] == steps
    assert list(folder.rglob("*.partial")) == []


def test_first_ctrl_c(begin):
    single, alone = begin("single", "train.py", "fit", "1")
    script, both = begin("script", "train.py", "fit with bar, delayed", "2")
    forked, called = begin("forked", "train.py", "fit", "2", "fork")
    # The script in new interpreters begins last: the others train until then.
    for process, folder in ((single, alone), (forked, called), (script, both)):
        interrupt(process, folder)
    for process, folder in ((single, alone), (script, both), (forked, called)):
        check_ended(process, folder)


@pytest.mark.slow
def test_first_ctrl_c_to_spawned_workers(begin):
    process, folder = begin("spawned", "train.py", "fit", "2", "spawn", start=start)
    interrupt(process, folder)
    check_ended(process, folder)


def test_ctrl_c_under_torchrun(begin):
    elastic = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    process, folder = begin("torchrun", *elastic, "train.py", "fit, delayed", "auto")
    interrupt(process, folder)
    code, out, err = finish(process)
    assert code != 0  # torchrun's own exit code
    assert "after" not in out
    (said,) = re.findall(r"Interrupted at step (\d+); ckpt_path=\"last\" resumes from (.*)", err)
    assert torch.load(folder / said[1], weights_only=True)["global_step"] == int(said[0])
    assert "KeyboardInterrupt" not in err


def test_ctrl_c_in_validation(begin):
    within, training = begin("within", "train.py", "validating", "1")
    shared, two = begin("shared", "train.py", "validating", "2", "fork")
    alone, evaluating = begin("alone", "train.py", "validate", "1")
    both, sharing = begin("both", "train.py", "validate", "2", "fork")
    for process, folder in ((within, training), (shared, two)):
        interrupt(process, folder, "v")
        check_ended(process, folder)
    assert len((training / "progressv").read_text().splitlines()) < 32
    for process, folder in ((alone, evaluating), (both, sharing)):
        interrupt(process, folder, "v")
        code, out, err = finish(process)
        assert code == 130, (out, err)
        assert "after" not in out
        assert "val_loss" not in out + err
        assert "Traceback" not in err, err
        assert len((folder / "progressv").read_text().splitlines()) < 1000


def test_second_ctrl_c(begin):
    single, alone = begin("single", "train.py", "stuck", "1")
    forked, both = begin("forked", "train.py", "stuck", "2", "fork")
    for process, folder in ((single, alone), (forked, both)):
        interrupt(process, folder, number=4)
        # Waits for the first signal's handler in each rank, because two pending signals count as one.
        wait_for_line(folder / "progressa", 2 if folder == both else 1, process=process)
        os.killpg(process.pid, signal.SIGINT)
        code, out, err = finish(process)
        assert code in (130, -signal.SIGINT), (out, err)
        assert "after" not in out
        assert list(folder.rglob("*.ckpt")) == []  # ended in the middle of a step
