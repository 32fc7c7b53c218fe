"""The known reasons for skipping a test: a skip for any other reason is a failure.  A run ends with one line per reason.

A plugin of pytest, loaded by tests/conftest.py.  Add new reasons to ``KNOWN``.
"""

from __future__ import annotations

import collections
import re

import pytest

__all__ = ["KNOWN", "is_known"]

KNOWN = {
    # The machine.
    r"needs a CUDA GPU": "CI and most laptops have none; `pytest -m gpu` runs these where there is one",
    r"needs two CUDA GPUs": "the same, for `pytest -m gpu2`",
    r"needs \d+ GiB of GPU memory": "indices beyond 32 bits take tensors of 4 GiB and more, which small cards do not hold",
    r"this GPU has no (thread-block clusters|ring for such rows)": "older cards than the H100 have no clusters",
    r"this GPU has no FP8 products": "Hopper's tensor cores are the first with the recipes of this level",
    r"norms are torch's on this GPU": "what is tested is a choice that this card never makes",
    r"this torch is built with CUDA": "what is tested is the sentence that another build gets",
    r"this torch does not say that its fused Adagrad can skip": "newer versions do",
    r"needs torch 2\.13": "older versions have no F.linear_cross_entropy to compare with",
    r"torch sums in another order here than where this was recorded.*": "the last digits of a recording are its machine's",
    r"torch's default backend needs a C(\+\+)? compiler": "torch.compile calls one",
    r"giving up root takes root": "root may write anywhere, so these tests become another user",
    r"mounting( a small tmpfs)? takes root": "a file system that is full, or read-only, is mounted",
    r"this container cannot mount": "root of a container may not",
    r"the tests run outside of a virtual environment": "the README's commands set one up",
    r"needs the git repository": "what a source distribution holds is compared with what git tracks",
    r"needs an installed Lightning 2\.6\.6": "the list of its private methods is read from its source",
    r"docs/step\.md is of another Python or torch": "their tracers tell of other lines; the page is that of one version",
    r"there is no make": "the README's commands call it",
    r"there is no node": "the site's search is a script for browsers",
    # Installed packages.
    r"needs the package (bitsandbytes|comet_ml|cupy|datasets|furo|hydra-core|ipykernel|IPython|lightning|litgpt|matplotlib"
    r"|mlflow|myst_parser|nanochat|nbclient|nbformat|onnx|onnxscript|optuna|peft|pillow|prodigyopt|pytorch_lightning"
    r"|pytorch_optimizer|safetensors|schedulefree|sklearn|sphinx|torchao|torchdata|torchft|torchmetrics|torchtitan"
    r"|transformers|uv|wandb|webdataset)": "an extra, or another library",
    r"needs the nvidia-cuda-(nvrtc|runtime) wheel": "kernels are compiled with it; on CI its lack is a failure",
    r"fabricamp is not installed here, only importable": "its console script is tested",
    r"LIGHTNING_PYTHON names no interpreter that has Lightning.*": "only who records anew has one",
    # Combinations that do not exist.
    r"four dimensions only": "channels_last is a layout of images",
    r"fp64 inputs take fp64 parameters": "no mixed module of fp64 exists",
    r"two cuts are enough with processes to start": "the others would take seconds and find nothing else",
    r"torch(|'s Adam) keeps (Adam's state|its squares) in half there.*": "torch has no right value to compare with",
}
"""Patterns of reasons, and why such a skip is no failure."""


def is_known(reason):
    return any(re.fullmatch(one, reason, re.DOTALL) for one in KNOWN)


def reason_of(report):
    """Returns the reason for a skip in a report of pytest."""
    _, _, reason = report.longrepr
    return reason.removeprefix("Skipped: ")


def failed_where_unknown(report):
    """Turns a skip for an unknown reason into a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = reason_of(report)
    if not is_known(reason):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that KNOWN of tests/skips.py does not have: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    report = yield
    failed_where_unknown(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    report = yield
    failed_where_unknown(report)
    return report


def pytest_terminal_summary(terminalreporter):
    counts = collections.Counter(
        (isinstance(one, pytest.CollectReport), reason_of(one)) for one in terminalreporter.stats.get("skipped", [])
    )
    if counts:
        terminalreporter.section("skipped")
    for (whole_file, reason), count in counts.most_common():
        files = " whole file(s)" if whole_file else ""
        terminalreporter.line(f"SKIPPED [{count}{files}] {reason}")
