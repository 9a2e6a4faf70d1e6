"""What a machine has and what works on it; imports nothing of ours but errors and files."""
