"""Pure math: tensors and numbers in, tensors out. No settings, no files, no processes, no choice of device.

Per-token tensors are (B, T), and entry t belongs to token t. Loss masks are bool and True for tokens that enter the
loss. Entries outside the mask never affect a value or a gradient, even if they are infinite or NaN. Half precision and
integers are computed in float32. Empty tensors give empty results or sums of 0.
"""
