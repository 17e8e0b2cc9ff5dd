"""The pure math: tensors and numbers in, tensors out. No settings, no files, no processes, no choice of device.

Per-token tensors are (B, T), entry t belongs to token t, and masks are bool, True where a token is learned. What lies
outside a mask never reaches a value or a gradient, not even where it is infinite or NaN. Half precision and integers
are computed in float32, and empty tensors give empty results or sums of 0.
"""
