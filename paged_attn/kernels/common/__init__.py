"""What all dialects share."""
