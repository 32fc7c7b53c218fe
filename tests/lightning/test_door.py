"""``python -m fabricamp.lightning script.py`` replaces Lightning's names by fabricamp's, whether Lightning is installed or not."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fabricamp.lightning
from tests.lightning.run import HERE
from tests.lightning.test_programs import differences, expected


def run(folder, *command, code=0, text=None):
    """Runs ``command`` in ``folder`` with ``text`` as ``script.py``; returns its stdout and stderr."""
    if text is not None:
        (folder / "script.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


DOOR = ("-m", "fabricamp.lightning")

ALL_FORMS = """
    import sys
    import lightning as L
    import lightning.pytorch as pl
    import pytorch_lightning
    from lightning import Callback, LightningModule as One
    from lightning.pytorch import LightningModule, callbacks
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint as Deep
    from pytorch_lightning.callbacks.progress.rich_progress import RichProgressBar
    from pytorch_lightning.utilities.types import STEP_OUTPUT
    import importlib.util, fabricamp
    assert pl is L.pytorch is not pytorch_lightning and pl is not fabricamp
    assert One is LightningModule is pl.LightningModule is pytorch_lightning.LightningModule is fabricamp.TrainingModule
    assert Deep is ModelCheckpoint is callbacks.ModelCheckpoint is fabricamp.callbacks.ModelCheckpoint
    assert importlib.import_module("lightning.pytorch.trainer.trainer").Trainer is fabricamp.Trainer
    assert L.Trainer is fabricamp.Trainer and L.pytorch.callbacks.EarlyStopping is EarlyStopping
    assert importlib.util.find_spec("lightning.pytorch.trainer.call") is None and importlib.util.find_spec("lightning.app") is None
    assert fabricamp.__spec__.name == "fabricamp" and fabricamp.__name__ == "fabricamp"
    assert not [name for name, one in sys.modules.items() if "site-packages/lightning/" in str(getattr(one, "__file__", ""))]
    for name in ("lightning.pytorch.trainer.call", "pytorch_lightning.utilities.migration", "lightning.pytorch.non"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            print(error)
    for arguments in ({"gpus": 2}, {"resume_from_checkpoint": "x.ckpt"}, {"amp_level": "O2"}):
        try:
            L.Trainer(**arguments)
        except TypeError as error:
            print(error)
    print(L.Trainer(precision=16, accelerator="cpu", logger=False).precision)
"""


NOT_INSTALLED = """
    import sys

    class Nowhere:
        def find_spec(self, name, *_):
            here = [one for one in sys.path if one.endswith("_path")]  # of the alias, in a spawned process
            if name in ("lightning", "pytorch_lightning", "lightning_fabric") and not here:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Nowhere())
"""


@pytest.mark.parametrize("installed", [True, False])
def test_every_form_of_import_and_what_is_not_offered(tmp_path, monkeypatch, installed):
    if not installed:
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(NOT_INSTALLED))  # Python imports it when it starts
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(fabricamp.__file__).parents[1]}")
        assert "No module named 'lightning'" in run(tmp_path, "-c", "import lightning", code=1)[1]
    shown, _ = run(tmp_path, *DOOR, "script.py", text=ALL_FORMS)
    lines = shown.splitlines()
    assert lines[0].startswith("Lightning's trainer.call is not offered by fabricamp: override the hooks")
    assert lines[1].startswith("Lightning's utilities.migration is not offered by fabricamp: ")
    assert lines[2] == "No module named 'lightning.pytorch.non'"
    assert "devices=2" in lines[3]
    assert "ckpt_path" in lines[4]
    assert "precision" in lines[5]
    assert lines[6] == "16-mixed"


LOOKS = """
    import sys, os
    print(sys.argv, __name__, __file__, __spec__ and __spec__.name, __package__)
    print([one for one in sys.path if one and "_path" not in one][:1], sys.modules["__main__"].__dict__ is globals())
    import beside
    sys.exit(int(sys.argv[1]))
