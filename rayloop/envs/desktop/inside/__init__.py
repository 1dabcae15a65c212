"""The part of rayloop that runs inside a desktop's sandbox.

Nothing else of rayloop is visible there, least of all the tasks' checks.
"""
