"""Several Trainers with different ``devices`` in one script: rank 0 makes the calls of those for another number of processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from fabricamp.errors import ConfigError
from fabricamp.launch import runs_on_first
from fabricamp.strategies.base import Environment
from tests.distributed.scripts import end, finish, start, wait_for_line
from tests.small import Classifier, loader, quiet_trainer

SCRIPT = """
import json, os, sys, time
import torch
from fabricamp import Trainer
from fabricamp.errors import FabricampError
from fabricamp.tuner import Tuner
from tests.inside import session
from tests.small import Classifier, loader, QUIET

class Net(Classifier):
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def begin(self, kind):
        with open("calls", "a") as file:  # one write: several processes append
            file.write(f"{kind} {self.number} {self.trainer.world_size} {self.global_rank}\\n")
        if "--raise" in sys.argv and kind == "test":
            raise ValueError("rank zero is unwell")
        if "--wait" in sys.argv and kind == "test":
            open("waiting", "w").write("waiting\\n")
            while not session(self.trainer).agreement.asked:
                time.sleep(0.01)

    def on_fit_start(self):
        self.begin("fit")

    def on_test_start(self):
        self.begin("test")

def call(word, module):
    open(f"pid{os.environ.get('RANK', '')}", "w").write(str(os.getpid()))
    devices, fn, *method = word.split(":")
    number = {} if devices == "auto" else {"devices": int(devices)}
    how = {"strategy": "delayed_ddp"} if devices not in ("1", "auto") else {}
    options = {name: value for name, value in QUIET.items() if name != "devices"}
    trainer = Trainer(**{**options, **number, **how}, max_epochs=1, start_method=method[0] if method else "auto")
    result = None
    if fn == "fit":
        trainer.fit(module, loader(16, 4))
    elif fn == "test":
        (result,) = trainer.test(module, loader(7, 2), verbose=False)
    elif fn == "predict":
        result = [float(batch.sum()) for batch in trainer.predict(module, loader(7, 2))]
    elif fn == "find":
        result = Tuner(trainer).lr_find(module, loader(16, 4), num_training=4, update_attr=False).results["loss"]
    elif fn == "guarded":  # as scripts do, where all processes would do it
        if os.environ.get("RANK", "0") == "0":
            trainer.test(module, loader(7, 2), verbose=False)
    elif fn == "caught":
        try:
            trainer.test(module, loader(7, 2), ckpt_path="nowhere.ckpt")
        except FabricampError as error:
            result = [type(error).__name__, "nowhere.ckpt" in str(error)]
    elif fn == "save":
        trainer.fit(module, loader(16, 4))
        trainer.save_checkpoint("own.ckpt")
        result = torch.load("own.ckpt", weights_only=True)["global_step"]
    elif fn == "missed":
        if os.environ.get("RANK") != "0":
            trainer.test(module, loader(7, 2), verbose=False)
    return [result, {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer.global_step, trainer.is_global_zero]

def main():
    module = Net()
    torch.manual_seed(1)
    results = []
    for module.number, word in enumerate(word for word in sys.argv[1:] if ":" in word):  # a spawned process has no global of main()
        results.append([*call(word, module), float(torch.rand(())), sum(float(v.sum()) for v in module.state_dict().values())])
        open(f"result{os.environ.get('RANK', '')}.json", "w").write(json.dumps(results))

if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        open(f"ended{os.environ.get('RANK', '')}", "w").write(type(error).__name__)
        raise
"""


def run(folder, *words, code=0):
    """Runs the script; returns what its processes have written last, its calls, and its stderr."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    returned, out, err = finish(start(folder, "train.py", *words))
    assert returned == code, (out, err)
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("result*.json"))]
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return results, sorted(calls), err


def one_process(*numbers_of_processes):
    """Returns the metrics and weights after fits with batches as large as those of so many processes together, then a test."""
    module = Classifier()
    for number in numbers_of_processes:
        quiet_trainer(max_epochs=1).fit(module, loader(16, 4 * number))
    trainer = quiet_trainer()
    (result,) = trainer.test(module, loader(7, 2), verbose=False)
    return result, sum(float(value.sum()) for value in module.state_dict().values())


def check_equal(first, second):
    for one, other in zip(first, second, strict=True):
        assert one[:3] == other[:3], "every process goes on with rank 0's results"
        assert one[3] is True
        assert other[3] is False
        assert one[4:] == other[4:], "and with its random numbers and weights"


def test_a_test_in_one_process_after_a_fit_in_two_and_another_fit(tmp_path):
    (first, second), calls, _ = run(tmp_path / "a", "2:fit", "1:test", "auto:test", "2:fit", "1:test", "1:predict")
    assert calls == ["fit 0 2 0", "fit 0 2 1", "fit 3 2 0", "fit 3 2 1", "test 1 1 0", "test 2 1 0", "test 4 1 0"]
    assert first[1][0] == pytest.approx(one_process(2)[0], abs=1e-5)
    assert first[1][1] == pytest.approx(first[1][0])
    assert first[2][:3] == first[1][:3]
    tested, weights = one_process(2, 2)
    assert first[4][0] == pytest.approx(tested, abs=1e-5)
    assert first[4][-1] == pytest.approx(weights, abs=1e-5)
    assert len(first[5][0]) == 4
    check_equal(first, second)


