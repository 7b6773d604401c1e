"""Methods: what each learns and what it changes in the towers."""
