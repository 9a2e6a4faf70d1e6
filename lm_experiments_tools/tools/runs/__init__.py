"""Run directories read back: what was logged and set, if it goes on; as tables, pages, pictures in a terminal."""
