"""Complete training runs, built from arguments: data, model, optimizer, backend and training loop."""
