"""strategy="fsdp" on two ranks, four and one: equal to one process on the joined batch, exact resumes at any number of ranks."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fabricamp import Callback, seed_everything
from fabricamp.callbacks import ModelCheckpoint
from fabricamp.checkpoint import read_checkpoint
from fabricamp.commands.export import export
from fabricamp.strategies import FSDP
from fabricamp.strategies.meta_init import leave_meta
from fabricamp.utilities.grads import grad_norm
from tests.distributed import sharded
from tests.distributed.ranks import run_ranks
from tests.distributed.sharded import OPTIMIZERS, Cell, Net, alone, fitted, flat, sharding, too_far
from tests.shared import once, shared_folder
from tests.small import loader, quiet_trainer

# Together with sharded.CELLS, these contain every pair of values of neighbouring options.
CELLS = [
    Cell("O0", "sgd", 1, ("norm", 0.5), True, "auto"),
    Cell("O0", "adamw", 3, None, False, "auto"),
    Cell("O0", "FusedAdam", 1, ("value", 0.02), "zero2", "blocks"),
    Cell("O0", "FusedAdagrad", 3, ("norm", 0.5), "zero3", "blocks"),
    Cell("O0", "FusedNovoGrad", 1, ("norm", 0.5), False, "auto"),
    Cell("O0", "LARC", 1, ("norm", 0.5), True, "blocks"),
    Cell("bf16-true", "sgd", 1, ("value", 0.02), True, "blocks"),
    Cell("64-true", "FusedSGD", 3, ("norm", 0.5), False, "auto"),
    *sharded.CELLS[1:],  # each pair of the first is in another one, too
]
# With three micro-batches per step the runs are interrupted within an accumulation.
RESUMED = [CELLS[0], *(cell for cell in CELLS if cell.accumulate > 1)]
MOVED = [CELLS[0], CELLS[3], next(cell for cell in CELLS if cell.level == "O1")]
COPIES = [CELLS[1], CELLS[3]]
PRODUCT = [
    Cell(level, optimizer, accumulate, clip, *((True, "blocks"), (False, "auto"))[number % 2])
    for number, (level, optimizer, accumulate, clip) in enumerate(
        itertools.product(
            ("O0", "O1", "O2", "O3", "O4", "O5"), OPTIMIZERS, (1, 3), (None, ("norm", 0.5), ("value", 0.02))
        )
    )
]
"""All combinations, for the slow version."""


def folder_of(folder, cell):
    return folder / f"{CELLS.index(cell)}.ckpt"


def on_two_ranks(folder):
    found = {"straight": {}, "resumed": {}}
    for cell in CELLS:
        save = folder_of(folder, cell) if cell in RESUMED else None
        found["straight"][cell] = fitted(cell, sharding(cell), 4, save=save)
    for cell in RESUMED:
        found["resumed"][cell] = fitted(cell, sharding(cell), 4, ckpt_path=folder_of(folder, cell))
    found["from a file"] = fitted(CELLS[0], "fsdp", 4, ckpt_path=folder / "single.ckpt")
    found["from a folder of it"] = fitted(CELLS[0], "fsdp", 4, ckpt_path=folder / "parts")
    found["meta"] = meta_weights()
    found["printed"] = printed()
    found["overflow"] = overflow_on_one_rank()
    found["evaluated"] = evaluated()
    found["norms"] = norms()
    found["logged"] = logged("fsdp", 4)
    found["weighted"] = weighted("fsdp", 4)
    found["rotated"] = rotated(folder / "rotated")
    found["validated"] = saved_behind_a_validation(folder / "validated.ckpt")
    found["interrupted"] = interrupted(folder / "interrupted")
    return found


def meta_weights():
    seed_everything(11, verbose=False)
    module = Net(meta=True)
    quiet_trainer(strategy="fsdp", devices="auto", max_steps=0).fit(module, loader(8, 4))
    return None if module.scale.is_meta else flat(module)


def first_values_alone():
    """Returns the initial values that calling the same methods by hand gives."""
    seed_everything(11, verbose=False)
    module = Net(meta=True)
    module.configure_model()
    leave_meta(module)
    return flat(module), module


def printed():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer = quiet_trainer(strategy="fsdp", devices="auto", max_steps=1, enable_model_summary=True)
        trainer.fit(Net(), loader(8, 4))
    return said.getvalue()


def overflow_on_one_rank():
    """Rank 1's second batch overflows; the flag is shared by all ranks."""

    class Overflowing(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (float("inf") if batch_idx == 1 and self.global_rank == 1 else 1.0)

    found = {}
    for optimizer in ("FusedAdam", "adamw"):
        seed_everything(5, verbose=False)
        trainer = quiet_trainer(strategy="fsdp", devices="auto", precision="O1", max_epochs=1)
        trainer.fit(Overflowing(optimizer), loader(32, 4))
        found[optimizer] = trainer.skipped_steps, trainer.precision_plugin.verdicts.applied_steps
    return found


def evaluated():
    """Runs a fit, the other entry points with the same module (full on rank 0 between the runs), and a second fit."""
    seed_everything(5, verbose=False)
    module = Net()
    trainer = quiet_trainer(strategy="fsdp", devices="auto", max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, loader(16, 4))
    value = trainer.validate(module, loader(16, 4), verbose=False)[0]["val_loss"]
    predictions = torch.cat(trainer.predict(module, loader(16, 4))[::2])  # every rank predicts all samples
    trainer.max_epochs = 2
    trainer.fit(module, loader(16, 4))
    return value, predictions.double(), trainer.global_step


def norms():
    class Watching(Net):
        def on_before_optimizer_step(self, optimizer):
            self.rates = {name: float(norm) for name, norm in grad_norm(self, 2).items()}

    seed_everything(5, verbose=False)
    module = Watching("FusedAdam")
    trainer = quiet_trainer(
        devices="auto", strategy="fsdp" if dist.is_torchelastic_launched() else "single", max_steps=1
    )
    trainer.fit(module, loader(8, 4 if trainer.world_size > 1 else 8))
    return module.rates


def logged(strategy, batch_size):
    """Logs numbers computed from sharded weights of a unit and from weights outside the units, which are gathered in a step."""

    class Logging(Net):
        def validation_step(self, batch, batch_idx):
            self(batch[0])
            self.log_dict({"unit": self.blocks[0].up.weight.norm(), "rest": self.head.weight.sum()})
            self.log("largest", self.blocks[1].down.weight.max(), on_step=True, on_epoch=False)

        def on_train_epoch_end(self):
            self.log("first", self.blocks[0].up.weight.mean(), rank_zero_only=True)

    seed_everything(5, verbose=False)
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=1)
    trainer.fit(Logging(), loader(8, batch_size), loader(8, batch_size))
    return {name: float(value) for name, value in trainer.logged_metrics.items() if name != "loss"}


