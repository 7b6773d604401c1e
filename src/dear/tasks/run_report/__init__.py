"""Run report: what a run learned and how good it is, as a page."""
