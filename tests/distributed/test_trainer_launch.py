"""A Trainer that starts its ranks: scripts as from a shell, torchrun, SLURM's variables, forked and spawned workers."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch

from fabricamp import Trainer, TrainingModule
from fabricamp.callbacks import EarlyStopping, ModelCheckpoint
from fabricamp.errors import CheckpointError, ConfigError, DistributedError
from fabricamp.loggers import CSVLogger
from fabricamp.precision import OptLevel
from tests.distributed.forked import start_forked
from tests.distributed.scripts import end, finish, start
from tests.small import Classifier, loader, quiet_trainer

SCRIPT = """
import json, os, sys
print("start\\n", end="", flush=True)  # in one piece: several processes write
from fabricamp import Trainer, TrainingModule
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.loggers import CSVLogger, TensorBoardLogger
from tests.small import Classifier, loader

class Net(Classifier):
    def training_step(self, batch, batch_idx):
        if "--raise" in sys.argv and self.global_rank == 1:
            raise ValueError("rank one is unwell")
        if "--raise-once" in sys.argv:
            self.note_and_raise_once(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        return super().training_step(batch, batch_idx)

    def note_and_raise_once(self, attempt):
        if self.global_rank == 0:
            with open("progress", "a") as file:
                file.write(f"{attempt} {self.global_step}\\n")
        if attempt == 0 and self.global_step == 5 and self.global_rank == 1:
            raise ValueError("rank one is unwell")

    def on_train_start(self):
        self.print("training once")

def main():
    devices = "auto" if "--auto" in sys.argv else 2
    goes_on = "--raise-once" in sys.argv
    # torch's DDP imports a compiler in each new interpreter, for seconds; forked ranks, which get no arguments, have it.
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="delayed_ddp" if sys.argv[1:] else "auto", max_epochs=2, log_every_n_steps=2,
        logger=[CSVLogger("logs"), TensorBoardLogger("logs")],
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=2)] if goes_on else None,
    )
    module = Net()
    trainer.fit(module, loader(32, 4), loader(7, 2), ckpt_path="auto" if goes_on else None)
    print(f"after {trainer.global_rank}", flush=True)
    (result,) = trainer.test(module, loader(7, 2))
    words = {
        "arguments": sys.argv[1:],
        "step": trainer.global_step,
        "best": trainer.checkpoint_callback.best_model_path,
        "loss": result["test_loss"],
        "sum": sum(float(value.sum()) for value in module.state_dict().values()),
        "world": trainer.world_size,
        "logs": trainer.log_dir,
    }
    if trainer.global_rank == 1:
        open("result.json", "w").write(json.dumps(words))
    if "--exit" in sys.argv:
        sys.exit(5)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def expected():
    """Returns the result of one process on batches of the same samples."""
    module = Classifier()
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(module, loader(32, 8))
    (result,) = trainer.test(module, loader(7, 2), verbose=False)
    return {
        "step": trainer.global_step,
        "loss": result["test_loss"],
        "sum": sum(float(v.sum()) for v in module.state_dict().values()),
    }


def folder_for(path, name):
    folder = path / name / "with space"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    return folder


def check_files(folder, expected, arguments, attempts=1):
    words = json.loads((folder / "result.json").read_text())
    assert words["arguments"] == arguments
    assert words["world"] == 2
    for name, value in expected.items():
        assert words[name] == pytest.approx(value, abs=1e-5), name
    versions = sorted(path.name for path in (folder / "logs").rglob("version_*"))
    assert (
        versions
        in (  # two loggers, with one run folder or one each
            sorted(["version_0", "version_1"][:attempts] * 2),
            [f"version_{number}" for number in range(2 * attempts)],
        )
    )
    assert len(list(folder.rglob("*.ckpt"))) == len(list(folder.rglob("checkpoints/*"))) <= 1 + attempts
    assert torch.load(words["best"], weights_only=True)["global_step"] == expected["step"]
    assert len(list(folder.rglob("metrics.csv"))) == attempts
    assert list(folder.rglob("events.out.tfevents*"))
    assert words["logs"].startswith("logs/fabricamp_logs/version_")


