"""Environments in a real Chromium: MiniWoB++ pages, and pages of one's own with a check expression (docs/environments.md)."""
