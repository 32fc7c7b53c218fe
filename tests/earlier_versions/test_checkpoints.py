"""Checkpoints of earlier versions, in format 2 and 3: runs go on from them bit for bit.  ``runs.py`` wrote them."""

from __future__ import annotations

import shutil
from fractions import Fraction

import pytest
import torch

from fabricamp import Callback
from fabricamp.checkpoint import read_checkpoint
from fabricamp.errors import CheckpointObjectsError
from fabricamp.rng import isolate_rng
from tests.distributed.ranks import run_ranks
from tests.earlier_versions.runs import (
    CUT_SHARDS_AT,
    FOLDER,
    SCENES,
    Cut,
    Restored,
    WithObjects,
    files_of,
    fit,
    sharded,
)
from tests.trainer.test_resume import assert_equal

SKIPPED = {"accumulation": 1, "optimizers": 1}


def of_both_formats(*scenes):
    """Parametrizes a test over the files of scenes."""
    files = [(scene, file) for scene in scenes for file in files_of(scene)]
    return pytest.mark.parametrize(
        ("scene", "file"), files, ids=[f"{file.parent.name}-{file.stem}" for _, file in files]
    )


def content(path, file):
    """What a run goes on from, without what each file has of its own, and what ``file``'s format has no word of."""
    state = read_checkpoint(path, weights_only=False)
    for own in ("loggers", "fabricamp_version", "torch_version"):
        state.pop(own)
    state["loops"]["fit"].pop("loggers_at_end")
    hyper_parameters = state.get("hyper_parameters", {})
    if "head" in hyper_parameters:
        hyper_parameters["head"] = hyper_parameters["head"].state_dict()
    for position in state["data"]["position"]:
        position.pop("before_accumulation", None)  # for a run that cannot go on with the gradients
        for order in position.get("orders", ()):
            assert order is None or order.pop("reads_to_end", True)  # the one rule of earlier files
    if file.parent.name == "format_3":
        return state
    for name in ("optimizer_identities", "lr_scheduler_identities"):
        state["loops"]["fit"].pop(name, None)
    state["amp"].pop("schedules_follow", None)
    for position in state["data"]["position"]:
        # What leads to a batch that is done again, and to the end of a pass: files of 0.2.0 have less of it.
        position.pop("earlier", None)
        position.get("at_pass_start", {}).pop("rng", None)
        for states in ("rng_states", "rng_states_ahead"):
            position.get("at_limit", {}).pop(states, None)
    return state


def assert_equal_states(one, other):
    """Checks that two contents are equal bit for bit; of the gradients' norms in the scaler's ring the last bit may differ.

    The files were written on one CPU, and another sums the squares of a norm in vectors of another width.  As integers of 32 bits
    such floats differ by one, and are far above all counts.
    """
    rings = []
    for state in (one, other):
        scaler = state.get("amp", {}).get("scaler", {})
        rings.append(scaler.pop("ring", torch.zeros(1, dtype=torch.int32)))
    assert_equal(one, other)
    ring, other_ring = rings
    differs = ring != other_ring
    assert (ring - other_ring).abs().max() <= 1
    assert (ring[differs] > 1_000_000).all()


def last_state(trainer, path, file):
    trainer.save_checkpoint(path)
    return content(path, file)


def before_the_first_batch(path, file):
    """The content without the two parts that a resumed run takes up with its first batch."""
    state = content(path, file)
    state.pop("rng")
    state["loops"]["fit"].pop("stepped")
    return state


@of_both_formats("accumulation", "limit", "optimizers", "objects")
def test_a_run_that_was_cut_goes_on_bit_for_bit(scene, file, tmp_path):
    cut = Cut(tmp_path / "cut.ckpt", SCENES[scene].cut_at)
    restored = Restored(tmp_path / "restored.ckpt")
    with isolate_rng():
        straight, whole = fit(scene, tmp_path / "straight", cut)
        resumed, rest = fit(scene, tmp_path / "resumed", restored, ckpt_path=file)
    assert_equal_states(content(tmp_path / "cut.ckpt", file), content(file, file))
    assert_equal(before_the_first_batch(tmp_path / "restored.ckpt", file), before_the_first_batch(file, file))
    assert resumed.seen == straight.seen[cut.seen :]
    assert whole.global_step == rest.global_step
    assert whole.skipped_steps == rest.skipped_steps == SKIPPED.get(scene, 0)
    ends = [last_state(trainer, tmp_path / f"{id(trainer)}.ckpt", file) for trainer in (rest, whole)]
    assert_equal_states(*ends)
    assert_equal(rest.callback_metrics, whole.callback_metrics)


