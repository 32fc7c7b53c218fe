"""What a run tells: its lines, its file on disk, the time it took, the phases that a profiler sees, the record of predictions."""
