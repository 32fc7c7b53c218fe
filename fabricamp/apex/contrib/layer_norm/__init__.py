"""LayerNorm under its name in apex.contrib."""

from fabricamp.apex.contrib.layer_norm.layer_norm import FastLayerNorm as FastLayerNorm
