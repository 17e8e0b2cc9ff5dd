"""Files to rows, rows to sequences, sequences to micro-batches."""
