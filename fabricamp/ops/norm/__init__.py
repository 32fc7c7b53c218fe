"""LayerNorm and RMSNorm: the functions, their kernels, and the plans of the kernels' layout."""
