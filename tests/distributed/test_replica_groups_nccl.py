"""Replica groups of one GPU each, over NCCL: one is killed and returns; if none is lost, the weights equal those of ``ddp``.

As a program it makes the same training by ``ddp``: ``python -m tests.distributed.test_replica_groups_nccl '{...}'``.
"""

import json
import os
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from fabricamp import seed_everything
from fabricamp.strategies import DDP
from tests.distributed.scripts import ROOT, end, finish, start
from tests.distributed.test_replica_groups import (
    BATCH,
    Groups,
    Net,
    check_ends,
    check_samples,
    check_weights,
    lost_and_back,
    samples,
)
from tests.small import quiet_trainer

pytestmark = [pytest.mark.gpu2, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]

ON_GPUS = {"groups": 2, "accelerator": "gpu", "timeout": 10, "quorum_timeout": 100}
"""NCCL does not notice a dead process of the same machine, so the other group waits for ``timeout``."""
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""Connections as between two machines: they break when a process dies, and NCCL reports an error."""
KILLED = {
    "in the forward": {"victim": 1, "precision": "O0", "accumulated": 2, "place": "forward"},
    "in the exchange": {"victim": 0, "precision": "O2", "accumulated": 2, "place": "exchange"},
    "over sockets": {"victim": 1, "precision": "O0", "accumulated": 1, "place": "forward", "variables": SOCKETS},
}


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_group_comes_back_with_the_weights_of_the_other(case, tmp_path):
    pytest.importorskip("torchft", reason="needs the package torchft")
    plan = {**ON_GPUS, "how": "kill", **KILLED[case]}
    rows, told, ends = lost_and_back(tmp_path, **plan)
    check_ends(ends)
    check_samples(rows, plan)
    if plan["precision"] == "O0":
        check_weights(rows, ends[0]["weights"], plan)
    report(case, tmp_path, rows, told, plan)


def report(case, folder, rows, told, plan):
    """Prints (with ``-s``) how long the other group was held up, in seconds since the kill."""
    lost, other = float((folder / "lost").read_text()), 1 - plan["victim"]
    failed = [float(line.split()[0]) for line in told[other].splitlines() if "sum over replica groups failed" in line]
    alone = next(when for _, groups, when, *_ in rows[other] if when > lost and groups == 1)
    both = next(when for _, groups, when, *_ in rows[other] if when > alone and groups == 2)
    missed = [f"{when - lost:.2f}" for when in failed]
    print(f"{case}: missed {', '.join(missed)} s, goes on {alone - lost:.2f} s, healed {both - lost:.2f} s")


@pytest.mark.parametrize(("precision", "clip"), [("O0", None), ("O0", 0.5), ("O2", 0.5)])
def test_groups_train_the_bits_of_ddp(precision, clip, tmp_path):
    pytest.importorskip("torchft", reason="needs the package torchft")
    plan = {**ON_GPUS, "precision": precision, "clip": clip, "accumulated": 2, "place": "", "max_steps": 40}
    groups = Groups(tmp_path, victim=None, min_replicas=2, **plan)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    program = ["-m", "tests.distributed.test_replica_groups_nccl", json.dumps({**plan, "victim": False})]
    processes = [groups.start(0), groups.start(1), start(tmp_path, *program, PYTHONPATH=paths)]
    try:
        for process in processes:
            code, out, err = finish(process)
            assert code == 0, out + err
    finally:
        for process in processes:
            end(process)
        groups.lighthouse.shutdown()
    ends = [torch.load(tmp_path / f"end-{who}", weights_only=True, map_location="cpu") for who in ("0-0", "1-0", "ddp")]
    assert [one["step"] for one in ends] == [40, 40, 40]
    assert {participants for number in (0, 1) for _, participants, *_ in groups.seen(number)} == {2}
    check_ends(ends)


def by_ddp(plan):
    """Makes the training of both groups as one run of two ranks."""
    torch.set_num_threads(1)
    seed_everything(7, verbose=False)
    torch.manual_seed(0)  # the first group's initial weights
    module = Net(plan)
    trainer = quiet_trainer(
        strategy=DDP(timeout=60),
        accelerator=plan["accelerator"],
        devices=2,
        precision=plan["precision"],
        accumulate_grad_batches=plan["accumulated"],
        gradient_clip_val=plan["clip"],
        max_epochs=-1,
        max_steps=plan["max_steps"],
    )
    trainer.fit(module, DataLoader(samples(), BATCH, shuffle=True))
    if trainer.global_rank == 0:
        ended = {
            "weights": module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "step": trainer.global_step,
        }
        torch.save(ended, "end-ddp")


if __name__ == "__main__":
    by_ddp(json.loads(sys.argv[1]))
