"""apex's recurrent networks, built on torch's."""

from fabricamp.apex.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]
