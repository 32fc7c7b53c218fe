"""apex's recurrent networks, built on torch's."""

from fabricamp.apex.RNN.models import GRU as GRU
from fabricamp.apex.RNN.models import LSTM as LSTM
from fabricamp.apex.RNN.models import ReLU as ReLU
from fabricamp.apex.RNN.models import Tanh as Tanh
from fabricamp.apex.RNN.models import mLSTM as mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]
