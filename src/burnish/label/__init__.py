"""The page where people rank completions."""
