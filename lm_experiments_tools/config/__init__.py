"""Arguments of the scripts, and how they are read from the command line and YAML files."""
