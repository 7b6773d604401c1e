"""Which method suits a dataset: `dear choose`."""
