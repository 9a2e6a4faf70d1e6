"""Mutation testing of the test suite."""
