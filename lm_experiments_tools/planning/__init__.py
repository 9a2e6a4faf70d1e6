"""Memory of a run before it starts, and settings that fit into it; imports recipes."""
