"""What the speed benchmarks share: timing, counting, the step without savings, other code's step."""
