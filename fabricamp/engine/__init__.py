"""One run of the Trainer: its session, sources of batches, loops, updates, schedules, and the state that a checkpoint holds."""
