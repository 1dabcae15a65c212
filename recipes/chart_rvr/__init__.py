"""Chart question answering with a structured rationale: chart type, table, numbered steps, answer
(Chart-RVR).
"""
