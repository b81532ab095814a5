"""Adapters for programs that people already run; each imports its host only when asked, and patches nothing."""
