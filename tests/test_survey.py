"""tools/survey.py lists the names of Lightning that a package uses, and those that the alias lacks."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SOURCE = """
import os
import lightning as L
import lightning.pytorch
import pytorch_lightning as pl
from lightning.fabric.utilities.types import _PATH
from lightning_fabric.utilities.nothing import absent
from pytorch_lightning.callbacks import ModelCheckpoint as Saves, NoSuchCallback
from .own import thing

os.path.join("a")
lightning.pytorch.Trainer(callbacks=[Saves.CHECKPOINT_NAME_LAST])

def late(value: "pl.core.LightningModule"):
    from lightning.pytorch.utilities import rank_zero as zero
    zero.rank_zero_info("x")
    zero.no_such_function()
    return L.Fabric, pl.no_such_part.deeper.still, pl.callbacks.Timer.state_dict
"""

LINE = (
    "| {0} | 16 | `fabric.utilities.nothing`, `pytorch.callbacks.NoSuchCallback`, `pytorch.no_such_part`, "
    "`pytorch.utilities.rank_zero.no_such_function` |"
)


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "part.py").write_text(SOURCE)
    (folder / "data.json").write_text("{}")
    with zipfile.ZipFile(tmp_path / "mine-1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "part.py", "mine/part.py")
    with tarfile.open(tmp_path / "mine-1.3.tar.gz", "w:gz") as sdist:
        sdist.add(folder, "mine-1.3/mine")
    return tmp_path


def test_folders_files_wheels_and_sdists_are_read(sources):
    paths = ["mine", "mine/part.py", "mine-1.2-py3-none-any.whl", "mine-1.3.tar.gz"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "survey.py", *paths], cwd=sources, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["| library | version | names | missing |", "|---|---|---|---|"]
    assert lines[2:] == [LINE.format(one) for one in ("mine | ", "part | ", "mine | 1.2", "mine | 1.3")]
