"""What a call will do and cost, in words."""
