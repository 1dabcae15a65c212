"""Environments in a real Chromium (docs/environments.md).

They are MiniWoB++'s pages, and custom pages with a check expression.
"""
