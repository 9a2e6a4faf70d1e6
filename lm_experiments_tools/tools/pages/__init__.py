"""Pages of HTML that load nothing: what they have in common; imports nothing of ours."""
