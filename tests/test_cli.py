"""The command as typed by a user: exit codes, one clear line for a mistake, a traceback for a bug."""

from __future__ import annotations

import ast
import email.message
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fabricamp
from fabricamp import Trainer
from fabricamp.cli import EXAMPLES, main
from fabricamp.commands.pages import topics
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish

CONFIG = """
trainer: {accelerator: cpu, devices: 1, max_epochs: 1, enable_progress_bar: false, enable_model_summary: false, logger: true}
module: {_target_: parts_of_command.Net}
data: {_target_: parts_of_command.Data}
"""

PARTS = """
import ctypes, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from fabricamp import ConfigError, DataModule, TrainingModule

class Net(TrainingModule):
    def __init__(self, lr=0.1, fail=""):
        super().__init__()
        self.net, self.lr, self.fail = torch.nn.Linear(2, 1), lr, fail

    def training_step(self, batch, batch_idx):
        if self.fail == "bug":
            raise RuntimeError("a bug in the step")
        if self.fail == "config":
            raise ConfigError("this cannot work; change that")
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        if self.fail == "loud":
            print("from the step")
            os.write(1, b"by number\\n")
            sys.__stdout__.write("by the first object\\n")
            ctypes.CDLL(None).puts(b"by a C library")
            return {"x": batch[0][:, 0], "half": (batch[0][0, 1].bfloat16() / 0, batch_idx, None, "name")}
        return object() if self.fail == "object" else batch[0][:, 0]

    def configure_optimizers(self):
        if self.fail == "early":  # before torch's optimizers import their compiler
            raise ConfigError("this cannot work; change that")
        return torch.optim.SGD(self.parameters(), lr=self.lr)

class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(10.0).view(5, 2)), batch_size=1)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
"""


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    Path("config.yaml").write_text(CONFIG)
    Path("parts_of_command.py").write_text(PARTS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("parts_of_command", None)


def test_fit_writes_the_resolved_configuration_beside_the_logs():
    assert main(["fit", "config.yaml", "module.lr=3e-4"]) == 0
    (copy,) = Path.cwd().rglob("version_0/config.yaml")
    assert "lr: 0.0003" in copy.read_text()
    assert "${" not in copy.read_text()
    assert main(["validate", str(copy), "trainer.logger=false"]) == 0


def test_the_written_configuration_runs_the_run_again(monkeypatch):
    """Runs the written file from another folder, with the same bits."""
    assert main(["fit", "config.yaml", "module.lr=0.03", "seed=7", "trainer.max_epochs=2"]) == 0
    (copy,) = Path.cwd().rglob("version_0/config.yaml")
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["fit", str(copy)]) == 0
    checkpoints = [next(one.rglob("*step=10.ckpt")) for one in (copy.parent, Path.cwd())]
    first, second = (torch.load(one, weights_only=True) for one in checkpoints)
    assert first["global_step"] == second["global_step"] == 10
    assert all(torch.equal(value, second["state_dict"][name]) for name, value in first["state_dict"].items())


