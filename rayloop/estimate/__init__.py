"""The demands of a run: steps, tokens, time and memory.

They come from its configuration, its model's shapes and measured steps.
"""
