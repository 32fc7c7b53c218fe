import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from fabricamp.apex.parallel import distributed, multiproc
from tests.distributed.ranks import run_ranks


def test_tensors_by_type():
    full, half = torch.ones(2), torch.ones(3).half()
    assert distributed.split_by_type([full, half, full]) == {
        "torch.FloatTensor": [full, full],
        "torch.HalfTensor": [half],
    }
    assert [len(one) for one in distributed.split_half_float_double([half, full, full])] == [1, 2]


def test_tensors_found_in_nests():
    found, tensors = [], [torch.ones(1), torch.zeros(2), torch.ones(3)]
    distributed.extract_tensors((tensors[0], {tensors[1]: 1}, [[tensors[2]], 5]), found)
    assert [one.numel() for one in found] == [1, 2, 3]


def _exchange():
    rank = dist.get_rank()
    tensors = [torch.full((2, 2), float(rank)), torch.full((3,), float(rank)).double(), torch.tensor([rank * 2.0])]
    distributed.flat_dist_call(tensors, dist.all_reduce)
    averaged = [one.clone() for one in tensors]
    other = [torch.full((2,), float(rank + 5))]
    distributed.flat_dist_call(other, dist.broadcast, (1,))
    return averaged, other


def test_collectives_on_many_tensors():
    for averaged, other in run_ranks(_exchange, 2):
        assert [one.unique().tolist() for one in averaged] == [[0.5], [0.5], [1.0]]
        assert averaged[0].shape == (2, 2)
        assert other[0].tolist() == [6.0, 6.0]


@pytest.fixture
def runner(monkeypatch):
    """Replaces `python -m fabricamp.apex` by a quick program that prints its arguments and exits with 3 times the rank."""
    code = "import sys; print(sys.argv[1:]); sys.exit(int(sys.argv[-1]) * 3)"
    start = subprocess.Popen

    def popen(command, **options):
        assert command[:4] == [sys.executable, "-u", "-m", "fabricamp.apex"]
        return start([sys.executable, "-S", "-c", code, *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)


def test_multiproc_starts_one_process_a_rank(runner, tmp_path, capfd):
    assert multiproc.main(["script.py", "--world-size", "2", "--lr", "1"]) == 3
    assert capfd.readouterr().out == "['script.py', '--world-size', '2', '--lr', '1', '--rank', '0']\n"
    assert (tmp_path / "GPU_1.log").read_text() == "['script.py', '--world-size', '2', '--lr', '1', '--rank', '1']\n"


def test_multiproc_counts_gpus(runner, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert multiproc.main(["script.py"]) == 0
    assert capfd.readouterr().out == "['script.py', '--world-size', '1', '--rank', '0']\n"


def test_multiproc_without_a_script(capsys):
    assert multiproc.main([]) == 2
    assert "usage" in capsys.readouterr().err
