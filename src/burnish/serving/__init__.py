"""A reward model or a judge behind HTTP."""
