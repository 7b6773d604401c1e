"""The training loop, schedules, precision and run folders."""
