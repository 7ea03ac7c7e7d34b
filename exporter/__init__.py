"""Command line and everything that happens before a bundle exists."""
