"""Build and run complete training runs from arguments: data, model, optimizer, backend, training."""