def test_help_has_every_argument_of_what_a_file_names(capsys):
    for words in (["fit", "--help"], ["fit", "config.yaml", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        out = capsys.readouterr().out
        parameters = inspect.signature(Trainer).parameters.values()
        names = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        missing = [name for name in names if not re.search(rf"^  {name} \(default .*\): \S", out, flags=re.MULTILINE)]
        assert missing == []
        assert len(names) > 30
        assert ("module (Net):\n  lr (default 0.1)\n  fail (default '')" in out) == (len(words) == 3)
        assert ("data (Data):\n  takes no arguments" in out) == (len(words) == 3)


def test_without_a_logger_no_configuration_is_written():
    # The default folder is the current one, which has the user's own config.yaml.
    assert main(["fit", "config.yaml", "trainer.logger=false"]) == 0
    assert [file.read_text() for file in Path.cwd().rglob("config.yaml")] == [CONFIG]


def test_bench_shows_where_the_time_goes_and_leaves_nothing_but_the_picture(capsys):
    before = set(Path.cwd().rglob("*"))
    words = ["bench", "config.yaml", "--steps", "6", "--out", "step.png", "trainer.accumulate_grad_batches=2"]
    kinds = ", ".join(
        f"{{_target_: fabricamp.callbacks.{name}}}" for name in ("LearningRateMonitor", "ModelCheckpoint")
    )
    kinds += ", {_target_: fabricamp.callbacks.EarlyStopping, monitor: val_loss, mode: max, patience: 1}"
    scheduler = "torch.optim.lr_scheduler.ReduceLROnPlateau(one)"
    text = PARTS.replace(
        "return torch.optim.SGD(self.parameters(), lr=self.lr)", "one = torch.optim.SGD(self.parameters())"
    )
    schedule = f"{{'optimizer': one, 'lr_scheduler': {{'scheduler': {scheduler}, 'monitor': 'val_loss'}}}}"
    Path("parts_of_command.py").write_text(
        text.replace("self.parameters())\n", f"self.parameters())\n        return {schedule}\n")
    )
    assert main([*words, f"trainer.callbacks=[{kinds}]", "trainer.max_epochs=1", "ckpt_path=last"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"eager: \d+\.\d{3} ms a batch \(mean of \d+\)", lines[0])
    assert [line.split()[0] for line in lines[1:]] == ["data", "host", "forward", "backward", "update", "picture:"]
    made = {path.name for path in set(Path.cwd().rglob("*")) - before if "__pycache__" not in str(path)}
    assert made == {"step.png"}
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_bench_measures_a_graph_too(capsys):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    words = ["bench", "config.yaml", "--steps", "20", "trainer.accelerator=gpu"]
    assert main(words) == 0  # torch's SGD keeps its step count on the host
    assert "graph: " in capsys.readouterr().out
    Path("parts_of_command.py").write_text(
        PARTS.replace("torch.optim.SGD", "fabricamp.optimizers.FusedSGD").replace(
            "import torch\n", "import torch\nimport fabricamp.optimizers\n", 1
        )
    )
    sys.modules.pop("parts_of_command", None)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("graph: "))
    assert lines[at].endswith("ms a batch (mean of 20)")
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["data", "host", "graph"]


def test_validate_test_and_predict(capfd, caplog):
    assert main(["validate", "config.yaml"]) == 0
    assert "val_loss" in caplog.text
    assert main(["test", "config.yaml"]) == 0
    assert "test uses the module's initial weights; give ckpt_path=FILE" in caplog.text
    capfd.readouterr()
    assert main(["predict", "config.yaml"]) == 0

    (file,) = Path.cwd().rglob("predictions.pt")
    assert capfd.readouterr().out == f"predictions: {file}\n"
    assert torch.cat(torch.load(file, weights_only=True)["predictions"]).tolist() == [0, 2, 4, 6, 8]


def test_predictions_as_json_are_alone_on_stdout(capfd):
    words = ["--json", "module.fail=loud", "trainer.enable_progress_bar=true", "trainer.limit_predict_batches=2"]
    assert main(["predict", "config.yaml", *words]) == 0
    out, err = capfd.readouterr()
    first = {"x": [0.0], "half": [None, 0, None, "name"]}
    assert json.loads(out) == {"predictions": [first, {"x": [2.0], "half": [None, 1, None, "name"]}]}
    assert all(words in err for words in ("from the step", "by number", "by a C library"))
    assert not list(Path.cwd().rglob("predictions.pt"))


def test_what_json_cannot_hold_is_named(capfd):
    assert main(["predict", "config.yaml", "--json", "module.fail=object"]) == 2
    os.write(1, b"stdout is back")
    out, err = capfd.readouterr()
    assert out == "stdout is back"
    assert "predict_step returned a value of class object, which JSON cannot hold" in err
    assert "leave --json out" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fitt", "config.yaml"], "'fitt' is not a command; did you mean 'fit'?"),
        (["fit", "konfig.yaml"], "did you mean 'config.yaml'?"),
        (["fit", "config.yaml", "trainer.precisn=O1"], "did you mean 'precision'?"),
        (["fit", "config.yaml", "trainer.precision"], "write key=value"),
        (["fit", "config.yaml", "--trainer.precision=O1"], "as in trainer.precision=O1"),
        (["fit", "config.yaml", "trainer.strategy=dpp"], "did you mean 'ddp'?"),
        (["fit", "config.yaml", "module.fail=config"], "this cannot work; change that"),
        (["fit", "--config", "config.yaml"], "without --config, before the overrides"),
        (["--verson"], "fabricamp has no option '--verson'; did you mean '--version'?"),
        (["plot", "--metrics", "loss", "run"], "plot has no option '--metrics'; did you mean '--metric'?"),
        (["plot", "run", "--smoth=0.3"], "plot has no option '--smoth'; did you mean '--smooth'?"),
        (["runs", "--hlp"], "runs has no option '--hlp'; did you mean '--help'?"),
        (["verify", "--batchs", "3", "train.py"], "verify has no option '--batchs'; did you mean '--batches'?"),
        (["export", "last.ckpt", "--too", "a.pt"], "export has no option '--too'; did you mean '--to'?"),
        (["doctor", "--mesure"], "doctor has no option '--mesure'; did you mean '--measure'?"),
        (["predict", "config.yaml", "--jsn"], "predict has no option '--jsn'; did you mean '--json'?"),
        (["bench", "config.yaml", "--step", "3"], "bench has no option '--step'; did you mean '--steps'?"),
        (["bench", "config.yaml", "--steps", "0"], "--steps 0 is not allowed"),
        (["bench", "config.yaml", "--out", "step.txt"], "give a file that ends in .png"),
        (["bench", "config.yaml", "trainer.devices=2"], "torchrun --nproc-per-node 2"),
        (["bench", "config.yaml", "trainer.limit_train_batches=0"], "ended within its first 30 batches"),
    ],
)
def test_a_mistake_gets_one_line_and_code_2(words, message, capfd):
    assert main(words) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_without_data_is_refused_before_it_begins(capfd):
    Path("parts_of_command.py").write_text(
        PARTS
        + """
class Sets(Net):
    def setup(self, stage):
        self.train_dataloader = Data().train_dataloader
"""
    )
    Path("config.yaml").write_text(CONFIG.replace("data: {_target_: parts_of_command.Data}", ""))
    for command, hook in (
        ("fit", "train"),
        ("validate", "val"),
        ("test", "test"),
        ("predict", "predict"),
        ("bench", "train"),
    ):
        assert main([command, "config.yaml"]) == 2
        error = capfd.readouterr().err
        assert error.startswith(
            f"fabricamp: the configuration has no section data, and Net has no {hook}_dataloader; write data:"
        )
        assert error.count("\n") == 1
    assert list(Path.cwd().glob("*/version_*")) == []
    assert main(["fit", "config.yaml", "module._target_=parts_of_command.Sets"]) == 0


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "trainer.callbacks.0.patience=3",
            "trainer.callbacks is not in the file, so it has no element 0 to change; give",
        ),
        (
            "data.sizes.1=3",
            "data.sizes is not in the file, so it has no element 1 to change; give it as a whole, as in 'data.sizes=[",
        ),
    ],
)
def test_an_element_of_no_list_cannot_be_changed(word, says, capfd):
    assert main(["fit", "config.yaml", word]) == 2
    assert says in capfd.readouterr().err
    if word.startswith("trainer"):
        assert main(["fit", "config.yaml", "trainer.callbacks=[]", word]) == 2
        assert "trainer.callbacks is an empty list, so it has no element 0" in capfd.readouterr().err


