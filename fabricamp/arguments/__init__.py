"""What arguments may be, wherever they are given: checks, and what was meant by others."""
