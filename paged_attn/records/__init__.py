"""What stages hand to one another."""
