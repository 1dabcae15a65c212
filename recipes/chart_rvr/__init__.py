"""Chart question answering with a structured rationale (Chart-RVR).

The rationale has chart type, table, numbered steps and answer.
"""
