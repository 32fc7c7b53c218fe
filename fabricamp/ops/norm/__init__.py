"""LayerNorm and RMSNorm: the functions, their kernels, and the plans that lay these out."""
