"""Google's t5 and seqio, in their own process; depends on data, data.text, data.tokens and data.objectives."""
