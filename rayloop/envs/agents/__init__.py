"""Programs that lead an episode themselves and ask the policy over HTTP."""
