"""Comparison with transformers: live where torch is installed, else with tensors that it made."""
