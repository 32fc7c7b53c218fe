"""The choice between kernel and torch: the package's tables, the user's own table, and the report of the choices."""

from __future__ import annotations

import json

import pytest
import torch

from fabricamp import ops
from fabricamp.cli import main
from fabricamp.commands import doctor
from fabricamp.errors import ConfigError
from fabricamp.ops import bridge, dispatch, measure

B = torch.bfloat16
GPU = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch, tmp_path):
    """Makes the tables see one GPU of compute capability 7.5; returns the path of the user's table."""
    monkeypatch.setenv("FABRICAMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bridge, "_cupy_obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    dispatch.forget()
    yield tmp_path / "cache" / "dispatch.json"
    dispatch.forget()


def table(**ops_of):
    return {"measured": "a card, today", "choices": ops_of}


def test_an_unknown_card_uses_torch(card):
    assert not dispatch.chosen("layer_norm", B, 4096, GPU)
    assert str(ops.backend()["layer_norm"]).startswith(
        "torch: this card was not measured; `fabricamp doctor --measure`"
    )
    assert ops.backend()["adam"].name == "cupy"


def test_bands_of_widths(card):
    bands = [(1000, "cupy"), (2000, "torch"), (4000, "cupy")]
    dispatch.write(card, "7.5", table(layer_norm={"bfloat16": bands, "mixed": [(1, "cupy")]}))
    chosen = {
        width: dispatch.chosen("layer_norm", B, width, GPU) for width in (1, 999, 1000, 1999, 2000, 3999, 4000, 10**6)
    }
    assert chosen == {1: False, 999: False, 1000: True, 1999: True, 2000: False, 3999: False, 4000: True, 10**6: True}
    assert dispatch.chosen("layer_norm", None, 5, GPU)
    assert not dispatch.chosen("layer_norm", torch.float16, 1000, GPU)
    assert not dispatch.chosen("rms_norm", B, 1000, GPU)
    said = str(ops.backend()["layer_norm"])
    assert "cupy: for widths bfloat16 1000 to 1999 and from 4000, mixed from 1" in said
    assert (
        "mixed from 1, where all has one dtype in eager steps from 4.2 million elements of input on; else torch" in said
    )
    assert "(a card, today)" in said
    assert ops.backend()["rms_norm"].name == "torch"


def test_the_shipped_table_is_well_formed_and_the_users_goes_before_it(card, monkeypatch):
    shipped = dispatch._read(dispatch.SHIPPED)
    assert set(shipped["9.0"]["choices"]) == set(dispatch.MEASURED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    known = {name for bands in shipped["9.0"]["choices"]["layer_norm"].values() for _, name in bands}
    assert known <= {"cupy", "torch"}
    dispatch.write(card, "9.0", table(layer_norm={"bfloat16": [(7, "cupy")]}))
    assert [dispatch.chosen("layer_norm", B, width, GPU) for width in (6, 7)] == [False, True]
    assert not dispatch.chosen("rms_norm", B, 4096, GPU)  # a user's table replaces all ops of a card, not single ops


def test_writing_keeps_the_other_cards(card):
    dispatch.write(card, "8.0", table(layer_norm={"float16": [(1, "cupy")]}))
    dispatch.write(card, "7.5", table(layer_norm={"float16": []}))
    found = json.loads(card.read_text())
    assert list(found) == ["7.5", "8.0"]
    assert found["8.0"] == {"measured": "a card, today", "choices": {"layer_norm": {"float16": [[1, "cupy"]]}}}
    assert [one.name for one in card.parent.iterdir()] == ["dispatch.json"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"7.5": {"choices": {}}}',
        '{"7.5": {}}',
        '{"7.5": {"choices": {"a": {"b": [[1, "cuda"]]}}}}',
        "[1]",
        '{"7.5": 3}',
    ],
)
def test_a_broken_table_says_so(card, text):
    card.parent.mkdir()
    card.write_text(text)
    with pytest.raises(ConfigError, match=r"dispatch\.json is not a dispatch table .*doctor --measure"):
        dispatch.chosen("layer_norm", B, 1, GPU)


def test_a_folder_that_is_not_ones_own_has_no_table(card, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("the home folder of another user")

    monkeypatch.setattr("os.access", lambda path, mode: False)
    for way in ("stat", "open"):
        monkeypatch.setattr(f"pathlib.Path.{way}", refuse)
    monkeypatch.setattr(dispatch, "SHIPPED", card)
    assert not dispatch.chosen("layer_norm", B, 4096, GPU)


def test_always_is_for_its_block_alone(card):
    with dispatch.always("cupy"):
        assert dispatch.chosen("layer_norm", B, 1, GPU)
        with dispatch.always("torch"):
            assert not dispatch.chosen("layer_norm", B, 1, GPU)
        assert dispatch.chosen("layer_norm", B, 1, GPU)
    assert not dispatch.chosen("layer_norm", B, 1, GPU)


def test_on_a_cpu_torch_runs():
    with dispatch.always("cupy"):
        assert not dispatch.chosen("layer_norm", B, 4096, torch.device("cpu"))
    assert str(ops.backend("cpu")["layer_norm"]) == "torch: its tensors are on cpu"


def test_the_users_file_is_under_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FABRICAMP_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dispatch.user_file() == tmp_path / ".cache" / "fabricamp" / "dispatch.json"


def test_bands_join_equal_neighbours_and_want_a_margin():
    def times(kernel, torchs):
        return {"cupy": kernel, "torch": torchs}

    found = measure.bands(
        {64: times(2, 1), 512: times(1, 2), 256: times(0.99, 1), 1024: times(1, 1.5), 2048: times(3, 1)}
    )
    assert found == [(512, "cupy"), (2048, "torch")]
    assert measure.bands({64: times(2, 1)}) == []


def test_the_doctor_measures_and_writes(card, monkeypatch, capfd):
    monkeypatch.setattr(measure, "compare", lambda op, dtype, width, device: {"cupy": 100.0, "torch": float(width)})
    monkeypatch.setattr(measure, "about", lambda device: "a card, today")
    monkeypatch.setattr(doctor, "examine", list)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert main(["doctor", "--measure"]) == 0
    assert "layer_norm mixed: 64: 0.64x" in capfd.readouterr().out
    assert dispatch.chosen("layer_norm", None, 128, GPU)
    assert not dispatch.chosen("layer_norm", None, 64, GPU)
    assert set(json.loads(card.read_text())["7.5"]["choices"]) == set(measure.CASES) == set(dispatch.MEASURED)


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (check,) = doctor.measure()
    assert check.status == "not here"


def test_steps_of_the_measurement_run():
    for case in measure.CASES.values():
        for dtype in case.dtypes:
            gradients = case.step(dtype, 3, 16, torch.device("cpu"))()
            assert all(one.isfinite().all() for one in gradients)


@pytest.mark.gpu
def test_a_comparison_on_a_gpu(monkeypatch):
    monkeypatch.setattr(measure, "_BYTES", 2**22)
    for op in measure.CASES:
        found = measure.compare(op, B, 1024, GPU)
        assert all(0 < taken < 100 for taken in found.values())