def check_lines(out, err, *, starts, attempts=1):
    assert out.count("start\n") == starts
    assert out.count("training once") == attempts
    assert sorted(re.findall(r"after \d", out)) == ["after 0", "after 1"]
    assert "test_loss" not in out
    assert err.count("test_loss") == 1  # the table of results


@pytest.mark.parametrize(
    ("way", "more", "code"),
    [(["-m", "train"], ["--exit"], 5), pytest.param(["train.py"], [], 0, marks=pytest.mark.slow)],
)
def test_a_script_as_module_and_as_script(tmp_path, expected, way, more, code):
    words = ["--a", "b c", "$HOME", "--x=*", "ü", *more]
    folder = folder_for(tmp_path, "script")
    returned, out, err = finish(start(folder, *way, *words))
    assert returned == code, err
    check_lines(out, err, starts=3)  # the starter and two workers; the starter runs no code after fit
    check_files(folder, expected, words)
    assert ("rank" in err) == (code != 0)
    assert "Traceback" not in err
    assert "Warning" not in err


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path, expected):
    """Tests an uninterrupted second attempt; test_trainer_interrupts.py tests one that Ctrl-C ends."""
    folder = folder_for(tmp_path, "torchrun")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1")
    process = start_forked(folder, *torchrun, "train.py", "--auto", "--raise-once")
    try:
        returned, out, err = finish(process)
    finally:
        end(process)
    assert returned == 0, err
    check_lines(out, err, starts=4, attempts=2)
    check_files(folder, expected, ["--auto", "--raise-once"], attempts=2)
    assert "ValueError: rank one is unwell" in err
    assert "Warning" not in err
    steps = [tuple(map(int, line.split())) for line in (folder / "progress").read_text().splitlines()]
    assert steps == [(0, step) for step in range(6)] + [(1, step) for step in range(4, 8)]


def test_slurm(tmp_path, expected):
    slurm = folder_for(tmp_path, "slurm")
    shared = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        start_forked(slurm, "train.py", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **shared) for rank in range(2)
    ]
    results = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in results] == [0, 0], results
    check_lines("".join(out for _, out, _ in results), "".join(err for _, _, err in results), starts=2)
    check_files(slurm, expected, [])
    assert "training once" in results[0][1]
    assert "test_loss" not in results[1][2]


def test_an_error_in_a_worker_is_shown_once_with_its_rank(tmp_path):
    folder = folder_for(tmp_path, "raise")
    code, out, err = finish(start_forked(folder, "train.py", "--raise"))
    assert code == 1
    assert "after" not in out
    assert err.count("ValueError: rank one is unwell") == 1
    assert "rank 1 ended with exit code 1" in err
    assert err.count("Traceback (most recent call last)") == err.count("Traceback") == 1
    assert 'train.py", line' in err
    assert "in <module>" in err  # the traceback begins in the script, not only where it was recorded
    assert "torch.distributed.elastic" not in err
    assert list(folder.rglob("*.partial")) == []


