"""What a person sees of a run: progress, curves, the page."""
