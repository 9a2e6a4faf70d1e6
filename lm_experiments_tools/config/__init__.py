"""Arguments of the scripts, and the command line and YAML they come from; imports only the top-level files."""
