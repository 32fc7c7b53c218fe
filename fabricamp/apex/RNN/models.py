"""Recurrent networks under apex's names; they are torch's modules, and are called like them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fabricamp.errors import ConfigError

State = tuple[Tensor, Tensor]
Network = TypeVar("Network", bound=nn.RNNBase)


def _named(name: str, network: Callable[..., Network], *, projects: bool = False) -> Callable[..., Network]:
    def build(
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> Network:
        """Returns torch's network of this name; ``output_size`` is the size that an LSTM's hidden state is projected to."""
        projection = {}
        if output_size not in (None, hidden_size):
            if not projects:
                raise ConfigError(
                    f"{name} got output_size={output_size} with hidden_size={hidden_size}; only LSTM and mLSTM may differ: add "
                    f"nn.Linear({hidden_size}, {output_size}) after it"
                )
            projection = {"proj_size": output_size}
        options = {"bias": bias, "batch_first": batch_first, "dropout": dropout, "bidirectional": bidirectional}
        return network(input_size, hidden_size, num_layers, **options, **projection)

    build.__name__ = build.__qualname__ = name
    return build


LSTM = _named("LSTM", nn.LSTM, projects=True)
GRU = _named("GRU", nn.GRU)
ReLU = _named("ReLU", functools.partial(nn.RNN, nonlinearity="relu"))
Tanh = _named("Tanh", functools.partial(nn.RNN, nonlinearity="tanh"))


class mLSTM(nn.Module):  # noqa: N801  # apex's name
    """Multiplicative LSTM: its gates see the product of a projection of the input and a projection of the hidden state.

    As torch's LSTM it returns the output (time, batch, features) and the last ``(hidden, cell)`` (layers, batch, features).

    >>> output, (hidden, cell) = mLSTM(3, 4, 2)(torch.zeros(5, 2, 3))
    >>> output.shape, hidden.shape
    (torch.Size([5, 2, 4]), torch.Size([2, 2, 4]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.output_size = output_size or hidden_size
        self.batch_first = batch_first
        self.dropout = dropout
        self.directions = 2 if bidirectional else 1
        widths = [input_size] + [self.output_size * self.directions] * (num_layers - 1)
        self.cells = nn.ModuleList(
            [_Cell(width, hidden_size, self.output_size, bias) for width in widths for _ in range(self.directions)]
        )

    def forward(self, input: Tensor, hx: State | None = None) -> tuple[Tensor, State]:  # noqa: A002  # torch's name
        """Returns the outputs and the last state; ``hx`` is the initial state, None means zeros."""
        value = input.transpose(0, 1) if self.batch_first else input
        last: list[State] = []
        for place in range(0, len(self.cells), self.directions):
            if place and self.dropout:
                value = F.dropout(value, self.dropout, self.training)
            outputs = []
            for direction in range(self.directions):
                start = self._start(value, hx, place + direction)
                output, state = self._run(place + direction, value.flip(0) if direction else value, start)
                outputs.append(output.flip(0) if direction else output)
                last.append(state)
            value = torch.cat(outputs, dim=-1)
        hidden, cells = (torch.stack(one) for one in zip(*last, strict=True))
        return (value.transpose(0, 1) if self.batch_first else value), (hidden, cells)

    def _start(self, value: Tensor, hx: State | None, place: int) -> State:
        if hx is not None:
            return hx[0][place], hx[1][place]
        batch = value.shape[1]
        return value.new_zeros(batch, self.output_size), value.new_zeros(batch, self.hidden_size)

    def _run(self, place: int, value: Tensor, state: State) -> tuple[Tensor, State]:
        outputs = []
        for step in value.unbind():
            state = self.cells[place](step, state)
            outputs.append(state[0])
        return torch.stack(outputs), state


class _Cell(nn.Module):
    """One step of one layer."""

    def __init__(self, input_size: int, hidden_size: int, output_size: int, bias: bool) -> None:
        super().__init__()
        self.w_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.w_hh = nn.Parameter(torch.empty(4 * hidden_size, output_size))
        self.w_mih = nn.Parameter(torch.empty(output_size, input_size))
        self.w_mhh = nn.Parameter(torch.empty(output_size, output_size))
        self.b_ih = nn.Parameter(torch.empty(4 * hidden_size)) if bias else None
        self.b_hh = nn.Parameter(torch.empty(4 * hidden_size)) if bias else None
        self.w_ho = nn.Parameter(torch.empty(output_size, hidden_size)) if output_size != hidden_size else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden_size), 1 / math.sqrt(hidden_size))

    def forward(self, value: Tensor, state: State) -> State:
        hidden, cell = state
        product = F.linear(value, self.w_mih) * F.linear(hidden, self.w_mhh)
        gates = F.linear(value, self.w_ih, self.b_ih) + F.linear(product, self.w_hh, self.b_hh)
        enter, keep, content, leave = gates.chunk(4, dim=-1)
        cell = keep.sigmoid() * cell + enter.sigmoid() * content.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        return (hidden if self.w_ho is None else F.linear(hidden, self.w_ho)), cell