class Late(Classifier):
    """Builds a layer in ``configure_model``, returns its own callbacks, overflows once."""

    def setup(self, stage):
        if stage == "validate":  # the fit ran in other processes
            assert {"val_loss", "falls"} <= self.trainer.callback_metrics.keys()

    def configure_model(self):
        if not hasattr(self, "late"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(9)
                self.late = torch.nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step((batch[0], batch[1]), batch_idx) + self.late(self.net(batch[0])).mean() ** 2
        return loss * float("inf") if self.global_step == 1 else loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("falls", -float(self.global_step))

    def configure_callbacks(self):
        return [EarlyStopping("falls", patience=3), ModelCheckpoint(monitor="val_loss", filename="best-{epoch}")]


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("spawn, twice", marks=pytest.mark.slow)])
def test_what_workers_did_comes_back_to_the_caller(method, tmp_path):
    options = {"max_epochs": 2, "enable_checkpointing": True}
    trainer = quiet_trainer(
        **options, precision=OptLevel("O2", loss_scale="dynamic"), devices=2, start_method=method.partition(",")[0],
        strategy="ddp" if method == "fork" else "delayed_ddp",  # which imports no compiler in each new interpreter
        logger=CSVLogger("logs"),
        enable_model_summary=True, enable_progress_bar=True, default_root_dir=tmp_path,
    )  # fmt: skip
    assert trainer.world_size == 2
    module = Late()
    trainer.fit(module, loader(32, 4), loader(7, 2))

    alone, twin = quiet_trainer(**options, precision="O2"), Late()
    alone.fit(twin, loader(32, 8), loader(7, 2))
    assert (trainer.global_step, trainer.current_epoch) == (alone.global_step, alone.current_epoch) == (8, 2)
    assert (trainer.state.fn, trainer.state.status) == (alone.state.fn, alone.state.status) == ("fit", "finished")
    assert trainer.skipped_steps == alone.skipped_steps == 1
    assert (trainer.num_training_batches, trainer.num_val_batches) == (4, [2])
    for name, value in twin.state_dict().items():
        assert torch.allclose(module.state_dict()[name].float(), value.float(), atol=2e-3), name
    assert trainer.callback_metrics.keys() == alone.callback_metrics.keys()
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(
        alone.callback_metrics["val_loss"].item(), abs=2e-3
    )
    best = trainer.checkpoint_callback.best_model_path
    assert torch.load(best, weights_only=True)["global_step"] in (4, 8)
    assert trainer.checkpoint_callback.best_model_score is not None
    assert trainer.early_stopping_callback.best_score == -8
    assert trainer.log_dir == str(trainer.logger.log_dir)
    assert module.trainer is trainer
    pickle.loads(pickle.dumps((trainer, module)))
    with pytest.raises(CheckpointError, match="in workers"):
        trainer.save_checkpoint("late.ckpt")

    if method == "spawn":  # a spawned worker takes seconds to start
        return
    expected = alone.validate(twin, loader(7, 2), verbose=False)[0]
    again = trainer.validate(module, loader(7, 2), verbose=False)[0]
    assert again["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-3)
    if method == "fork":
        tested = trainer.test(module, loader(7, 2), ckpt_path="best", verbose=False)[0]
        assert tested["test_loss"] == pytest.approx(
            alone.test(twin, loader(7, 2), verbose=False)[0]["test_loss"], abs=0.1
        )
        assert len(torch.cat(trainer.predict(module, loader(7, 2)))) == 7
        trainer.fit(module, loader(32, 4), ckpt_path=best)
    assert trainer.global_step == 8
    assert trainer.checkpoint_callback.best_model_path == best
    assert [path.name for path in tmp_path.rglob("version_*")] == ["version_0"]


class Unwell(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            raise ValueError("rank one is unwell")
        return super().training_step(batch, batch_idx)


def test_errors_of_workers_reach_the_caller():
    with pytest.raises(DistributedError, match=r"rank 1 ended with exit code 1(.|\n)*ValueError: rank one is unwell"):
        quiet_trainer(devices=2, max_epochs=1).fit(Unwell(), loader())
    with pytest.raises(ConfigError, match="no batches"):
        quiet_trainer(devices=2, max_epochs=1).fit(Classifier(), [])
    local = type("Local", (Classifier,), {})
    with pytest.raises(ConfigError, match="spawn"):
        quiet_trainer(devices=2, max_epochs=1, start_method="spawn").fit(local(), loader())
    # Raised before any process is started.
    with pytest.raises(ConfigError, match="no training_step"):
        quiet_trainer(devices=2).fit(TrainingModule(), loader())


def test_default_callbacks_are_the_same_in_every_run(tmp_path):
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, default_root_dir=tmp_path, enable_progress_bar=False
    )
    module = Classifier()
    trainer.fit(module, loader())
    best = trainer.checkpoint_callback.best_model_path
    assert best
    trainer.test(module, loader(), verbose=False)
    assert trainer.checkpoint_callback.best_model_path == best
    assert trainer.validate(module, loader(), ckpt_path="best", verbose=False)
