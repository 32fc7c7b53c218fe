import os
import sys
from pathlib import Path

import pytest

import fabricamp.apex
from fabricamp._utils.script import end_as_python_does
from fabricamp.apex.__main__ import main

pytestmark = pytest.mark.usefixtures("as_found")

PARSES = """
import argparse, os, sys
from apex.optimizers import FusedAdam
parser = argparse.ArgumentParser()
parser.add_argument({option!r}, default=-1, type=int)
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()
print("rank", args.local_rank, "epochs", args.epochs, __name__, sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        file = tmp_path / name
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
@pytest.mark.parametrize("given", [["--local_rank=3"], ["--local-rank=3"], ["--local-rank", "3"]])
def test_rank_in_front_of_the_script_reaches_its_parser(script, capsys, option, given):
    main([*given, script(PARSES.format(option=option)), "--epochs", "2"])
    assert capsys.readouterr().out == "rank 3 epochs 2 __main__ ['--epochs', '2']\n"


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
@pytest.mark.parametrize("given", [["--local_rank=3"], ["--local-rank=3"], ["--local_rank", "3"]])
def test_rank_behind_the_script_is_spelled_as_its_parser_does(script, capsys, option, given):
    main([script(PARSES.format(option=option)), *given])
    assert capsys.readouterr().out.startswith("rank 3 epochs 1")


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_torchruns_variable_reaches_the_parser(script, capsys, monkeypatch, option):
    monkeypatch.setenv("LOCAL_RANK", "2")
    main([script(PARSES.format(option=option))])
    assert capsys.readouterr().out.startswith("rank 2 ")


def test_the_command_line_wins_over_the_variable(script, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    main([script(PARSES.format(option="--local_rank")), "--local_rank", "1"])
    assert capsys.readouterr().out.startswith("rank 1 ")


def test_without_a_launcher_a_script_has_its_default(script, capsys):
    main([script(PARSES.format(option="--local_rank"))])
    assert capsys.readouterr().out.startswith("rank -1 ")


def test_a_script_that_reads_the_variable_is_not_given_an_option(script, capsys):
    text = "import argparse, os\nargparse.ArgumentParser().parse_args()\nprint(os.environ['LOCAL_RANK'])\n"
    main(["--local-rank=1", script(text)])
    assert capsys.readouterr().out == "1\n"


def test_a_list_of_the_scripts_own_is_left_alone(script, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    text = PARSES.format(option="--local_rank").replace("parse_args()", "parse_args(['--epochs', '7'])")
    main([script(text), "--something"])
    assert capsys.readouterr().out.startswith("rank -1 epochs 7")


def test_modules_are_run_by_name(script, capsys, monkeypatch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    script(PARSES.format(option="--local_rank"), "package/train.py")
    monkeypatch.syspath_prepend(tmp_path)
    main(["--local-rank=1", "-m", "package.train", "--epochs", "4"])
    assert capsys.readouterr().out == "rank 1 epochs 4 __main__ ['--epochs', '4']\n"


def test_a_script_finds_its_neighbours(script, capsys):
    script("VALUE = 5\n", "neighbour_of_script.py")
    main([script("from neighbour_of_script import VALUE\nprint(VALUE)\n")])
    assert capsys.readouterr().out == "5\n"
    del sys.modules["neighbour_of_script"]


def test_argparse_is_put_back(script):
    import argparse

    before = argparse.ArgumentParser.parse_known_args
    with pytest.raises(ZeroDivisionError):
        main([script("1 / 0\n")])
    assert argparse.ArgumentParser.parse_known_args is before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage:"),
        (["--local-rank=1"], "usage:"),
        (["--local_rank"], "usage:"),
        (["missing.py"], "no file 'missing.py'"),
        (["missing"], "for a module write -m missing"),
        (["-m", "missing"], "no module 'missing'"),
        (["-m", "missing.train"], "no module 'missing', the package of missing.train"),
        (["-m", "fabricamp.apexx"], "no module 'apexx' in 'fabricamp'; did you mean 'apex'?"),
        (["."], "a folder without __main__.py"),
        (["--epochs=1", "train.py"], "--epochs=1 is given before the script"),
    ],
)
def test_nothing_to_run_is_said(capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_a_package_whose_own_import_fails_shows_it(script, monkeypatch, tmp_path):
    (tmp_path / "broken_package").mkdir()
    script("import not_there_at_all\n", "broken_package/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        main(["-m", "broken_package.train"])


@pytest.mark.filterwarnings(
    "ignore:Unable to enable fault handler"
)  # torch's warning about the stderr that pytest captures
def test_torchrun_is_told_of_an_error(script, monkeypatch, tmp_path, capsys):
    """The traceback on the terminal has only the script's lines."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["fabricamp.apex", script("1 / 0\n")])
    with pytest.raises(SystemExit) as raised:
        end_as_python_does(main, "no hook")
    assert raised.value.code == 1
    assert "division by zero" in (tmp_path / "error.json").read_text()
    lines = capsys.readouterr().err.splitlines()
    assert [one for one in lines if "File" in one] == [f'  File "{tmp_path}/train.py", line 1, in <module>']


