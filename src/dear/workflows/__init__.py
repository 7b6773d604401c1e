"""What a practitioner does with a model, one function per command: adapt, evaluate, predict, retrieve."""
