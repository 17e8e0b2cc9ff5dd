"""The one trainer, its checkpoints, and what a person sees of a run."""
