"""Metal kernels of the verify step, each beside the stock operations that it must equal."""
