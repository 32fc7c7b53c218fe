"""Files of other formats are refused by number.  ``tests/earlier_versions`` resumes from those that are read."""

from __future__ import annotations

import pytest
import torch

from fabricamp import CheckpointError
from fabricamp.checkpoint import read_checkpoint, read_header
from tests.earlier_versions.runs import files_of, fit

(FORMAT_2,) = files_of("accumulation", 2)


def changed(path, **changes):
    """Writes a file of format 2 with other values of some of its keys; ``...`` leaves a key out."""
    state = torch.load(FORMAT_2, weights_only=True)
    del state["checksum"]
    state.update(changes)
    torch.save({key: value for key, value in state.items() if value is not ...}, path)
    return path


def test_step_statuses_and_logged_values_are_written_by_name(tmp_path):
    _, trainer = fit("accumulation", tmp_path)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    state = torch.load(tmp_path / "new.ckpt", weights_only=True)
    assert state["format"] == 3
    assert state["amp"]["scaler"]["last_status"]["skipped_steps"] == 1
    flushes = [flush for rank in state["loops"]["fit"]["metrics"] for flush in rank["pending"]]
    assert all(row["published"][0]["key"] == "loss_step" for flush in flushes for row in flush["ranks"])


@pytest.mark.parametrize("read", [read_checkpoint, read_header])
@pytest.mark.parametrize("number", [4, -1, "1", True])
def test_a_file_of_a_later_version_is_refused(number, read, tmp_path):
    path = changed(tmp_path / "later.ckpt", format=number, fabricamp_version="9.0")
    with pytest.raises(CheckpointError, match=rf"format {number!r} .* fabricamp 9.0; .* up to 3: install"):
        read(path)


@pytest.mark.parametrize(("number", "told"), [(..., 0), (0, 0), (1, 1)])
def test_a_file_of_before_0_2_0_is_refused_and_says_what_to_do(number, told, tmp_path):
    path = changed(tmp_path / "early.ckpt", format=number, fabricamp_version="0.1.0")
    with pytest.raises(
        CheckpointError,
        match=rf"early\.ckpt has format {told}, which fabricamp 0\.1\.0 wrote .* reads formats 2 to 3: resume .* 0\.2\.0",
    ):
        fit("accumulation", tmp_path, ckpt_path=path)


@pytest.mark.parametrize("scaler", [{"window": 1, "windows": 2, "scalers": 3, "ring": 4, "known": 5}])
def test_a_file_that_is_not_as_its_format_is_refused(scaler, tmp_path):
    path = changed(tmp_path / "other.ckpt", amp={"scaler": scaler})
    with pytest.raises(CheckpointError, match="does not have the layout of format 2"):
        read_checkpoint(path)
