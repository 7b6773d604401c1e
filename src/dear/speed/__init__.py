"""How fast this machine trains, answers and reads images, and how that compares: `dear speed`."""
