"""What this machine does: plans, sweeps, probes. Above `weights`; only commands and benchmarks use
it."""
