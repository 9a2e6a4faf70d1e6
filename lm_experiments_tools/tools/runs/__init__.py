"""Run directories read back; imports files."""
