"""What one trained model does: its held-out loss token by token, text it writes, and its marks in downstream tasks."""
