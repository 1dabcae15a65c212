"""The current policy of a live run as an OpenAI-compatible endpoint (docs/policy_endpoint.md)."""
