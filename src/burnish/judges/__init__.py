"""Models that judge: which of two completions is better, or how good one is."""
