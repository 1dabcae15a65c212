"""A Python interpreter that the policy writes code for, in the sandbox."""
