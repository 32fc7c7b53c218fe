import sys

import pytest

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
        (["--epochs=1", "train.py"], "--epochs=1 stands where the script has to"),
    ],
)
def test_nothing_to_run_is_said(capsys, arguments, said):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


SPAWNS = """
import sys
import torch.multiprocessing as mp
import amp_C
from apex.optimizers import FusedAdam

def worker(rank, file):
    with open(file, "w") as out:
        print(rank, FusedAdam.__module__, amp_C.multi_tensor_scale.__name__, file=out)

if __name__ == "__main__":
    mp.spawn(worker, nprocs=1, args=(sys.argv[1],))
"""


def test_workers_that_a_script_spawns_find_it_too(script, tmp_path):
    main([script(SPAWNS), str(tmp_path / "out")])
    assert (tmp_path / "out").read_text() == "0 fabricamp.apex.optimizers.fused_adam multi_tensor_scale\n"
