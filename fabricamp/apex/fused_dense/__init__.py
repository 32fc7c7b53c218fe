"""apex's dense layers."""

from fabricamp.apex.fused_dense.fused_dense import FusedDense as FusedDense
from fabricamp.apex.fused_dense.fused_dense import FusedDenseGeluDense as FusedDenseGeluDense
from fabricamp.apex.fused_dense.fused_dense import dense_no_bias_function as dense_no_bias_function
from fabricamp.apex.fused_dense.fused_dense import fused_dense_function as fused_dense_function
from fabricamp.apex.fused_dense.fused_dense import fused_dense_gelu_dense_function as fused_dense_gelu_dense_function
