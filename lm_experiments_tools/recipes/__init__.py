"""Runs put together: the one place that knows arguments, data, model and backend; imports everything below."""