def test_a_folder_is_run_by_its_main(script, capsys, tmp_path):
    (tmp_path / "folder").mkdir()
    script("import beside_main, sys\nprint(sys.argv, __file__)\n", "folder/__main__.py")
    script("print('imported')\n", "folder/beside_main.py")
    main([str(tmp_path / "folder"), "--x"])
    folder = f"{tmp_path}/folder"
    assert capsys.readouterr().out == f"imported\n['{folder}', '--x'] {folder}/__main__.py\n"
    del sys.modules["beside_main"]


@pytest.mark.parametrize("given", [0, 7, "a message", None])
def test_the_exit_code_is_the_scripts(script, given):
    with pytest.raises(SystemExit) as raised:
        main([script(f"import sys\nsys.exit({given!r})\n")])
    assert raised.value.code == given


def test_an_interrupt_reaches_the_shell(script):
    with pytest.raises(KeyboardInterrupt):
        main([script("raise KeyboardInterrupt\n")])


def test_a_script_that_changes_the_folder_still_knows_its_own(script, capsys, monkeypatch, tmp_path):
    file = script(f"import os\nos.chdir({str(tmp_path.parent)!r})\nprint(open(__file__).read()[:9])\n")
    monkeypatch.chdir(tmp_path)
    main([file.removeprefix(f"{tmp_path}/")])
    assert capsys.readouterr().out == "import os\n"


def test_help_behind_a_script_is_the_scripts(script, capsys):
    with pytest.raises(SystemExit) as raised:
        main([script(PARSES.format(option="--local_rank")), "--help"])
    assert raised.value.code == 0
    assert "--epochs EPOCHS" in capsys.readouterr().out


SPAWNS = """
import sys
import torch.multiprocessing as mp
import amp_C
from apex.mlp import MLP
from apex.optimizers import FusedAdam

def worker(rank, file):
    with open(file, "w") as out:
        print(rank, FusedAdam.__module__, MLP.__module__, amp_C.multi_tensor_scale.__name__, file=out)

if __name__ == "__main__":
    mp.spawn(worker, nprocs=1, args=(sys.argv[1],))
"""


def test_workers_that_a_script_spawns_find_it_too(script, tmp_path):
    main([script(SPAWNS), str(tmp_path / "out")])
    assert (tmp_path / "out").read_text() == "0 apex.optimizers.fused_adam apex.mlp.mlp multi_tensor_scale\n"


STARTS = """
import subprocess, sys
found = "from importlib.util import find_spec; print(find_spec('apex').origin, find_spec('amp_C').origin)"
print(subprocess.check_output([sys.executable, "-c", found], text=True))
"""


def test_processes_that_a_script_starts_find_it_too(script, capsys, monkeypatch):
    """Child processes find the modules, like the worker above, which imports one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path[1:]))
    main([script(STARTS)])
    here = Path(fabricamp.apex.__file__).parent / "_extensions"
    assert capsys.readouterr().out.split() == [f"{here}/apex.py", f"{here}/amp_C.py"]
