"""Messages go to the logger ``fabricamp``, as plain lines to stderr if logging is not configured; stdout is the user's."""

from __future__ import annotations

import ast
import json
import logging
import re
import textwrap
import traceback
from pathlib import Path

import pytest

from fabricamp._utils.optional_packages import load
from fabricamp.errors import NotInstalledError
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish
from tests.small import Classifier, loader, quiet_trainer

ROOT = Path(__file__).parents[1]
PROGRAM = """
import logging, logging.config, sys
{before}
from fabricamp import Callback, Trainer
from tests.small import Classifier, loader

class Misspelt(Callback):
    def on_train_epoch_ends(self, trainer, module):
        raise AssertionError

def fit():
    Trainer(accelerator="cpu", logger=False, callbacks=[Misspelt()], {options}).fit(Classifier(), loader(16), loader(8))

if __name__ == "__main__":
    fit()
    {between}
    print("mine")
"""
SAID = [
    "CPU, 1 process, strategy single, precision O0",
    "Misspelt.on_train_epoch_ends is not a hook; did you mean 'on_train_epoch_end'?",
    "Checkpoints: checkpoints",
    "Name  Type        Params  Trainable",
    "epoch 1/1  step 4",
    "Ended at step 4: max_epochs=1 reached",
]
"""The beginnings of the expected lines: information, a warning, a summary, a bar and the end."""


def ran(folder, *, before="", between="", options="devices=1, max_epochs=1", start=start_forked):
    """Runs the program; returns its stdout and stderr."""
    before, between = textwrap.dedent(before), between.replace("\n", "\n    ")
    (folder / "program.py").write_text(PROGRAM.format(before=before, between=between, options=options))
    code, out, err = finish(start(folder, "program.py", CUDA_VISIBLE_DEVICES=""))
    assert code == 0, err
    return out, err


def times(text, before=""):
    """Returns for each expected line the number of lines that begin with it, after the prefix ``before``."""
    return [sum(line.startswith(before.format(line) + said) for line in text.splitlines()) for said in SAID]


ONCE, NEVER = [1] * len(SAID), [0] * len(SAID)


def test_without_a_configuration_it_goes_to_stderr_in_plain_lines(tmp_path):
    out, err = ran(tmp_path)
    assert out == "mine\n"
    assert err.count("fabricamp: ") == 1
    assert times(err.replace("fabricamp: ", "")) == ONCE


@pytest.mark.parametrize(
    "before",
    [
        "logging.getLogger().setLevel(logging.ERROR)",
        "logging.basicConfig(level=logging.ERROR)",
        "logging.getLogger('fabricamp').addHandler(logging.NullHandler())",
    ],
)
def test_the_usual_means_silence_it(tmp_path, before):
    assert ran(tmp_path, before=before) == ("mine\n", "")


HYDRA = """
logging.config.dictConfig({{
    "version": 1, "disable_existing_loggers": False,
    "formatters": {{"simple": {{"format": "[%(name)s][%(levelname)s] - %(message)s"}}}},
    "handlers": {{
        "console": {{"class": "logging.StreamHandler", "formatter": "simple", "stream": "ext://sys.stdout"}},
        "file": {{"class": "logging.FileHandler", "formatter": "simple", "filename": "job.log"}},
    }},
    "root": {{"level": "INFO", "handlers": ["console", "file"]}},
}})
""".replace("{{", "{").replace("}}", "}")


def plain(text):
    """Returns the lines without the prefixes of their format."""
    for prefix in ("[fabricamp][INFO] - ", "[fabricamp][WARNING] - ", "INFO:fabricamp:", "WARNING:fabricamp:"):
        text = text.replace(prefix, "")
    return text


@pytest.mark.parametrize("when", ["before the import", "between two fits"])
def test_a_configured_root_gets_each_line_once_and_stderr_none(tmp_path, when):
    early = when == "before the import"
    between = "" if early else HYDRA + "fit()"
    out, err = ran(tmp_path, before=HYDRA if early else "", between=between)
    assert times(plain(out)) == times(plain((tmp_path / "job.log").read_text())) == ONCE
    assert times(err.replace("fabricamp: ", "")) == (NEVER if early else ONCE)
    assert (err == "") == early


@pytest.mark.parametrize("name", ["", "fabricamp"])
def test_a_handler_without_a_level_gets_each_line_once(tmp_path, name):
    out, err = ran(tmp_path, before=f"logging.getLogger({name!r}).addHandler(logging.FileHandler('job.log'))")
    assert (out, err) == ("mine\n", "")
    assert times((tmp_path / "job.log").read_text()) == ONCE


