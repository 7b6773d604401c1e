"""The tabs of the studio in gradio; what they show is computed by the plain modules of the same names."""
