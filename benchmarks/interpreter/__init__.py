"""Of the policy's Python."""