def weighted(strategy, batch_size):
    """Trains with losses as (sum, weight), three micro-batches per step, and clipping."""

    class Weighted(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            kept = y > 0
            return F.cross_entropy(self(x)[kept], y[kept], reduction="sum"), kept.sum()

    found = {}
    for optimizer in ("FusedAdam", "adamw"):
        seed_everything(5, verbose=False)
        module = Weighted(optimizer)
        options = {"max_epochs": 1, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "strategy": strategy}
        quiet_trainer(devices="auto", **options).fit(module, loader(32, batch_size))
        found[optimizer] = None if module.scale.is_meta else flat(module)
    return found


def rotated(folder):
    """Tests a ModelCheckpoint's rotation, and resumes from its "last" checkpoint."""

    def run(max_steps, ckpt_path=None):
        seed_everything(5, verbose=False)
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
        trainer = quiet_trainer(
            strategy="fsdp", devices="auto", max_steps=max_steps, enable_checkpointing=True, callbacks=[checkpoint]
        )
        trainer.fit(Net(), loader(32, 4, shuffle=True), ckpt_path=ckpt_path)
        return trainer

    run(4)
    names = sorted(one.name for one in folder.iterdir())
    trainer = run(6, "last")
    return names, sorted(one.name for one in folder.iterdir()), trainer.global_step


def saved_behind_a_validation(path):
    """Saves within an accumulation, after a validation forward has left weights gathered."""

    class Saving(Callback):
        def on_validation_end(self, trainer, pl_module):
            if trainer.state.batches_done == 4 and trainer.ckpt_path is None:
                trainer.save_checkpoint(path)

    def run(ckpt_path=None):
        seed_everything(5, verbose=False)
        module = Net("FusedAdam")
        options = {"max_epochs": 1, "accumulate_grad_batches": 3, "val_check_interval": 2, "callbacks": [Saving()]}
        trainer = quiet_trainer(strategy=FSDP(reshard_after_forward=False), devices="auto", **options)
        trainer.fit(module, loader(64, 4, shuffle=True), loader(8, 4), ckpt_path=ckpt_path)
        return None if trainer.global_rank else flat(module)

    return run(), run(path)


def interrupted(folder):
    """SIGTERM on one rank within an accumulation ends all ranks; the resumed run has the bits of an uninterrupted one."""

    class Terminating(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_global_zero and trainer.state.batches_done == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks, ckpt_path=None):
        seed_everything(5, verbose=False)
        module = Net("FusedAdam")
        options = {"max_epochs": 2, "accumulate_grad_batches": 3, "enable_checkpointing": True}
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=100)
        trainer = quiet_trainer(strategy="fsdp", devices="auto", callbacks=[*callbacks, checkpoint], **options)
        try:
            trainer.fit(module, loader(64, 4, shuffle=True), ckpt_path=ckpt_path)
        except SystemExit as end:
            assert type(module) is Net
            return end.code
        return None if trainer.global_rank else flat(module)

    return run(Terminating()), run(ckpt_path="last"), run()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory, "fsdp")