@pytest.mark.parametrize("word", ["best", "last"])
def test_a_word_for_a_checkpoint_that_no_run_has_saved_gets_one_line_and_code_2(word, capfd):
    assert main(["predict", "config.yaml", f"ckpt_path={word}"]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"fabricamp: ckpt_path={word!r}: no ModelCheckpoint of this Trainer has saved one yet")
    assert error.count("\n") == 1


def test_a_checkpoint_that_is_not_there_gets_one_line_and_code_2(capfd):
    for command in (["fit", "config.yaml", "ckpt_path=missing.ckpt"], ["export", "missing.ckpt", "--to", "a.pt"]):
        assert main(command) == 2
        error = capfd.readouterr().err
        assert "'missing.ckpt' is not there" in error
        assert "Traceback" not in error


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_misspelt_checkpoint_word_is_named(command, capfd):
    """tests/trainer/test_ckpt_path.py tests the Trainer's own check of these words."""
    for given, meant in (("bst", "best"), ("lats", "last"), ("autoo", "auto")):
        assert main([command, "config.yaml", f"ckpt_path={given}"]) == 2
        named = f"ckpt_path={given!r} is not there; did you mean {meant!r}?" in capfd.readouterr().err
        assert named is (command == "fit" or meant != "auto")
    for path in ("bests/bst", "bst.ckpt", "weights"):  # a folder, a suffix, nothing near
        assert main([command, "config.yaml", f"ckpt_path={path}"]) == 2
        error = capfd.readouterr().err
        assert f"{path!r} is not there; give the path of a checkpoint, or ckpt_path=last" in error


