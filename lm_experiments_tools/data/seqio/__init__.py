"""Google's t5 and seqio, in a process that owns TensorFlow; imports data, data.text, data.tokens, data.objectives."""
