"""Write and read checkpoints, each of which is either complete or absent.

Modules here import the packages backends and modules.
"""
