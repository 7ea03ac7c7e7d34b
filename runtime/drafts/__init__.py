"""What proposes tokens for the target to verify."""