def test_what_is_not_there_names_the_checkpoints_that_are(capfd):
    for _ in range(2):
        assert main(["fit", "config.yaml"]) == 0
    first, second = (f"fabricamp_logs/version_{run}/checkpoints/epoch=0-step=5.ckpt" for run in range(2))
    os.utime(first, (1, 1))
    capfd.readouterr()
    in_its_folder = second.replace("epoch=0", "epoch=9")
    for path, found in (
        ("last.ckpt", f"{second}, {first}"),
        (in_its_folder, second),
        ("nowhere/x.ckpt", f"{second}, {first}"),
    ):
        for command in (["test", "config.yaml", f"ckpt_path={path}"], ["export", path, "--to", "a.pt"]):
            assert main(command) == 2
            assert f"{path!r} is not there; there are {found};" in capfd.readouterr().err.replace(
                "there is ", "there are "
            )


def test_help_names_what_a_run_by_default_writes():
    for _ in range(2):
        assert main(["fit", "config.yaml"]) == 0
    words = {word.strip("'") for word in EXAMPLES.split()}
    for path in (one.removeprefix("ckpt_path=") for one in words if "fabricamp_logs" in one):
        pattern = re.sub(r"\d+", "[0-9]*", path) if path.endswith(".ckpt") else path
        assert list(Path.cwd().glob(pattern)), path
    assert "last.ckpt" not in words
    (word,) = (
        one.removeprefix("ckpt_path=") for one in words if one.startswith("ckpt_path=") and one != "ckpt_path=auto"
    )
    assert main(["test", "config.yaml", f"ckpt_path={word}"]) == 0


def test_a_run_that_cannot_begin_leaves_no_folder():
    assert main(["fit", "config.yaml", "module.fail=early"]) == 2
    assert list(Path.cwd().glob("*/version_*")) == []


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_evaluation_writes_its_configuration_too(command):
    assert main([command, "config.yaml", "module.lr=3e-4"]) == 0
    (copy,) = Path.cwd().rglob("version_0/config.yaml")
    assert "lr: 0.0003" in copy.read_text()


