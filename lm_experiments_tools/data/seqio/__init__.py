"""Training data from Google's t5 and seqio, which run in a process of their own."""
