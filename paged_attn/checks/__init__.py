"""What may come in."""
