"""The CPU's compiled executor: one pass over many tensors, compiled by numba on first use and kept on disk."""
