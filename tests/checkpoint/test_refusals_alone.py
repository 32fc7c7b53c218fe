"""A checkpoint that is refused is told with one error: the message has the reason, and no traceback of torch's stands above it."""

from __future__ import annotations

import shutil
import traceback

import pytest
import torch

from fabricamp import Callback, CheckpointError, ConfigError
from fabricamp.callbacks import ModelCheckpoint
from tests.small import Classifier, loader, quiet_trainer


class Wider(Classifier):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))


def trainer(folder, **options):
    return quiet_trainer(default_root_dir=folder, max_epochs=1, enable_checkpointing=True, **options)


def fit(module, folder, ckpt_path=None, **options):
    trainer(folder, callbacks=ModelCheckpoint(folder, filename="a"), **options).fit(
        module, loader(8), ckpt_path=ckpt_path
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    fit(Classifier(), folder)
    return folder


def truncated(file):
    file.write_bytes(file.read_bytes()[:2000])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def of_lightning_without_its_layout(file):
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": {}, "callbacks": 3, "loops": 4}, file)


def with_a_class(file):
    torch.save({"state_dict": {}, "of": Wider()}, file)


DAMAGES = (truncated, flipped, of_lightning_without_its_layout, with_a_class)


def refused(call):
    """Returns the error's message, once it is seen that Python prints one traceback."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        call()
    assert sum(line.startswith("Traceback") for line in traceback.format_exception(caught.value)) == 1
    return str(caught.value)


@pytest.mark.parametrize("word", ["auto", "last", "file"])
def test_another_models_checkpoint(folder, word):
    told = refused(lambda: fit(Wider(), folder, str(folder / "a.ckpt") if word == "file" else word))
    assert "does not fit the model of this Wider: other shape net.0.bias" in told


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_files_that_cannot_be_read(folder, tmp_path, damage):
    file = tmp_path / "b.ckpt"
    shutil.copy(folder / "a.ckpt", file)
    damage(file)
    for ckpt_path in (str(file), file.name):
        assert "b.ckpt" in refused(lambda path=ckpt_path: fit(Classifier(), tmp_path, path))
    assert "b.ckpt" in refused(lambda: Classifier.load_from_checkpoint(file))


def test_what_is_not_there_and_a_name_that_is_no_template(tmp_path):
    assert "there is no checkpoint" in refused(lambda: fit(Classifier(), tmp_path, str(tmp_path / "no.ckpt")))
    assert "is not a template" in refused(
        lambda: ModelCheckpoint(tmp_path, filename="{epoch").format_checkpoint_name({})
    )


def test_an_error_of_the_programs_own_code_keeps_its_traceback(folder):
    class Breaks(Callback):
        def on_load_checkpoint(self, trainer, pl_module, checkpoint):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainer(folder, callbacks=Breaks()).fit(Classifier(), loader(8), ckpt_path=folder / "a.ckpt")
