"""What a Loop saves, another goes on from to the bit: at every level, within an epoch and an accumulation, in the background."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fabricamp import CheckpointError, ConfigError, Loop
from fabricamp.optimizers import FusedAdam
from tests.distributed.ranks import run_ranks
from tests.own_loop.same import copied, difference, prepared, state_of
from tests.pairs import pairs

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def loop(optimizer, folder, *, save_at=None, restores=False, epochs=3, **options):
    """Returns the state at the end; ``save_at``: saves after so many batches, and stops there."""
    torch.manual_seed(1 if restores else 7)
    run, model, made, train = prepared(optimizer, default_root_dir=folder, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    losses = []
    with run:
        if restores:
            assert run.restore("last", schedule=schedule)
            torch.rand(3)  # what a program draws before its loop goes on changes nothing
        while run.epoch < epochs:
            for batch in train:
                before = run.global_step
                losses.append(run.step(lambda b: F.cross_entropy(model(b[0]).float(), b[1]), batch))
                if run.global_step > before:
                    schedule.step()
                if run._state.batches_done == save_at:
                    run.save("last", schedule=schedule, asynchronous=options.get("precision") in ("O2", "O4"))
                    if options.get("precision") == "O2":  # what is trained meanwhile is not in the file
                        run.step(lambda b: F.cross_entropy(model(b[0]).float(), b[1]), batch)
                    return losses, None
        return losses, copied({**state_of(model, [made], run._trainer), "lr": made.param_groups[0]["lr"]})


def problem_of(folder, optimizer, save_at, **options):
    """Returns what differs between a run that was cut and resumed, and one that was not; empty if nothing does."""
    whole, state = loop(optimizer, folder, **options)
    before, _ = loop(optimizer, folder, save_at=save_at, **options)
    after, resumed = loop(optimizer, folder, restores=True, **options)
    return difference(whole, before[:save_at] + after) or difference(state, resumed)


@pytest.mark.parametrize(
    ("level", "optimizer", "accumulate", "save_at"),
    pairs(LEVELS, ["sgd", "adamw", "fused_adam"], [1, 3], [4, 7, 9]),
)
def test_a_resumed_loop_has_the_bits_of_an_uninterrupted_one(level, optimizer, accumulate, save_at, tmp_path):
    options = {"precision": level, "accumulate_grad_batches": accumulate}
    assert problem_of(tmp_path, optimizer, save_at, **options) == ""


def on_two_ranks(folder):
    found = []
    for number, (strategy, level, optimizer, accumulate) in enumerate(
        pairs(["ddp", "delayed_ddp", "fsdp"], ["O0", "O2", "O5"], ["adamw", "fused_adam"], [1, 3])
    ):
        options = {"strategy": strategy, "precision": level, "accumulate_grad_batches": accumulate, "devices": "auto"}
        found.append(problem_of(folder / str(number), optimizer, 5, **options))
    return found


def test_two_ranks_resume_to_the_bit(tmp_path):
    for problems in run_ranks(on_two_ranks, 2, tmp_path):
        assert not any(problems)


def in_parts(folder, level, *, begin=0, end=24):
    """Makes micro-batches ``begin`` to ``end``, drawn by the program, two of them a step of two optimizers; returns the state."""
    torch.manual_seed(5)
    first, second = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
    one, two = torch.optim.SGD(first.parameters(), 0.1), FusedAdam(second.parameters(), 0.01)
    run = Loop(accelerator="cpu", devices=1, precision=level, default_root_dir=folder)
    run.prepare(first, second, one, two, clip=1.0)
    if begin:
        run.restore("last")
    with run:
        for number in range(begin, end):
            with run.accumulate(2):
                run.backward(run.forward(lambda x: second(first(x)).square().mean(), torch.randn(4, 8)))
            if number % 2:
                run.update(one, two)
        if end < 24:
            run.save("last")
        return copied([first.state_dict(), second.state_dict(), two.state_dict()["state"], run.global_step])


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_steps_in_parts_resume_with_their_gradients(level, tmp_path):
    whole = in_parts(tmp_path, level)
    assert whole[-1] == 12
    in_parts(tmp_path, level, end=9)
    assert difference(whole, in_parts(tmp_path, level, begin=9)) == ""


def test_batches_that_a_program_draws_itself_go_on_with_its_random_numbers(tmp_path):
    run = Loop(accelerator="cpu", devices=1, default_root_dir=tmp_path)
    model = torch.nn.Linear(8, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def draws():
        return [float(run.step(lambda x: model(x).square().mean(), torch.randn(4, 8))) for _ in range(3)]

    draws()
    run.save("here")
    expected = draws()
    run.close()
    run = Loop(accelerator="cpu", devices=1, default_root_dir=tmp_path, seed=9)
    run.prepare(model := torch.nn.Linear(8, 1), torch.optim.SGD(model.parameters(), 0.1))
    assert run.restore("here")
    assert draws() == expected
    assert run.global_step == 6


def test_a_missing_name_begins_anew_and_a_missing_path_is_an_error(tmp_path):
    run, _, _, _ = prepared("sgd", default_root_dir=tmp_path)
    assert not run.restore("last")
    with pytest.raises(CheckpointError, match=r"other\.ckpt"):
        run.restore(tmp_path / "other.ckpt")
    run.close()


def test_objects_of_a_file_are_asked_for_by_their_names(tmp_path):
    loop("sgd", tmp_path, save_at=3)
    run, _, _, _ = prepared("sgd", default_root_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"\['schedule'\].* restore was given \[\]"):
        run.restore("last")
    run.close()


def test_restore_comes_before_the_first_step(tmp_path):
    run, model, _, _ = prepared("sgd", default_root_dir=tmp_path)
    run.step(lambda x: model(x).sum(), torch.randn(4, 8))
    with pytest.raises(ConfigError, match="before the first step"):
        run.restore("last")
    run.close()


def test_a_pass_that_is_left_ends_its_epoch_when_the_next_begins(tmp_path):
    run, model, _, train = prepared("sgd", default_root_dir=tmp_path)

    def passed(stop):
        seen = []
        for batch in train:
            seen.append(batch[0])
            run.step(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
            if len(seen) == stop:
                break
        return seen

    first = passed(3)
    run.save("last")
    second = passed(None)
    assert (len(first), len(second), run.epoch) == (3, len(train), 2)
    assert not torch.equal(first[0], second[0])
    run.close()
    run, model, _, train = prepared("sgd", default_root_dir=tmp_path)
    run.restore("last")
    assert len(passed(None)) == len(train) - 3
    assert run.epoch == 1
    run.close()
