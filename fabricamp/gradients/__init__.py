"""Gradients between backward and update: where they are, how they are summed, what travels together."""