def test_an_interruption_is_code_130_and_no_traceback(monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fabricamp.config.read_config", interrupted)
    assert main(["fit", "config.yaml"]) == 130
    assert capfd.readouterr().err == ""


def test_nothing_given_prints_the_help(capfd):
    assert main([]) == 2
    out = capfd.readouterr().out
    assert "fit" in out
    assert "doctor" in out
    assert "_target_" in out


@pytest.mark.parametrize("words", [["--help"], ["fit", "--help"], ["fit", "config.yaml", "--help"], ["--version"]])
def test_help_and_version_end_well(words, capfd):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "fabricamp" in capfd.readouterr().out


@pytest.mark.parametrize("words", [["fit"], ["doctor", "--unlike"], ["plot"], ["verify", "--batches", "x", "y"]])
def test_usage_errors_have_code_2(words, capfd):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_options_of_a_script_are_its_own(tmp_path, capfd):
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    for options in ([], ["--batches", "3"]):
        main(["verify", *options, str(tmp_path / "train.py"), "--batchs=2"])
        assert "has no option" not in capfd.readouterr().err


def test_a_bug_has_its_traceback_and_code_1():
    program = Path(fabricamp.__file__).with_name("__main__.py")
    code, _, err = finish(start_forked(Path.cwd(), str(program), "fit", "config.yaml", "module.fail=bug"))
    assert code == 1
    assert "Traceback" in err
    assert "a bug in the step" in err
    assert not list(Path.cwd().rglob("*.ckpt*"))


def test_the_console_script_is_the_same_command():
    """tests/examples/test_readme.py tests it in a new interpreter and in two processes."""
    script = Path(sys.executable).with_name("fabricamp")
    if not script.exists():
        pytest.skip("fabricamp is not installed here, only importable")
    code, _, err = finish(start_forked(Path.cwd(), str(script), "fit", "config.yaml"))
    assert code == 0, err
    assert list(Path.cwd().rglob("version_0/config.yaml"))


@pytest.mark.parametrize(
    ("command", "words"),
    [("export", "varies where the example has 2 rows or more"), ("runs", "In a pipe or a file: a line with the heads")],
)
def test_help_says_what_a_user_would_try_out(command, words, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert words in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict", "bench"])
def test_a_command_shows_its_own_examples(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    shown = [line for line in out.splitlines() if line.startswith("  fabricamp ")]
    assert shown
    assert all(line.startswith(f"  fabricamp {command} config.yaml") for line in shown)
    assert "exit codes: 0 done" in out


def test_the_pages_of_help_have_words_for_their_links(monkeypatch, capsys):
    relative = re.compile(r"\]\((?!\w+:)")
    for topic, page in topics().items():
        assert main(["help", topic]) == 0
        shown = capsys.readouterr().out
        without_code = re.sub(r"^```.*?^```|`[^`\n]+`", "", shown, flags=re.DOTALL | re.MULTILINE)
        assert relative.findall(without_code) == [], topic
        named = re.findall(r"`fabricamp help ([\w-]+)`", shown)
        assert set(named) <= {*topics(), "TOPIC"}, topic
        # Code is as it was.
        code = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
        assert code.findall(shown) == code.findall(page.read_text())
    assert main(["help", "tutorial"]) == 0
    shown = capsys.readouterr().out
    assert "From a loop of your own: `fabricamp help loop`." in shown
    assert "(which one? `fabricamp help precision`)" in shown
    assert "Complete examples: examples/README.md (in the source)." in shown
    urls = {"Project-URL": "Source, https://host/owner/fabricamp", "Version": "1.2"}
    metadata = email.message.Message()
    for name, value in urls.items():
        metadata[name] = value
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    assert main(["help", "tutorial"]) == 0
    assert "examples: https://host/owner/fabricamp/blob/v1.2/examples/README.md." in capsys.readouterr().out


def test_help_shows_the_pages_that_messages_name(capsys):
    package = Path(fabricamp.__file__).parent
    named = set()
    for file in (*package.rglob("*.py"), *package.rglob("*.toml")):
        named.update(re.findall(r"fabricamp help ([a-z][\w-]*)", file.read_text()))
    assert {"from-lightning", "from-apex"} <= named
    for topic in sorted(named):
        assert main(["help", topic]) == 0
        assert capsys.readouterr().out.startswith("# ")
    assert main(["help"]) == 0
    listed = capsys.readouterr().out
    headings = [line for line in listed.splitlines()[1:] if line and line[0] != " "]
    assert headings == ["Start here", "How-to", "In depth", "Guides", "Reference", "Explanation"]
    assert re.search(r"^Start here\n  tutorial +Tutorial.*\n  questions +What people ask\n\n", listed, re.MULTILINE)
    assert re.search(r"^  slow-data +Slow data$", listed, re.MULTILINE)
    assert sorted(re.findall(r"^  (\S+)", listed, re.MULTILINE)) == sorted(topics())
    assert main(["help", "guides/loop.md"]) == 0  # as pages name each other
    assert "From a loop" in capsys.readouterr().out
    assert main(["help", "slow-dat"]) == 2
    assert "there is no page on 'slow-dat'; did you mean slow-data?" in capsys.readouterr().err
    assert main(["help", "slow-dtaa"]) == 2
    assert "there is no page on 'slow-dtaa'; did you mean 'slow-data'?" in capsys.readouterr().err
    assert main(["help", "EarlyStopping"]) == 2
    assert re.search("no page on 'EarlyStopping'; it is mentioned in .*validation", capsys.readouterr().err)
    assert main(["help", "zzzz"]) == 2
    assert "mentioned" not in capsys.readouterr().err


def test_no_message_names_a_file_that_only_a_clone_has():
    package = Path(fabricamp.__file__).parent
    for file in package.rglob("*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        pages = [node.value for node in texts if id(node) not in docstrings and re.search(r"\w\.md\b", node.value)]
        assert pages == [], file
    assert not re.search(r"\w\.md\b", (package / "arguments" / "migration.toml").read_text())


def test_help_on_a_terminal_shows_colours_and_not_their_codes(tmp_path):
    pytest.importorskip("pty")
    environment = {key: value for key, value in os.environ.items() if key not in ("LESS", "PAGER", "NO_COLOR")}
    pager = tmp_path / "less"
    pager.write_text('#!/bin/sh\ncat > /dev/null\necho "options: $LESS"\n')
    pager.chmod(0o755)
    environment |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "TERM": "xterm", "PAGER": str(pager)}
    command = f"import pty; pty.spawn([{sys.executable!r}, '-m', 'fabricamp', 'help', 'precision'])"
    run = subprocess.run(
        [sys.executable, "-c", command], check=False, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "options: -R" in run.stdout, run.stdout + run.stderr
