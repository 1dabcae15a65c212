"""Environments and tools of gymnasium, OpenEnv and MCP.

Each needs a package, and is imported only where it is named.
"""
