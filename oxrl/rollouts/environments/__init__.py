"""Environments that a config names by their scheme, such as `gym:ID`: one file per library, listed in `table`."""
