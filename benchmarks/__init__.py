"""Measuring the library against its peers."""
