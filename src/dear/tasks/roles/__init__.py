"""Role maps: the evidence behind each head's role, and the page that shows it."""
