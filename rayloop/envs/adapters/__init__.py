"""Other people's environments and tools behind our seam; each needs a package of its own, and is imported only where it is
named."""
