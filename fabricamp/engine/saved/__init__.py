"""What a checkpoint holds of a run and how a run goes on from it: its sections, the resume point, the file that is chosen."""
