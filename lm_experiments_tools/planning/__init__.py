"""Memory of a run before it starts: a formula for each part, a trace of the model without memory; imports recipes."""
