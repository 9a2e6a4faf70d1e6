"""Write and read checkpoints, each of which is either complete or absent."""
