"""What all benchmarks share: gate, timing, memory, environment and result files."""
