"""What the policy is shown of its past: history policies, and the contexts that they make."""
