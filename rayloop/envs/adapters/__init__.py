"""Environments and tools of gymnasium, OpenEnv and MCP: each needs a package, and is imported only
where it is named.
"""
