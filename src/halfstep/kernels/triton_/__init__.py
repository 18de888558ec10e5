"""The GPU's compiled executor: one launch over many tensors, compiled by Triton on first use and kept on disk."""
