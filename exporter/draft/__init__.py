"""Drafts: made from the target, or taken from elsewhere."""