"""


def test_a_script_sees_what_python_shows_it(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "beside.py").write_text("print('imported')")
    (tmp_path / "inner" / "script.py").write_text(textwrap.dedent(LOOKS))
    script = "inner/script.py"
    assert run(tmp_path, *DOOR, script, "3", "--x", code=3) == run(tmp_path, script, "3", "--x", code=3)


def test_a_module_sees_what_python_shows_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    for name, text in {"__init__": "", "part": LOOKS, "__main__": LOOKS}.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "beside.py").write_text("print('imported')")
    for name in ("package.part", "package"):
        assert run(tmp_path, *DOOR, "-m", name, "4", code=4) == run(tmp_path, "-m", name, "4", code=4)


ERRORS = {
    "raise": "def f():\n    return 1 / 0\nf()",
    "syntax": "1 1",
    "exit": "import sys\nsys.exit('told')",
    "hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', kind.__name__, trace.tb_lineno)\n1 / 0",
}


@pytest.mark.parametrize("name", ERRORS)
def test_it_ends_as_python_ends_it(tmp_path, name):
    (tmp_path / "script.py").write_text(ERRORS[name])
    plain = run(tmp_path, "script.py", code=1)
    assert run(tmp_path, *DOOR, "script.py", code=1) == plain
    assert plain != ("", "")


def test_an_interrupt_is_told_by_the_signal(tmp_path):
    text = """
        import atexit
        atexit.register(print, "left")
        raise KeyboardInterrupt
    """
    printed, shown = run(tmp_path, *DOOR, "script.py", code=-signal.SIGINT, text=text)
    assert printed == "left\n"
    assert shown.splitlines()[-1] == "KeyboardInterrupt"
    assert shown.count("Traceback") == 1


def test_an_import_that_fails_shows_the_scripts_line_alone(tmp_path):
    _, shown = run(
        tmp_path, *DOOR, "script.py", code=1, text="from lightning.pytorch.trainer.call import _call_setup_hook"
    )
    assert re.findall(r'File "(.*?)", line', shown) == [str(tmp_path / "script.py")]
    assert "ModuleNotFoundError: Lightning's trainer.call is not offered by fabricamp" in shown


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ((), 2, "usage: python -m fabricamp.lightning script.py"),
        (("none.py",), 2, "there is no file 'none.py'"),
        (("--lr=1", "train.py"), 2, "--lr=1 is given before the script"),
        ((".",), 2, "a folder without __main__.py"),
        (("none",), 2, "for a module write -m none"),
        (("-m", "none.of_these"), 2, "Python's path has no module 'none', the package of none.of_these"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path, command, code, words):
    assert words in run(tmp_path, *DOOR, *command, code=code)[1]


SPAWNS = """
    import multiprocessing
    import lightning.pytorch as pl

    def name(_):
        return pl.__name__

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as workers:  # a loader's workers are started so
            print(workers.map(name, range(4)))
"""


NAMES = ("lightning", "pytorch_lightning", "lightning_fabric")


def test_a_tool_that_imports_every_module_of_ours_changes_no_import():
    before = [*sys.meta_path], *map(sys.modules.get, NAMES)
    for one in pkgutil.walk_packages(fabricamp.lightning.__path__, "fabricamp.lightning."):
        importlib.import_module(one.name)
    for name in NAMES:
        importlib.import_module(f"fabricamp.lightning._path.{name}")
    assert before == ([*sys.meta_path], *map(sys.modules.get, NAMES))


def test_spawned_workers_find_the_names_too(tmp_path):
    assert run(tmp_path, *DOOR, "script.py", text=SPAWNS)[0].strip() == str(["lightning.pytorch"] * 4)


def test_a_public_style_program_runs_as_written(tmp_path):
    """Two processes run the script."""
    name = "ddp_strategy"
    text = (HERE / "programs" / f"{name}.py").read_text()
    assert "fabricamp" not in text
    printed, _ = run(tmp_path, *DOOR, "script.py", text=text)
    lines = expected(name).splitlines()
    own = [line for line in printed.splitlines() if line.split(" ")[0] in {one.split(" ")[0] for one in lines}]
    different = list(differences("\n".join(lines), "\n".join(own)))
    assert not different, "".join(different)


FACTORY = """
    from lightning.pytorch.callbacks import Callback, Timer

    class Counts(Callback):
        pass

    def one():
        return Counts()

    def several():
        return [Timer()]
"""


def test_installed_packages_add_callbacks_to_the_trainers_of_a_lightning_script(tmp_path):
    (tmp_path / "adds.py").write_text(textwrap.dedent(FACTORY))
    folder = tmp_path / "adds-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: adds\nVersion: 1.0\n")
    group = "[lightning.pytorch.callbacks_factory]\none = adds:one\nseveral = adds:several\n"
    (folder / "entry_points.txt").write_text(group)
    script = """
        import {package} as pl
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        print([type(callback).__name__ for callback in trainer.callbacks])
    """
    shown, _ = run(tmp_path, *DOOR, "script.py", text=script.format(package="lightning.pytorch"))
    assert shown == "['Counts', 'Timer', 'ModelSummary']\n"
    shown, _ = run(tmp_path, "script.py", text=script.format(package="fabricamp"))
    assert shown == "['ModelSummary']\n"
