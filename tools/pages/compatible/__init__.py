"""The sections of docs/compatibility.md: published artefacts, each tried beside the library that
defines it.
"""
