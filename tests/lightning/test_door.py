"""``python -m fabricamp.lightning script.py`` replaces Lightning's names by fabricamp's, whether Lightning is installed or not."""

from __future__ import annotations

import importlib
import pkgutil
import re
import signal
import subprocess
import sys
import textwrap

import pytest

import fabricamp.lightning
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.lightning.run import HERE
from tests.lightning.test_programs import expected


def run(folder, *command, code=0, text=None):
    """Runs ``command`` in ``folder`` with ``text`` as ``script.py``; returns its stdout and stderr."""
    if text is not None:
        (folder / "script.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def run_forked(monkeypatch):
    """Like ``run`` with the door, in a forked process, where torch is imported and Lightning, as in a new interpreter, is not."""
    for name in [one for one in sys.modules if one.split(".")[0] in NAMES]:
        monkeypatch.delitem(sys.modules, name)

    def run(folder, text, expected=0):
        (folder / "script.py").write_text(textwrap.dedent(text))
        code, out, err = finish(start_forked(folder, *DOOR, "script.py", CUDA_VISIBLE_DEVICES=""))
        assert code == expected, out + err
        return out, err

    return run


DOOR = ("-m", "fabricamp.lightning")
NAMES = ("lightning", "pytorch_lightning", "lightning_fabric")

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


def test_an_import_that_fails_shows_the_scripts_line_alone(tmp_path, run_forked):
    _, shown = run_forked(tmp_path, "from lightning.pytorch.trainer.call import _call_setup_hook", expected=1)
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


def test_a_tool_that_imports_every_module_of_ours_changes_no_import():
    before = [*sys.meta_path], *map(sys.modules.get, NAMES)
    for one in pkgutil.walk_packages(fabricamp.lightning.__path__, "fabricamp.lightning."):
        importlib.import_module(one.name)
    for name in NAMES:
        importlib.import_module(f"fabricamp.lightning._path.{name}")
    assert before == ([*sys.meta_path], *map(sys.modules.get, NAMES))


def test_a_public_style_program_runs_as_written(tmp_path, run_forked):
    """Two processes run the script: the second is an interpreter that the strategy starts, through the door too."""
    name = "ddp_strategy"
    text = (HERE / "programs" / f"{name}.py").read_text()
    assert "fabricamp" not in text
    printed, _ = run_forked(tmp_path, text)
    lines = expected(name).splitlines()
    own = [line for line in printed.splitlines() if line.split(" ")[0] in {one.split(" ")[0] for one in lines}]
    # Losses and sums were recorded on another CPU, whose vectors have another width.
    for line, ours in zip(lines, own, strict=True):
        for word, same in zip(line.split(), ours.split(), strict=True):
            assert word == same or float(word) == pytest.approx(float(same), rel=1e-6, abs=0), (line, ours)


FACTORY = """
    from lightning.pytorch.callbacks import Callback, Timer

    class Counts(Callback):
        pass

    def one():
        return Counts()

    def several():
        return [Timer()]
"""


def test_installed_packages_add_callbacks_to_the_trainers_of_a_lightning_script(tmp_path, run_forked):
    """A script for fabricamp has none of them, and loads none of the modules under Lightning's names."""
    (tmp_path / "adds.py").write_text(textwrap.dedent(FACTORY))
    folder = tmp_path / "adds-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: adds\nVersion: 1.0\n")
    group = "[lightning.pytorch.callbacks_factory]\none = adds:one\nseveral = adds:several\n"
    (folder / "entry_points.txt").write_text(group)
    script = """
        import sys
        import {package} as pl
        pl.callbacks.ModelCheckpoint
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        print([type(callback).__name__ for callback in trainer.callbacks])
        print([one for one in sys.modules if one.startswith("fabricamp.lightning.") and "packages" in one] == [])
    """
    shown, _ = run_forked(tmp_path, script.format(package="lightning.pytorch"))
    assert shown == "['Counts', 'Timer', 'ModelSummary']\nFalse\n"
    shown, _ = run(tmp_path, "script.py", text=script.format(package="fabricamp"))
    assert shown == "['ModelSummary']\nTrue\n"
