"""Environments in a real Chromium: MiniWoB++ pages, and your own pages with a check expression
(docs/environments.md).
"""
