import os

# One thread a process: the suite runs several processes on two cores, and sums come out the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Default folders (logs, checkpoints) land in the test's own folder."""
    monkeypatch.chdir(tmp_path)