def test_no_message_brings_the_prefix_that_the_handler_writes():
    calls = {"debug", "info", "warning", "error", "exception", "log", "say_once"}
    found = []
    for file in (ROOT / "fabricamp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in calls:
                texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                found += [(file, node.lineno) for text in texts if str(text).startswith("fabricamp: ")]
    assert found == []


def test_several_processes_say_it_once(tmp_path):
    options = "devices=2, strategy='ddp_notebook', max_epochs=1"
    _, err = ran(tmp_path, options=options)
    first = "CPU, 2 forked processes, strategy ddp, precision O0"
    assert [one.replace("fabricamp: ", "") for one in err.splitlines()].count(first) == 1
    assert times(err.replace("fabricamp: ", ""))[1:4] == ONCE[1:4]


def test_under_pytest_its_records_have_each_line_once(caplog, capfd):
    quiet_trainer(enable_progress_bar=True, enable_model_summary=True, max_epochs=1).fit(Classifier(), loader(16))
    said = [record.getMessage() for record in caplog.records]
    assert [sum(line.startswith(start) for line in said) for start in (SAID[0], *SAID[3:])] == [1, 1, 1, 1]
    assert {record.name for record in caplog.records} == {"fabricamp"}
    assert capfd.readouterr() == ("", "")


PREDICT = """
import json
from tests.small import Classifier, loader, quiet_trainer
trainer = quiet_trainer(enable_progress_bar=True)
trainer.test(Classifier(), loader(8))
print(json.dumps([one.tolist() for one in trainer.predict(Classifier(), loader(8))]))
"""


def test_what_a_program_prints_is_alone_in_its_pipe(tmp_path):
    (tmp_path / "predict.py").write_text(PREDICT)
    code, out, err = finish(start_forked(tmp_path, "predict.py"))
    assert code == 0, err
    assert len(json.loads(out)) == 2
    lines = err.splitlines()
    assert sum("test_loss" in line for line in lines) == 1
    assert [line.split()[0] for line in lines if line[0].isalpha()] == ["test", "predict"]


class Gone:
    """A stream that raises because its reader has closed it."""

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error

    def isatty(self):
        return False


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_reader_that_is_gone_is_no_reason_to_fail(error, tmp_path):
    (tmp_path / "gone.py").write_text(
        "import sys; from tests.small import *; from tests.test_messages import Gone\n"
        f"sys.stderr = Gone({error!r})\n"
        "trainer = quiet_trainer(enable_progress_bar=True, max_epochs=2)\n"
        "trainer.fit(Classifier(), loader(16)); print(trainer.state.status)\n"
        "sys.stderr = sys.__stderr__"
    )
    code, out, _ = finish(start_forked(tmp_path, "gone.py"))
    assert (code, out) == (0, "finished\n")


def test_on_a_terminal_a_line_is_broken_between_words(monkeypatch, capsys):
    (handler,) = (
        one for one in logging.getLogger("fabricamp").handlers if type(one).__module__ == "fabricamp.messages"
    )
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    monkeypatch.setenv("COLUMNS", "40")
    line = "Ended at step 8: max_epochs=2 reached; checkpoint: a/version_0/checkpoints/epoch=1-step=8.ckpt"
    handler.handle(logging.LogRecord("fabricamp", logging.INFO, "", 0, line, None, None))
    assert capsys.readouterr().err.splitlines() == [
        "Ended at step 8: max_epochs=2 reached;",
        "  checkpoint:",
        "  a/version_0/checkpoints/epoch=1-step=8.ckpt",
    ]


def test_hydras_job_log_has_each_line_once(tmp_path):
    pytest.importorskip("hydra", reason="needs the package hydra-core")
    (tmp_path / "job.py").write_text(
        "import hydra\nfrom program import fit\n"
        "@hydra.main(version_base=None, config_name=None)\n"
        "def main(config):\n    fit()\n"
        "main()\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM.format(before="", between="", options="devices=1, max_epochs=1"))
    code, out, err = finish(start_forked(tmp_path, "job.py", "hydra.run.dir=outputs"))
    assert (code, err) == (0, "")
    lines = (tmp_path / "outputs" / "job.log").read_text().splitlines()
    assert lines == out.splitlines()
    assert [sum(f"] - {said}" in line for line in lines) for said in SAID] == ONCE


PAGE = (Path(__file__).parents[1] / "docs" / "output.md").read_text()
# A promise stands behind its statement, or where the line would be too long, above it.
LINES = re.findall(
    r"^(?:# (?P<above>.*)\n)?(?P<statement>logging\..*?)(?: +# (?P<behind>.*))?$",
    PAGE.partition("import logging\n")[2].partition("```")[0],
    re.MULTILINE,
)


def test_the_page_has_a_promise_for_each_line():
    assert [bool(above) != bool(behind) for above, _, behind in LINES] == [True] * 4


@pytest.mark.parametrize(("above", "statement", "behind"), LINES)
def test_each_line_of_the_page_does_what_it_promises(tmp_path, above, statement, behind):
    promise = above or behind
    out, err = ran(tmp_path, before=statement)
    expected = f"fabricamp: {SAID[1]}\n" if "warnings only" in promise else ""
    assert (out, err) == ("mine\n", expected)
    if "to a file" in promise:
        assert times((tmp_path / "run.log").read_text()) == ONCE


def test_a_package_that_is_not_installed_is_one_error_and_one_that_lacks_another_says_so(monkeypatch, tmp_path):
    with pytest.raises(NotInstalledError, match="^needs absent_package: pip install it$") as caught:
        load("absent_package.part", "needs absent_package: pip install it")
    assert sum(line.startswith("Traceback") for line in traceback.format_exception(caught.value)) == 1
    (tmp_path / "present_package.py").write_text("import absent_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'absent_package'$"):
        load("present_package", "needs present_package: pip install it")
