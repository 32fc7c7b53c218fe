"""What the functions of ``amp_C`` are made of."""
