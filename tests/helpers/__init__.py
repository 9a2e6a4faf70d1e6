"""Toys, data and checks that several test files share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout's root folder."""
