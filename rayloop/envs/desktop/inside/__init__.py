"""What runs inside a desktop's sandbox: nothing else of rayloop is visible there, least of all the
tasks' checks.
"""
