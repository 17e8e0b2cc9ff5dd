"""Search over reasoning steps. In this folder a step is always a reasoning step."""
