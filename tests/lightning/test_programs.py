"""Programs written for Lightning run with only the package's name changed, and print Lightning's numbers."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch

from tests.lightning.run import HERE, NAMES, STARTS_PROCESSES, nearly, printed, recorded, source

MISSING = {}
"""Programs that wait for a feature, by what is missing."""

ON_PURPOSE = {
    # A subclass of DistributedSampler that a resumed run can enter at any position.
    "ddp_strategy": {"sampler DistributedSampler 4": "sampler SharingSampler 4"},
    # A OneCycleLR stays at the rate of its last step (docs/how-to/schedules.md).
    "diffusion_ema": {"rate 0.0003093059": "rate 0.0000000800"},
    # save_top_k=1 keeps the file before the best one, in case that one is damaged (docs/reliability.md).
    "hydra_template": {
        "files ['epoch_001.ckpt', 'last.ckpt']": "files ['epoch_000.ckpt', 'epoch_001.ckpt', 'last.ckpt']"
    },
}
"""By program: lines of Lightning's output, and the lines printed here instead."""

FOLLOWS_NOISE = {"fine_tuning", "simclr"}
"""Programs with a bias before a BatchNorm: its gradient is rounding errors, which Adam scales to full steps."""

LAST_DIGITS = 3e-7
"""An epoch's mean is summed in fp64 here and in fp32 in Lightning: printed means may differ by two roundings of fp32."""

OTHER_RELEASE = 1e-6
"""Another release of torch with the same bits in by_hand may sum products of other shapes in another order: roundings of fp32."""

OTHER_MACHINE = 1e-2
"""If torch itself sums in another order, losses differ after some steps."""


def expected(name):
    """Returns Lightning's output, with the lines replaced that are different on purpose."""
    lines = recorded(name).splitlines()
    for line, ours in ON_PURPOSE.get(name, {}).items():
        lines[lines.index(line)] = ours
    return "\n".join(lines)


@functools.cache
def torch_computes_the_same():
    """Returns whether torch itself gives the recorded bits here; another processor or release may sum in another order."""
    return printed("by_hand", "fabricamp") == recorded("by_hand")


def recorded_by_this_release():
    """Returns whether the recordings were made with this release of torch."""
    first, _, _ = (HERE / "printed" / "by_hand.txt").read_text().partition("\n")
    return re.search(r"torch ([\d.]+)", first)[1] == re.match(r"[\d.]+", torch.__version__)[0]


def tolerance():
    """Returns the allowed relative difference of decimal numbers."""
    if not torch_computes_the_same():
        return OTHER_MACHINE
    return LAST_DIGITS if recorded_by_this_release() else OTHER_RELEASE


def differences(recording, given):
    """Returns the lines that differ: weights bit for bit if this release of torch recorded them, others beyond the tolerance."""
    for one, two in itertools.zip_longest(recording.splitlines(), given.splitlines(), fillvalue="(no line)"):
        exact = one.startswith("weights") and torch_computes_the_same() and recorded_by_this_release()
        if one != two if exact else not nearly(one, two, tolerance()):
            yield f"\nLightning  {one}\nfabricamp  {two}"


def programs():
    for name in NAMES:
        reason = f"waits for {MISSING[name]}" if name in MISSING else None
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        # test_door.py also runs it unchanged in two processes.
        yield pytest.param(name, marks=[*marks, *[pytest.mark.slow] * (name in STARTS_PROCESSES)])


@pytest.mark.parametrize("name", list(programs()))
def test_prints_what_lightning_printed(name):
    if name in FOLLOWS_NOISE and not torch_computes_the_same():
        pytest.skip(
            "torch sums in another order here than where this was recorded, and Lightning prints other numbers too"
        )
    different = list(differences(expected(name), printed(name, "fabricamp")))
    assert not different, "".join(different)
    assert not logging.getLogger("fabricamp").disabled


@pytest.mark.parametrize("name", sorted({*NAMES} - {"by_hand"}))
def test_the_name_is_all_that_is_changed(name):
    program, changed = (HERE / "programs" / f"{name}.py").read_text(), source(name, "fabricamp")
    assert "fabricamp" in changed
    assert "fabricamp" not in program
    assert "pytorch_lightning" not in changed
    assert "lightning.pytorch" not in changed
    assert source(name, "lightning.pytorch").count("lightning.pytorch") == changed.count("fabricamp")


def test_other_digits_are_seen():
    assert nearly("loss 0.12345678 in 3 steps", "loss 0.12345679 in 3 steps", LAST_DIGITS)
    assert not nearly("loss 0.12345678 in 3 steps", "loss 0.12345698 in 3 steps", LAST_DIGITS)
    assert not nearly("loss 0.12345678 in 3 steps", "loss 0.12345678 in 4 steps", LAST_DIGITS)
    assert list(differences("weights 0.12345678", "weights 0.12345679")) or not (
        torch_computes_the_same() and recorded_by_this_release()
    )


def test_the_script_that_mypy_checks_runs(capsys):
    runpy.run_path(str(HERE / "typed.py"), run_name="__main__")
    assert "0.1" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lightning_prints_it_again(tmp_path):
    """Needs ``LIGHTNING_PYTHON=/tmp/lightning/bin/python``, an interpreter with Lightning as described in record.py."""
    interpreter = os.environ.get("LIGHTNING_PYTHON")
    if not interpreter:
        pytest.skip(
            "LIGHTNING_PYTHON names no interpreter that has Lightning; tests/lightning/record.py says how to make one"
        )
    subprocess.run([interpreter, str(HERE / "record.py"), "--into", str(tmp_path)], check=True)
    for file in sorted(Path(tmp_path).iterdir()):
        assert file.read_text() == (HERE / "printed" / file.name).read_text(), file.name
