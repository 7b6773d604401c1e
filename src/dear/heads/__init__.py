"""What each attention head does: contributions, TEXTSPAN, concepts, entropy, roles."""