@pytest.fixture(scope="module")
def ranks(folder):
    def run():
        fitted(CELLS[0], "single", 8, save=folder / "single.ckpt")
        export(folder / "single.ckpt", f"{folder}/parts/")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_ranks(on_two_ranks, 2, folder, timeout=400.0)

    return once(folder, run)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_two_ranks_train_what_one_process_trains_on_the_joined_batch(cell, ranks):
    assert too_far(cell, ranks[0]["straight"][cell]) is None


@pytest.mark.slow
@pytest.mark.parametrize("level", sorted({cell.level for cell in PRODUCT}))
def test_each_level_with_each_optimizer_clipping_and_accumulation(level, tmp_path):
    cells = [cell for cell in PRODUCT if cell.level == level]

    def on_a_rank():
        found = {}
        for number, cell in enumerate(cells):
            path = tmp_path / f"{number}.ckpt"
            straight = fitted(cell, sharding(cell), 4, save=path)
            found[cell] = straight, fitted(cell, sharding(cell), 4, ckpt_path=path)
        return found

    found = run_ranks(on_a_rank, 2, timeout=1500.0)[0]
    wrong = {str(cell): far for cell in cells if (far := too_far(cell, found[cell][0])) is not None}
    assert wrong == {}
    assert [str(cell) for cell in cells if not torch.equal(found[cell][0][0], found[cell][1][0])] == []


@pytest.mark.parametrize("cell", RESUMED, ids=str)
def test_a_resumed_run_has_the_bits_of_the_straight_one(cell, ranks):
    assert torch.equal(ranks[0]["straight"][cell][0], ranks[0]["resumed"][cell][0])


def test_a_file_of_one_process_goes_on_sharded(ranks):
    assert torch.allclose(ranks[0]["from a file"][0], alone(CELLS[0])[0], rtol=0, atol=1e-6)
    assert torch.equal(ranks[0]["from a folder of it"][0], ranks[0]["from a file"][0])