@pytest.mark.parametrize("first", ["auto", pytest.param("1", marks=pytest.mark.slow)])
def test_no_fit_runs_twice(first, tmp_path):
    (only,), calls, _ = run(tmp_path / "a", f"{first}:fit", "2:fit", f"{first}:test")
    assert calls == ["fit 0 1 0", "fit 1 2 0", "fit 1 2 1", "test 2 1 0"]
    tested, weights = one_process(1, 2)
    assert only[2][0] == pytest.approx(tested, abs=1e-5)
    assert only[2][-1] == pytest.approx(weights, abs=1e-5)


def test_other_numbers_of_processes_and_calls(tmp_path):
    """More processes than the script has, a search, a checkpoint, a call of rank 0 alone, an error that is caught."""
    words = ["2:fit", "3:fit", "1:find", "1:guarded", "1:save", "1:caught", "1:test", "1:missed"]
    (first, second), calls, err = run(tmp_path / "a", *words, code=1)
    assert [call for call in calls if call.startswith("fit 1")] == ["fit 1 3 0", "fit 1 3 1", "fit 1 3 2"]
    assert [call for call in calls if call.startswith("test")] == ["test 3 1 0", "test 6 1 0"]
    check_equal([*first[:3], *first[4:7]], [*second[:3], *second[4:7]])
    assert len(first[2][0]) == 4
    assert first[4][0] == 4
    assert first[5][0] == ["CheckpointNotFoundError", True]
    told = "rank 1 waits for a call of a Trainer that runs on rank 0 alone, and rank 0 has ended without making it"
    assert told in err, "of the last word"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_run_a_function(method, tmp_path):
    (only,), calls, _ = run(tmp_path / "a", f"2:fit:{method}", "1:test", f"2:fit:{method}")
    assert calls == ["fit 0 2 0", "fit 0 2 1", "fit 2 2 0", "fit 2 2 1", "test 1 1 0"]
    assert only[-1][-1] == pytest.approx(one_process(2, 2)[1], abs=1e-5)


@pytest.mark.slow
def test_a_script_that_has_to_run_again_says_what_is_repeated(tmp_path):
    # The first file is that of the process that started the script's ranks, up to then.
    (_, first, second), calls, err = run(tmp_path / "a", "1:fit", "2:fit:script", "1:test")
    assert calls == ["fit 0 1 0", "fit 0 1 0", "fit 1 2 0", "fit 1 2 1", "test 2 1 0"]
    assert "the script is run again from its beginning, in 2 processes" in err
    check_equal(first, second)
    assert first[2][0] == pytest.approx(one_process(1, 2)[0], abs=1e-5)


def test_an_error_on_rank_zero_ends_all_with_its_reason(tmp_path):
    _, calls, err = run(tmp_path / "a", "2:fit", "1:test", "--raise", code=1)
    assert calls[-1] == "test 1 1 0"
    assert "rank 0" in err
    assert "ValueError: rank zero is unwell" in err
    assert err.count("Traceback") == 1


def ignores_ctrl_c(pid_file):
    """Returns whether the process of this file ignores SIGINT now, by the mask that Linux shows."""
    status = Path(f"/proc/{pid_file.read_text()}/status").read_text()
    return bool(int(status.partition("SigIgn:")[2].split()[0], 16) & 1 << signal.SIGINT - 1)


def test_ctrl_c_is_left_to_rank_zero(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    process = start(tmp_path, "train.py", "2:fit", "1:test", "--wait")
    try:
        wait_for_line(tmp_path / "waiting", process=process)
        while not ignores_ctrl_c(tmp_path / "pid1"):  # rank 1 may not wait for rank 0 yet
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        code, out, err = finish(process)
    finally:
        end(process)
    assert code == 130, (out, err)
    assert "Traceback" not in err
    # Rank 1 ends with rank 0, whose run ends in the usual way: if it ended first, rank 0 would be killed.
    assert (tmp_path / "ended1").read_text() == "SystemExit"


def test_another_number_is_refused_within_a_run_and_by_other_launchers():
    in_worker = Environment(rank=0, world_size=2, local_world_size=2, name="fork")
    with pytest.raises(ConfigError, match=r"Trainer\(devices=1\) is made by a run in 2 processes"):
        runs_on_first(in_worker, 1)
    assert not runs_on_first(in_worker, 2)
    assert not runs_on_first(Environment(world_size=2, local_world_size=2, name="torchrun"), 1)
    assert not runs_on_first(None, 1)
