"""The attribute world: pictures whose every factor is drawn, named and known."""