def test_folders_of_two_ranks_go_on_with_four_and_with_one(ranks, folder):
    def resumed(batch_size):
        moved = MOVED[1:] if batch_size == 2 else MOVED
        found = {cell: fitted(cell, "fsdp", batch_size, ckpt_path=folder_of(folder, cell)) for cell in moved}
        if batch_size == 2:  # four ranks: two copies, each sharded over two ranks
            path = folder / "copies.ckpt"
            for cell in COPIES:
                save = path if cell == COPIES[-1] else None
                found["copies", cell] = fitted(cell, FSDP(replicate=2), batch_size, save=save)
            found["resumed"] = fitted(COPIES[-1], FSDP(replicate=2), batch_size, ckpt_path=path)
        else:
            found["meta"] = meta_weights()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {number: run_ranks(resumed, number, 8 // number)[0] for number in (4, 1)}
    assert torch.equal(found[1].pop("meta"), ranks[0]["meta"])
    copies = {cell: found[4].pop(("copies", cell))[0] for cell in COPIES}
    for cell, weights in copies.items():
        assert (weights - alone(cell)[0]).abs().max() < 1e-6, cell
    assert torch.equal(found[4].pop("resumed")[0], copies[COPIES[-1]])
    for number, cells in found.items():
        for cell, (weights, _) in cells.items():
            straight, limit = ranks[0]["straight"][cell][0], 1e-6 if cell.level == "O0" else 2e-3
            assert (weights - straight).abs().max() < limit, (number, cell)
    cell = MOVED[1]
    without_sharding, _ = fitted(cell, "single", 8, ckpt_path=folder_of(folder, cell))
    assert (without_sharding - ranks[0]["straight"][cell][0]).abs().max() < 1e-6


def test_a_folder_holds_whole_weights_for_who_reads_it_alone(ranks, folder):
    path = folder_of(folder, CELLS[0])
    checkpoint = read_checkpoint(path)
    assert checkpoint["state_dict"]["blocks.0.up.weight"].shape == (33, 16)
    assert checkpoint["optimizer_states"][0]["state"][0]["momentum_buffer"].abs().sum() > 0
    module = Net.load_from_checkpoint(path)
    assert torch.equal(module.first.weight, checkpoint["state_dict"]["first.weight"])
    on_meta = Net.load_from_checkpoint(path, meta=True)
    assert torch.equal(flat(on_meta), flat(module))


def test_meta_parameters_get_the_values_of_the_seed_at_any_number_of_ranks(ranks):
    weights, none = ranks[0]["meta"], ranks[1]["meta"]
    assert none is None
    other, module = first_values_alone()
    assert torch.allclose(weights, other)
    assert module.blocks[1].down.weight.std() < 0.02 < module.blocks[1].up.weight.std()
    assert weights.std() > 0.05
    assert not weights.isnan().any()


def test_units_and_bytes_are_told_before_the_first_step(ranks):
    words = "fsdp: 3 Block and the rest; 7.35 kB of 14.4 kB of weights on rank 0, at most 4.55 kB gathered at once"
    assert words in ranks[0]["printed"]
    assert "fsdp" not in ranks[1]["printed"]


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks):
    for one in ranks:
        assert one["overflow"] == {"FusedAdam": (2, 2), "adamw": (2, 2)}  # the initial scale overflows too


def test_the_other_entry_points_and_a_second_fit_take_the_same_module(ranks):
    seed_everything(5, verbose=False)
    module = Net()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(16, 4))
    value, predictions, steps = ranks[0]["evaluated"]
    assert value == pytest.approx(trainer.validate(module, loader(16, 4), verbose=False)[0]["val_loss"], rel=1e-5)
    assert torch.allclose(predictions, torch.cat(trainer.predict(module, loader(16, 4))).double(), atol=1e-5)
    assert steps == 8


def test_norms_of_gradients_are_those_of_whole_ones(ranks):
    assert ranks[0]["norms"] == ranks[1]["norms"]
    assert ranks[0]["norms"] == pytest.approx(norms(), rel=1e-5)


def test_logged_numbers_of_weights_are_those_of_whole_ones(ranks):
    assert ranks[0]["logged"] == pytest.approx(logged("single", 8), rel=1e-5)


def test_losses_with_weights_are_divided_by_those_of_all_ranks(ranks):
    alone = weighted("single", 8)
    for optimizer, weights in ranks[0]["weighted"].items():
        assert torch.allclose(weights, alone[optimizer], rtol=0, atol=2e-6), optimizer


def test_folders_are_rotated_as_files_are(ranks):
    before, after, steps = ranks[0]["rotated"]
    assert before == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    assert after == ["epoch=1-step=5.ckpt", "epoch=1-step=6.ckpt", "last.ckpt"]
    assert steps == 6


def test_a_window_that_was_saved_behind_a_validation_goes_on(ranks):
    straight, resumed = ranks[0]["validated"]
    assert torch.equal(straight, resumed)


def test_a_signal_ends_all_ranks_and_nothing_is_lost(ranks):
    assert [one["interrupted"][0] for one in ranks] == [143, 143]
    _, resumed, straight = ranks[0]["interrupted"]
    assert torch.equal(resumed, straight)
