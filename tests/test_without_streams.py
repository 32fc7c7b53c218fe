"""Runs without stdout or stderr, which Python sets to None in a service, and with streams that are closed or know little."""

from __future__ import annotations

import io
import sys

import pytest
import rich

from fabricamp import Trainer
from fabricamp.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from fabricamp.cli import main
from fabricamp.messages import is_terminal
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.small import Classifier, loader


class OwnStream:
    """A program's own stream, which can only be written to."""

    def write(self, text):
        return len(text)

    def flush(self):
        """Does nothing."""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {"no": lambda: None, "a closed": closed, "an own": OwnStream, "a": io.StringIO, "a terminal as": Terminal}


@pytest.fixture
def replace_streams(monkeypatch):
    """Returns a function for the test itself to call: pytest sets the streams again after the fixtures."""

    def replace(stdout, stderr):
        monkeypatch.setattr(sys, "stdout", STREAMS[stdout]())
        monkeypatch.setattr(sys, "stderr", STREAMS[stderr]())
        monkeypatch.setattr(rich, "_console", None)  # that of the process may hold other streams
        monkeypatch.setenv("TERM", "xterm")

    return replace


PAIRS = [
    ("no", "no"),
    ("no", "a"),
    ("a", "no"),
    ("a closed", "a closed"),
    ("an own", "an own"),
    ("no", "a terminal as"),
]
PAIRS += [("a terminal as", "no"), ("a terminal as", "a closed"), ("a terminal as", "an own")]


@pytest.mark.parametrize("streams", PAIRS, ids=" stdout, ".join)
@pytest.mark.parametrize("bar", [ProgressBar, RichProgressBar, TQDMProgressBar])
def test_the_default_trainer_runs(replace_streams, streams, bar, tmp_path):
    replace_streams(*streams)
    module = Classifier()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, default_root_dir=tmp_path, callbacks=[bar()])
    trainer.fit(module, loader(16), loader(8))
    assert trainer.global_step == 8
    assert trainer.checkpoint_callback.best_model_path
    assert trainer.validate(module, loader(8))[0].keys() == {"val_loss"}
    assert trainer.test(module, loader(8))[0].keys() == {"test_loss"}
    assert len(trainer.predict(module, loader(8))) == 2
    if streams[0] != "a closed":
        trainer.print("as print itself does")


def test_terminals():
    found = {kind: is_terminal(stream()) for kind, stream in STREAMS.items()}
    assert found == {kind: kind == "a terminal as" for kind in STREAMS}


@pytest.mark.parametrize("streams", [("no", "no"), ("no", "a")], ids=" stdout, ".join)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["fit", "--help"], ["fit", "missing.yaml"], ["runs", "."], ["doctor"]]
)
def test_commands_end_with_their_codes(replace_streams, streams, arguments):
    replace_streams(*streams)
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == (2 if arguments[-1] in ("missing.yaml", ".") else 0)  # no such file; no run in this folder


SERVICE = """
import os, sys
from pathlib import Path

for descriptor in range(3):
    os.close(descriptor)
sys.stdin = sys.stdout = sys.stderr = None
devices = int(sys.argv[1])

import torch
from fabricamp import Trainer
from tests.small import Classifier, loader

class Noisy(Classifier):
    def training_step(self, batch, batch_idx):
        os.write(1, b"a library's own text")
        os.write(2, b"a library's own text")
        return super().training_step(batch, batch_idx)

trainer = Trainer(accelerator="cpu", devices=devices, start_method="fork", max_epochs=2)
trainer.fit(Noisy(), loader(16), loader(8))
assert trainer.global_step == 8 // devices
if devices == 1:
    null = os.stat(os.devnull)
    assert all(os.path.samestat(os.fstat(descriptor), null) for descriptor in range(3))
path = trainer.checkpoint_callback.best_model_path
torch.load(path, weights_only=True)
files = [file for file in Path("fabricamp_logs").rglob("*") if file.is_file()]
assert not any(b"a library's own text" in file.read_bytes() for file in files)
Path("done").write_text(path)
"""


@pytest.mark.parametrize("devices", ["1", "2"])
def test_no_file_gets_the_number_of_a_closed_stream(tmp_path, devices):
    (tmp_path / "service.py").write_text(SERVICE)
    code, _, _ = finish(start_forked(tmp_path, "service.py", devices))
    assert code == 0
    assert (tmp_path / "done").exists()
