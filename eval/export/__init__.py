"""Trained models as folders that ``transformers`` loads, and Llama models as the beginning of a run."""
