"""How fast this machine trains, answers and reads pictures, and how that compares: `dear speed`."""
