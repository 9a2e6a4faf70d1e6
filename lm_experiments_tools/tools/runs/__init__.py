"""Run directories read back and shown: tables, pages, pictures in a terminal; imports pages and what is in files."""
