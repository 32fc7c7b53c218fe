"""The tensor table: new addresses, skipped rows, and uploads."""

from __future__ import annotations

import pytest
import torch

from fabricamp import ops
from fabricamp.ops import table as table_module
from fabricamp.ops.layouts import is_dense
from fabricamp.ops.table import Table, table_of


def copies(device, sources, **options):
    """Returns a table for a copy of ``sources``, and the tensors that the copy writes."""
    out = [torch.zeros(one.shape, device=device) for one in options.pop("like", sources)]
    return Table([sources, out], device=device, **options), out


def launch(table):
    table.launch("tensors", "scale", None, 1.0, -1.0)


def test_rows_without_a_first_column_take_no_part(kernel_device):
    like = [torch.ones(70, device=kernel_device), torch.ones(3, device=kernel_device)]
    table, out = copies(kernel_device, [like[0], None], like=like)
    launch(table)
    assert [one.sum().item() for one in out] == [70, 0]
    table.refresh([None, like[1]])
    launch(table)
    assert [one.sum().item() for one in out] == [70, 3]


def test_tensors_that_move_are_found_again_and_others_are_not_uploaded(kernel_device, monkeypatch):
    first = [torch.full((100,), 1.0, device=kernel_device), torch.full((2,), 2.0, device=kernel_device)]
    table, out = copies(kernel_device, first)
    launch(table)
    uploads = []
    monkeypatch.setattr(Table, "_describe", uploads.append)
    table.refresh(list(first))
    assert uploads == []
    monkeypatch.undo()
    other = [torch.full((100,), 3.0, device=kernel_device), first[1]]
    table.refresh(other)
    launch(table)
    assert [one[0].item() for one in out] == [3.0, 2.0]


def test_another_dtype_or_layout_at_the_same_address_needs_a_second_look(kernel_device):
    memory = torch.arange(6.0, device=kernel_device)
    table, out = copies(kernel_device, [memory.view(2, 3)])
    launch(table)
    assert out[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    turned = torch.as_strided(memory, (2, 3), (1, 2))
    table.refresh([turned], trust=False)
    launch(table)
    assert torch.equal(out[0], turned)


def test_flags_in_device_memory_decide(kernel_device):
    sources = [torch.ones(70, device=kernel_device) for _ in range(3)]
    flags = [torch.tensor(value, device=kernel_device) for value in (1.0, 0.0)]
    table, out = copies(kernel_device, sources, cells=[[*flags, None]], flags=0)
    launch(table)
    assert [one.sum().item() for one in out] == [70, 0, 70]
    flags[1].fill_(2.0)
    launch(table)
    assert out[1].sum().item() == 70


def test_chunks_lead_back_to_rows(kernel_device):
    chunk = table_module.CHUNK_SIZE
    table, _ = copies(
        kernel_device, [torch.ones(size, device=kernel_device) for size in (1, 2 * chunk, chunk + 1, 0, 5)]
    )
    assert table.chunks == 7
    assert [table.row_of_chunk(index) for index in range(7)] == [0, 1, 1, 2, 2, 3, 4]


def test_a_table_of_the_same_memory_is_built_once_and_holds_no_tensor(kernel_device):
    tensors = [torch.ones(5, device=kernel_device), torch.ones(2, 2, device=kernel_device)]
    table = table_of(tensors, tensors)
    assert table_of(tensors, tensors) is table
    assert table_of(tensors) is not table
    assert table_of([one.double() for one in tensors], tensors) is not table
    assert not any(column for column in table._columns)
    strided = [torch.ones(9, device=kernel_device)[::2]]
    assert table_of(strided) is not table_of(strided)


def test_no_more_tables_are_kept_than_allowed(kernel_device, monkeypatch):
    monkeypatch.setattr(table_module, "_MOST_TABLES", 3)
    kept = [torch.ones(size, device=kernel_device) for size in range(1, 8)]
    for one in kept:
        ops.l2norm([one])
    assert len(table_module._tables) == 3


def test_a_tensor_of_another_device_is_refused(kernel_device):
    with pytest.raises(ValueError, match="one table per device"):
        Table([[torch.ones(2, device="meta")]], device=kernel_device)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(4, 4)[:, :2], False),
        (torch.ones(1, 4).expand(3, 4), False),
        (torch.ones(8)[::2], False),
        (torch.ones(()), True),
        (torch.ones(5, 1, 3).transpose(0, 2), True),
    ],
)
def test_is_dense(tensor, dense):
    assert is_dense(tensor) is dense


def test_the_same_tuple_is_not_looked_at_again(kernel_device, monkeypatch):
    sources = (torch.ones(70, device=kernel_device), torch.ones(3, device=kernel_device))
    table, out = copies(kernel_device, sources)
    table.refresh(sources)
    sources[0].fill_(4.0)
    monkeypatch.setattr(Table, "_set_addresses", None)
    table.refresh(sources)
    launch(table)
    assert out[0][0].item() == 4.0
    monkeypatch.undo()
    out[0].zero_()
    table.refresh((None, sources[1]))
    launch(table)
    assert out[0][0].item() == 0.0
    table.refresh(sources)
    launch(table)
    assert out[0][0].item() == 4.0


def test_a_row_is_looked_at_again_where_the_order_of_its_elements_changes(kernel_device):
    memory = torch.arange(12.0, device=kernel_device).view(1, 3, 2, 2)
    table, out = copies(kernel_device, [memory])
    launch(table)
    turned = torch.as_strided(memory, (1, 3, 2, 2), (12, 1, 6, 3))
    assert turned.data_ptr() == memory.data_ptr()
    table.refresh([turned])
    launch(table)
    assert torch.equal(out[0], turned)
