"""Share a run: through the Hugging Face hub, or as one archive with its backbone."""