@of_both_formats("end")
def test_a_run_that_had_ended_shows_its_values_and_goes_on_bit_for_bit(scene, file, tmp_path):
    with isolate_rng():
        _, ended = fit(scene, tmp_path / "ended", Cut(tmp_path / "none.ckpt", 0))
        ended.save_checkpoint(tmp_path / "ended.ckpt")
        _, again = fit(scene, tmp_path / "again", ckpt_path=file)
        straight, whole = fit(scene, tmp_path / "straight", Cut(tmp_path / "none.ckpt", 0), max_steps=11)
        resumed, rest = fit(scene, tmp_path / "resumed", ckpt_path=file, max_steps=11)
    assert_equal(content(tmp_path / "ended.ckpt", file), content(file, file))
    assert_equal(again.callback_metrics, ended.callback_metrics)
    assert again.callback_metrics["own"] == 7.0
    assert resumed.seen == straight.seen[5:]
    ends = [last_state(trainer, tmp_path / f"{id(trainer)}.ckpt", file) for trainer in (rest, whole)]
    assert_equal_states(*ends)


@of_both_formats("objects")
def test_objects_are_opened_where_that_is_allowed(scene, file):
    with pytest.raises(CheckpointObjectsError, match=r"\['head'\]: torch\.nn\.modules\.linear\.Linear"):
        read_checkpoint(file)
    state = read_checkpoint(file, weights_only=False)
    assert state["hyper_parameters"]["ratio"] == 1 / 3  # numbers are plain values there
    assert state["callbacks"]["Ratio"] == {"ratio": Fraction(SCENES[scene].cut_at, 3)}
    weight = state["hyper_parameters"]["head"].weight
    assert weight.data_ptr() == state["current_model_state"]["net.weight"].data_ptr()
    module = WithObjects.load_from_checkpoint(file, weights_only=False)
    assert module.hparams.ratio == 1 / 3
    assert torch.equal(module.net.weight, state["state_dict"]["net.weight"])  # the averaged ones
    assert not torch.equal(module.net.weight, weight)


class Step(Callback):
    """Notes the step from which a run goes on."""

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step


def two_fits(folder, file):
    cut = Cut(folder / "cut.ckpt", CUT_SHARDS_AT)
    straight = sharded(cut, folder=folder)
    step = Step()
    resumed = sharded(step, Restored(folder / "restored.ckpt"), folder=folder, ckpt_path=file)
    return straight, cut.seen, resumed, step.step


@of_both_formats("fsdp")
def test_a_run_of_shards_goes_on(scene, file, tmp_path):
    shutil.copytree(file, tmp_path / "file.ckpt")
    ranks = run_ranks(two_fits, 2, tmp_path, tmp_path / "file.ckpt", backend=None)
    for (seen, steps, _), cut_at, (rest, same_steps, _), began_at in ranks:
        assert rest == seen[cut_at:]  # the same samples in the same order, from where it was cut
        assert steps == same_steps == 6
        assert began_at == 2
    (_, _, weights), _, (_, _, same_weights), _ = ranks[0]
    # Computed on another machine up to the cut.
    torch.testing.assert_close(same_weights, weights, rtol=0, atol=1e-3)
    written, found, cut = (read_checkpoint(one) for one in (file, tmp_path / "restored.ckpt", tmp_path / "cut.ckpt"))
    for name in ("state_dict", "optimizer_states", "current_model_state", "averaging_state"):
        torch.testing.assert_close(found[name], written[name], rtol=0, atol=0)
        torch.testing.assert_close(cut[name], written[name], rtol=0, atol=1e-3)
    accumulation, same = (state["loops"]["fit"]["accumulation"] for state in (written, found))
    assert accumulation["accumulate"] == same["accumulate"] == 2
    torch.testing.assert_close(same["gradients"], accumulation["gradients"], rtol=0, atol=0)
    assert accumulation["gradients"]


def test_each_format_has_a_small_file_of_each_run():
    for number in (2, 3):
        found = sorted(file.name.partition("-")[2] for file in (FOLDER / f"format_{number}").iterdir())
        assert found == sorted(f"{scene}.ckpt" for scene in (*SCENES, "fsdp"))
        for scene in (*SCENES, "fsdp"):
            (file,) = files_of(scene, number)
            stored = torch.load(file / "state.pt" if scene == "fsdp" else file, weights_only=scene != "objects")
            assert stored["format"] == number
    every = [one for number in (2, 3) for one in (FOLDER / f"format_{number}").rglob("*") if one.is_file()]
    assert all(one.stat().st_size < 140_000 for one in every)
