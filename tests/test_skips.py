"""A test run prints one line per reason for skips, fails for an unknown reason, and shows no warning of fabricamp."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.skips import KNOWN, is_known

ROOT = Path(__file__).parents[1]
KNOWN_SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_without_a_gpu(number):
    pytest.skip("needs a CUDA GPU")

@pytest.mark.skipif(True, reason="needs a CUDA GPU")
def test_without_a_gpu_by_a_mark():
    pass

@pytest.mark.xfail(reason="is not there yet")
def test_expected_to_fail():
    raise AssertionError

def test_that_passes():
    pass
"""
A_WHOLE_FILE = """
import pytest

pytest.importorskip("no_such_package", reason="needs the package optuna")
"""
UNKNOWN_SKIP = """
import pytest

def test_that_nobody_knows_of():
    pytest.skip("not today")
"""
UNKNOWN_FILE = """
import pytest

pytest.importorskip("no_such_package")
"""


def run(folder, *options):
    """Runs the tests in ``folder`` in a new interpreter with the plugin, and with xdist for ``-n``."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, "--rootdir", str(folder), "-rfE", str(folder), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    "workers", [(), ("-p", "xdist.plugin", "-n", "2", "--dist", "worksteal")], ids=["alone", "xdist"]
)
def test_one_line_a_reason_and_unknown_reasons_fail(workers, tmp_path):
    (tmp_path / "test_known.py").write_text(KNOWN_SKIPS)
    (tmp_path / "test_file.py").write_text(A_WHOLE_FILE)
    done = run(tmp_path, *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "SKIPPED" in line]
    assert told == ["SKIPPED [6] needs a CUDA GPU", "SKIPPED [1 whole file(s)] needs the package optuna"]
    assert "1 passed, 7 skipped, 1 xfailed in" in done.stdout.splitlines()[-1]

    (tmp_path / "test_unknown.py").write_text(UNKNOWN_SKIP)
    (tmp_path / "test_unknown_file.py").write_text(UNKNOWN_FILE)
    done = run(tmp_path, *workers, "--continue-on-collection-errors")
    assert done.returncode == 1, done.stdout + done.stderr
    begin = "skipped for a reason that KNOWN of tests/skips.py does not have: "
    assert f"{begin}not today" in done.stdout
    assert f"{begin}could not import" in done.stdout
    assert "1 failed, 1 passed, 7 skipped, 1 xfailed, 1 error in" in done.stdout.splitlines()[-1]


def reasons(text):
    """Returns the reasons in a file, including those for rare machines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            given = [one.value for one in node.keywords if one.arg == "reason"]
            name = ast.unparse(node.func)
            if name == "pytest.skip":
                yield node.args[0]
            elif name in ("pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"):
                yield from given


def test_reasons_that_stand_in_the_tests_are_known():
    texts = {one: one.read_text() for one in (ROOT / "tests").rglob("*.py") if one != Path(__file__)}
    skipping = {file: text for file, text in texts.items() if "skip" in text}
    found = [
        (file, one.value) for file, text in skipping.items() for one in reasons(text) if isinstance(one, ast.Constant)
    ]
    assert len(found) > 50
    assert [(file, reason) for file, reason in found if not is_known(reason)] == []


def test_every_known_reason_says_why():
    assert all(KNOWN.values())
    assert is_known("needs a CUDA GPU")
    assert not is_known("needs a CUDA GPU that somebody else has")


def test_a_warning_of_ours_is_an_error_and_one_of_others_is_not():
    code = 'import warnings\nwarnings.warn("is not to be done")'
    for name in ("fabricamp.engine.session", "tests.ops.test_adam"):
        with pytest.raises(UserWarning, match="is not to be done"):
            exec(code, {"__name__": name})
    with warnings.catch_warnings(record=True) as caught:
        exec(code, {"__name__": "another_package"})
    assert [str(one.message) for one in caught] == ["is not to be done"]
