"""Steps as CUDA graphs: a micro-batch with its update, several steps, or a batch of an evaluation; a replay is one call."""
