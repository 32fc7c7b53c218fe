"""The implementation of functions of ``amp_C``."""
